"""Attention over the paged store, as the decoder layers call it: write this step's keys and values, then attend.

`DecodeAttention` serves one token per lane, `PrefillAttention` packed prompt chunks that may continue a cached
prefix, `DenseAttention` whole sequences without a store (scoring). Each is made once per launch and called once per layer.

On the CPU one fused call handles a whole batch: query heads that share a K/V head are folded into the query length,
so the keys are never expanded, and lanes of other lengths are masked. Trailing masked keys add exact zeros in that
kernel, so a row's bits depend neither on its neighbours nor on the padded length (a test holds it to that).

A layer with a window attends to the last tokens only. Its old pages stay where they are; it has a mask of its own, made
once per launch for all layers of that width. A width that hides nothing in a launch costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F

from areno.config import LANE_MULTIPLE
from areno.kv.store import KVStore

PAD_TOKENS = 64


def table_width(longest: int, page_size: int) -> int:
    """Return how many page-table entries decode attention reads for `longest` tokens: whole steps of `PAD_TOKENS`."""
    step = max(PAD_TOKENS // page_size, 1)
    return -(-longest // (step * page_size)) * step


BLOCK_TOKENS = 512
NO_WINDOWS: Mapping[int, int] = MappingProxyType({})
"""Window by layer: how many tokens, its own included, a token attends to there. Layers not named attend to all."""


@functools.lru_cache(maxsize=64)
def _mask_parts(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what decode masks of a width are made of: places [width], the value of hidden places and that of seen ones."""
    return torch.arange(width, dtype=torch.int32), torch.tensor(float("-inf"), dtype=dtype), torch.tensor(0.0, dtype=dtype)


def _narrow(bias: torch.Tensor, ends: torch.Tensor, windows: Mapping[int, int], longest: int) -> dict[int, torch.Tensor]:
    """Return the masks of layers whose window hides something among `longest` tokens; equal widths share one.

    Shapes: `bias` [..., N] of full attention, `ends` [..., 1], the place after each query's own.
    """
    if not windows:
        return {}
    places = torch.arange(bias.shape[-1], device=bias.device)
    made = {width: bias.masked_fill(places < ends - width, float("-inf")) for width in set(windows.values()) if width < longest}
    return {layer: made[width] for layer, width in windows.items() if width in made}


def _fold(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Fold [B, T, H, D] into [B, K, (H / K) * T, D]."""
    batch, tokens, heads, dim = q.shape
    return q.view(batch, tokens, num_kv_heads, heads // num_kv_heads, dim).permute(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, -1, dim)


def _unfold(out: torch.Tensor, tokens: int) -> torch.Tensor:
    """Undo `_fold`: [B, K, g * T, D] into [B, T, H, D]."""
    batch, num_kv_heads, folded, dim = out.shape
    return out.view(batch, num_kv_heads, folded // tokens, tokens, dim).permute(0, 3, 1, 2, 4).reshape(batch, tokens, -1, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaneGroup:
    """Lanes that attend in one call. Shapes: `lanes` int64 [b], None for all of them; `tables` [b, P]; `bias` [b, 1, 1, P * G]."""

    lanes: torch.Tensor | None
    tables: torch.Tensor
    bias: torch.Tensor
    windowed: Mapping[int, torch.Tensor]


def _group_lanes(lengths: np.ndarray, longest: int) -> list[np.ndarray] | None:
    """Part lanes in two by length where that spares a fifth of the tokens read; None where it does not."""
    if lengths.size < 2 * LANE_MULTIPLE or longest < 2 * PAD_TOKENS:
        return None
    widths = -(-lengths // PAD_TOKENS) * PAD_TOKENS
    order = np.argsort(widths, kind="stable")
    firsts = np.arange(1, lengths.size)
    read = firsts * widths[order][firsts - 1] + (lengths.size - firsts) * widths[order][-1]
    best = int(read.argmin())
    if read[best] > 0.8 * lengths.size * widths[order][-1]:
        return None
    return [order[: best + 1], order[best + 1 :]]


class DecodeAttention:
    """One query per lane. Shapes: tables [B, P] int64, lengths [B] counting the token of this step; none is above `longest`.

    Short lanes attend apart from long ones where that spares reading much padding. Masks are made by the first layer.
    """

    __slots__ = ("_dtype", "_groups", "_lengths", "_longest", "_slots", "_store", "_tables", "_windows")

    def __init__(
        self,
        store: KVStore,
        tables_BP: torch.Tensor,
        slots_B: torch.Tensor,
        lengths_B: torch.Tensor,
        longest: int,
        dtype: torch.dtype,
        windows: Mapping[int, int] = NO_WINDOWS,
    ) -> None:
        self._store, self._slots, self._tables, self._lengths = store, slots_B, tables_BP, lengths_B
        self._longest, self._dtype, self._windows = longest, dtype, windows
        self._groups: list[_LaneGroup] = []

    def _make_groups(self) -> list[_LaneGroup]:
        parts = _group_lanes(self._lengths.numpy(), self._longest)
        if parts is None:
            return [self._group(None, self._tables, self._lengths, self._longest)]
        groups = []
        for part in parts:
            lanes = torch.from_numpy(part)
            lengths = self._lengths[lanes]
            groups.append(self._group(lanes, self._tables[lanes], lengths, int(lengths.max())))
        return groups

    def _group(self, lanes: torch.Tensor | None, tables_BP: torch.Tensor, lengths_B: torch.Tensor, longest: int) -> _LaneGroup:
        page_size = self._store.page_size
        width = min(table_width(longest, page_size), tables_BP.shape[1])
        places, hidden, seen = _mask_parts(width * page_size, self._dtype)
        bias = torch.where(places >= lengths_B[:, None], hidden, seen)[:, None, None, :]
        windowed = _narrow(bias, lengths_B[:, None, None, None], self._windows, longest)
        return _LaneGroup(lanes=lanes, tables=tables_BP[:, :width], bias=bias, windowed=windowed)

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        self._store.write(layer, self._slots, k_TKD, v_TKD)
        batch, heads, dim = q_THD.shape
        kv_heads = k_TKD.shape[1]
        q = q_THD.view(batch, kv_heads, heads // kv_heads, dim)
        self._groups = self._groups or self._make_groups()
        out = torch.empty_like(q)
        for group in self._groups:
            if group.lanes is None:
                return self._attend(layer, q, group).reshape(batch, heads, dim)
            out.index_copy_(0, group.lanes, self._attend(layer, q.index_select(0, group.lanes), group))
        return out.view(batch, heads, dim)

    def _attend(self, layer: int, q_BKgD: torch.Tensor, group: _LaneGroup) -> torch.Tensor:
        keys, values = self._store.gather(layer, group.tables)
        return F.scaled_dot_product_attention(q_BKgD, keys, values, attn_mask=group.windowed.get(layer, group.bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroup:
    """Chunks of similar size that attend in one call.

    Shapes: `token_index` and `valid` [S, Q], places in the packed tokens; `tables` [S, P]; `bias` [S, 1, Q, P * G],
    `windowed` likewise for the layers whose window hides something here.
    """

    token_index: torch.Tensor
    valid: torch.Tensor
    tables: torch.Tensor
    bias: torch.Tensor
    windowed: Mapping[int, torch.Tensor] = field(default_factory=dict)


def group_chunks(
    starts: Sequence[int],
    counts: Sequence[int],
    offsets: Sequence[int],
    tables: Sequence[np.ndarray],
    page_size: int,
    dtype: torch.dtype,
    windows: Mapping[int, int] = NO_WINDOWS,
) -> list[ChunkGroup]:
    """Sort chunks into groups whose padding stays within a factor of two.

    `starts[i]` is the first position of chunk i, `counts[i]` its tokens, `offsets[i]` its place in the packed batch,
    `tables[i]` the pages that hold positions 0..starts[i] + counts[i] - 1.
    """
    buckets: dict[tuple[int, int], list[int]] = {}
    for chunk, (start, count) in enumerate(zip(starts, counts)):
        buckets.setdefault(((count - 1).bit_length(), (start + count - 1).bit_length()), []).append(chunk)
    groups = []
    for members in buckets.values():
        width = max(counts[m] for m in members)
        pages = max(len(tables[m]) for m in members)
        table = torch.zeros((len(members), pages), dtype=torch.int64)
        for place, member in enumerate(members):
            table[place, : len(tables[member])] = torch.from_numpy(tables[member])
        start_S1, count_S1, offset_S1 = (
            torch.as_tensor([values[m] for m in members], dtype=torch.int64)[:, None] for values in (starts, counts, offsets)
        )
        column = torch.arange(width)[None, :]
        inside = torch.minimum(column, count_S1 - 1)
        position = start_S1 + inside
        hidden = torch.arange(pages * page_size)[None, None, :] > position[:, :, None]
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None]
        longest = max(starts[m] + counts[m] for m in members)
        windowed = _narrow(bias, position[:, None, :, None] + 1, windows, longest)
        groups.append(ChunkGroup(token_index=offset_S1 + inside, valid=column < count_S1, tables=table, bias=bias, windowed=windowed))
    return groups


class PrefillAttention:
    """Packed chunks, each over its own pages: cached prefix, earlier chunks and itself, causally."""

    __slots__ = ("_groups", "_slots", "_store")

    def __init__(self, store: KVStore, groups: Sequence[ChunkGroup], slots_T: torch.Tensor) -> None:
        self._store, self._groups, self._slots = store, groups, slots_T

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        self._store.write(layer, self._slots, k_TKD, v_TKD)
        kv_heads = k_TKD.shape[1]
        share = q_THD.shape[1] // kv_heads
        out = torch.zeros_like(q_THD)
        for group in self._groups:
            keys, values = self._store.gather(layer, group.tables)
            q = _fold(q_THD[group.token_index], kv_heads)
            bias = group.windowed.get(layer, group.bias)
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias.repeat(1, 1, share, 1))
            unfolded = _unfold(attended, group.token_index.shape[1])
            out[group.token_index[group.valid]] = unfolded[group.valid]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Band:
    """Some queries of a sequence and the keys that their window reaches. Shapes: `seen` [queries, keys], bool."""

    queries: slice
    keys: slice
    seen: torch.Tensor


def _bands(length: int, window: int) -> list[_Band]:
    """Cut a sequence so that memory grows with its length times the window's, not with its square."""
    seen: dict[tuple[int, int], torch.Tensor] = {}
    bands = []
    for start in range(0, length, BLOCK_TOKENS):
        stop, first = min(start + BLOCK_TOKENS, length), max(start + 1 - window, 0)
        shape = (stop - start, start - first)
        if shape not in seen:
            query, key = torch.arange(start, stop)[:, None], torch.arange(first, stop)[None, :]
            seen[shape] = (key <= query) & (key > query - window)
        bands.append(_Band(queries=slice(start, stop), keys=slice(first, stop), seen=seen[shape]))
    return bands


class DenseAttention:
    """Whole sequences laid end to end, without a store; used to score given ids."""

    __slots__ = ("_bands", "_lengths", "_windows")

    def __init__(self, lengths: Sequence[int], windows: Mapping[int, int] = NO_WINDOWS) -> None:
        self._lengths, self._windows = tuple(lengths), windows
        self._bands = {
            (length, window): _bands(length, window) for window in set(windows.values()) for length in self._lengths if window < length
        }

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        share = q_THD.shape[1] // k_TKD.shape[1]
        window = self._windows.get(layer, 0)
        parts = []
        start = 0
        for length in self._lengths:
            q, k, v = (tensor[start : start + length].transpose(0, 1)[None] for tensor in (q_THD, k_TKD, v_TKD))
            k, v = (tensor.repeat_interleave(share, dim=1) for tensor in (k, v))
            bands = self._bands.get((length, window))
            if bands is None:
                parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
            for band in bands or ():
                own = q[:, :, band.queries], k[:, :, band.keys], v[:, :, band.keys]
                parts.append(F.scaled_dot_product_attention(*own, attn_mask=band.seen)[0].transpose(0, 1))
            start += length
        if start < q_THD.shape[0]:
            parts.append(torch.zeros_like(q_THD[start:]))
        return torch.cat(parts)
