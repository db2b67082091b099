"""A manifest that does not fit the model is refused before a byte is taken, with every wrong name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from areno.errors import ManifestMismatch
from areno.weights.names import ParameterTable, TensorSpec
from areno.weights.update import WeightUpdate
from tests.fixtures_models import checkpoint_tensors, load_decoder, manifest_of, write_checkpoint

ATTENTION = "model.layers.0.self_attn"
Q, K, V = f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("manifest"))


@pytest.fixture
def old(checkpoint: Path) -> ParameterTable:
    return load_decoder(checkpoint).table


@pytest.fixture
def new(checkpoint: Path) -> dict[str, torch.Tensor]:
    return checkpoint_tensors(checkpoint)


def refuse_manifest(table: ParameterTable, manifest: Mapping[str, TensorSpec], *named: str, partial: bool = False) -> ManifestMismatch:
    with pytest.raises(ManifestMismatch) as caught:
        WeightUpdate(table, manifest, version=1, partial=partial)
    for text in (*named, "the old weights serve on"):
        assert text in str(caught.value), f"{text!r} is not in: {caught.value}"
    return caught.value


def test_a_manifest_that_lacks_a_tensor_is_refused_by_name(old: ParameterTable, new: dict[str, torch.Tensor]) -> None:
    manifest = manifest_of(new)
    del manifest[K], manifest["model.norm.weight"]
    error = refuse_manifest(old, manifest, f"missing: {K}, model.norm.weight", "partial=True")
    assert error.value == [K, "model.norm.weight"]


def test_a_misspelt_name_is_refused_with_the_nearest_one(old: ParameterTable, new: dict[str, torch.Tensor]) -> None:
    manifest = manifest_of(new)
    manifest[Q.replace("q_proj", "q_prj")] = manifest.pop(Q)
    refuse_manifest(old, manifest, "unknown: model.layers.0.self_attn.q_prj.weight", f"did you mean {Q}?", f"missing: {Q}")


@pytest.mark.parametrize("shape", [(64,), (1,), (1, 64), (64, 32), (32, 128), ()])
def test_a_wrong_shape_in_the_manifest_is_refused(old: ParameterTable, new: dict[str, torch.Tensor], shape: tuple[int, ...]) -> None:
    refuse_manifest(old, {**manifest_of(new), Q: TensorSpec("float32", shape)}, f"wrong shape: {Q} is {shape}, the model's is (64, 64)")


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "complex64", "bf16", ""])
def test_a_wrong_dtype_in_the_manifest_is_refused(old: ParameterTable, new: dict[str, torch.Tensor], dtype: str) -> None:
    refuse_manifest(old, {**manifest_of(new), Q: TensorSpec(dtype, (64, 64))}, f"wrong dtype: {Q} is {dtype}", "bfloat16")


@pytest.mark.parametrize("alias", [f"module.{Q}", f"_orig_mod.{Q}", Q.removeprefix("model.")])
def test_one_tensor_under_two_names_of_a_manifest_is_refused(old: ParameterTable, new: dict[str, torch.Tensor], alias: str) -> None:
    refuse_manifest(old, {**manifest_of(new), alias: TensorSpec("float32", (64, 64))}, f"offered twice: {Q}", alias)


def test_all_faults_of_a_manifest_are_told_at_once(old: ParameterTable, new: dict[str, torch.Tensor]) -> None:
    manifest = {**manifest_of(new), V: TensorSpec("float32", (64,)), "extra.weight": TensorSpec("float32", (3,))}
    del manifest[K]
    refuse_manifest(old, manifest, f"missing: {K}", f"wrong shape: {V}", "unknown: extra.weight")


def test_an_empty_manifest_is_refused_even_if_partial(old: ParameterTable) -> None:
    refuse_manifest(old, {}, "no tensor is named", partial=True)


def test_names_beyond_the_model_are_to_be_left_out_and_only_missing_ones_may_be_partial(
    old: ParameterTable, new: dict[str, torch.Tensor]
) -> None:
    head = {"value.weight": TensorSpec("float32", (1, 64)), "value.bias": TensorSpec("float32", (1,))}
    for partial in (False, True):
        error = refuse_manifest(old, {**manifest_of(new), **head}, "unknown: value.weight", "unknown: value.bias", partial=partial)
        assert "leave out what the served model does not have" in str(error.remedy) and "partial" not in str(error)
    with pytest.raises(ManifestMismatch, match="leave out what the served model does not have; did you mean"):
        WeightUpdate(old, None, version=1, partial=False).stage("value.weight", torch.zeros(1, 64))
    for shape in ((1, 64), ()):
        error = refuse_manifest(old, {**manifest_of(new), **head, Q: TensorSpec("float32", shape)}, "wrong shape")
        assert "offer tensors as the model has them" in str(error.remedy) and "partial" not in str(error)
