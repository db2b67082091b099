"""Prompt chunks laid end to end: what a prefill computes, as arrays. Host only, no torch.

Called by `Forward` on the CPU and by the captured prefill on a CUDA device, which read the same packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areno.commands import PrefillChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedChunks:
    """Chunks end to end. Shapes: `ids`, `positions` and `slots` int64 [T], padding included; `offsets` [C + 1].

    `spans` are the tokens that each chunk's last one sees; padding writes to the sink.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    counts: list[int]
    spans: list[int]
    offsets: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return self.offsets[-1]


def pack_chunks(chunks: Sequence[PrefillChunk], *, page_size: int, sink_slot: int, total: int | None = None) -> PackedChunks:
    """Lay chunks end to end and pad them to `total` tokens."""
    counts = [chunk.ids.size for chunk in chunks]
    offsets = [0, *np.cumsum(counts).tolist()]
    size = offsets[-1] if total is None else total
    ids = np.zeros(size, dtype=np.int64)
    positions = np.zeros(size, dtype=np.int64)
    slots = np.full(size, sink_slot, dtype=np.int64)
    for chunk, offset, count in zip(chunks, offsets, counts):
        place = slice(offset, offset + count)
        ids[place] = chunk.ids
        positions[place] = position = np.arange(chunk.start, chunk.start + count)
        slots[place] = chunk.pages[position // page_size] * page_size + position % page_size
    spans = [chunk.start + count for chunk, count in zip(chunks, counts)]
    return PackedChunks(ids=ids, positions=positions, slots=slots, counts=counts, spans=spans, offsets=offsets)


def seen_slots(chunks: Sequence[PrefillChunk], spans: Sequence[int], page_size: int) -> np.ndarray:
    """Return the slots of all tokens that the chunks see, chunk by chunk. Shapes: int64 [sum of spans]."""
    offset = np.arange(page_size)
    return np.concatenate(
        [(chunk.pages[: -(-span // page_size), None] * page_size + offset).reshape(-1)[:span] for chunk, span in zip(chunks, spans)]
    )
