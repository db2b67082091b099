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
from pathlib import Path

import numpy as np
import torch

from areno.kernels.prefill_attention import SplitWorkspace, Tiling, prefill_attention
from tests.gpu.attention_cases import CUDA
from tests.gpu.graph_time import time_graph
from tests.gpu.prefill_cases import SPARE_ROWS, Chunks, Gathered, Shape, exact, place, poison


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to launch: tokens per block, tiling (None: the picked one), parts that keys are split in (0: not), programmatic launch."""

    block_m: int = 64
    tiling: Tiling | None = None
    splits: int = 0
    pdl: bool = False

    def workspace(self, shape: Shape, num_blocks: int) -> SplitWorkspace | None:
        """Allocate what the splits need."""
        if not self.splits:
            return None
        return SplitWorkspace.allocate(
            num_blocks=num_blocks, block_m=self.block_m, num_heads=shape.heads, head_dim=shape.dim, splits=self.splits, device=CUDA
        )


def launch(
    chunks: Chunks, shape: Shape, way: Way, blocks: torch.Tensor, out: torch.Tensor, workspace: SplitWorkspace | None
) -> torch.Tensor:
    prefill_attention(
        chunks.q,
        chunks.keys,
        chunks.values,
        blocks,
        chunks.pages,
        out,
        scale=shape.dim**-0.5,
        window=shape.window,
        block_m=way.block_m,
        pdl=way.pdl,
        workspace=workspace,
        tiling=way.tiling,
    )
    return out[:-SPARE_ROWS]


def attended(chunks: Chunks, shape: Shape, way: Way, *, cut: int = 0) -> torch.Tensor:
    """Attend into a poisoned output; `cut` is the tokens per block where that is less than the tile takes."""
    blocks, out = chunks.blocks(cut or way.block_m), torch.full_like(chunks.q, math.nan)
    workspace = way.workspace(shape, blocks.shape[0])
    if workspace is not None:
        workspace.partials.fill_(math.nan)
        workspace.states.fill_(math.nan)
    result = launch(chunks, shape, way, blocks, out, workspace)
    assert out[-SPARE_ROWS:].isnan().all(), "a row of no block was written"
    assert workspace is None or not workspace.arrivals.any(), "arrivals are left"
    return result


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


def check_shape(shape: Shape, way: Way, *, heads_first: bool = False) -> dict:
    """Compare with float64, and the bits again, alone, in company, under programmatic launch and, without splits, cut otherwise."""
    draw = np.random.default_rng(7)
    drawn = [[(int(start), int(count))] for start, count in zip(draw.integers(0, 1500, 6), draw.integers(1, 200, 6))]
    (chunks,) = place(shape, [*MIX, *drawn])
    poison(chunks, shape.window)
    if heads_first:
        keys, values = (store.transpose(1, 2).contiguous().transpose(1, 2) for store in (chunks.keys, chunks.values))
        chunks = replace(chunks, keys=keys, values=values)
    what = f"{shape} {way} {heads_first=}"
    out = attended(chunks, shape, way)
    expected = exact(chunks, shape.dim**-0.5, shape.window)
    error = float((out.double() - expected).norm() / expected.norm())
    worst = float((out.double() - expected).abs().max())
    limit, most = (1e-5, 1e-4) if shape.dtype == torch.float32 else (8e-3, 8e-2)
    assert error < limit and worst < most, f"{what}: error {error:.2e}, largest difference {worst:.2e}"
    for again in (way, replace(way, pdl=way.tiling is None)):
        assert torch.equal(attended(chunks, shape, again), out), f"{what}: other bits with {again}"
    begins = np.cumsum(chunks.counts) - chunks.counts
    for chosen in ((3,), (9, 1), (8, 6)):
        own = torch.cat([out[begins[chunk] : begins[chunk] + chunks.counts[chunk]] for chunk in chosen])
        assert torch.equal(attended(chunks.pick(*chosen), shape, way), own), f"{what}: {chosen=} has other bits"
    for cut in (way.block_m - 1, way.block_m // 2)[: 0 if way.splits else 2]:
        other = attended(chunks, shape, way, cut=cut)
        assert torch.equal(other, out), f"{what}: {int((other != out).sum())} elements differ when cut by {cut}"
    return {"name": "prefill_attention", "shape": what, "error": error}


CHECKS: tuple[tuple[Shape, Way, bool], ...] = (
    (Shape(), Way(), False),
    (Shape(), Way(block_m=32), True),
    (Shape(), Way(splits=4), False),
    (Shape(heads=32), Way(), False),
    (Shape(window=300), Way(), False),
    (Shape(window=700), Way(splits=3), False),
    (Shape(heads=4, kv_heads=4, dim=32, page=16), Way(), False),
    (Shape(heads=4, kv_heads=4, dim=32, page=16, window=100), Way(block_m=16), True),
    (Shape(heads=9, kv_heads=3, dim=64, page=16), Way(block_m=21), False),
    (Shape(heads=8, kv_heads=1, dim=64), Way(block_m=16, splits=8), False),
    (Shape(dtype=torch.float32), Way(), False),
    (Shape(heads=4, kv_heads=2, dim=32, page=16, window=100, dtype=torch.float32), Way(splits=2), False),
)

CONFIGS: dict[str, Way] = {
    "m64 f1 n64 w4 s3": Way(block_m=64, tiling=Tiling(fold=1, block_n=64, num_warps=4, num_stages=3)),
    "m64 f1 n64 w4 s2": Way(block_m=64, tiling=Tiling(fold=1, block_n=64, num_warps=4, num_stages=2)),
    "m64 f1 n32 w4 s3": Way(block_m=64, tiling=Tiling(fold=1, block_n=32, num_warps=4, num_stages=3)),
    "m64 f1 n128 w8 s2": Way(block_m=64, tiling=Tiling(fold=1, block_n=128, num_warps=8, num_stages=2)),
    "m64 f2 n64 w8 s3": Way(block_m=64, tiling=Tiling(fold=2, block_n=64, num_warps=8, num_stages=3)),
    "m64 f2 n32 w8 s3": Way(block_m=64, tiling=Tiling(fold=2, block_n=32, num_warps=8, num_stages=3)),
    "m64 f2 n128 w8 s2": Way(block_m=64, tiling=Tiling(fold=2, block_n=128, num_warps=8, num_stages=2)),
    "m32 f2 n64 w4 s3": Way(block_m=32, tiling=Tiling(fold=2, block_n=64, num_warps=4, num_stages=3)),
    "m32 f2 n32 w4 s3": Way(block_m=32, tiling=Tiling(fold=2, block_n=32, num_warps=4, num_stages=3)),
    "m32 f2 n128 w8 s2": Way(block_m=32, tiling=Tiling(fold=2, block_n=128, num_warps=8, num_stages=2)),
    "m16 f2 n64 w4 s3": Way(block_m=16, tiling=Tiling(fold=2, block_n=64, num_warps=4, num_stages=3)),
    "m128 f1 n64 w8 s3": Way(block_m=128, tiling=Tiling(fold=1, block_n=64, num_warps=8, num_stages=3)),
    "m32 f4 n64 w8 s3": Way(block_m=32, tiling=Tiling(fold=4, block_n=64, num_warps=8, num_stages=3)),
    "m16 f4 n64 w4 s3": Way(block_m=16, tiling=Tiling(fold=4, block_n=64, num_warps=4, num_stages=3)),
    "m16 f4 n32 w4 s3": Way(block_m=16, tiling=Tiling(fold=4, block_n=32, num_warps=4, num_stages=3)),
}
"""Tokens per block, query heads per program, keys at a time, warps, stages."""
SPLIT_CONFIGS = {
    f"{name} x{splits}": replace(CONFIGS[name], splits=splits)
    for name in ("m64 f1 n64 w4 s3", "m32 f2 n64 w4 s3", "m64 f2 n64 w8 s3", "m16 f4 n64 w4 s3")
    for splits in (2, 4, 8)
}
"""Tried where there are few blocks."""


TIMED = (Shape(), Shape(heads=32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Chunks of one launch, over how many sets of them its timing rotates, and whether splits are tried."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    sets: int
    split: bool = False


LOADS = (
    Load(name="8 x 256", chunks=((0, 256),) * 8, sets=15),
    Load(name="64 x 256", chunks=((0, 256),) * 64, sets=2),
    Load(name="16 x 80 over 1000-2000", chunks=tuple((start, 80) for start in range(1000, 2001, 66)), sets=2, split=True),
    Load(name="1 x 80 over 1000", chunks=((1000, 80),), sets=28, split=True),
    Load(name="1 x 2048", chunks=((0, 2048),), sets=15, split=True),
    Load(name="4 x 512 over 4096", chunks=((4096, 512),) * 4, sets=2),
)


def time_load(shape: Shape, load: Load) -> Iterator[dict]:
    """Time every tiling on one load, the picked one under programmatic launch, then gathering and plain torch."""
    sets = place(shape, [[chunk] for chunk in load.chunks], sets=load.sets)
    name, launches = f"{load.name} H{shape.heads}", 2 * max(load.sets, 4)
    traffic, flop = sets[0].traffic, sets[0].flop
    out = torch.empty_like(sets[0].q)

    def row(config: str, us: float) -> dict:
        return {"name": name, "config": config, "us": us, "tb_per_s": traffic / us / 1e6, "tflop_per_s": flop / us / 1e6}

    ways = configs(shape, CONFIGS | SPLIT_CONFIGS if load.split else CONFIGS)
    for config, way in (ways | {"picked": Way(), "picked pdl": Way(pdl=True)}).items():
        blocks = sets[0].blocks(way.block_m)
        workspace = way.workspace(shape, blocks.shape[0])

        def step(index: int, way: Way = way, blocks: torch.Tensor = blocks, workspace: SplitWorkspace | None = workspace) -> None:
            launch(sets[index % load.sets], shape, way, blocks, out, workspace)

        yield row(config, time_graph(step, launches))
    gathered = Gathered(sets)
    yield row("varlen", time_graph(gathered.attend, launches))
    yield row("gather", time_graph(gathered.gather, launches))
    result, want = attended(sets[0], shape, Way()).double(), gathered.attend(0).double()
    error = float((result - want).norm() / want.norm())
    assert error < 8e-3, f"{name}: error {error:.2e} against varlen_attn"


def configs(shape: Shape, named: dict[str, Way]) -> dict[str, Way]:
    """Return the ways whose fold divides the query heads of a kv head."""
    return {name: way for name, way in named.items() if way.tiling is None or shape.heads // shape.kv_heads % way.tiling.fold == 0}


def jobs() -> list[tuple[Shape, Way]]:
    """List what the checks and timings launch."""
    found = [(shape, replace(way, pdl=pdl)) for shape, way, _ in CHECKS for pdl in (False, True)]
    found += [(shape, way) for shape in TIMED for way in configs(shape, CONFIGS | SPLIT_CONFIGS).values()]
    return found


def compile_share(index: int, count: int) -> None:
    """Launch every `count`-th kernel once on small chunks, so that it is in Triton's cache on disk."""
    for shape, way in jobs()[index::count]:
        (chunks,) = place(shape, [[(0, 20)], [(70, 20)]])
        attended(chunks, shape, way)
    torch.cuda.synchronize()


def compile_all() -> None:
    """Compile the kernels in several processes. Blocks: until all have ended."""
    count = min(14, os.cpu_count() or 1)
    argv = [sys.executable, "-m", "tests.gpu.check_prefill_attention", "--compile"]
    workers = [subprocess.Popen([*argv, str(index), str(count)], cwd=Path(__file__).parents[2]) for index in range(count)]
    codes = [worker.wait() for worker in workers]
    assert not any(codes), f"compiling processes ended with {codes}"


def check() -> list[dict]:
    """Check shapes with the picked tiling, then every way that is timed. Raises: AssertionError."""
    torch.manual_seed(0)
    compile_all()
    results = [check_shape(shape, way, heads_first=heads_first) for shape, way, heads_first in CHECKS]
    for shape in TIMED:
        results += [check_shape(shape, way) for way in configs(shape, CONFIGS).values()]
    return results


def timings() -> list[dict]:
    """Time all loads. Prints a line for each, its fastest way first, and leaves all figures in $OUT where that is set."""
    torch.manual_seed(0)
    found = []
    for load, shape in itertools.product(LOADS, TIMED):
        rows = sorted(time_load(shape, load), key=lambda row: row["us"])
        found += rows
        best = next(row for row in rows if row["config"] not in ("gather", "varlen"))
        print(f"{best['name']}: best {best['config']} {best['us']:.1f} us {best['tb_per_s']:.2f} TB/s {best['tflop_per_s']:.0f} TFLOP/s")
        print("    " + "; ".join(f"{row['config']} {row['us']:.1f}" for row in rows), flush=True)
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
