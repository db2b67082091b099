"""The captured decode step alone on a CUDA device: ms per replay, and where its time goes by kernel.

Timed with events over back-to-back replays of one step over rows of a fixed length that do not end; the host does nothing
else. The breakdown is torch.profiler's sum of kernel times per replay, so what lies between kernels shows as the difference
to `step_ms`. Rows are set directly in the tables.

    python -m tests.bench.gpu_step --models qwen3-0.6b --batches 1 8 64 256
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from areno import Engine, EngineConfig
from areno.commands import DecodeLaunch
from areno.decode.deltas import DeltaPacker
from areno.decode.graphs import GraphPath
from areno.models import dense_cuda
from areno.request import MAX_STOP_IDS
from areno.sampling.variant import Variant
from tests.bench import shapes
from tests.bench.record import arguments, publish

VARIANT = Variant(noise=True, sums=True)
GROWTH = 100
"""More than the tokens by which rows grow while they are timed."""


def set_rows(engine: Engine, lengths: np.ndarray) -> None:
    """Fill the tables with rows of these lengths on pages of their own."""
    path = engine._path
    assert isinstance(path, GraphPath)
    page_size, first = engine.info.page_size, 4
    packer = DeltaPacker()
    for row, length in enumerate(lengths.tolist()):
        pages = np.arange(first, first + (length + 600) // page_size + 1)
        first += pages.size
        fields = {"row": row, "generation": 1, "last_token": 5, "length": length, "remaining": 1 << 20, "temperature": 1.0, "top_p": 1.0}
        fields |= {"sampling_slot": -1, "recurrent_slot": -1, "seed": row, "stop_ids": np.full(MAX_STOP_IDS, -1, np.int32)}
        packer.set_row(fields, pages)
    for slot in packer.take():
        path.apply(slot)


def time_steps(engine: Engine, batch: int, longest: int, *, replays: int = 60) -> tuple[float, dict[str, float]]:
    """Return ms per replay and ms per replay of each kernel."""
    path = engine._path
    seats = np.zeros(batch, dtype=np.int64)
    launch = DecodeLaunch(bucket=batch, longest=longest, seats=seats, generations=seats.astype(np.int32), variant=VARIANT)
    with torch.inference_mode():
        for _ in range(6):
            path.decode(launch, None)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        walls = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(replays // 5):
                path.decode(launch, None)  # type: ignore[arg-type]
            end.record()
            torch.cuda.synchronize()
            walls.append(start.elapsed_time(end) / (replays // 5))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            for _ in range(5):
                path.decode(launch, None)  # type: ignore[arg-type]
            torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name[:60]] += event.device_time / 5e3
    return statistics.median(walls), dict(sorted(spent.items(), key=lambda item: -item[1]))


def choose(engine: Engine, *, pdl: bool, fused_rows: int, tiling: str) -> None:
    """Drop the captured steps; the next ones are made another way."""
    path = engine._path
    assert isinstance(path, GraphPath)
    steps = path.steps
    steps._graphs.clear()
    steps._seen.clear()
    steps._pool = torch.cuda.graph_pool_handle()
    steps._fused._pdl = pdl
    dense_cuda.FUSED_ROWS = fused_rows
    if tiling:
        block, warps, stages, *chunk = map(int, tiling.split(","))
        sizes = {"short_chunk": chunk[0], "long_chunk": max(chunk[0], 512)} if chunk else {}
        dense_cuda.TILING = replace(dense_cuda.TILING, block=block, num_warps=warps, num_stages=stages, **sizes)
        dense_cuda.MANY_ROWS_TILING = dense_cuda.TILING


def measure(
    model: str, batches: list[int], contexts: list[int], ways: list[tuple[bool, int, str]], options: dict[str, Any], *, log: bool
) -> list[dict[str, Any]]:
    """Return one row per context, batch and way of making a step."""
    engine = Engine(EngineConfig(model=shapes.write(model), load_format="dummy", seed=0, max_rows=max(batches), **options))
    rows = []
    for context, batch, (pdl, fused_rows, tiling) in itertools.product(contexts, batches, ways):
        choose(engine, pdl=pdl, fused_rows=fused_rows, tiling=tiling)
        set_rows(engine, np.full(batch, context))
        step, spent = time_steps(engine, batch, context + GROWTH)
        case = {"model": model, "batch": batch, "context": context, "pdl": pdl, "fused": batch <= fused_rows, "tiling": tiling}
        rows.append({**case, "step_ms": step, "kernels_ms": sum(spent.values()), "kernels": spent})
        if log:
            print(f"{case}: {step:.3f} ms, kernels {sum(spent.values()):.3f}")
            print("   " + ", ".join(f"{name[:38]} {value * 1e3:.0f}" for name, value in list(spent.items())[:12]), flush=True)
    engine.close()
    return rows


def main() -> None:
    """Measure every model."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b"], choices=sorted(shapes.SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[384])
    parser.add_argument("--pdl", nargs="+", type=int, default=[1], choices=(0, 1), help="kernels start before the one before has ended")
    parser.add_argument("--fused-rows", nargs="+", type=int, default=[dense_cuda.FUSED_ROWS], help="most rows for the fused products")
    parser.add_argument("--tilings", nargs="+", default=[""], help="attention's block, warps, stages and short chunk, as in 64,4,3,256")
    options = parser.parse_args()
    ways = [(bool(pdl), rows, tiling) for pdl, rows, tiling in itertools.product(options.pdl, options.fused_rows, options.tilings)]
    rows = []
    for model in options.models:
        rows += measure(model, options.batches, options.contexts, ways, {}, log=not options.json)
        torch.cuda.empty_cache()
    publish("gpu_step", {"contexts": options.contexts}, rows, options)


if __name__ == "__main__":
    main()
