"""The model, its K/V store and its sampler as one thing to run: lanes or prompt chunks in, logits and drawn tokens out.

Both decode paths and the prefill go through here, so a token is computed by the same arithmetic whoever keeps the row
state. On a CUDA device prompts run through captured graphs. The rank makes one; the weights behind it change only
between launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from areno.commands import PrefillChunk
from areno.config import LANE_MULTIPLE
from areno.decode.launch import ChunkScores
from areno.decode.tables import Lanes
from areno.kv.store import KVStore
from areno.layers.attention import DecodeAttention, DenseAttention, PrefillAttention, group_chunks
from areno.models.dense import DenseDecoder
from areno.prefill import PackedChunks, pack_chunks
from areno.sampling.sampler import Drawn, LaneParams, Sampler
from areno.sampling.shards import VocabularyShard, logprobs_of
from areno.sampling.variant import Variant
from areno.uploads import upload

if TYPE_CHECKING:
    from areno.prefill_graphs import PrefillGraphs


def vocabulary_shard(model: DenseDecoder) -> VocabularyShard | None:
    """Return which ids a rank's decoder has; None of a whole one."""
    shard = model.shard
    if shard.size == 1:
        return None
    return VocabularyShard(
        first_id=shard.ids.start, count=shard.ids.size, width=shard.width, vocab_size=shard.whole.vocab_size, group=model.group
    )


SCORE_ROWS = 512
_PADDING = ((16, LANE_MULTIPLE), (64, 16), (256, 32), (512, 64), (2048, 256), (8192, 1024))


def _padded(count: int) -> int:
    """Round up to one of few sizes, multiples of four: the library keeps half a megabyte of code for each size of a product."""
    step = next((step for bound, step in _PADDING if count <= bound), _PADDING[-1][1])
    return -(-count // step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What a prefill gives. Shapes: `logits` float32 [S, W], one per completed prompt in the chunks' order; None without one.

    `places` [B] names the logits of each sampled row: several rows of a group share them.
    """

    logits: torch.Tensor | None
    places: Sequence[int]
    scores: list[ChunkScores]


class Forward:
    """One rank's model over one store. Logits are of the rank's ids; what is drawn and scored is of the whole vocabulary."""

    __slots__ = ("_device", "_dtype", "_model", "_prompts", "_sampler", "_shard", "_store", "_windows")

    def __init__(self, model: DenseDecoder, store: KVStore, dtype: torch.dtype, prompts: PrefillGraphs | None = None) -> None:
        self._model, self._store, self._dtype, self._prompts = model, store, dtype, prompts
        self._shard = vocabulary_shard(model)
        valid = model.config.num_valid_ids
        self._sampler = (
            Sampler(first_id=0, width=model.config.vocab_size, num_valid_ids=valid)
            if self._shard is None
            else Sampler.of_shard(self._shard, valid)
        )
        self._device = model.table.device
        self._windows = {layer: window for layer, window in enumerate(model.config.windows) if window is not None}

    def decode(self, lanes: Lanes, longest: int) -> torch.Tensor:
        """Run one token of each lane. Shapes: logits float32 [B, W]. Mutates: the store."""
        attend = DecodeAttention(self._store, lanes.tables, lanes.slots, lanes.lengths, longest, self._dtype, self._windows)
        return self._model.logits(self._model.forward(lanes.ids, lanes.positions, attend))

    def prefill(self, chunks: Sequence[PrefillChunk]) -> PrefillResult:
        """Run packed chunks; return the logits of the rows they complete and the scores they were asked for. Mutates: the store."""
        packed, hidden = self._run(chunks) if self._prompts is None else self._prompts.run(chunks)
        ends = [offset + count - 1 for chunk, offset, count in zip(chunks, packed.offsets, packed.counts) if chunk.rows]
        rows = [len(chunk.rows) for chunk in chunks if chunk.rows]
        logits = None
        if ends:
            (last,) = upload(self._device, np.array(ends + [ends[-1]] * (self._padded(len(ends)) - len(ends)), dtype=np.int64))
            logits = self._model.logits(hidden.index_select(0, last))[: len(ends)]
        places = [place for place, count in enumerate(rows) for _ in range(count)]
        return PrefillResult(logits=logits, places=places, scores=self._score_chunks(chunks, packed.offsets, hidden))

    def forget_captures(self) -> None:
        """Drop what was captured over memory that has moved."""
        if self._prompts is not None:
            self._prompts.forget_captures()

    def _padded(self, count: int) -> int:
        return _padded(count) if self._device.type == "cpu" else count

    def _run(self, chunks: Sequence[PrefillChunk]) -> tuple[PackedChunks, torch.Tensor]:
        page_size = self._store.page_size
        total = self._padded(sum(chunk.ids.size for chunk in chunks))
        packed = pack_chunks(chunks, page_size=page_size, sink_slot=self._store.sink_slot, total=total)
        starts, tables = [chunk.start for chunk in chunks], [chunk.pages for chunk in chunks]
        groups = group_chunks(starts, packed.counts, packed.offsets, tables, page_size, self._dtype, self._windows)
        attend = PrefillAttention(self._store, groups, torch.from_numpy(packed.slots))
        return packed, self._model.forward(torch.from_numpy(packed.ids), torch.from_numpy(packed.positions), attend)

    def _score_chunks(self, chunks: Sequence[PrefillChunk], offsets: Sequence[int], hidden_TH: torch.Tensor) -> list[ChunkScores]:
        scores = []
        for chunk, offset in zip(chunks, offsets):
            if chunk.score_targets.size:
                first = offset + chunk.score_from - chunk.start
                tempered, raw = self._chosen(hidden_TH[first : first + chunk.score_targets.size], chunk.score_targets, chunk.temperature)
                scores.append(
                    ChunkScores(
                        seat=chunk.seat,
                        generation=chunk.generation,
                        position=chunk.score_from + 1,
                        logprobs=_on_its_way(tempered),
                        raw_logprobs=_on_its_way(raw),
                    )
                )
        return scores

    def draw(self, logits_BV: torch.Tensor, params: LaneParams, variant: Variant) -> Drawn:
        """Draw one token per lane."""
        return self._sampler.draw(logits_BV, params, variant)

    def score(self, ids: np.ndarray, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of ids[1:] given what precedes them: tempered and raw. Shapes: float32 [n - 1]."""
        count = ids.size
        padded = np.zeros(_padded(count), dtype=np.int64)
        padded[:count] = ids
        positions = np.zeros_like(padded)
        positions[:count] = np.arange(count)
        given, places = upload(self._device, padded, positions)
        hidden = self._model.forward(given, places, DenseAttention([count], self._windows))
        return self._chosen(hidden[: count - 1], ids[1:], temperature)

    def _chosen(self, hidden_SH: torch.Tensor, targets: np.ndarray, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of one target after each hidden state, the head running over slices of rows."""
        (chosen,) = upload(self._device, targets[:, None])
        tempered, raw = [], []
        for start in range(0, targets.size, SCORE_ROWS):
            rows = hidden_SH[start : start + SCORE_ROWS]
            count = rows.shape[0]
            logits = self._model.logits(F.pad(rows, (0, 0, 0, self._padded(count) - count)))[:count]
            picked = chosen[start : start + count]
            if self._shard is not None:
                both = logprobs_of(logits, picked[:, 0], temperature, self._shard)
                tempered.append(both[0])
                raw.append(both[1])
                continue
            raw.append(torch.log_softmax(logits, dim=1).gather(1, picked)[:, 0])
            plain = temperature in (0.0, 1.0)
            tempered.append(raw[-1] if plain else torch.log_softmax(logits / temperature, dim=1).gather(1, picked)[:, 0])
        return torch.cat(tempered), torch.cat(raw)


def _on_its_way(values: torch.Tensor) -> np.ndarray:
    """Return host memory that holds `values` once the launch has passed."""
    if values.device.type == "cpu":
        return values.numpy()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True).numpy()
