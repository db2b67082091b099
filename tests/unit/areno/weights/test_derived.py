"""Copies made of the weights: ready before the swap, right after it and after the swap back, also where an update brings a part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areno.errors import CanaryMismatch, DigestMismatch, ManifestMismatch
from areno.models.dense import DenseDecoder
from areno.models.model_config import read_model_config
from areno.models.registry import build_model
from areno.weights.canary import Canary
from areno.weights.digest import digest
from areno.weights.load import load_checkpoint
from areno.weights.slices import Slice
from areno.weights.update import WeightUpdate
from tests.engine_runs import make_engine
from tests.fixtures_models import checkpoint_tensors, reference_logprobs, reference_model, write_checkpoint
from tests.unit.areno.weights.test_slices import slices_of, spec_of

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tied"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("derived")
    for seed, age in enumerate(("old", "new")):
        write_checkpoint(folder / age, seed=seed, tie_word_embeddings=request.param)
    return folder / "old", folder / "new"


def load_decoder(folder: Path, dtype: torch.dtype) -> DenseDecoder:
    """As an engine loads it: with packed weights."""
    decoder = build_model(read_model_config(folder), dtype=dtype, device=torch.device("cpu"), pack_weights=True)
    load_checkpoint(folder, decoder.table)
    return decoder


def copies_of(decoder: DenseDecoder) -> list[torch.Tensor]:
    table = decoder.table
    return [copy.current for storage in table.live for copy in table.copies_of(storage)]


def assert_follow(decoder: DenseDecoder) -> None:
    """Every copy is the one that a rebuild makes of the live weights."""
    found = [copy.clone() for copy in copies_of(decoder)]
    assert found, "this model keeps no copies, so nothing is tested"
    decoder.table.rebuild_derived()
    for copy, rebuilt in zip(found, copies_of(decoder), strict=True):
        dense = [one.to_dense() if one.is_mkldnn else one for one in (copy, rebuilt)]
        assert torch.equal(*dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swap_only_changes_prepared_copies_for_the_current_ones_and_another_swap_changes_them_back(
    folders: tuple[Path, Path], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_decoder(folders[0], dtype)
    update = WeightUpdate(decoder.table, None, version=1, partial=False)
    for name, tensor in checkpoint_tensors(folders[1]).items():
        update.stage(name, tensor)
    update.verify(None)
    assert update.derive_s > 0
    before = copies_of(decoder)
    monkeypatch.setattr("areno.weights.derived.DerivedCopy.made_of", lambda self, staged: pytest.fail("the pause is no time for this"))
    update.swap()
    swapped = copies_of(decoder)
    assert not {id(one) for one in before} & {id(one) for one in swapped}
    update.swap()
    assert [id(one) for one in copies_of(decoder)] == [id(one) for one in before]
    update.swap()
    monkeypatch.undo()
    assert_follow(decoder)


def test_a_tensor_that_comes_again_is_copied_again(folders: tuple[Path, Path]) -> None:
    decoder, new = load_decoder(folders[0], torch.float32), checkpoint_tensors(folders[1])
    update = WeightUpdate(decoder.table, None, version=1, partial=False)
    for name, tensor in new.items():
        update.stage(name, tensor)
    update.stage(UP, new[UP] * 2)
    for start, values in ((start, values) for name, start, values in slices_of({UP: new[UP] * 3}, 1000)):
        update.stage_slices([Slice(UP, values, start, spec_of(new[UP]))])
    update.verify(None)
    update.swap()
    assert torch.equal(decoder.table.views[UP], new[UP] * 3)
    assert_follow(decoder)


def test_a_part_of_a_fused_storage_is_copied_with_the_live_values_of_the_rest(folders: tuple[Path, Path]) -> None:
    decoder, new = load_decoder(folders[0], torch.float32), checkpoint_tensors(folders[1])
    update = WeightUpdate(decoder.table, None, version=1, partial=True)
    update.stage(UP, new[UP])
    update.verify(None)
    update.swap()
    gate = UP.replace("up_proj", "gate_proj")
    assert torch.equal(decoder.table.views[UP], new[UP])
    assert torch.equal(decoder.table.views[gate], checkpoint_tensors(folders[0])[gate])
    assert_follow(decoder)


def test_an_engine_whose_update_failed_computes_with_the_old_copies(folders: tuple[Path, Path]) -> None:
    engine, ids = make_engine(folders[0]), torch.arange(5, 40).numpy()
    wrong = Canary(ids=ids, expected_logprobs=reference_logprobs(reference_model(folders[0]), ids).astype("float32"))
    before = engine.score(ids).token_logprobs
    engine.begin_update(None, version=1)
    for name, tensor in checkpoint_tensors(folders[1]).items():
        engine.stage(name, tensor)
    with pytest.raises(CanaryMismatch):
        engine.commit_update(canaries=[wrong])
    assert (engine.score(ids).token_logprobs == before).all()


def test_slices_may_be_filled_where_they_are_staged_and_what_was_there_is_void_meanwhile(folders: tuple[Path, Path]) -> None:
    decoder, new = load_decoder(folders[0], torch.float32), checkpoint_tensors(folders[1])
    update = WeightUpdate(decoder.table, None, version=1, partial=False)
    for name, start, values in slices_of(new, 777):
        opened = update.open_slice(name, start=start, count=values.numel(), spec=spec_of(new[name]))
        if name == "lm_head.weight" and opened is None:
            continue
        assert opened is not None
        for part in values.split(300):
            opened.values[opened.looked : opened.looked + part.numel()] = part
            opened.look(part.numel())
        update.close_slice(opened)
    again = update.open_slice(UP, start=0, count=777, spec=spec_of(new[UP]))
    assert again is not None
    with pytest.raises(Exception, match=f"1 of .* tensors never came: {UP}"):
        update.verify(None)
    again.look(777)
    update.close_slice(again)
    update.verify({name: digest(tensor) for name, tensor in new.items()})
    update.swap()
    assert all(torch.equal(view, new[name]) for name, view in decoder.table.views.items())
    assert_follow(decoder)


def test_a_slice_filled_with_what_is_not_finite_or_with_other_bits_is_refused_by_name(folders: tuple[Path, Path]) -> None:
    decoder, new = load_decoder(folders[0], torch.float32), checkpoint_tensors(folders[1])
    update, size = WeightUpdate(decoder.table, None, version=1, partial=False), new[UP].numel()

    def fill(values: torch.Tensor) -> None:
        opened = update.open_slice(UP, start=0, count=size, spec=spec_of(new[UP]))
        assert opened is not None
        opened.values.copy_(values.reshape(-1))
        opened.look(size - 5)
        opened.look(5)
        update.close_slice(opened)

    broken = new[UP].clone()
    broken[-1, -1] = torch.inf
    with pytest.raises(ManifestMismatch, match=f"{UP} holds NaN or infinity"):
        fill(broken)
    broken[-1, -1] = new[UP][-1, -1] + 1.0
    fill(broken)
    for name, tensor in new.items():
        if name != UP:
            update.stage(name, tensor)
    digests = {name: digest(tensor) for name, tensor in new.items()}
    with pytest.raises(DigestMismatch, match=f"differ for {UP}"):
        update.verify(digests)
    fill(new[UP])
    update.verify(digests)


def test_a_slice_that_was_not_looked_at_to_its_end_cannot_be_closed(folders: tuple[Path, Path]) -> None:
    decoder, new = load_decoder(folders[0], torch.float32), checkpoint_tensors(folders[1])
    update = WeightUpdate(decoder.table, None, version=1, partial=False)
    opened = update.open_slice(UP, start=0, count=100, spec=spec_of(new[UP]))
    assert opened is not None
    opened.look(99)
    with pytest.raises(AssertionError, match="99 of 100 elements"):
        update.close_slice(opened)


def test_values_that_must_be_cast_get_no_memory(folders: tuple[Path, Path]) -> None:
    decoder, new = load_decoder(folders[0], torch.bfloat16), checkpoint_tensors(folders[1])
    update = WeightUpdate(decoder.table, None, version=1, partial=False)
    assert update.open_slice(UP, start=0, count=10, spec=spec_of(new[UP])) is None
    assert update.open_slice(UP, start=new[UP].numel() - 5, count=10, spec=spec_of(new[UP].bfloat16())) is None
