"""The model, its K/V store and its sampler as one thing to run: lanes or prompt chunks in, drawn tokens out.

Both decode paths and the prefill go through here, so a token is computed by the same arithmetic whoever keeps the row
state. The executor makes one; the weights behind it change only between launches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from areno.commands import PrefillChunk
from areno.config import LANE_MULTIPLE
from areno.decode.tables import Lanes
from areno.kv.store import KVStore
from areno.layers.attention import DecodeAttention, DenseAttention, PrefillAttention, group_chunks
from areno.models.dense import DenseDecoder
from areno.sampling.sampler import Drawn, LaneParams, Sampler
from areno.sampling.variant import Variant

SCORE_ROWS = 512


def _padded(count: int) -> int:
    return -(-count // LANE_MULTIPLE) * LANE_MULTIPLE


class Forward:
    """One rank's model over one store."""

    __slots__ = ("_dtype", "_model", "_sampler", "_store")

    def __init__(self, model: DenseDecoder, store: KVStore, sampler: Sampler, dtype: torch.dtype) -> None:
        self._model, self._store, self._sampler, self._dtype = model, store, sampler, dtype

    def decode(self, lanes: Lanes, longest: int) -> torch.Tensor:
        """Run one token of each lane. Shapes: logits float32 [B, V]. Mutates: the store."""
        attend = DecodeAttention(self._store, lanes.tables, lanes.slots, lanes.lengths, longest, self._dtype)
        return self._model.logits(self._model.forward(lanes.ids, lanes.positions, attend))

    def prefill(self, chunks: Sequence[PrefillChunk]) -> torch.Tensor | None:
        """Run packed chunks; return the logits after each complete prompt, padded to whole lanes. Shapes: float32 [B, V]."""
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
        groups = group_chunks([chunk.start for chunk in chunks], counts, offsets, [chunk.pages for chunk in chunks], page_size, self._dtype)
        attend = PrefillAttention(self._store, groups, torch.from_numpy(slots))
        hidden = self._model.forward(torch.from_numpy(ids), torch.from_numpy(positions), attend)
        last = [offset + count - 1 for chunk, offset, count in zip(chunks, offsets, counts) if chunk.row >= 0]
        if not last:
            return None
        last.extend([last[-1]] * (_padded(len(last)) - len(last)))
        return self._model.logits(hidden[last])

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
        hidden = self._model.forward(torch.from_numpy(padded), torch.from_numpy(positions), DenseAttention([count]))
        targets = torch.from_numpy(padded[1:count])
        tempered, raw = [], []
        for start in range(0, count - 1, SCORE_ROWS):
            end = min(start + SCORE_ROWS, count - 1)
            logits = self._model.logits(hidden[start : start + _padded(end - start)])[: end - start]
            chosen = targets[start:end, None]
            raw.append(torch.log_softmax(logits, dim=1).gather(1, chosen)[:, 0])
            divided = logits if temperature in (0.0, 1.0) else logits / temperature
            tempered.append(raw[-1] if divided is logits else torch.log_softmax(divided, dim=1).gather(1, chosen)[:, 0])
        return torch.cat(tempered), torch.cat(raw)
