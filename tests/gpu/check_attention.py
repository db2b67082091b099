"""Attention over pages and the small kernels around it on a card: right in bf16, and equal bits in any company.

`python -m tests.gpu.check_attention` compiles side by side, checks, then times (`attention_times`) and prints a line for
each case. Rows lie on scattered pages; whatever no row may read is NaN, and so is every output before a launch.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from areno.kernels.activation import silu_mul
from areno.kernels.attention import TILING, Tiling
from areno.kernels.norm import add_rms_norm, rms_norm
from areno.kernels.pages import copy_pages
from areno.kernels.rope_kv import rope_kv
from areno.layers.norm import RMSNorm
from areno.layers.rope import Rope
from areno.layers.rotary import RotaryTable
from tests.gpu import attention_times
from tests.gpu.attention_cases import CUDA, PAGE, Attention, Rows, allocate_store, exact, normal, place_rows, poison, programs
from tests.gpu.attention_times import CHECKED_TILINGS, FEW_HEADS, MANY_HEADS

EPS = 1e-6
EDGES = (1, 63, 64, 65, 127, 128, 129, 256, 511, 512, 513, 2047, 2048, 2049, 4096, 4097, 8191, 300)
IDLE = (17,)


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def attended(rows: Rows, tiling: Tiling, *, window: int = 0, listed: int = 0) -> torch.Tensor:
    """Attend with a fresh poisoned workspace and output."""
    lanes, heads, dim = rows.q.shape
    attention = Attention(lanes, heads, rows.keys.shape[2], dim, 8192, tiling, listed)
    attention.workspace.partials.fill_(math.nan)
    attention.workspace.states.fill_(math.nan)
    attention.prepare(rows, window)
    out = torch.full_like(rows.q, math.nan)
    attention.run(rows, out, window=window)
    assert not attention.workspace.arrivals.any(), f"{tiling}: arrivals are left"
    return out


def heads_outside(store: torch.Tensor) -> torch.Tensor:
    """Return a store of the same contents whose heads are outside of a page's tokens."""
    return store.transpose(1, 2).contiguous().transpose(1, 2)


def check_attention(heads: int, kv_heads: int, dim: int, tiling: Tiling, *, window: int = 0, heads_first: bool = False) -> dict:
    """Compare with float64, and the bits of all ways to run, alone and in company."""
    keys, values = allocate_store(sum(EDGES) // PAGE + 2 * len(EDGES), kv_heads, dim)
    (rows,) = place_rows(keys, values, EDGES, heads, idle=IDLE)
    poison(rows, IDLE)
    if heads_first:
        rows = replace(rows, keys=heads_outside(rows.keys), values=heads_outside(rows.values))
    what = f"H={heads} K={kv_heads} D={dim} window={window} heads_first={heads_first} {tiling}"
    out = attended(rows, tiling, window=window)
    error = relative(out, exact(rows, dim**-0.5, window))
    assert error < 8e-3, f"{what}: error {error:.2e}"
    assert (out[list(IDLE)] == 0).all(), f"{what}: an idle lane is not zero"
    for listed in (programs(), 7, 0, programs()):
        other = attended(rows, tiling, window=window, listed=listed)
        assert torch.equal(out, other), f"{what} {listed=}: {int((out != other).sum())} elements differ"
    for row in (0, 4, 10, 13, 16):
        for listed, company in itertools.product((0, programs()), ((), (15, 3))):
            alone = attended(rows.pick(*company, row), tiling, window=window, listed=listed)[-1]
            assert torch.equal(out[row], alone), f"{what} {listed=} {company=}: row {row} has other bits in other company"
    return {"name": "attention", "shape": what, "error": error}


def check_fused(heads: int, kv_heads: int, dim: int, norm: bool) -> dict:
    """Compare the fused form with two launches, its own bits in any company, and both under programmatic launch."""
    store = allocate_store(sum(EDGES) // PAGE + 2 * len(EDGES), kv_heads, dim)
    (rows,) = place_rows(*store, EDGES, heads, idle=IDLE)
    lanes = len(EDGES)
    qkv = normal(lanes, (heads + 2 * kv_heads) * dim)
    weight = normal(heads + kv_heads, dim) if norm else None
    angles = RotaryTable(dim, Rope(theta=1e6), 8192, dtype=torch.bfloat16, device=CUDA).angles
    positions = (rows.lengths - 1) * rows.running
    own = rows.table.gather(1, (positions // PAGE).long()[:, None])[:, 0]
    slots = torch.where(rows.running != 0, own * PAGE + positions % PAGE, PAGE)

    def two(attention: Attention, pdl: bool) -> tuple[Rows, torch.Tensor]:
        out = torch.full_like(rows.q, math.nan)
        written = replace(rows, q=torch.full_like(rows.q, math.nan), keys=store[0].clone(), values=store[1].clone())
        rope_kv(qkv, positions, slots, angles, weight, written.q, written.keys, written.values, eps=EPS, pdl=pdl)
        attention.run(written, out, pdl=pdl)
        return written, out

    def one(attention: Attention, chosen: list[int], pdl: bool = False) -> tuple[Rows, torch.Tensor]:
        written = replace(rows, keys=store[0].clone(), values=store[1].clone()).pick(*chosen)
        out = torch.full_like(written.q, math.nan)
        attention.prepare(written)
        attention.run_fused(written, qkv[chosen].contiguous(), weight, angles, out, pdl=pdl)
        return written, out

    everyone = list(range(lanes))
    plain, listed = (Attention(lanes, heads, kv_heads, dim, 8192, TILING, number) for number in (0, programs()))
    expected_rows, expected = two(plain, False)
    fused_rows, fused = one(plain, everyone)
    what = f"fused H={heads} K={kv_heads} D={dim} norm={norm}"
    error = relative(fused, expected.double())
    assert error < 8e-3, f"{what}: error {error:.2e} against two launches"
    assert (fused[list(IDLE)] == 0).all(), f"{what}: an idle lane is not zero"
    for name in ("keys", "values"):
        # The lane that does not run writes the sink page in one form and nothing in the other.
        got, want = getattr(fused_rows, name)[2:], getattr(expected_rows, name)[2:]
        differing = int((got != want).sum())
        assert differing <= lanes * kv_heads * dim // 100, f"{what}: {differing} elements of {name} differ"
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        assert not getattr(fused_rows, name)[0].any(), f"{what}: page 0 was written"
    for attention, pdl in ((listed, False), (plain, True), (listed, True), (plain, False)):
        assert torch.equal(one(attention, everyone, pdl)[1], fused), f"{what} {pdl=}: other bits"
    for row in (0, 3, 10, 16):
        assert torch.equal(one(plain, [row])[1][0], fused[row]), f"{what}: row {row} has other bits alone"
        assert torch.equal(one(listed, [9, row])[1][1], fused[row]), f"{what}: row {row} has other bits in company"
    for _ in range(5):
        assert torch.equal(two(plain, True)[1], expected), f"{what}: two launches have other bits under programmatic launch"
    return {"name": "fused", "shape": what, "error": error}


def check_chain(heads: int = 16, kv_heads: int = 8, dim: int = 128) -> dict:
    """Replay dependent layers (norm, rotation, attention, gate) with programmatic launch and compare with plain launches."""
    lengths = (1, 64, 300, 513, 2049, 129, 65, 4000)
    keys, values = allocate_store(160, kv_heads, dim)
    (rows,) = place_rows(keys, values, lengths, heads)
    hidden, lanes = heads * dim, len(lengths)
    qkv_size = (heads + 2 * kv_heads) * dim
    angles = RotaryTable(dim, Rope(theta=1e6), 8192, dtype=torch.bfloat16, device=CUDA).angles
    weight, qk_weight = normal(hidden), normal(heads + kv_heads, dim)
    positions = rows.lengths - 1
    slots = rows.table.gather(1, (positions // PAGE).long()[:, None])[:, 0] * PAGE + positions % PAGE
    start = normal(lanes, hidden)
    x, normed, gated, out, q = (torch.empty_like(start) for _ in range(5))
    wide = torch.empty(lanes, qkv_size, dtype=torch.bfloat16, device=CUDA)
    attention = Attention(lanes, heads, kv_heads, dim, 8192)

    def step(pdl: bool) -> None:
        x.copy_(start)
        for layer in range(6):
            rms_norm(x, weight, EPS, normed, pdl=pdl)
            wide.view(lanes, -1, hidden).copy_(normed[:, None].expand(-1, qkv_size // hidden, -1))
            if layer % 2:
                attention.run_fused(rows, wide, qk_weight, angles, out.view(lanes, heads, dim), pdl=pdl)
            else:
                rope_kv(wide, positions, slots, angles, qk_weight, q.view(lanes, heads, dim), keys, values, eps=EPS, pdl=pdl)
                attention.run(replace(rows, q=q.view(lanes, heads, dim)), out.view(lanes, heads, dim), pdl=pdl)
            add_rms_norm(x, out, weight, EPS, normed, pdl=pdl)
            silu_mul(torch.cat((normed, out), 1), gated, pdl=pdl)
            x.add_(gated)

    step(False)
    expected = x.clone()
    assert expected.isfinite().all() and not torch.equal(expected, start)
    graph = torch.cuda.CUDAGraph()
    step(True)
    with torch.cuda.graph(graph):
        step(True)
    for _ in range(20):
        for buffer in (x, normed, gated, out, q, wide):
            buffer.fill_(math.nan)
        graph.replay()
        assert torch.equal(x, expected), f"programmatic launch changes {int((x != expected).sum())} elements"
    return {"name": "chain", "shape": "6 layers", "error": 0.0}


def check_parts() -> Iterator[dict]:
    """Compare rotation, norms, gate and page copies with plain torch in bf16: nearly all bits, since the rounding is the same."""

    def same(what: str, got: torch.Tensor, want: torch.Tensor) -> dict:
        equal, error = float((got == want).float().mean()), relative(got, want.double())
        assert equal > 0.985 and error < 2e-3, f"{what}: {equal:.4f} of the elements are equal, error {error:.2e}"
        return {"name": what, "shape": tuple(got.shape), "error": error}

    for tokens, heads, kv_heads, dim in ((1, 16, 8, 128), (37, 32, 8, 128), (300, 9, 3, 64), (5, 14, 2, 64)):
        qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
        weight = normal(heads + kv_heads, dim) if dim == 128 else None
        positions = torch.randint(0, 4000, (tokens,), device=CUDA, dtype=torch.int32)
        slots = torch.randperm(20 * PAGE, device=CUDA)[:tokens]
        table = RotaryTable(dim, Rope(theta=1e6), 4000, dtype=torch.bfloat16, device=CUDA)
        keys, values = (torch.full((20, PAGE, kv_heads, dim), math.nan, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
        q = torch.full((tokens, heads, dim), math.nan, dtype=torch.bfloat16, device=CUDA)
        rope_kv(qkv, positions, slots, table.angles, weight, q, keys, values, eps=EPS)
        qk, v = qkv.view(tokens, -1, dim).split((heads + kv_heads, kv_heads), 1)
        qk = qk.clone() if weight is None else RMSNorm(weight, EPS, dim)(qk)
        want_q, want_k = table.select(positions).rotate(qk).split((heads, kv_heads), 1)
        yield same("rope q", q, want_q)
        yield same("rope k", keys.view(-1, kv_heads, dim)[slots], want_k)
        assert torch.equal(values.view(-1, kv_heads, dim)[slots], v), "values differ"
        assert int(keys.isnan().sum()) == (20 * PAGE - tokens) * kv_heads * dim, "other slots were written"
    for tokens, size in ((1, 1024), (33, 4096), (7, 2560), (3, 8192)):
        x, delta, weight = normal(tokens, size), normal(tokens, size), normal(size)
        out, total = torch.full_like(x, math.nan), x + delta
        rms_norm(x, weight, EPS, out)
        yield same("rms_norm", out, RMSNorm(weight, EPS, size)(x))
        out.fill_(math.nan)
        add_rms_norm(x, delta, weight, EPS, out)
        assert torch.equal(x, total), "the residual sum differs"
        yield same("add_rms_norm", out, RMSNorm(weight, EPS, size)(total))
    for tokens, size in ((1, 3072), (65, 12288), (9, 1000)):
        gate_up, out = normal(tokens, 2 * size) * 3, torch.full((tokens, size), math.nan, dtype=torch.bfloat16, device=CUDA)
        silu_mul(gate_up, out)
        gate, up = gate_up.chunk(2, -1)
        yield same("silu_mul", out, functional.silu(gate).mul_(up))
    keys, values = normal(3, 20, PAGE, 8, 64), normal(3, 20, PAGE, 8, 64)
    sources, targets = torch.tensor([4, 9, 4], device=CUDA), torch.tensor([1, 19, 7], device=CUDA)
    want = [store.index_copy(1, targets, store[:, sources]) for store in (keys, values)]
    copy_pages(keys, values, sources, targets)
    assert torch.equal(keys, want[0]) and torch.equal(values, want[1]), "copied pages differ"
    yield {"name": "pages", "shape": tuple(keys.shape), "error": 0.0}


def check() -> list[dict]:
    """Check every kernel. Raises: AssertionError."""
    torch.manual_seed(0)
    attention_times.compile_all()
    results = [check_attention(heads, 8, 128, TILING) for heads in (FEW_HEADS, MANY_HEADS)]
    results.append(check_attention(FEW_HEADS, 8, 128, TILING, heads_first=True))
    results.append(check_attention(FEW_HEADS, 8, 128, TILING, window=1000))
    results += [check_attention(heads, kv, 64, TILING) for heads, kv in ((9, 3), (8, 1))]
    results += [check_attention(FEW_HEADS, 8, 128, tiling) for tiling in CHECKED_TILINGS]
    results += [check_fused(FEW_HEADS, 8, 128, True), check_fused(9, 3, 64, False)]
    results.append(check_chain())
    return results + list(check_parts())


def main() -> None:
    if sys.argv[1:2] == ["--compile"]:
        attention_times.compile_share(int(sys.argv[2]), int(sys.argv[3]))
        return
    results = check()
    print(f"check_attention: {len(results)} cases right, largest error {max(row['error'] for row in results):.1e}", flush=True)
    timings()


def timings() -> list[dict]:
    """Time all cases and print a line for each."""
    return attention_times.timings()


if __name__ == "__main__":
    main()
