"""Checkpoints that are whole load; broken ones are refused with the names of tensors and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areno.errors import CheckpointError
from areno.weights.load import INDEX_FILE, SINGLE_FILE, load_checkpoint
from tests.fixtures_models import checkpoint_tensors, decoder_logprobs, load_decoder, reference_logprobs, write_checkpoint

IDS = np.random.default_rng(3).integers(0, 256, 48)
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints made once; tests break copies of them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "single")
    write_checkpoint(folder / "sharded", max_shard_size="100KB")
    write_checkpoint(folder / "tied", tie_word_embeddings=True)
    return folder


def copy_of(made: Path, name: str, to: Path) -> Path:
    return Path(shutil.copytree(made / name, to / name))


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def refuse(folder: Path, *named: str) -> CheckpointError:
    """Assert that `folder` is refused in words that hold each of `named`, and return the error."""
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    for text in named:
        assert text in str(caught.value), f"{text!r} is not in: {caught.value}"
    assert caught.value.remedy and caught.value.remedy in str(caught.value)
    return caught.value


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of one file (None drops one); double underscores stand for dots."""
    tensors = load_file(path)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path)


def key(name: str) -> str:
    return name.replace(".", "__")


def test_single_file_sharded_and_index_free_full_shards_load_alike(made: Path, tmp_path: Path) -> None:
    expected = reference_logprobs(made / "single", IDS)
    unindexed = copy_of(made, "sharded", tmp_path)
    (unindexed / INDEX_FILE).unlink()
    assert len(shards_of(unindexed)) > 2
    for folder in (made / "single", made / "sharded", unindexed):
        np.testing.assert_allclose(decoder_logprobs(load_decoder(folder), IDS), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_loading_casts_as_tensor_to_does(tmp_path: Path, saved: torch.dtype, served: torch.dtype) -> None:
    table = load_decoder(write_checkpoint(tmp_path, dtype=saved), served).table
    for name, tensor in checkpoint_tensors(tmp_path).items():
        assert tensor.dtype == saved
        assert torch.equal(table.views[name], tensor.to(served)), name


def test_prefixes_of_wrapped_models_are_understood(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "single", tmp_path)
    tensors = load_file(folder / SINGLE_FILE)
    for prefix in ("module.", "_orig_mod.", "model."):
        save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / SINGLE_FILE)
        assert torch.equal(load_decoder(folder).table.views[Q0], tensors[Q0])
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / SINGLE_FILE)
    assert torch.equal(load_decoder(folder).table.views[Q0], tensors[Q0])


def test_every_missing_shard_is_named_with_its_tensors(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "sharded", tmp_path)
    lost = shards_of(folder)[-1]
    names = list(load_file(lost))
    lost.unlink()
    refuse(folder, lost.name, names[0], "copy the checkpoint again")
    (folder / INDEX_FILE).unlink()
    refuse(folder, lost.name, "shards are missing")


def test_a_missing_first_shard_without_an_index_is_named(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "sharded", tmp_path)
    (folder / INDEX_FILE).unlink()
    lost = shards_of(folder)[0]
    lost.unlink()
    refuse(folder, lost.name)


@pytest.mark.parametrize("others", [[], ["pytorch_model.bin", "optimizer.pt"], ["consolidated.safetensors"], ["adapter_model.safetensors"]])
def test_a_folder_without_weights_is_refused_with_what_it_holds(made: Path, tmp_path: Path, others: list[str]) -> None:
    shutil.copy(made / "single" / "config.json", tmp_path)
    for name in others:
        shutil.copy(made / "single" / SINGLE_FILE, tmp_path / name)
    refuse(tmp_path, "no weights in", SINGLE_FILE, *others, "save_pretrained")


def test_a_folder_in_a_files_place_is_refused(made: Path, tmp_path: Path) -> None:
    shutil.copy(made / "single" / "config.json", tmp_path)
    shutil.copytree(made / "single", tmp_path / SINGLE_FILE)
    refuse(tmp_path, "model.safetensors is a folder")


def test_a_folder_that_is_named_like_a_file_loads(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "single", tmp_path / "x.safetensors")
    load_decoder(folder)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "sharded", tmp_path)
    owner = json.loads((folder / INDEX_FILE).read_text())["weight_map"][Q0]
    rewrite(folder / owner, **{key(Q0): None})
    refuse(folder, Q0, owner, "of one save")


def test_a_stale_index_that_forgets_a_tensor_is_refused_with_the_file_that_holds_it(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "sharded", tmp_path)
    index = json.loads((folder / INDEX_FILE).read_text())
    owner = index["weight_map"].pop(Q0)
    (folder / INDEX_FILE).write_text(json.dumps(index))
    error = refuse(folder, f"{Q0} is in {owner} but not in {INDEX_FILE}")
    assert error.value == [Q0]


def test_the_file_that_the_index_names_wins_over_a_copy_elsewhere(made: Path, tmp_path: Path) -> None:
    for position in (0, -1):
        folder = copy_of(made, "sharded", tmp_path / str(position))
        owner = json.loads((folder / INDEX_FILE).read_text())["weight_map"][Q0]
        other = [path for path in shards_of(folder) if path.name != owner][position]
        rewrite(other, **{key(Q0): torch.zeros(64, 64)})
        expected = reference_logprobs(made / "single", IDS)
        np.testing.assert_allclose(decoder_logprobs(load_decoder(folder), IDS), expected, atol=1e-4, rtol=0)
        (folder / INDEX_FILE).unlink()
        refuse(folder, Q0, owner, other.name, "keep one of the two")


def test_two_names_of_one_tensor_are_refused(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "single", tmp_path)
    rewrite(folder / SINGLE_FILE, **{f"module__{key(Q0)}": torch.zeros(64, 64)})
    refuse(folder, Q0, "is in model.safetensors too")


def test_a_single_file_beside_shards_is_ambiguous(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "sharded", tmp_path)
    shutil.copy(made / "single" / SINGLE_FILE, folder)
    refuse(folder, "two sets of weights", SINGLE_FILE, "delete the set")
    (folder / INDEX_FILE).unlink()
    refuse(folder, "two sets of weights", shards_of(folder)[0].name)


def test_shards_of_two_saves_are_ambiguous_without_an_index(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "sharded", tmp_path)
    (folder / INDEX_FILE).unlink()
    shutil.copy(shards_of(folder)[0], folder / "model-00001-of-00002.safetensors")
    refuse(folder, "two sets of weights", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("kept", [0, 4, 100, 50_000])
def test_a_truncated_file_is_named(made: Path, tmp_path: Path, kept: int) -> None:
    folder = copy_of(made, "single", tmp_path)
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:kept])
    refuse(folder, "model.safetensors cannot be read", "copy the checkpoint again")


def test_a_truncated_shard_is_named(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "sharded", tmp_path)
    path = shards_of(folder)[1]
    path.write_bytes(path.read_bytes()[:-8])
    refuse(folder, f"{path.name} cannot be read")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x.safetensors"}}'],
)
def test_an_index_that_makes_no_sense_is_refused(made: Path, tmp_path: Path, text: str) -> None:
    folder = copy_of(made, "sharded", tmp_path)
    (folder / INDEX_FILE).write_text(text)
    refuse(folder, INDEX_FILE)


@pytest.mark.parametrize("name", [Q0, "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_is_named(made: Path, tmp_path: Path, name: str) -> None:
    folder = copy_of(made, "single", tmp_path)
    rewrite(folder / SINGLE_FILE, **{key(name): None})
    error = refuse(folder, f"lacks 1 of the model's tensors: {name}")
    assert error.value == [name]


def test_tensors_that_the_model_does_not_have_are_named(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "single", tmp_path)
    rewrite(
        folder / SINGLE_FILE,
        **{"model__layers__2__mlp__up_proj__weight": torch.zeros(128, 64), "model__layers__0__self_attn__q_proj__bias": torch.zeros(64)},
    )
    refuse(folder, "model.layers.2.mlp.up_proj.weight (model.safetensors)", "model.layers.0.self_attn.q_proj.bias", "config.json")


def test_rope_frequencies_of_old_checkpoints_are_skipped(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "single", tmp_path)
    rewrite(folder / SINGLE_FILE, **{"model__layers__0__self_attn__rotary_emb__inv_freq": torch.zeros(8)})
    load_decoder(folder)


@pytest.mark.parametrize("shape", [(64,), (1,), (1, 64), (64, 32), (1, 64, 64)])
def test_a_wrong_shape_is_refused_and_nothing_is_broadcast(made: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    folder = copy_of(made, "single", tmp_path)
    rewrite(folder / SINGLE_FILE, **{key(Q0): torch.zeros(shape)})
    refuse(folder, Q0, str(shape), "(64, 64)", "config.json that belongs")


def test_quantized_and_unfinite_weights_are_refused(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "single", tmp_path)
    rewrite(folder / SINGLE_FILE, **{key(Q0): torch.zeros(64, 64, dtype=torch.int8)})
    refuse(folder, Q0, "torch.int8", "save the weights in float32")
    for poison in (float("nan"), float("inf")):
        poisoned = torch.zeros(64, 64)
        poisoned[5, 5] = poison
        rewrite(folder / SINGLE_FILE, **{key(Q0): poisoned})
        refuse(folder, Q0, "NaN or infinity")


def test_a_tied_head_may_be_in_the_file_if_it_is_equal(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, "tied", tmp_path)
    embedding = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"]
    rewrite(folder / SINGLE_FILE, lm_head__weight=embedding.clone())
    np.testing.assert_allclose(decoder_logprobs(load_decoder(folder), IDS), reference_logprobs(made / "tied", IDS), atol=1e-4, rtol=0)
    rewrite(folder / SINGLE_FILE, lm_head__weight=embedding * 1.01)
    refuse(folder, "lm_head.weight", "ties it to model.embed_tokens.weight", "tie_word_embeddings")


def test_loading_again_replaces_everything_and_the_derived_head(made: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", seed=5)
    decoder = load_decoder(made / "single", torch.bfloat16)
    first = decoder_logprobs(decoder, IDS)
    load_checkpoint(other, decoder.table)
    second = decoder_logprobs(decoder, IDS)
    assert np.array_equal(second, decoder_logprobs(load_decoder(other, torch.bfloat16), IDS))
    assert np.abs(second - first).max() > 0.1
    decoder.table.check_integrity()
