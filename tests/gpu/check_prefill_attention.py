"""Attention of packed prompt chunks over pages on a card: right against float64, equal bits in any company, and its times.

`python -m tests.gpu.check_prefill_attention` compiles side by side, checks, then times. Timed: one captured graph of launches that
rotate over chunks on other pages (more than twice the L2 together), the median of its replays over the launches; beside it, in the
same run, `varlen_attn` on keys and values gathered before, and that gather by itself. Not timed: compiling and cutting blocks.
Sequences lie on scattered pages; whatever no chunk may read is NaN, and so is every output before a launch.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from areno.kernels.prefill_attention import Tiling, pick_tiling, prefill_attention
from tests.gpu.attention_times import time_graph
from tests.gpu.prefill_cases import SPARE_ROWS, Chunks, Gathered, Shape, exact, place, poison


def attended(chunks: Chunks, shape: Shape, block_m: int, tiling: Tiling | None, *, cut: int = 0, pdl: bool = False) -> torch.Tensor:
    """Attend into a poisoned output; `cut` is the tokens per block where it is less than `block_m`."""
    out = torch.full_like(chunks.q, math.nan)
    prefill_attention(
        chunks.q,
        chunks.keys,
        chunks.values,
        chunks.blocks(cut or block_m),
        chunks.pages,
        out,
        scale=shape.dim**-0.5,
        window=shape.window,
        block_m=block_m,
        pdl=pdl,
        tiling=tiling,
    )
    assert out[-SPARE_ROWS:].isnan().all(), "a row of no block was written"
    return out[:-SPARE_ROWS]


MIX = (
    [(0, 1)],
    [(0, 63)],
    [(0, 64), (64, 65)],
    [(1, 80)],
    [(63, 2)],
    [(1000, 16)],
    [(0, 300), (300, 129)],
    [(2047, 97)],
    [(1500, 333)],
    [(4096, 1)],
)


def check_shape(shape: Shape, block_m: int, tiling: Tiling | None = None, *, heads_first: bool = False) -> dict:
    """Compare with float64, and the bits alone, in company, under programmatic launch and cut otherwise."""
    draw = np.random.default_rng(7)
    drawn = [[(int(start), int(count))] for start, count in zip(draw.integers(0, 1500, 6), draw.integers(1, 200, 6))]
    (chunks,) = place(shape, [*MIX, *drawn])
    poison(chunks, shape.window)
    if heads_first:
        keys, values = (store.transpose(1, 2).contiguous().transpose(1, 2) for store in (chunks.keys, chunks.values))
        chunks = replace(chunks, keys=keys, values=values)
    what = f"{shape} block_m={block_m} {heads_first=} {tiling or 'picked'}"
    out = attended(chunks, shape, block_m, tiling)
    expected = exact(chunks, shape.dim**-0.5, shape.window)
    error = float((out.double() - expected).norm() / expected.norm())
    worst = float((out.double() - expected).abs().max())
    limit, most = (1e-5, 1e-4) if shape.dtype == torch.float32 else (8e-3, 8e-2)
    assert error < limit and worst < most, f"{what}: error {error:.2e}, largest difference {worst:.2e}"
    assert torch.equal(attended(chunks, shape, block_m, tiling, pdl=True), out), f"{what}: other bits under programmatic launch"
    begins = np.cumsum(chunks.counts) - chunks.counts
    for chosen in ((3,), (9, 1), (8, 6)):
        own = torch.cat([out[begins[chunk] : begins[chunk] + chunks.counts[chunk]] for chunk in chosen])
        assert torch.equal(attended(chunks.pick(*chosen), shape, block_m, tiling), own), f"{what}: {chosen=} has other bits"
    for cut in (block_m - 1, block_m // 2):
        other = attended(chunks, shape, block_m, tiling, cut=cut)
        assert torch.equal(other, out), f"{what}: {int((other != out).sum())} elements differ when cut by {cut}"
    return {"name": "prefill_attention", "shape": what, "error": error}


CHECKS: tuple[tuple[Shape, int, bool], ...] = (
    (Shape(), 64, False),
    (Shape(), 32, True),
    (Shape(heads=32), 64, False),
    (Shape(window=300), 64, False),
    (Shape(heads=4, kv_heads=4, dim=32, page=16), 64, False),
    (Shape(heads=4, kv_heads=4, dim=32, page=16, window=100), 16, True),
    (Shape(heads=9, kv_heads=3, dim=64, page=16), 42, False),
    (Shape(heads=8, kv_heads=1, dim=64), 64, False),
    (Shape(dtype=torch.float32), 64, False),
    (Shape(heads=4, kv_heads=2, dim=32, page=16, window=100, dtype=torch.float32), 64, False),
)

CONFIGS: dict[str, tuple[int, Tiling]] = {
    "m64 f1 n64 w4 s3": (64, Tiling(fold=1, block_n=64, num_warps=4, num_stages=3)),
    "m64 f1 n64 w4 s2": (64, Tiling(fold=1, block_n=64, num_warps=4, num_stages=2)),
    "m64 f1 n32 w4 s3": (64, Tiling(fold=1, block_n=32, num_warps=4, num_stages=3)),
    "m64 f1 n128 w8 s2": (64, Tiling(fold=1, block_n=128, num_warps=8, num_stages=2)),
    "m64 f2 n64 w8 s3": (64, Tiling(fold=2, block_n=64, num_warps=8, num_stages=3)),
    "m64 f2 n32 w8 s3": (64, Tiling(fold=2, block_n=32, num_warps=8, num_stages=3)),
    "m64 f2 n128 w8 s2": (64, Tiling(fold=2, block_n=128, num_warps=8, num_stages=2)),
    "m32 f2 n64 w4 s3": (32, Tiling(fold=2, block_n=64, num_warps=4, num_stages=3)),
    "m32 f2 n32 w4 s3": (32, Tiling(fold=2, block_n=32, num_warps=4, num_stages=3)),
    "m32 f2 n128 w8 s2": (32, Tiling(fold=2, block_n=128, num_warps=8, num_stages=2)),
    "m16 f2 n64 w4 s3": (16, Tiling(fold=2, block_n=64, num_warps=4, num_stages=3)),
    "m128 f1 n64 w8 s3": (128, Tiling(fold=1, block_n=64, num_warps=8, num_stages=3)),
    "m32 f4 n64 w8 s3": (32, Tiling(fold=4, block_n=64, num_warps=8, num_stages=3)),
    "m16 f4 n64 w4 s3": (16, Tiling(fold=4, block_n=64, num_warps=4, num_stages=3)),
    "m16 f4 n32 w4 s3": (16, Tiling(fold=4, block_n=32, num_warps=4, num_stages=3)),
}
"""Tokens per block, query heads per program, keys at a time, warps, stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Chunks of one launch, and over how many sets of them its timing rotates."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    sets: int


LOADS = (
    Load(name="8 x 256", chunks=((0, 256),) * 8, sets=15),
    Load(name="64 x 256", chunks=((0, 256),) * 64, sets=2),
    Load(name="16 x 80 over 1000-2000", chunks=tuple((start, 80) for start in range(1000, 2001, 66)), sets=2),
    Load(name="1 x 80 over 1000", chunks=((1000, 80),), sets=28),
    Load(name="1 x 2048", chunks=((0, 2048),), sets=15),
    Load(name="4 x 512 over 4096", chunks=((4096, 512),) * 4, sets=2),
)


def time_load(shape: Shape, load: Load) -> Iterator[dict]:
    """Time every tiling on one load, the picked one under programmatic launch, then gathering and plain torch."""
    sets = place(shape, [[chunk] for chunk in load.chunks], sets=load.sets)
    name, launches = f"{load.name} H{shape.heads}", 2 * max(load.sets, 4)
    traffic, flop = sets[0].traffic, sets[0].flop
    out = torch.empty_like(sets[0].q)

    def run(index: int, block_m: int, blocks: torch.Tensor, tiling: Tiling | None, pdl: bool) -> None:
        own = sets[index % load.sets]
        scale = shape.dim**-0.5
        prefill_attention(own.q, own.keys, own.values, blocks, own.pages, out, scale=scale, block_m=block_m, pdl=pdl, tiling=tiling)

    def row(config: str, us: float) -> dict:
        return {"name": name, "config": config, "us": us, "tb_per_s": traffic / us / 1e6, "tflop_per_s": flop / us / 1e6}

    kinds: list[tuple[str, int, Tiling | None, bool]] = [(name, *CONFIGS[name], False) for name in configs(shape)]
    kinds += [("picked", 64, None, False), ("picked pdl", 64, None, True)]
    for config, block_m, tiling, pdl in kinds:
        blocks = sets[0].blocks(block_m)
        yield row(config, time_graph(partial(run, block_m=block_m, blocks=blocks, tiling=tiling, pdl=pdl), launches))

    gathered = Gathered(sets)
    yield row("varlen", time_graph(gathered.attend, launches))
    yield row("gather", time_graph(gathered.gather, launches))
    result, want = attended(sets[0], shape, 64, None).double(), gathered.attend(0).double()
    error = float((result - want).norm() / want.norm())
    assert error < 8e-3, f"{name}: error {error:.2e} against varlen_attn"


def configs(shape: Shape) -> list[str]:
    """Name the tilings to time; a fold of a kv head's query heads must divide them."""
    return [name for name, (_, tiling) in CONFIGS.items() if shape.heads // shape.kv_heads % tiling.fold == 0]


def jobs() -> list[tuple[Shape, int, Tiling, bool]]:
    """List what the checks and timings launch."""
    found = [
        (shape, block_m, pick_tiling(shape.dim, shape.heads // shape.kv_heads, block_m, shape.dtype), pdl)
        for (shape, block_m, _), pdl in itertools.product(CHECKS, (False, True))
    ]
    for shape in (Shape(), Shape(heads=32)):
        found += [(shape, *CONFIGS[name], pdl) for name in configs(shape) for pdl in (False, True)]
    return list(dict.fromkeys(found))


def compile_share(index: int, count: int) -> None:
    """Launch every `count`-th kernel once on small chunks, so that it is in Triton's cache on disk."""
    for shape, block_m, tiling, pdl in jobs()[index::count]:
        (chunks,) = place(shape, [[(0, 20)], [(70, 20)]])
        attended(chunks, shape, block_m, tiling, pdl=pdl)
    torch.cuda.synchronize()


def compile_all() -> None:
    """Compile the kernels in several processes. Blocks: until all have ended."""
    count = min(14, os.cpu_count() or 1)
    argv = [sys.executable, "-m", "tests.gpu.check_prefill_attention", "--compile"]
    workers = [subprocess.Popen([*argv, str(index), str(count)], cwd=Path(__file__).parents[2]) for index in range(count)]
    codes = [worker.wait() for worker in workers]
    assert not any(codes), f"compiling processes ended with {codes}"


def check() -> list[dict]:
    """Check shapes with the picked tiling and all tilings on one shape. Raises: AssertionError."""
    torch.manual_seed(0)
    compile_all()
    results = [check_shape(shape, block_m, heads_first=heads_first) for shape, block_m, heads_first in CHECKS]
    for shape in (Shape(), Shape(heads=32)):
        results += [check_shape(shape, *CONFIGS[name]) for name in configs(shape)]
    return results


def timings() -> list[dict]:
    """Time all loads. Prints a line for each, its fastest way first, and leaves all figures in $OUT where that is set."""
    torch.manual_seed(0)
    rows = (row for load, heads in itertools.product(LOADS, (16, 32)) for row in time_load(Shape(heads=heads), load))
    found = []
    for name, group in groupby(rows, key=lambda row: row["name"]):
        same = sorted(group, key=lambda row: row["us"])
        found += same
        best = next(row for row in same if row["config"] not in ("gather", "varlen"))
        print(f"{name}: best {best['config']} {best['us']:.1f} us {best['tb_per_s']:.2f} TB/s {best['tflop_per_s']:.0f} TFLOP/s")
        print("    " + "; ".join(f"{row['config']} {row['us']:.1f}" for row in same), flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "check_prefill_attention.json").write_text(json.dumps(found), encoding="utf-8")
    return found


def main() -> None:
    if sys.argv[1:2] == ["--compile"]:
        compile_share(int(sys.argv[2]), int(sys.argv[3]))
        return
    results = check()
    print(f"check_prefill_attention: {len(results)} cases right, largest error {max(row['error'] for row in results):.1e}", flush=True)
    timings()


if __name__ == "__main__":
    main()
