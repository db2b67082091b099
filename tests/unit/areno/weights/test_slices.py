"""Tensors that arrive in slices: any order, again, cast, fused and tied; never in part, never over each other."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from areno.errors import DigestMismatch, ManifestMismatch
from areno.models.dense import DenseDecoder
from areno.weights.digest import digest
from areno.weights.names import TensorSpec, dtype_name
from areno.weights.slices import Slice, SliceLedger
from areno.weights.staged import StagedFacts
from areno.weights.update import WeightUpdate
from tests.fixtures_models import checkpoint_tensors, load_decoder, manifest_of, write_checkpoint

Q = "model.layers.0.self_attn.q_proj.weight"
Part = tuple[str, int, torch.Tensor]


@pytest.fixture(scope="module", params=["plain", "tied"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("slices")
    for seed, age in enumerate(("old", "new")):
        write_checkpoint(folder / age, seed=seed, tie_word_embeddings=request.param == "tied")
    return folder / "old", folder / "new"


@pytest.fixture
def decoder(folders: tuple[Path, Path]) -> DenseDecoder:
    return load_decoder(folders[0], torch.bfloat16)


@pytest.fixture
def new(folders: tuple[Path, Path]) -> dict[str, torch.Tensor]:
    return checkpoint_tensors(folders[1])


def slices_of(tensors: dict[str, torch.Tensor], step: int) -> list[Part]:
    return [
        (name, start, tensor.reshape(-1)[start : start + step])
        for name, tensor in tensors.items()
        for start in range(0, tensor.numel(), step)
    ]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))


def test_slices_in_any_order_and_again_make_the_update_that_whole_tensors_make(decoder: DenseDecoder, new: dict[str, torch.Tensor]) -> None:
    if "lm_head.weight" not in new:
        new["lm_head.weight"] = new["model.embed_tokens.weight"]
    update = WeightUpdate(decoder.table, manifest_of(new), version=1, partial=False)
    slices = slices_of(new, 777)
    order = torch.randperm(len(slices), generator=torch.Generator().manual_seed(3)).tolist()
    for index in [*order, *order[:50]]:
        name, start, values = slices[index]
        scratch = values.clone()
        update.stage_slices([Slice(name, scratch, start, spec_of(new[name]))])
        scratch.fill_(7.0)
    update.verify({name: digest(tensor.to(torch.bfloat16)) for name, tensor in new.items()})
    update.swap()
    for name, view in decoder.table.views.items():
        assert torch.equal(view, new[name].to(torch.bfloat16)), name


def test_a_tensor_with_a_slice_missing_never_came(decoder: DenseDecoder, new: dict[str, torch.Tensor]) -> None:
    update = WeightUpdate(decoder.table, None, version=1, partial=False)
    for name, start, values in slices_of(new, 1000):
        if (name, start) != (Q, 1000):
            update.stage_slices([Slice(name, values, start, spec_of(new[name]))])
    with pytest.raises(ManifestMismatch, match=rf"1 of \d+ tensors never came: {Q}"):
        update.verify(None)
    update.stage_slices([Slice(Q, new[Q].reshape(-1)[1000:2000], 1000, spec_of(new[Q]))])
    update.verify(None)


def test_a_slice_of_other_bits_is_named_by_its_digest(decoder: DenseDecoder, new: dict[str, torch.Tensor]) -> None:
    update = WeightUpdate(decoder.table, None, version=1, partial=False)
    for name, start, values in slices_of(new, 1000):
        update.stage_slices([Slice(name, -values if (name, start) == (Q, 1000) else values, start, spec_of(new[name]))])
    with pytest.raises(DigestMismatch, match=f"differ for {Q}"):
        update.verify({name: digest(tensor.to(torch.bfloat16)) for name, tensor in new.items()})


@pytest.mark.parametrize(
    ("start", "count", "said"),
    [
        (4090, 10, "lie within the tensor"),
        (-1, 10, "lie within the tensor"),
        (5, 10, "cut a tensor the same way"),
        (0, 5, "cut a tensor the same way"),
    ],
)
def test_slices_that_reach_over_the_end_or_into_each_other_are_refused(
    decoder: DenseDecoder, new: dict[str, torch.Tensor], start: int, count: int, said: str
) -> None:
    update = WeightUpdate(decoder.table, None, version=1, partial=False)
    flat, spec = new[Q].reshape(-1), spec_of(new[Q])
    update.stage_slices([Slice(Q, flat[:10], 0, spec)])
    with pytest.raises(ManifestMismatch, match=said):
        update.stage_slices([Slice(Q, flat[:count], start, spec)])


def test_a_slice_with_nan_or_under_another_name_or_shape_is_refused(decoder: DenseDecoder, new: dict[str, torch.Tensor]) -> None:
    update = WeightUpdate(decoder.table, None, version=1, partial=False)
    flat, spec = new[Q].reshape(-1), spec_of(new[Q])
    update.stage_slices([Slice(Q, flat, 0, spec)])
    with pytest.raises(ManifestMismatch, match="NaN or infinity"):
        update.stage_slices([Slice(Q, torch.full_like(flat, torch.nan), 0, spec)])
    with pytest.raises(ManifestMismatch, match="never came"):
        update.verify(None)
    with pytest.raises(ManifestMismatch, match="shape"):
        update.stage_slices([Slice(Q, flat, 0, TensorSpec("float32", (flat.numel(),)))])
    update.stage_slices([Slice(Q, flat, 0, spec)])
    with pytest.raises(ManifestMismatch, match="offered twice"):
        update.stage_slices([Slice(f"module.{Q}", flat, 0, spec)])


def test_the_ledger_agrees_with_a_plain_list_of_runs_whatever_comes() -> None:
    draws = random.Random(7)
    for _ in range(300):
        ledger, runs, size = SliceLedger(), {}, 60
        if draws.random() < 0.5:
            # Came all at once; that it is as long as it may be is the caller's to know.
            runs[0] = draws.randrange(1, 20)
            ledger.add_whole("x", runs[0])
        assert ledger.knows("x") == bool(runs)
        for _ in range(40):
            start = draws.randrange(size)
            count = draws.randrange(0, min(12, size - start) + 1)
            if draws.random() < 0.15 and runs:
                start = draws.choice(list(runs))
                ledger.drop("x", start)
                del runs[start]
                continue
            if draws.random() < 0.3 and runs:
                start = draws.choice(list(runs))
                count = runs[start]
            fits = not count or runs.get(start) == count or not any(a < start + count and start < a + n for a, n in runs.items())
            if not fits:
                with pytest.raises(ManifestMismatch, match="reach into each other"):
                    ledger.check("x", start, count)
                continue
            ledger.check("x", start, count)
            if count:
                runs[start] = count
            whole = ledger.add("x", start, count, StagedFacts(start, finite=True, changed=False), size=size)
            assert whole == (sum(runs.values()) == size)
            if runs:
                assert ledger.facts("x").digest == sum(runs)


def test_a_slice_costs_the_ledger_the_same_however_many_came_before() -> None:
    def seconds(slices: int) -> float:
        ledger, started = SliceLedger(), time.process_time()
        for number in range(slices):
            ledger.check("x", number * 10, 10)
            ledger.add("x", number * 10, 10, None, size=slices * 10)
        return (time.process_time() - started) / slices

    assert seconds(20_000) < 10 * min(seconds(500) for _ in range(3))
