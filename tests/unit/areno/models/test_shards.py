"""A model cut into ranks: what each holds, that together they are the whole, and what cannot be cut."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno.errors import CheckpointError, InvalidConfig
from areno.models.dense import DenseDecoder
from areno.models.model_config import read_model_config
from areno.models.registry import build_model
from areno.models.shards import check_tp, shard_model
from areno.parallel import TPGroup
from areno.rank import fill_randomly
from areno.weights.cut import Cut
from areno.weights.digest import digest, digest_rows
from areno.weights.live_digests import digests
from areno.weights.load import load_checkpoint
from areno.weights.shards import TensorShard
from tests.fixtures_models import FAMILIES, DenseCache, checkpoint_tensors, load_decoder, write_checkpoint
from tests.tp_ranks import run_ranks

IDS = np.random.default_rng(2).integers(0, 250, 24)
ODD = {"vocab_size": 250, "attention_bias": True, "mlp_bias": True}


def load_part(folder: Path, group: TPGroup) -> DenseDecoder:
    decoder = build_model(read_model_config(folder), dtype=torch.float32, device=group.device, group=group)
    load_checkpoint(folder, decoder.table, group)
    decoder.table.check_integrity()
    return decoder


def logits_of(decoder: DenseDecoder) -> torch.Tensor:
    with torch.inference_mode():
        positions = torch.arange(IDS.size)
        return decoder.logits(decoder.forward(torch.as_tensor(IDS), positions, DenseCache()))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ranks_logits_side_by_side_are_the_whole_models(family: str, size: int, tmp_path: Path) -> None:
    # Two kv heads: at four ranks neighbours hold copies of one. 250 ids: the last rank holds fewer.
    folder = write_checkpoint(tmp_path, family, vocab_size=250)
    parts = torch.cat(run_ranks(size, lambda group: logits_of(load_part(folder, group))), dim=1)
    whole = logits_of(load_decoder(folder))
    assert parts.shape == whole.shape
    assert (parts - whole).abs().max() < 2e-5 * whole.abs().max()


def test_biases_of_added_up_projections_count_once_and_tied_heads_are_cut_like_the_embedding(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", tie_word_embeddings=True, **ODD)
    parts = torch.cat(run_ranks(2, lambda group: logits_of(load_part(folder, group))), dim=1)
    assert (parts - logits_of(load_decoder(folder))).abs().max() < 1e-4


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_hold_every_element_and_their_digests_add_up(size: int, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", **ODD)
    tensors = checkpoint_tensors(folder)
    parts = run_ranks(size, lambda group: (lambda decoder: (decoder, digests(decoder.table, group)))(load_part(folder, group)))
    expected = {name: digest(tensor) for name, tensor in tensors.items()}
    for decoder, found in parts:
        assert found == expected
        assert decoder.table.manifest() == load_decoder(folder).table.manifest()
        assert decoder.table.num_parameters == sum(tensor.numel() for tensor in tensors.values())
        for name, view in decoder.table.views.items():
            assert torch.equal(view, decoder.table.shards[name].take(tensors[name])), name
    held = sum(decoder.table.num_local_parameters for decoder, _ in parts)
    assert held < 1.5 * sum(tensor.numel() for tensor in tensors.values()), "matrices are cut, not copied"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_only_a_ranks_part_of_a_tensor_is_read(tied: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, "llama", tie_word_embeddings=tied, **ODD)
    monkeypatch.setattr("areno.weights.load.safe_open", _CountingFile)
    _CountingFile.num_bytes.clear()
    parts = run_ranks(size, lambda group: (load_part(folder, group), _CountingFile.num_bytes[threading.get_ident()]))
    whole = sum(tensor.nbytes for tensor in checkpoint_tensors(folder).values())
    for part, num_bytes in parts:
        # Norms and the biases of summed projections are read by several; a key and value head that neighbours hold by both.
        assert num_bytes == sum(view.nbytes for view in part.table.views.values()) < 1.35 * whole / size


class _CountingFile:
    """A safetensors file that counts the bytes of what is taken from it, by thread; tensors that are cut are not given whole."""

    num_bytes: Counter[int] = Counter()

    def __init__(self, *args: object, **options: object) -> None:
        import safetensors

        self._file = safetensors.safe_open(*args, **options)

    def __enter__(self) -> _CountingFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> _CountingSlice:
        return _CountingSlice(self._file.get_slice(name))


class _CountingSlice:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_shape(self) -> list[int]:
        return list(self._inner.get_shape())

    def __getitem__(self, place: Any) -> torch.Tensor:
        taken: torch.Tensor = self._inner[place]
        _CountingFile.num_bytes[threading.get_ident()] += taken.nbytes
        return taken


def test_a_checkpoint_that_differs_between_ranks_is_refused_by_all(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / str(rank), "llama", seed=rank) for rank in range(2)]
    with pytest.raises(CheckpointError, match="found other files than this rank"):
        run_ranks(2, lambda group: load_part(folders[group.rank], group))


def test_a_rank_that_cannot_load_fails_all_of_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    said = []

    def load(group: TPGroup) -> None:
        decoder = build_model(read_model_config(folder), dtype=torch.float32, device=group.device, group=group)
        try:
            load_checkpoint(folder if group.rank == 0 else tmp_path / "nothing", decoder.table, group)
        except CheckpointError as error:
            said.append(str(error))

    run_ranks(2, load)
    assert len(said) == 2 and any("rank 1 could not load its part" in text for text in said)


def test_random_weights_are_those_of_one_rank(tmp_path: Path) -> None:
    config = read_model_config(write_checkpoint(tmp_path, "qwen3"))

    def fill(group: TPGroup) -> DenseDecoder:
        decoder = build_model(config, dtype=torch.float32, device=group.device, group=group)
        fill_randomly(decoder, 5)
        return decoder

    (whole,) = run_ranks(1, fill)
    for part in run_ranks(2, fill):
        for name, view in part.table.views.items():
            assert torch.equal(view, part.table.shards[name].take(whole.table.views[name])), name


@pytest.mark.parametrize(
    ("field", "value", "tp"), [("num_heads", 6, 4), ("num_kv_heads", 3, 2), ("intermediate_size", 129, 2), ("vocab_size", 3, 4)]
)
def test_a_number_of_ranks_that_does_not_fit_is_refused_with_those_that_do(field: str, value: int, tp: int, tmp_path: Path) -> None:
    config = replace(read_model_config(write_checkpoint(tmp_path, "llama")), **{"num_heads": 12, "num_kv_heads": 4, field: value})
    with pytest.raises(InvalidConfig, match=r"what works: 1.*; set tp to one of them") as refused:
        check_tp(config, tp)
    assert refused.value.field == "tp" and str(value) in str(refused.value)


@pytest.mark.parametrize("vocab", [250, 256, 1000, 151936])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_id_lies_in_one_rank_and_no_rank_is_empty(vocab: int, size: int, tmp_path: Path) -> None:
    config = replace(read_model_config(write_checkpoint(tmp_path, "llama")), vocab_size=vocab, num_heads=8, num_kv_heads=8)
    shards = [shard_model(config, rank, size) for rank in range(size)]
    assert [one for shard in shards for one in range(shard.ids.start, shard.ids.stop)] == list(range(vocab))
    assert all(0 < shard.ids.size <= shard.width for shard in shards)


@pytest.mark.parametrize("dimension", [0, 1])
def test_any_flat_run_of_a_tensor_finds_its_elements_in_a_part(dimension: int) -> None:
    whole = torch.arange(7 * 12, dtype=torch.float32).view(7, 12)
    cuts = (Cut(7, 2, 5), Cut.whole(12)) if dimension == 0 else (Cut.whole(7), Cut(12, 4, 9))
    shard = TensorShard.of(*cuts, ranks=2)
    for start in range(0, whole.numel(), 3):
        for count in (1, 2, 11, 12, 25, 84 - start):
            if start + count > whole.numel():
                continue
            held, run = torch.full_like(shard.take(whole), -1).contiguous(), whole.view(-1)[start : start + count]
            total = 0
            for one in shard.overlaps(start, count):
                one.of_shard(held).copy_(one.of_run(run))
                total += digest_rows(one.of_run(run), one.index, one.stride)
            inside = (torch.arange(84) >= start) & (torch.arange(84) < start + count)
            assert torch.equal(held, torch.where(shard.take(inside.view(7, 12)), shard.take(whole), -1.0))
            alone = torch.where(inside.view(7, 12), whole, 0.0)
            part = torch.zeros_like(whole)
            part[shard.place] = alone[shard.place]
            # Zeros have no bits, so they add nothing to a digest.
            assert total % 2**64 == digest(part)
