"""Decode attention against a torch reference that gathers each row's tokens by itself, in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from areno.kernels.attention import Tiling, WorkList, Workspace, build_work_list, decode_attention, decode_attention_fused
from areno.kernels.rope_kv import rope_kv
from areno.layers.rope import Rope
from areno.layers.rotary import RotaryTable

CPU = torch.device("cpu")
SMALL = Tiling(short_chunk=8, long_chunk=32, split=2, block=8, num_stages=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Random rows over scattered pages; every slot at or beyond a row's length is NaN, as are pages of no row."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    running: torch.Tensor

    def rows(self, *chosen: int) -> Case:
        index = torch.tensor(chosen)
        return replace(self, q=self.q[index], table=self.table[index], lengths=self.lengths[index], running=self.running[index])


def make_case(
    lengths: list[int],
    *,
    seed: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    page: int = 8,
    dtype: torch.dtype = torch.float32,
    idle: tuple[int, ...] = (),
    heads_first: bool = False,
) -> Case:
    draw = torch.Generator().manual_seed(seed)
    width = max(lengths) // page + 2
    pages = len(lengths) * width + 2
    table = (torch.randperm(pages - 2, generator=draw) + 2).view(len(lengths), width).to(torch.int32)
    stores = []
    for _ in range(2):
        store = torch.randn(pages, page, kv_heads, dim, generator=draw).to(dtype)
        store[0] = 0.0
        store[1] = math.nan
        for row, length in enumerate(lengths):
            places = torch.arange(length, width * page)
            store[table[row, places // page].long(), places % page] = math.nan
        for row in idle:
            store[table[row].long()] = math.nan
        stores.append(store.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else store)
    running = torch.tensor([row not in idle for row in range(len(lengths))])
    q = torch.randn(len(lengths), heads, dim, generator=draw).to(dtype)
    return Case(q=q, keys=stores[0], values=stores[1], table=table, lengths=torch.tensor(lengths, dtype=torch.int32), running=running)


def reference(case: Case, scale: float, window: int = 0) -> torch.Tensor:
    page = case.keys.shape[1]
    share = case.q.shape[1] // case.keys.shape[2]
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    for row, length in enumerate(case.lengths.tolist()):
        if not case.running[row]:
            continue
        places = torch.arange(max(length - window, 0) if window else 0, length)
        held = case.table[row, places // page].long(), places % page
        k, v = (store[held].double().repeat_interleave(share, 1) for store in (case.keys, case.values))
        weights = (torch.einsum("hd,nhd->hn", case.q[row].double(), k) * scale).softmax(-1)
        out[row] = torch.einsum("hn,nhd->hd", weights, v)
    return out


def attend(case: Case, scale: float, *, tiling: Tiling = SMALL, window: int = 0, listed: bool = False, spare: int = 0) -> torch.Tensor:
    lanes, heads, dim = case.q.shape
    chunks = tiling.max_chunks(int(case.lengths.max())) + spare
    workspace = Workspace.allocate(lanes=lanes, num_heads=heads, num_kv_heads=case.keys.shape[2], head_dim=dim, chunks=chunks, device=CPU)
    workspace.partials.fill_(math.nan)
    workspace.states.fill_(math.nan)
    out = torch.full_like(case.q, math.nan)
    work = None
    if listed:
        work = WorkList.allocate(lanes=lanes, chunks=chunks, device=CPU)
        build_work_list(case.lengths, case.running, work, max_chunks=chunks, page_size=case.keys.shape[1], window=window, tiling=tiling)
    decode_attention(
        case.q,
        case.keys,
        case.values,
        case.table,
        case.lengths,
        case.running,
        out,
        workspace,
        scale=scale,
        max_chunks=chunks,
        window=window,
        work=work,
        num_programs=5,
        tiling=tiling,
    )
    assert not workspace.arrivals.any()
    return out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "heads_first"),
    [(4, 2, 16, 8, False), (3, 3, 32, 4, True), (8, 1, 64, 16, True), (7, 1, 16, 8, False)],
)
def test_decode_attention_equals_the_reference(heads: int, kv_heads: int, dim: int, page: int, heads_first: bool) -> None:
    case = make_case([1, 7, 8, 9, 50], seed=1, heads=heads, kv_heads=kv_heads, dim=dim, page=page, heads_first=heads_first, idle=(1,))
    out = attend(case, 0.3)
    torch.testing.assert_close(out.double(), reference(case, 0.3), rtol=1e-5, atol=1e-5)
    assert (out[1] == 0).all()


def test_half_precision_stays_close() -> None:
    case = make_case([5, 40], seed=2, dtype=torch.float16)
    torch.testing.assert_close(attend(case, 0.25).double(), reference(case, 0.25), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("window", [1, 5, 16])
def test_a_window_hides_all_but_the_last_tokens(window: int) -> None:
    case = make_case([1, 6, 47], seed=3)
    for row, length in enumerate(case.lengths.tolist()):
        hidden = torch.arange(max(length - window, 0))
        case.values[case.table[row, hidden // 8].long(), hidden % 8] = math.nan
    for listed in (False, True):
        torch.testing.assert_close(
            attend(case, 0.3, window=window, listed=listed).double(), reference(case, 0.3, window), rtol=1e-5, atol=1e-5
        )


def test_every_way_to_run_gives_the_same_bits() -> None:
    case = make_case([3, 8, 50, 66, 20], seed=4, heads=2, kv_heads=1, idle=(4,))
    plain = attend(case, 0.3)
    for listed in (False, True):
        assert torch.equal(plain, attend(case, 0.3, listed=listed, spare=3)), f"{listed=}"


def test_a_row_has_the_same_bits_alone_and_in_company() -> None:
    case = make_case([3, 50, 66, 9], seed=5, heads=2, kv_heads=1)
    together = attend(case, 0.3)
    for row in (1, 2, 3):
        assert torch.equal(attend(case.rows(row), 0.3)[0], together[row]), f"row {row}"
        assert torch.equal(attend(case.rows(0, row), 0.3, listed=True)[1], together[row]), f"row {row}"


def test_page_tables_may_be_wider_and_hold_int64() -> None:
    case = make_case([30, 12], seed=6)
    wide = replace(case, table=torch.cat([case.table, case.table], 1).long())
    assert torch.equal(attend(case, 0.3), attend(wide, 0.3))


@pytest.mark.parametrize("tiling", [SMALL, Tiling(), Tiling(short_chunk=64, long_chunk=64, split=1)])
def test_no_shorter_row_has_more_chunks_than_the_bound(tiling: Tiling) -> None:
    most = 0
    for span in range(1, 1200):
        chunk = tiling.short_chunk
        while span > tiling.split * chunk and chunk < tiling.long_chunk:
            chunk *= 2
        most = max(most, -(-span // chunk))
        assert tiling.max_chunks(span) == most, f"{span=}"


def test_the_work_list_holds_every_chunk_once_and_long_chunks_first() -> None:
    lengths = [1, 70, 8, 20, 200, 33]
    running = torch.tensor([True, True, False, True, True, True])
    chunks = SMALL.max_chunks(200)
    work = WorkList.allocate(lanes=6, chunks=chunks, device=CPU)
    work.items.fill_(-1)
    build_work_list(torch.tensor(lengths, dtype=torch.int32), running, work, max_chunks=chunks, page_size=8, tiling=SMALL)
    sizes = {1: 8, 70: 32, 20: 16, 200: 32, 33: 32}
    expected = {}
    for lane, length in enumerate(lengths):
        size = sizes[length] if running[lane] else 8
        for index in range(-(-length // size) if running[lane] else 1):
            expected[lane << 16 | index] = size
    count = int(work.count)
    items = work.items[:count].tolist()
    assert sorted(items) == sorted(expected)
    assert [expected[item] for item in items] == sorted(expected.values(), reverse=True)
    assert (work.items[count:] == -1).all()


@pytest.mark.parametrize("norm", [True, False])
def test_the_fused_form_stores_and_attends_like_two_launches(norm: bool) -> None:
    lengths = [1, 8, 17, 33, 12]
    heads, kv_heads, dim = 4, 2, 16
    case = make_case(lengths, seed=7, idle=(4,))
    draw = torch.Generator().manual_seed(8)
    qkv = torch.randn(len(lengths), (heads + 2 * kv_heads) * dim, generator=draw)
    weight = torch.randn(heads + kv_heads, dim, generator=draw) if norm else None
    angles = RotaryTable(dim, Rope(theta=100.0), 64, dtype=torch.float32, device=CPU).angles
    positions = case.lengths - 1
    own = case.table.gather(1, (positions // 8).long()[:, None])[:, 0]
    slots = torch.where(case.running, own * 8 + positions % 8, 8)

    q = torch.full((len(lengths), heads, dim), math.nan)
    two = replace(case, q=q, keys=case.keys.clone(), values=case.values.clone())
    rope_kv(qkv, positions, slots, angles, weight, q, two.keys, two.values, eps=1e-6)
    expected = attend(two, 0.3)

    chunks = SMALL.max_chunks(max(lengths))
    for listed in (False, True):
        workspace = Workspace.allocate(lanes=len(lengths), num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, chunks=chunks, device=CPU)
        work = None
        if listed:
            work = WorkList.allocate(lanes=len(lengths), chunks=chunks, device=CPU)
            build_work_list(case.lengths, case.running, work, max_chunks=chunks, page_size=8, tiling=SMALL)
        keys, values = case.keys.clone(), case.values.clone()
        out = torch.full_like(q, math.nan)
        decode_attention_fused(
            qkv,
            weight,
            angles,
            keys,
            values,
            case.table,
            case.lengths,
            case.running,
            out,
            workspace,
            eps=1e-6,
            scale=0.3,
            max_chunks=chunks,
            work=work,
            num_programs=4,
            tiling=SMALL,
        )
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert (out[4] == 0).all()
        for fused, unfused in ((keys, two.keys), (values, two.values)):
            # The lane that does not run leaves its token on the sink page in one form and nowhere in the other.
            torch.testing.assert_close(fused[2:], unfused[2:], rtol=1e-6, atol=1e-6, equal_nan=True)
            assert (fused[0] == 0).all()
