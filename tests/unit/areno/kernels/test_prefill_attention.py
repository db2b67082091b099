"""Attention of packed prompt chunks against a torch reference that gathers each sequence by itself, in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from areno.kernels.prefill_attention import SplitWorkspace, Tiling, cut_blocks, pick_tiling, prefill_attention

SCALE = 0.3
GARBAGE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Chunks of sequences on scattered pages. All that no chunk may read is NaN; two packed rows at the end belong to none."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor
    starts: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray

    def chunks(self, *chosen: int) -> Case:
        """Return some of the chunks, packed anew over the same store."""
        begins = np.cumsum(self.counts) - self.counts
        rows = np.concatenate([np.arange(begins[chunk], begins[chunk] + self.counts[chunk]) for chunk in chosen])
        q = torch.cat([self.q[rows], self.q[-2:]])
        index = np.array(chosen)
        return replace(self, q=q, starts=self.starts[index], counts=self.counts[index], offsets=self.offsets[index])


def make_case(
    chunks: Sequence[tuple[int, int]],
    *,
    seed: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    page: int = 8,
    dtype: torch.dtype = torch.float32,
    heads_first: bool = False,
) -> Case:
    """Make (start, count) chunks, each of a sequence of its own."""
    draw = torch.Generator().manual_seed(seed)
    starts, counts = (np.array(given) for given in zip(*chunks))
    needed = -(-(starts + counts) // page)
    order = (torch.randperm(int(needed.sum()), generator=draw) + 2).to(torch.int32)
    # The page after a sequence's last one is far outside of the store.
    lists = [torch.cat([part, torch.tensor([GARBAGE], dtype=torch.int32)]) for part in order.split(needed.tolist())]
    offsets = np.cumsum(needed + 1) - (needed + 1)
    stores = []
    for _ in range(2):
        store = torch.randn(len(order) + 2, page, kv_heads, dim, generator=draw).to(dtype)
        store[:2] = math.nan
        for (start, count), held in zip(chunks, lists):
            places = torch.arange(start + count, (len(held) - 1) * page)
            store[held[places // page].long(), places % page] = math.nan
        stores.append(store.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else store)
    q = torch.randn(int(counts.sum()) + 2, heads, dim, generator=draw).to(dtype)
    q[-2:] = math.nan
    return Case(q=q, keys=stores[0], values=stores[1], pages=torch.cat(lists), starts=starts, counts=counts, offsets=offsets)


def reference(case: Case, window: int = 0) -> torch.Tensor:
    page, share = case.keys.shape[1], case.q.shape[1] // case.keys.shape[2]
    out = torch.full(case.q.shape, math.nan, dtype=torch.float64)
    row = 0
    for start, count, offset in zip(case.starts.tolist(), case.counts.tolist(), case.offsets.tolist()):
        for position in range(start, start + count):
            places = torch.arange(max(position + 1 - window, 0) if window else 0, position + 1)
            held = case.pages[offset + places // page].long(), places % page
            k, v = (store[held].double().repeat_interleave(share, 1) for store in (case.keys, case.values))
            weights = (torch.einsum("hd,nhd->hn", case.q[row].double(), k) * SCALE).softmax(-1)
            out[row] = torch.einsum("hn,nhd->hd", weights, v)
            row += 1
    return out


def attend(
    case: Case,
    *,
    block_m: int = 8,
    fold: int = 2,
    block_n: int = 8,
    window: int = 0,
    blocks: np.ndarray | None = None,
    splits: int = 0,
) -> torch.Tensor:
    """Attend with unused entries among the blocks; a given number of splits starts from a poisoned workspace."""
    _, heads, dim = case.q.shape
    out = torch.full_like(case.q, math.nan)
    cut = cut_blocks(case.starts, case.counts, case.offsets, block_m) if blocks is None else blocks
    unused = np.array([[GARBAGE, 0, GARBAGE, GARBAGE]], dtype=np.int32)
    entries = torch.from_numpy(np.concatenate([cut[:1], unused, cut[1:], unused]))
    tiling = Tiling(fold=fold, block_n=block_n, num_stages=1)
    workspace = None
    if splits:
        workspace = SplitWorkspace.allocate(
            num_blocks=len(entries),
            block_m=block_m,
            num_heads=heads,
            head_dim=dim,
            splits=splits,
            device=torch.device("cpu"),
            least_keys=2 * block_n,
        )
        workspace.partials.fill_(math.nan)
        workspace.states.fill_(math.nan)
    prefill_attention(
        case.q,
        case.keys,
        case.values,
        entries,
        case.pages,
        out,
        scale=SCALE,
        window=window,
        block_m=block_m,
        workspace=workspace,
        tiling=tiling,
    )
    assert workspace is None or not workspace.arrivals.any()
    return out


MIX = ((0, 1), (0, 21), (5, 3), (16, 8), (33, 10))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "heads_first", "fold", "block_n"),
    [
        (4, 2, 16, 8, False, 2, 8),
        (4, 2, 16, 4, False, 1, 16),
        (3, 3, 32, 16, True, 1, 8),
        (8, 1, 64, 16, True, 4, 16),
        (3, 1, 16, 8, False, 3, 16),
    ],
)
def test_prefill_attention_equals_the_reference(
    heads: int, kv_heads: int, dim: int, page: int, heads_first: bool, fold: int, block_n: int
) -> None:
    case = make_case(MIX, seed=1, heads=heads, kv_heads=kv_heads, dim=dim, page=page, heads_first=heads_first)
    out = attend(case, fold=fold, block_n=block_n)
    torch.testing.assert_close(out.double(), reference(case), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert not out[:-2].isnan().any()


def test_half_precision_stays_close() -> None:
    case = make_case(MIX, seed=2, dtype=torch.float16)
    torch.testing.assert_close(attend(case).double(), reference(case), rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("window", [1, 5, 16])
def test_a_window_hides_all_but_the_last_tokens(window: int) -> None:
    case = make_case(MIX, seed=3)
    for start, offset in zip(case.starts.tolist(), case.offsets.tolist()):
        hidden = torch.arange(max(start + 1 - window, 0) // 8 * 8)
        for store in (case.keys, case.values):
            store[case.pages[offset + hidden // 8].long(), hidden % 8] = math.nan
    torch.testing.assert_close(attend(case, window=window).double(), reference(case, window), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("window", [0, 7])
def test_a_chunk_has_the_same_bits_alone_and_in_company(window: int) -> None:
    case = make_case(MIX, seed=4)
    together = attend(case, window=window)
    begins = np.cumsum(case.counts) - case.counts
    for chosen in ((1,), (4, 2), (0, 3)):
        out = attend(case.chunks(*chosen), window=window)[:-2]
        expected = torch.cat([together[begins[chunk] : begins[chunk] + case.counts[chunk]] for chunk in chosen])
        assert torch.equal(out, expected), f"{chosen=}"


def test_how_a_sequence_is_cut_changes_no_more_than_rounding() -> None:
    case = make_case(((0, 11), (33, 10)), seed=4)
    whole = attend(case)
    for block_m in (3, 5):
        blocks = cut_blocks(case.starts, case.counts, case.offsets, block_m)
        torch.testing.assert_close(attend(case, blocks=blocks)[:-2], whole[:-2], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("splits", "window", "block_n"), [(2, 0, 8), (3, 0, 16), (4, 20, 8)])
def test_split_keys_change_no_more_than_rounding(splits: int, window: int, block_n: int) -> None:
    case = make_case(((0, 21), (44, 10)), seed=7)
    whole, parted = attend(case, window=window, block_n=block_n), attend(case, window=window, block_n=block_n, splits=splits)
    torch.testing.assert_close(parted, whole, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert not parted[:-2].isnan().any()
    assert torch.equal(parted[:8], whole[:8]), "a block of few keys is not split"


def test_blocks_may_hold_a_number_of_tokens_that_is_no_power_of_two() -> None:
    case = make_case(MIX, seed=5, heads=3, kv_heads=1)
    torch.testing.assert_close(attend(case, block_m=5, fold=3).double(), reference(case), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_launch_without_blocks_writes_nothing() -> None:
    case = make_case(((0, 3),), seed=6)
    assert attend(case, blocks=np.zeros((0, 4), dtype=np.int32)).isnan().all()


def test_blocks_cover_every_token_once_and_the_longest_come_first() -> None:
    starts, counts, offsets = np.array([0, 7, 100, 3]), np.array([9, 4, 1, 16]), np.array([5, 9, 0, 50])
    blocks = cut_blocks(starts, counts, offsets, 4)
    assert blocks.dtype == np.int32 and blocks.flags.c_contiguous
    expected, first = [], 0
    for start, count, offset in zip(starts.tolist(), counts.tolist(), offsets.tolist()):
        expected += [(first + at, min(4, count - at), start + at, offset) for at in range(0, count, 4)]
        first += count
    assert sorted(map(tuple, blocks.tolist())) == sorted(expected)
    ends = blocks[:, 1] + blocks[:, 2]
    assert (np.diff(ends) <= 0).all()
    assert cut_blocks(starts[:0], counts[:0], offsets[:0], 4).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [1, 2, 3, 4, 7, 8])
def test_the_picked_tiling_folds_a_divisor_of_the_share(share: int, dtype: torch.dtype) -> None:
    for head_dim in (32, 64, 128):
        for block_m in (16, 64, 128):
            tiling = pick_tiling(head_dim, share, block_m, dtype)
            assert share % tiling.fold == 0
            assert tiling.fold == 1 or tiling.fold * block_m <= 64
