"""Times of the attention kernels and those around them, each beside the same work in plain torch.

Timed: one captured graph of launches that rotate over rows on other pages (more than twice the L2 together where they fit),
the median of its replays over the launches. Not timed: compiling, which subprocesses do first, side by side, into Triton's
cache, and the work list, which a step makes once for all its layers and which has a line of its own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import triton
from torch.nn import functional

from areno.kernels.activation import silu_mul
from areno.kernels.attention import FEW_ROWS_TILING, TILING, Tiling
from areno.kernels.norm import add_rms_norm, rms_norm
from areno.kernels.pages import copy_pages
from areno.kernels.rope_kv import rope_kv
from areno.layers.norm import RMSNorm
from areno.layers.rope import Rope
from areno.layers.rotary import RotaryTable
from tests.gpu.attention_cases import CUDA, PAGE, Attention, allocate_store, gathered, normal, place_rows, programs
from tests.gpu.graph_time import time_graph

EPS = 1e-6
KV_HEADS, DIM = 8, 128

CONFIGS: dict[str, Tiling] = {
    "c512 b64 w2 s2": TILING,
    "c256 b64 w4 s3": FEW_ROWS_TILING,
    "c512 b64 w4 s3": replace(TILING, num_warps=4, num_stages=3),
    "c512 b32 w2 s3": replace(TILING, block=32, num_stages=3),
    "c512 b32 w1 s3": replace(TILING, block=32, num_warps=1, num_stages=3),
}
"""Timed, first those of the engine; a name holds the first chunk, the block, warps and stages."""
FUSED_CONFIGS = {"": TILING, ", few rows": FEW_ROWS_TILING}
CHECKED_TILINGS = (
    *list(CONFIGS.values())[1:],
    replace(TILING, block=2 * PAGE, num_warps=4),
    replace(TILING, short_chunk=128, split=16),
)
"""Beside the default: what is timed, blocks of two pages, chunks that double twice."""
FEW_HEADS, MANY_HEADS = 16, 32

Store = tuple[torch.Tensor, torch.Tensor]


def measured(name: str, config: str, traffic: float, num_launches: int, step: Callable[[int], object]) -> dict:
    us = time_graph(step, num_launches)
    return {"name": name, "config": config, "us": us, "tb_per_s": traffic / us / 1e6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Lengths of one step's rows, and over how many sets of rows its timing rotates."""

    name: str
    lengths: tuple[int, ...]
    sets: int
    listed: bool = False

    @property
    def launches(self) -> int:
        return max(2 * self.sets, 4)


def loads() -> list[Load]:
    draw = np.random.default_rng(0)
    mixed = np.exp(draw.uniform(math.log(128), math.log(8192), 256)).astype(int)
    short = draw.integers(256, 514, 256)
    return [
        Load(name="64 x 8192", lengths=(8192,) * 64, sets=1, listed=True),
        Load(name="256 mixed", lengths=tuple(mixed.tolist()), sets=1, listed=True),
        Load(name="256 short", lengths=tuple(short.tolist()), sets=1, listed=True),
        Load(name="64 short", lengths=tuple(short[:64].tolist()), sets=3),
        Load(name="8 short", lengths=tuple(short[:8].tolist()), sets=16),
        Load(name="1 short", lengths=(385,), sets=80),
    ]


def time_attention(store: Store, heads: int, load: Load) -> Iterator[dict]:
    """Time every tiling on one load, then the default's other ways to run."""
    sets = place_rows(*store, load.lengths, heads, count=load.sets)
    out = torch.empty_like(sets[0].q)
    traffic = sets[0].traffic + 4 * out.numel()

    def run(tiling: Tiling, config: str, *, listed: int = 0, pdl: bool = False) -> dict:
        attention = Attention(len(load.lengths), heads, KV_HEADS, DIM, max(load.lengths), tiling, listed)
        attention.prepare(sets[0])

        def step(index: int) -> None:
            attention.run(sets[index % load.sets], out, pdl=pdl)

        return measured(f"{load.name} H{heads}", config, traffic, load.launches, step)

    for name, tiling in CONFIGS.items():
        yield run(tiling, name)
        if load.listed:
            yield run(tiling, f"{name} list", listed=programs())
    yield run(TILING, "pdl", pdl=True)
    whole = sets
    sets = [replace(rows, keys=_heads_outside(rows.keys), values=_heads_outside(rows.values)) for rows in whole]
    yield run(TILING, "store [N, K, G, D]")
    yield measured(
        f"{load.name} H{heads}", "torch gather + sdpa", traffic, load.sets, lambda index: gathered(whole[index % load.sets], DIM**-0.5)
    )


def _heads_outside(store: torch.Tensor) -> torch.Tensor:
    return store.view(-1, KV_HEADS, PAGE, DIM).transpose(1, 2)


def time_fused(store: Store, heads: int, load: Load) -> Iterator[dict]:
    """Time rotation and attention in one launch against two."""
    angles = RotaryTable(DIM, Rope(theta=1e6), 8192, dtype=torch.bfloat16, device=CUDA).angles
    weight = normal(heads + KV_HEADS, DIM)
    sets = place_rows(*store, load.lengths, heads, count=load.sets)
    out, q = torch.empty_like(sets[0].q), torch.empty_like(sets[0].q)
    qkv = normal(len(load.lengths), (heads + 2 * KV_HEADS) * DIM)
    positions = sets[0].lengths - 1
    slots = [rows.table.gather(1, (positions // PAGE).long()[:, None])[:, 0] * PAGE + positions % PAGE for rows in sets]

    def attention(tiling: Tiling, listed: int) -> Attention:
        made = Attention(len(load.lengths), heads, KV_HEADS, DIM, max(load.lengths), tiling, listed)
        made.prepare(sets[0])
        return made

    def two(index: int, attention: Attention, pdl: bool) -> None:
        rows = sets[index % load.sets]
        rope_kv(qkv, positions, slots[index % load.sets], angles, weight, q, rows.keys, rows.values, eps=EPS, pdl=pdl)
        attention.run(replace(rows, q=q), out, pdl=pdl)

    def one(index: int, attention: Attention, pdl: bool) -> None:
        attention.run_fused(sets[index % load.sets], qkv, weight, angles, out, pdl=pdl)

    traffic = sets[0].traffic
    for listed in (0, programs())[: 1 + load.listed]:
        for name, tiling in FUSED_CONFIGS.items():
            made = attention(tiling, listed)
            for launch, what in ((two, "rope + attend"), (one, "fused")):
                for pdl in (True, False)[: 1 + (tiling == TILING)]:
                    config = f"{what}{' list' if listed else ''}{name}{'' if pdl else ', no pdl'}"
                    yield measured(f"{load.name} H{heads}", config, traffic, load.launches, partial(launch, attention=made, pdl=pdl))
    if load.listed:
        listed_attention = attention(TILING, programs())
        yield measured(f"{load.name} H{heads}", "work list", 0, 4, lambda index: listed_attention.prepare(sets[0]))


def time_rope(store: Store, tokens: int, heads: int) -> Iterator[dict]:
    table = RotaryTable(DIM, Rope(theta=1e6), 8192, dtype=torch.bfloat16, device=CUDA)
    keys, values = store
    qkv, weight = normal(tokens, (heads + 2 * KV_HEADS) * DIM), normal(heads + KV_HEADS, DIM)
    positions = torch.randint(0, 8192, (tokens,), device=CUDA, dtype=torch.int32)
    slots = torch.randperm(keys.shape[0] * PAGE - 2 * PAGE, device=CUDA)[:tokens] + 2 * PAGE
    q = torch.empty(tokens, heads, DIM, dtype=torch.bfloat16, device=CUDA)
    name, traffic = f"rope_kv {tokens} H{heads}", 4 * qkv.numel()

    def step(per_program: int, warps: int) -> None:
        rope_kv(qkv, positions, slots, table.angles, weight, q, keys, values, eps=EPS, heads_per_program=per_program, num_warps=warps)

    yield measured(name, "2 heads w1", traffic, 20, lambda index: step(2, 1))
    yield measured(name, "4 heads w1", traffic, 20, lambda index: step(4, 1))
    yield measured(name, "8 heads w2", traffic, 20, lambda index: step(8, 2))
    yield measured(name, "8 heads w4", traffic, 20, lambda index: step(8, 4))

    def layers(index: int) -> None:
        qk, v = qkv.view(tokens, -1, DIM).split((heads + KV_HEADS, KV_HEADS), 1)
        turned = table.select(positions).rotate(RMSNorm(weight, EPS, DIM)(qk))
        keys.view(-1, KV_HEADS, DIM).index_copy_(0, slots, turned[:, heads:])
        values.view(-1, KV_HEADS, DIM).index_copy_(0, slots, v)

    yield measured(name, "torch", traffic, 5, layers)


def time_rows(tokens: int, size: int, inner: int) -> Iterator[dict]:
    """Time the norms and the gate on rows of one model."""
    x, delta, weight, out = normal(tokens, size), normal(tokens, size), normal(size), normal(tokens, size)
    layer = RMSNorm(weight, EPS, size)
    name, traffic = f"rms_norm {tokens} x {size}", 4 * x.numel()
    yield measured(name, "", traffic, 20, lambda index: rms_norm(x, weight, EPS, out))
    yield measured(name, "pdl", traffic, 20, lambda index: rms_norm(x, weight, EPS, out, pdl=True))
    yield measured(name, "torch", traffic, 20, lambda index: layer(x))
    name, traffic = f"add_{name}", 2 * traffic
    yield measured(name, "", traffic, 20, lambda index: add_rms_norm(x, delta, weight, EPS, out))
    yield measured(name, "pdl", traffic, 20, lambda index: add_rms_norm(x, delta, weight, EPS, out, pdl=True))
    yield measured(name, "torch", traffic, 20, lambda index: layer(x.add_(delta)))

    gate_up, gated = normal(tokens, 2 * inner), normal(tokens, inner)
    gate, up = gate_up.chunk(2, -1)
    name, traffic = f"silu_mul {tokens} x {inner}", 6 * gated.numel()
    yield measured(name, "b512 w2", traffic, 20, lambda index: silu_mul(gate_up, gated, block=512, num_warps=2))
    yield measured(name, "b1024 w4", traffic, 20, lambda index: silu_mul(gate_up, gated))
    yield measured(name, "b1024 w4 pdl", traffic, 20, lambda index: silu_mul(gate_up, gated, pdl=True))
    yield measured(name, "b2048 w4", traffic, 20, lambda index: silu_mul(gate_up, gated, block=2048))
    yield measured(name, "torch", traffic, 20, lambda index: functional.silu(gate).mul_(up))


def time_pages(count: int = 32, layers: int = 28) -> Iterator[dict]:
    keys, values = normal(layers, 256, PAGE, KV_HEADS, DIM), normal(layers, 256, PAGE, KV_HEADS, DIM)
    sources, targets = (torch.arange(first, first + count, device=CUDA) for first in (16, 128))
    traffic = 8 * count * layers * PAGE * KV_HEADS * DIM
    yield measured(f"copy {count} pages", f"{layers} layers", traffic, 4, lambda index: copy_pages(keys, values, sources, targets))

    def copy(index: int) -> None:
        for part in (keys, values):
            part.index_copy_(1, targets, part.index_select(1, sources))

    yield measured(f"copy {count} pages", "torch", traffic, 4, copy)


def every_timing() -> Iterator[dict]:
    store = allocate_store(17000, KV_HEADS, DIM)
    for load in loads():
        for heads in (FEW_HEADS, MANY_HEADS):
            yield from time_attention(store, heads, load)
    for load in loads()[1:]:
        yield from time_fused(store, FEW_HEADS, load)
    for tokens, heads in ((1, 16), (8, 16), (64, 16), (256, 16), (256, 32), (8192, 16)):
        yield from time_rope(store, tokens, heads)
    for tokens, size, inner in ((1, 1024, 3072), (64, 1024, 3072), (256, 1024, 3072), (1, 4096, 12288), (256, 4096, 12288)):
        yield from time_rows(tokens, size, inner)
    yield from time_rows(8192, 4096, 12288)
    yield from time_pages()


def timings() -> list[dict]:
    """Time all cases. Prints one line for each case, its fastest way first, and leaves all figures in $OUT where that is set."""
    torch.manual_seed(0)
    found = []
    for name, rows in groupby(every_timing(), key=lambda row: row["name"]):
        same = list(rows)
        found += same
        ranked = sorted(same, key=lambda row: row["us"])
        print(f"{name}: " + "; ".join(f"{row['config']} {row['us']:.1f}/{row['tb_per_s']:.2f}" for row in ranked), flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "check_attention.json").write_text(json.dumps(found), encoding="utf-8")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An attention kernel to compile; with `fused` also the fused one."""

    heads: int
    tiling: Tiling
    kv_heads: int = KV_HEADS
    dim: int = DIM
    listed: int = 0
    pdl: bool = False
    window: int = 0
    fused: bool = False


def jobs() -> list[Job]:
    """List what the checks and timings launch."""
    found = []
    for listed in (0, 1):
        for heads, kv_heads, dim in ((FEW_HEADS, 8, 128), (MANY_HEADS, 8, 128), (9, 3, 64), (8, 1, 64)):
            own = Job(heads=heads, tiling=TILING, kv_heads=kv_heads, dim=dim, listed=listed)
            found += [own, replace(own, pdl=True)]
        found += [Job(heads=heads, tiling=tiling, listed=listed) for heads in (FEW_HEADS, MANY_HEADS) for tiling in CONFIGS.values()]
        found += [Job(heads=FEW_HEADS, tiling=tiling, listed=listed) for tiling in CHECKED_TILINGS]
        found += [Job(heads=9, tiling=TILING, kv_heads=3, dim=64, listed=listed, pdl=pdl, fused=True) for pdl in (False, True)]
        for tiling in FUSED_CONFIGS.values():
            own = Job(heads=FEW_HEADS, tiling=tiling, listed=listed)
            found += [replace(own, pdl=True), replace(own, pdl=True, fused=True), replace(own, fused=True)]
        found.append(Job(heads=FEW_HEADS, tiling=TILING, listed=listed, window=1000))
    return list(dict.fromkeys(found))


def compile_share(index: int, count: int) -> None:
    """Launch every `count`-th kernel once on small rows, so that it is in Triton's cache on disk."""
    for job in jobs()[index::count]:
        (rows,) = place_rows(*allocate_store(20, job.kv_heads, job.dim), (64, 300), job.heads)
        attention = Attention(2, job.heads, job.kv_heads, job.dim, 300, job.tiling, job.listed)
        attention.prepare(rows, job.window)
        out = torch.empty_like(rows.q)
        try:
            if job.fused:
                angles = torch.ones(512, 2, 1, job.dim, dtype=torch.bfloat16, device=CUDA)
                weight = normal(job.heads + job.kv_heads, job.dim) if job.dim == 128 else None
                attention.run_fused(rows, normal(2, (job.heads + 2 * job.kv_heads) * job.dim), weight, angles, out, pdl=job.pdl)
            else:
                attention.run(rows, out, window=job.window, pdl=job.pdl)
        except triton.runtime.errors.OutOfResources:
            continue
    torch.cuda.synchronize()


def compile_all() -> None:
    """Compile the attention kernels in several processes. Blocks: until all have ended."""
    count = min(14, os.cpu_count() or 1)
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-m", "tests.gpu.check_attention", "--compile"]
    workers = [subprocess.Popen([*argv, str(index), str(count)], cwd=root) for index in range(count)]
    codes = [worker.wait() for worker in workers]
    assert not any(codes), f"compiling processes ended with {codes}"
