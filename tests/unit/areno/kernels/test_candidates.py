"""Thresholds from each rank's largest scores, against draws from all scores: ties, masks, flat and steep rows, few ids left."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from areno.decode.tables import DecodeTables
from areno.kernels.candidates import RECORD, find_thresholds_by_candidates
from areno.kernels.filters import FilterWorkspace, find_thresholds
from areno.kernels.reduce import Draw
from areno.parallel import TPGroup
from areno.sampling.variant import Variant
from tests.unit.areno.kernels import sampling_cases as cases
from tests.unit.areno.kernels.test_shards import LANES, VOCAB, by_shard, in_rounds, shard_of

PLAIN = Variant(noise=True, filters=True)
SHAPED = Variant(noise=True, temperature=True, stop_mask=True, slots=True, filters=True)


def few(rng: np.random.Generator, variant: Variant) -> DecodeTables:
    """Return tables of which one row has no filter and the others a top-k of at most 64, with or without the rest."""
    made = cases.tables(LANES, VOCAB, rng, variant)
    given = {"top_k": rng.choice([1, 5, 40, 64], LANES), "top_p": rng.choice([0.1, 0.6, 0.95, 1.0], LANES)}
    given["min_p"] = rng.choice([0.0, 0.0, 0.05], LANES)
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        values = given[name]
        values[int(rng.integers(LANES))] = values[0]
        values[0] = off
        made.field(name).copy_(torch.from_numpy(values))
    return made


@pytest.mark.parametrize(
    ("size", "ties", "seed"), [(2, False, 1), (2, True, 2), (3, True, 3), pytest.param(3, False, 4, marks=pytest.mark.long)]
)
def test_ranks_draw_as_one_rank_does(size: int, ties: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = cases.random_logits(rng, LANES, VOCAB, ties=ties)
    expected = few(rng, SHAPED)
    made = cases.copied(expected)
    reference = cases.by_torch(expected, logits, SHAPED, 170)
    found = in_rounds(size, lambda group: by_shard(made, logits, SHAPED, 170, group, sums=True))
    for told, tables in found:
        cases.compare(told, reference, tables, expected)
        assert np.array_equal(told.words, found[0][0].words) and told.floats.tobytes() == found[0][0].floats.tobytes()


def hard_logits(seed: int) -> torch.Tensor:
    """Return rows with all ids tied, with ties at every place, with few ids that are not masked, and with one id far above."""
    rng = np.random.default_rng(seed)
    rows = np.stack([np.zeros(VOCAB), rng.integers(0, 4, VOCAB), np.full(VOCAB, -np.inf), rng.normal(size=VOCAB)]).astype(np.float32)
    rows[2, rng.permutation(VOCAB)[:7]] = rng.integers(0, 3, 7)
    rows[3, int(rng.integers(VOCAB))] = 60.0
    return torch.from_numpy(rows)


FILTERS = [(1, 1.0, 0.0), (64, 1.0, 0.0), (3, 0.5, 0.0), (40, 0.9, 0.2), (7, 1.0, 0.3)]


@pytest.mark.parametrize(
    ("size", "top_k", "top_p", "min_p"),
    [(2, 64, 0.97, 0.0), (4, 64, 0.97, 0.0)]
    + [(2, *one) for one in FILTERS]
    + [pytest.param(4, *one, marks=pytest.mark.long) for one in FILTERS],
)
def test_what_is_kept_is_what_a_search_through_all_scores_keeps(size: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = hard_logits(top_k)
    made = cases.tables(LANES, VOCAB, np.random.default_rng(0), PLAIN)
    made.state.alive.fill_(True)
    made.state.page_table.fill_(9)
    for name, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p), ("temperature", 1.0)):
        made.field(name).fill_(value)
    running = torch.ones(LANES, dtype=torch.bool)
    given = {"lanes": LANES, "state": made.state, "slots": made.slots, "variant": PLAIN, "num_valid_ids": VOCAB, "running": running}

    def room() -> FilterWorkspace:
        workspace = FilterWorkspace.allocate(LANES, VOCAB, cases.CPU, block=128)
        workspace.scores.fill_(float("nan"))
        workspace.thresholds.fill_(float("nan"))
        return workspace

    whole = room()
    find_thresholds(Draw(logits=logits, **given), whole, torch.ones((), dtype=torch.int32))

    def by_candidates(group: TPGroup) -> torch.Tensor:
        shard, workspace = shard_of(group, VOCAB), room()
        part = logits[:, shard.first_id : shard.first_id + shard.count].contiguous()
        find_thresholds_by_candidates(Draw(logits=part, shard=shard, **given), workspace)
        assert group.counts.all_gather_bytes == size * LANES * RECORD * 4
        return workspace.thresholds

    found = in_rounds(size, by_candidates)
    for thresholds in found:
        assert torch.equal(thresholds, found[0])
        kept = (logits >= thresholds[:, None]) & (logits > float("-inf"))
        assert torch.equal(kept, (logits >= whole.thresholds[:, None]) & (logits > float("-inf")))
