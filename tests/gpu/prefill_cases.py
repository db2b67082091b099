"""Random prompt chunks over scattered pages for the checks on a card, and what plain torch says of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from areno.kernels.prefill_attention import cut_blocks
from tests.gpu.attention_cases import CUDA

GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
SINK = 2
SPARE_ROWS = 3
"""Packed rows at the end that belong to no chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Packed chunks and their store. Shapes: `q` [T, H, D], store [N, G, K, D], `pages` int32 [M], numpy [C] each."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor
    starts: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray

    @property
    def ends(self) -> np.ndarray:
        return self.starts + self.counts

    def pick(self, *chosen: int) -> Chunks:
        """Return some of the chunks, packed anew over the same store."""
        begins = np.cumsum(self.counts) - self.counts
        rows = np.concatenate([np.arange(begins[chunk], begins[chunk] + self.counts[chunk]) for chunk in chosen])
        index = np.array(chosen)
        q = torch.cat((self.q[torch.from_numpy(rows).to(CUDA)], self.q[-SPARE_ROWS:]))
        return replace(self, q=q, starts=self.starts[index], counts=self.counts[index], offsets=self.offsets[index])

    def held(self, chunk: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pages and offsets of positions of a chunk's sequence."""
        page = self.keys.shape[1]
        return self.pages[int(self.offsets[chunk]) + places // page].long(), places % page

    def blocks(self, block_m: int) -> torch.Tensor:
        """Return the entries, unused ones among them and behind."""
        cut = cut_blocks(self.starts, self.counts, self.offsets, block_m)
        unused = np.array([[1 << 30, 0, 1 << 30, 1 << 30]] * 2, dtype=np.int32)
        return torch.from_numpy(np.concatenate((cut[:1], unused, cut[1:], unused))).to(CUDA)

    @property
    def traffic(self) -> int:
        """Bytes that must move: keys and values of each chunk once, q and the output."""
        stored = 2 * int(self.ends.sum()) * self.keys.shape[2] * self.keys.shape[3]
        return (stored + 2 * int(self.counts.sum()) * self.q.shape[1] * self.q.shape[2]) * self.q.element_size()

    @property
    def flop(self) -> int:
        pairs = int((self.counts * self.starts + self.counts * (self.counts + 1) // 2).sum())
        return 4 * pairs * self.q.shape[1] * self.q.shape[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a kernel is compiled for besides its tiling."""

    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    page: int = 64
    window: int = 0
    dtype: torch.dtype = torch.bfloat16


def place(shape: Shape, sequences: Sequence[Sequence[tuple[int, int]]], *, sets: int = 1) -> list[Chunks]:
    """Return sets of chunks (start, count), those of one sequence over the same pages, each set on pages of its own."""
    needed = np.array([-(-max(start + count for start, count in chunks) // shape.page) for chunks in sequences])
    total = int(needed.sum())
    store = [
        torch.empty(sets * total + SINK, shape.page, shape.kv_heads, shape.dim, device=CUDA, dtype=shape.dtype).normal_() for _ in range(2)
    ]
    order = (torch.randperm(sets * total, device=CUDA) + SINK).to(torch.int32)
    flat = [(start, count, index) for index, chunks in enumerate(sequences) for start, count in chunks]
    starts, counts, owner = (np.array(column) for column in zip(*flat))
    offsets = (np.cumsum(needed) - needed)[owner]
    found = []
    for index in range(sets):
        q = torch.randn(int(counts.sum()) + SPARE_ROWS, shape.heads, shape.dim, device=CUDA).to(shape.dtype)
        pages = order[index * total : (index + 1) * total]
        found.append(Chunks(q=q, keys=store[0], values=store[1], pages=pages, starts=starts, counts=counts, offsets=offsets))
    return found


def poison(chunks: Chunks, window: int) -> None:
    """Fill every slot that no chunk sees with NaN, hidden whole pages below the windows too. Mutates: the store and spare rows."""
    page = chunks.keys.shape[1]
    seen = torch.zeros(chunks.keys.shape[:2], dtype=torch.bool, device=CUDA)
    for chunk, (start, end) in enumerate(zip(chunks.starts.tolist(), chunks.ends.tolist())):
        first = max(start + 1 - window, 0) // page * page if window else 0
        seen[chunks.held(chunk, torch.arange(first // 128 * 128, end, device=CUDA))] = True
    for store in (chunks.keys, chunks.values):
        store[~seen] = math.nan
    chunks.q[-SPARE_ROWS:] = math.nan


def exact(chunks: Chunks, scale: float, window: int) -> torch.Tensor:
    """Return attention in float64, chunk by chunk."""
    share = chunks.q.shape[1] // chunks.keys.shape[2]
    parts = []
    queries = chunks.q[:-SPARE_ROWS].double().split(chunks.counts.tolist())
    for chunk, (q, start, end) in enumerate(zip(queries, chunks.starts.tolist(), chunks.ends.tolist())):
        key, query = torch.arange(end, device=CUDA), torch.arange(start, end, device=CUDA)[:, None]
        hidden = key > query if not window else (key > query) | (key <= query - window)
        # Hidden keys may be NaN below a window.
        k, v = (store[chunks.held(chunk, key)].double().nan_to_num().repeat_interleave(share, 1) for store in (chunks.keys, chunks.values))
        scores = (torch.einsum("qhd,nhd->hqn", q, k) * scale).masked_fill(hidden, -math.inf)
        parts.append(torch.einsum("hqn,nhd->qhd", scores.softmax(-1), v))
    return torch.cat(parts)


class Gathered:
    """Keys and values of each set of chunks copied end to end, as `varlen_attn` takes them."""

    def __init__(self, sets: Sequence[Chunks]) -> None:
        self._sets, first = sets, sets[0]
        self._flat = [store.flatten(0, 1) for store in (first.keys, first.values)]
        self._places = [
            torch.cat(
                [
                    page * own.keys.shape[1] + offset
                    for page, offset in (own.held(chunk, torch.arange(int(end), device=CUDA)) for chunk, end in enumerate(own.ends))
                ]
            )
            for own in sets
        ]
        self._held = [self.gather(index) for index in range(len(sets))]
        ends = [np.cumsum([0, *counts]).astype(np.int32) for counts in (first.counts, first.ends)]
        self._starts = [torch.from_numpy(counts).to(CUDA) for counts in ends]
        self._longest = int(first.counts.max()), int(first.ends.max())

    def gather(self, index: int) -> list[torch.Tensor]:
        """Copy keys and values of a set."""
        return [store.index_select(0, self._places[index % len(self._sets)]) for store in self._flat]

    def attend(self, index: int) -> torch.Tensor:
        """Attend with a set's tokens to what was gathered before."""
        own = index % len(self._sets)
        attend: Any = varlen_attn
        return attend(self._sets[own].q[:-SPARE_ROWS], *self._held[own], *self._starts, *self._longest, window_size=(-1, 0), **GROUPED)
