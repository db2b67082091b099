"""The filters' thresholds on the device: the same kept sets as by the torch search, drawn from and returned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areno.kernels.filters import FilterWorkspace, find_thresholds
from areno.kernels.reduce import Draw, Splits
from areno.sampling import filters
from areno.sampling.variant import Variant
from tests.unit.areno.kernels import sampling_cases as cases

FILTERS = Variant(noise=True, filters=True)
ALL = Variant(noise=True, temperature=True, stop_mask=True, slots=True, filters=True, kept=True)


@pytest.mark.parametrize(("seed", "ties"), [(0, False), (1, True)])
def test_thresholds_keep_the_same_ids_as_the_torch_search(seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    lanes, vocab = 6, 200
    logits = cases.random_logits(rng, lanes, vocab, ties=ties)
    made = cases.tables(lanes, vocab, rng, FILTERS)
    for name, values in (
        ("top_k", [0, 3, 0, 40, 199, 90]),
        ("top_p", [0.9, 1.0, 0.2, 0.7, 0.99, 1.0]),
        ("min_p", [0, 0, 0.02, 0, 0.01, 0]),
    ):
        made.field(name).copy_(torch.tensor(values))
    draw = Draw(
        lanes=lanes,
        logits=logits,
        state=made.state,
        slots=made.slots,
        variant=FILTERS,
        num_valid_ids=vocab,
        running=torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.uint8),
    )
    workspace = FilterWorkspace.allocate(lanes, vocab, torch.device("cpu"), block=64)
    for scratch in (workspace.thresholds, workspace.scores):
        scratch.fill_(float("nan"))
    find_thresholds(draw, workspace, torch.ones((), dtype=torch.int32), warps=1)
    expected = filters.apply(logits, min_p_B=made.field("min_p"), top_k_B=made.field("top_k"), top_p_B=made.field("top_p"))
    kept = logits >= workspace.thresholds[:, None]
    assert torch.equal(kept[:5], expected[:5] > -torch.inf)
    assert workspace.thresholds[5] == -torch.inf


@pytest.mark.parametrize("ties", [False, True])
def test_kernels_draw_from_and_return_the_kept_sets(ties: bool) -> None:
    rng = np.random.default_rng(11)
    lanes, vocab = 4, 200
    variant = Variant(noise=True, filters=True, kept=True)
    logits = cases.random_logits(rng, lanes, vocab, ties=ties)
    expected = cases.tables(lanes, vocab, rng, variant)
    found = cases.copied(expected)
    kernels = cases.by_kernels(found, logits, variant, vocab, splits=Splits.cut(lanes, vocab, block=64, warps=1, programs=8))
    reference = cases.by_torch(expected, logits, variant, vocab)
    if ties and reference.kept_ids is not None and kernels.kept_ids is not None:
        # The order among equals is torch's own.
        for ids in (reference.kept_ids, kernels.kept_ids):
            ids.sort(axis=1)
    cases.compare(kernels, reference, found, expected)


@pytest.mark.parametrize("seed", [2, pytest.param(1, marks=pytest.mark.long)])
def test_all_parts_of_the_sampler_work_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lanes, vocab, num_valid = 4, 200, 180
    logits = cases.random_logits(rng, lanes, vocab)
    expected = cases.tables(lanes, vocab, rng, ALL)
    found = cases.copied(expected)
    kernels = cases.by_kernels(found, logits, ALL, num_valid, splits=Splits.cut(lanes, vocab, block=64, warps=1, programs=8))
    cases.compare(kernels, cases.by_torch(expected, logits, ALL, num_valid), found, expected)
