"""The model, its K/V store and its sampler as one thing to run: lanes or prompt chunks in, drawn tokens out.

Both decode paths and the prefill go through here, so a token is computed by the same arithmetic whoever keeps the row
state. The executor makes one; the weights behind it change only between launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from areno.sampling.sampler import Drawn, LaneParams, Sampler
from areno.sampling.variant import Variant

SCORE_ROWS = 512


def _padded(count: int) -> int:
    return -(-count // LANE_MULTIPLE) * LANE_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What a prefill gives. Shapes: `logits` float32 [B, V], one per sampled row in the chunks' order; None without one."""

    logits: torch.Tensor | None
    scores: list[ChunkScores]


class Forward:
    """One rank's model over one store."""

    __slots__ = ("_dtype", "_model", "_sampler", "_store", "_windows")

    def __init__(self, model: DenseDecoder, store: KVStore, sampler: Sampler, dtype: torch.dtype) -> None:
        self._model, self._store, self._sampler, self._dtype = model, store, sampler, dtype
        self._windows = {layer: window for layer, window in enumerate(model.config.windows) if window is not None}

    def decode(self, lanes: Lanes, longest: int) -> torch.Tensor:
        """Run one token of each lane. Shapes: logits float32 [B, V]. Mutates: the store."""
        attend = DecodeAttention(self._store, lanes.tables, lanes.slots, lanes.lengths, longest, self._dtype, self._windows)
        return self._model.logits(self._model.forward(lanes.ids, lanes.positions, attend))

    def prefill(self, chunks: Sequence[PrefillChunk]) -> PrefillResult:
        """Run packed chunks; return the logits of the rows they complete and the scores they were asked for. Mutates: the store."""
        page_size = self._store.page_size
        counts = [chunk.ids.size for chunk in chunks]
        offsets = [0, *np.cumsum(counts).tolist()]
        total = _padded(offsets[-1])
        ids = np.zeros(total, dtype=np.int64)
        positions = np.zeros(total, dtype=np.int64)
        slots = np.full(total, self._store.sink_slot, dtype=np.int64)
        for chunk, offset, count in zip(chunks, offsets, counts):
            span = slice(offset, offset + count)
            ids[span] = chunk.ids
            positions[span] = position = np.arange(chunk.start, chunk.start + count)
            slots[span] = chunk.pages[position // page_size] * page_size + position % page_size
        starts, tables = [chunk.start for chunk in chunks], [chunk.pages for chunk in chunks]
        groups = group_chunks(starts, counts, offsets, tables, page_size, self._dtype, self._windows)
        attend = PrefillAttention(self._store, groups, torch.from_numpy(slots))
        hidden = self._model.forward(torch.from_numpy(ids), torch.from_numpy(positions), attend)
        complete = [(offset + count - 1, len(chunk.rows)) for chunk, offset, count in zip(chunks, offsets, counts) if chunk.rows]
        logits = None
        if complete:
            last = [place for place, _ in complete]
            computed = self._model.logits(hidden[last + [last[-1]] * (_padded(len(last)) - len(last))])
            logits = computed[[lane for lane, (_, rows) in enumerate(complete) for _ in range(rows)]]
        return PrefillResult(logits=logits, scores=self._score_chunks(chunks, offsets, hidden))

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
                        logprobs=tempered.numpy(),
                        raw_logprobs=raw.numpy(),
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
        hidden = self._model.forward(torch.from_numpy(padded), torch.from_numpy(positions), DenseAttention([count], self._windows))
        return self._chosen(hidden[: count - 1], ids[1:], temperature)

    def _chosen(self, hidden_SH: torch.Tensor, targets: np.ndarray, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of one target after each hidden state, the head running over slices of rows."""
        chosen = torch.from_numpy(targets)[:, None]
        tempered, raw = [], []
        for start in range(0, targets.size, SCORE_ROWS):
            rows = hidden_SH[start : start + SCORE_ROWS]
            count = rows.shape[0]
            logits = self._model.logits(F.pad(rows, (0, 0, 0, _padded(count) - count)))[:count]
            picked = chosen[start : start + count]
            raw.append(torch.log_softmax(logits, dim=1).gather(1, picked)[:, 0])
            plain = temperature in (0.0, 1.0)
            tempered.append(raw[-1] if plain else torch.log_softmax(logits / temperature, dim=1).gather(1, picked)[:, 0])
        return torch.cat(tempered), torch.cat(raw)
