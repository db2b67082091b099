"""Prefill on a CUDA device: packed chunks through the fused decoder, captured for a few numbers of tokens.

A prompt of some dozens of tokens costs more in launches than in arithmetic. So chunks are padded to the next of a few sizes, their
ids, places, blocks and pages go to fixed buffers in one copy, and a graph of the whole model runs over them; lengths are read
on the device. What is larger than the largest size, or holds too many pages, is launched kernel by kernel with the library's
attention. The forward makes one; it is not for concurrent use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areno.commands import PrefillChunk
from areno.decode.capture import CapturePermit
from areno.kernels.prefill_attention import cut_blocks
from areno.kv.store import KVStore
from areno.models.dense_cuda import FusedDecoder, PagedChunks, SeenChunks
from areno.prefill import PackedChunks, pack_chunks, seen_slots
from areno.uploads import upload

SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
BLOCK_TOKENS = 64
MAX_PAGES = 1 << 14


@dataclass(frozen=True, slots=True)
class _Fields:
    """Where the fields of one size lie in the fixed buffer, in int32 words."""

    tokens: int
    blocks: int

    @property
    def first_block(self) -> int:
        """Where the blocks start: after ids, positions and slots."""
        return 3 * self.tokens

    @property
    def first_page(self) -> int:
        """Where the pages start."""
        return self.first_block + 4 * self.blocks


class PrefillGraphs:
    """Runs prompt chunks. Shapes: hidden states [T, hidden], valid until the next run."""

    def __init__(self, fused: FusedDecoder, store: KVStore, *, max_tokens: int, permit: CapturePermit) -> None:
        self._fused, self._store, self._permit = fused, store, permit
        self._device = store.keys.device
        self._sizes = [size for size in SIZES if size <= max_tokens]
        largest = self._fields(self._sizes[-1] if self._sizes else 0)
        self._buffer = torch.zeros(largest.first_page + MAX_PAGES, dtype=torch.int32, device=self._device)
        self._seen: set[int] = set()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def _fields(size: int) -> _Fields:
        # Every chunk may leave a block that is not full, and a chunk has a token at least.
        return _Fields(size, size // BLOCK_TOKENS + min(size, 256))

    def run(self, chunks: Sequence[PrefillChunk]) -> tuple[PackedChunks, torch.Tensor]:
        """Run chunks; return their packing and the hidden states after the final norm. Mutates: the store."""
        total = sum(chunk.ids.size for chunk in chunks)
        size = next((size for size in self._sizes if size >= total), None)
        pages = [chunk.pages[: -(-(chunk.start + chunk.ids.size) // self._store.page_size)] for chunk in chunks]
        if size is None or sum(map(len, pages)) > MAX_PAGES or len(chunks) > 256:
            return self._run_large(chunks)
        packed = pack_chunks(chunks, page_size=self._store.page_size, sink_slot=self._store.sink_slot, total=size)
        fields = self._fields(size)
        self._fill(fields, chunks, packed, pages)
        graph = self._graphs.get(size)
        if graph is None and size in self._seen and self._permit.allows(size):
            graph = self._graphs[size] = torch.cuda.CUDAGraph()
            with self._permit.capture(graph, self._pool):
                self._launch(fields)
        if graph is not None:
            graph.replay()
        else:
            self._launch(fields)
            self._seen.add(size)
        return packed, self._fused.prefilled[:size]

    def forget_captures(self) -> None:
        """Drop the graphs, whose launches name addresses."""
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._seen.clear()
        self._permit.forget()
        self._pool = torch.cuda.graph_pool_handle()

    def _fill(self, fields: _Fields, chunks: Sequence[PrefillChunk], packed: PackedChunks, pages: list[np.ndarray]) -> None:
        flat = np.concatenate(pages)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        offsets = np.cumsum([0, *map(len, pages)])[:-1].astype(np.int32)
        blocks = cut_blocks(starts, np.array(packed.counts, dtype=np.int32), offsets, BLOCK_TOKENS)
        words = np.zeros(fields.first_page + flat.size, dtype=np.int32)
        for place, values in enumerate((packed.ids, packed.positions, packed.slots)):
            words[place * fields.tokens : (place + 1) * fields.tokens] = values
        words[fields.first_block : fields.first_block + blocks.size] = blocks.reshape(-1)
        words[fields.first_page :] = flat
        staged = torch.empty(words.size, dtype=torch.int32, pin_memory=True)
        staged.numpy()[:] = words
        self._buffer[: words.size].copy_(staged, non_blocking=True)

    def _launch(self, fields: _Fields) -> None:
        size = fields.tokens
        ids, positions, slots = (self._buffer[place * size : (place + 1) * size] for place in range(3))
        blocks = self._buffer[fields.first_block : fields.first_page].view(fields.blocks, 4)
        self._fused.prefill(
            ids, positions, slots, PagedChunks(blocks=blocks, pages=self._buffer[fields.first_page :], block_tokens=BLOCK_TOKENS)
        )

    def _run_large(self, chunks: Sequence[PrefillChunk]) -> tuple[PackedChunks, torch.Tensor]:
        packed = pack_chunks(chunks, page_size=self._store.page_size, sink_slot=self._store.sink_slot)
        narrow = [array.astype(np.int32) for array in (packed.ids, packed.positions, packed.slots)]
        starts = [np.cumsum([0, *counts]).astype(np.int32) for counts in (packed.counts, packed.spans)]
        seen = seen_slots(chunks, packed.spans, self._store.page_size)
        ids, positions, slots, starts_q, starts_k, places = upload(self._device, *narrow, *starts, seen)
        seen_chunks = SeenChunks(starts_q=starts_q, starts_k=starts_k, places=places, counts=packed.counts, spans=packed.spans)
        return packed, self._fused.prefill(ids, positions, slots, seen_chunks)
