"""Paged attention equals dense attention, and a row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from areno.config import SINK_PAGE, ZERO_PAGE
from areno.kv.store import KVStore
from areno.layers.attention import BLOCK_TOKENS, NO_WINDOWS, DecodeAttention, DenseAttention, PrefillAttention, _group_lanes, group_chunks

HEADS, KV_HEADS, DIM, G = 6, 2, 16, 16


def _store(pages: int, dtype: torch.dtype = torch.float32) -> KVStore:
    store = KVStore(
        num_layers=1, num_pages=pages, page_size=G, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, device=torch.device("cpu")
    )
    store.keys[:, SINK_PAGE + 1 :] = float("nan")
    store.values[:, SINK_PAGE + 1 :] = float("nan")
    return store


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, window: int | None = None) -> torch.Tensor:
    """One query at `position` over keys 0..position, or the last `window` of them, in float64."""
    share = HEADS // KV_HEADS
    first = 0 if window is None else max(position + 1 - window, 0)
    keys, values = (t[first : position + 1].double().repeat_interleave(share, dim=1) for t in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), keys) / DIM**0.5
    return torch.einsum("ht,thd->hd", scores.softmax(dim=1), values)


class Rows:
    """Sequences laid into pages, with everything a launch needs."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.lengths = lengths
        self.k = [torch.randn(n, KV_HEADS, DIM) for n in lengths]
        self.v = [torch.randn(n, KV_HEADS, DIM) for n in lengths]
        self.q = torch.randn(len(lengths), HEADS, DIM)
        counts = [-(-n // G) for n in lengths]
        order = torch.randperm(sum(counts)) + SINK_PAGE + 1
        self.pages = [pages.tolist() for pages in order.split(counts)]
        self.store = _store(int(sum(counts)) + SINK_PAGE + 1)
        # Unwritten tails of pages hold finite leftovers, as they do in a store that began as zeros.
        self.store.keys[:, SINK_PAGE + 1 :] = torch.randn_like(self.store.keys[:, SINK_PAGE + 1 :])
        self.store.values[:, SINK_PAGE + 1 :] = torch.randn_like(self.store.values[:, SINK_PAGE + 1 :])
        for k, v, pages in zip(self.k, self.v, self.pages):
            slots = torch.tensor([pages[i // G] * G + i % G for i in range(len(k) - 1)], dtype=torch.int64)
            self.store.write(0, slots, k[:-1], v[:-1])

    def attend(
        self, width: int, order: list[int] | None = None, extra_longest: int = 0, windows: Mapping[int, int] = NO_WINDOWS
    ) -> torch.Tensor:
        order = order if order is not None else list(range(len(self.lengths)))
        tables = torch.full((len(order), width), ZERO_PAGE, dtype=torch.int64)
        for lane, row in enumerate(order):
            tables[lane, : len(self.pages[row])] = torch.tensor(self.pages[row])
        lengths = torch.tensor([self.lengths[row] for row in order])
        slots = torch.tensor([self.pages[row][(self.lengths[row] - 1) // G] * G + (self.lengths[row] - 1) % G for row in order])
        longest = int(lengths.max()) + extra_longest
        attention = DecodeAttention(self.store, tables, slots, lengths, longest, torch.float32, windows)
        k = torch.stack([self.k[row][-1] for row in order])
        v = torch.stack([self.v[row][-1] for row in order])
        return attention(0, self.q[order], k, v)


def test_decode_attention_equals_dense_attention_at_every_page_edge() -> None:
    lengths = [1, 2, G - 1, G, G + 1, 63, 64, 65, 200, 511, 512, 513, 700]
    rows = Rows(lengths)
    out = rows.attend(width=64)
    for lane, length in enumerate(lengths):
        expected = _dense(rows.q[lane], rows.k[lane], rows.v[lane], length - 1)
        assert (out[lane] - expected).abs().max() < 2e-6


@pytest.mark.parametrize("window", [1, 16, 17, 100, 512])
def test_decode_attention_in_a_window_sees_its_last_tokens_only(window: int) -> None:
    lengths = [1, 2, 15, 16, 17, 18, 99, 100, 101, 511, 512, 513, 700, 1100]
    rows = Rows(lengths)
    out = rows.attend(width=80, windows={0: window})
    for lane, length in enumerate(lengths):
        expected = _dense(rows.q[lane], rows.k[lane], rows.v[lane], length - 1, window)
        assert (out[lane] - expected).abs().max() < 2e-6


@pytest.mark.parametrize("windows", [NO_WINDOWS, {0: 20}, {0: 150}])
def test_a_lanes_bits_do_not_depend_on_padding_company_or_place(windows: Mapping[int, int]) -> None:
    lengths = [1, 17, 64, 65, 130, 400, 513, 600]
    rows = Rows(lengths)
    base = rows.attend(width=128, windows=windows)
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3], [4, 2, 0, 6]):
        out = rows.attend(width=128, order=order, windows=windows)
        assert all(torch.equal(out[lane], base[row]) for lane, row in enumerate(order))
    for extra in (1, 100, 700):
        assert torch.equal(rows.attend(width=128, extra_longest=extra, windows=windows), base)


def test_a_window_that_hides_nothing_gives_the_bits_of_full_attention() -> None:
    rows = Rows([1, 17, 64, 600])
    full = rows.attend(width=64)
    for windows in ({0: 600}, {0: 5000}, {1: 8}):
        assert torch.equal(rows.attend(width=64, windows=windows), full)
    assert torch.equal(rows.attend(width=64, windows={0: 600}, extra_longest=300), full)
    assert not torch.equal(rows.attend(width=64, windows={0: 599}), full)


def test_masks_are_made_for_distinct_widths_that_hide_something_and_shared_by_their_layers() -> None:
    store = _store(4)
    lengths = torch.tensor([40, 9, 1, 1])

    def masks(windows: Mapping[int, int]) -> dict[int, torch.Tensor]:
        attention = DecodeAttention(
            store, torch.zeros((4, 4), dtype=torch.int64), torch.full((4,), SINK_PAGE * G), lengths, 40, torch.float32, windows
        )
        (group,) = attention._make_groups()
        return dict(group.windowed)

    assert masks(NO_WINDOWS) == {} and masks({3: 40, 5: 99}) == {}
    made = masks({1: 8, 2: 40, 4: 8, 5: 3})
    assert set(made) == {1, 4, 5} and made[1] is made[4] and made[1] is not made[5]


def test_a_lane_on_the_zero_page_gives_exactly_zero() -> None:
    store = _store(4)
    tables = torch.full((4, 4), ZERO_PAGE, dtype=torch.int64)
    attention = DecodeAttention(store, tables, torch.full((4,), SINK_PAGE * G), torch.ones(4, dtype=torch.int64), 1, torch.float32)
    out = attention(0, torch.randn(4, HEADS, DIM), torch.randn(4, KV_HEADS, DIM), torch.randn(4, KV_HEADS, DIM))
    assert torch.equal(out, torch.zeros_like(out)) and not store.keys[:, ZERO_PAGE].any()


@pytest.mark.parametrize(("seed", "window"), [(0, None), (1, None), (2, None), (3, 1), (4, 16), (5, 40), (6, 149), (7, 600)])
def test_packed_chunks_that_continue_prefixes_equal_dense_attention(seed: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    lengths = [*(int(n) for n in rng.integers(1, 150, size=9)), *([700] if window else [])]
    rows = Rows(lengths, seed)
    starts = [int(rng.integers(0, n)) for n in lengths]
    counts = [n - start for n, start in zip(lengths, starts)]
    offsets = np.concatenate([[0], np.cumsum(counts)])[:-1].tolist()
    pages = [np.array(p, dtype=np.int64) for p in rows.pages]
    total = sum(counts) + (-sum(counts)) % 4
    slots = torch.full((total,), SINK_PAGE * G)
    k, v = torch.randn(total, KV_HEADS, DIM), torch.randn(total, KV_HEADS, DIM)
    q = torch.randn(total, HEADS, DIM)
    for row, (start, count, offset) in enumerate(zip(starts, counts, offsets)):
        positions = np.arange(start, start + count)
        slots[offset : offset + count] = torch.from_numpy(pages[row][positions // G] * G + positions % G)
        k[offset : offset + count], v[offset : offset + count] = rows.k[row][start:], rows.v[row][start:]
    groups = group_chunks(starts, counts, offsets, pages, G, torch.float32, {0: window} if window else NO_WINDOWS)
    assert sum(int(group.valid.sum()) for group in groups) == sum(counts)
    out = PrefillAttention(rows.store, groups, slots)(0, q, k, v)
    for row, (start, count, offset) in enumerate(zip(starts, counts, offsets)):
        for place in range(count):
            expected = _dense(q[offset + place], rows.k[row], rows.v[row], start + place, window)
            assert (out[offset + place] - expected).abs().max() < 2e-6


def test_dense_attention_keeps_sequences_apart_and_ignores_padding() -> None:
    lengths = [5, 1, 9]
    total = sum(lengths) + 1
    q, k, v = torch.randn(total, HEADS, DIM), torch.randn(total, KV_HEADS, DIM), torch.randn(total, KV_HEADS, DIM)
    out = DenseAttention(lengths)(0, q, k, v)
    start = 0
    for length in lengths:
        for place in range(length):
            expected = _dense(q[start + place], k[start : start + length], v[start : start + length], place)
            assert (out[start + place] - expected).abs().max() < 2e-6
        start += length


@pytest.mark.parametrize("window", [1, 16, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 1200])
def test_dense_attention_in_a_window_is_exact_across_its_blocks(window: int) -> None:
    lengths = [5, 2 * BLOCK_TOKENS + 30, 17]
    total = sum(lengths) + 4
    q, k, v = torch.randn(total, HEADS, DIM), torch.randn(total, KV_HEADS, DIM), torch.randn(total, KV_HEADS, DIM)
    attention = DenseAttention(lengths, {1: window})
    full, out = attention(0, q, k, v), attention(1, q, k, v)
    assert torch.equal(full, DenseAttention(lengths)(0, q, k, v)) and not out[sum(lengths) :].any()
    start = 0
    for length in lengths:
        edges = {0, 1, 15, 16, 17, window - 1, window, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + window, 2 * BLOCK_TOKENS, length - 1}
        for place in sorted(edge for edge in edges if edge < length):
            expected = _dense(q[start + place], k[start : start + length], v[start : start + length], place, window)
            assert (out[start + place] - expected).abs().max() < 2e-6
        start += length


def test_short_lanes_attend_apart_from_long_ones_with_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    pages_of = [1, 1, 1, 2, 1, 12, 13, 1, 2, 1]
    store = KVStore(num_layers=1, num_pages=64, page_size=16, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
    store.keys.copy_(torch.randn(store.keys.shape, generator=generator))
    store.values.copy_(torch.randn(store.values.shape, generator=generator))
    store.keys[:, 0], store.values[:, 0] = 0.0, 0.0
    tables, first = torch.zeros((len(pages_of), 16), dtype=torch.int64), 2
    for lane, count in enumerate(pages_of):
        tables[lane, :count] = torch.arange(first, first + count)
        first += count
    lengths = torch.tensor([16 * count - lane % 5 for lane, count in enumerate(pages_of)], dtype=torch.int32)
    slots = torch.full((len(pages_of),), SINK_PAGE * 16)
    q, k, v = (torch.randn((len(pages_of), heads, 8), generator=generator) for heads in (4, 2, 2))

    def attended(lanes: list[int]) -> torch.Tensor:
        longest = int(lengths[lanes].max())
        attention = DecodeAttention(store, tables[lanes], slots[lanes], lengths[lanes], longest, torch.float32)
        return attention(0, q[lanes], k[lanes], v[lanes])

    everyone = list(range(len(pages_of)))
    assert _group_lanes(lengths.numpy(), int(lengths.max())) is not None, "the lanes are parted"
    together = attended(everyone)
    for lane in everyone:
        assert torch.equal(together[lane], attended([lane] * 4)[0]), f"lane {lane}"
