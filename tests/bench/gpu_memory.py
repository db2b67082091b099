"""What an engine takes on a CUDA device beside weights and KV, and whether that grows with requests; `gpu_checks` calls it.

Tables, rings and scratch are the sizes of their tensors; graphs are what free memory falls by while they are captured, their
kernels being loaded before. The soak keeps to steps that are captured at the start, drains in every wave so that each size of a
step comes early, and compares idle moments alone.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from areno import Engine, Request, SamplingParams
from areno.decode.graphs import GraphPath
from areno.decode.steps import StepKind
from areno.prefill_graphs import SIZES
from areno.sampling.variant import Variant

VARIANT = Variant(noise=True, sums=True)
SHARE_LIMIT = 0.01
WAVE = 500
CANCELLED = 0.05
FREE_LIMIT_MB = 8.0
RSS_LIMIT_MB_PER_1000 = 1.0


def tensor_bytes(*parts: object) -> dict[str, int]:
    """Return how many bytes the tensors inside these objects hold, by kind of device; shared storage counts once."""
    seen: set[int] = set()
    storages: set[int] = set()
    sizes: dict[str, int] = {}

    def walk(part: object) -> None:
        if id(part) in seen:
            return
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in storages:
                storages.add(storage.data_ptr())
                sizes[part.device.type] = sizes.get(part.device.type, 0) + storage.nbytes()
        elif isinstance(part, Mapping):
            for one in part.values():
                walk(one)
        elif isinstance(part, list | tuple):
            for one in part:
                walk(one)
        elif type(part).__module__.startswith("areno."):
            names = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
            for name in [*names, *getattr(part, "__dict__", ())]:
                walk(getattr(part, name, None))

    for part in parts:
        walk(part)
    return sizes


def _free_bytes() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def drain(engine: Engine, requests: Sequence[Request], cancels: Mapping[int, int] | None = None) -> None:
    """Run requests to their ends; `cancels` names the step before which a request is cancelled."""
    for request in requests:
        engine.submit(request)
    due = sorted((step, request_id) for request_id, step in (cancels or {}).items())
    step = 0
    while engine.has_work:
        while due and due[0][0] <= step:
            engine.cancel(due.pop(0)[1])
        engine.step()
        step += 1


def run_prompts(engine: Engine) -> None:
    """Run one prompt of each size that prefill pads to, one after the other."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
    for size in SIZES:
        prompt = rng.integers(3, engine.info.num_valid_ids, size=size)
        # A salt of its own: no prefix is known, so all of it is computed.
        drain(engine, [Request(request_id=size, prompt_ids=prompt, sampling=sampling, cache_salt=str(rng.integers(2**62)))])


def measure_footprint(engine: Engine, model: str) -> dict[str, Any]:
    """Capture steps of every bucket and prompts of every size; return bytes by kind. `engine` was made with graphs off."""
    path, proof, prompts = engine._path, engine._updates._proof._path, engine._forward._prompts
    assert isinstance(path, GraphPath) and isinstance(proof, GraphPath) and prompts is not None
    runner, fused = path.steps, path.steps._fused
    weights, pages = tensor_bytes(engine._table), tensor_bytes(engine._store)
    buckets = engine._resolved.buckets
    with torch.inference_mode():
        for bucket in buckets:
            kind = StepKind(bucket=bucket, variant=VARIANT, span=fused.span_of(1))
            runner._launch(kind, path.memory_of(kind))
    # Steps outside the engine's log: the device counts them, the host does not.
    runner.counter.fill_(engine._ring.last_launch)
    run_prompts(engine)
    before = _free_bytes()
    runner._graphs_on = prompts._graphs_on = True
    runner._pool = torch.cuda.graph_pool_handle()
    path.warm_up(buckets, VARIANT)
    runner.counter.fill_(engine._ring.last_launch)
    after_steps = _free_bytes()
    run_prompts(engine)
    after_prompts = _free_bytes()
    captured = runner.num_graphs, len(prompts._graphs)
    assert captured == (len(buckets), len(SIZES)), f"{captured} graphs of {len(buckets)} buckets and {len(SIZES)} sizes: memory ran short"
    tables = tensor_bytes(path.tables, proof.tables)
    rings = tensor_bytes(engine._ring, engine._updates._proof._ring, path._deltas, proof._deltas)
    scratch = tensor_bytes(fused._workspace, fused._split, fused._work, fused._scratch, prompts._buffer)
    steps = tensor_bytes(*((one._lanes, one._x, one._logits, one._workspace) for one in (runner, proof.steps)))
    total = torch.cuda.mem_get_info()[1]
    taken = tables["cuda"] + rings.get("cuda", 0) + (before - after_prompts)
    return {
        "check": "footprint",
        "model": model,
        "rows": buckets[-1],
        "graphs": sum(captured),
        "tables_bytes": tables["cuda"],
        "rings_bytes": rings.get("cuda", 0),
        "rings_pinned_bytes": rings.get("cpu", 0),
        "step_graphs_bytes": before - after_steps,
        "prompt_graphs_bytes": after_steps - after_prompts,
        "scratch_bytes": scratch.get("cuda", 0) + steps.get("cuda", 0),
        "weights_bytes": weights["cuda"],
        "pages_bytes": pages["cuda"],
        "card_bytes": total,
        "share_of_card": taken / total,
        "share_with_scratch": (taken + scratch.get("cuda", 0) + steps.get("cuda", 0)) / total,
        "limit": SHARE_LIMIT,
        "ok": taken / total < SHARE_LIMIT,
    }


def _memory_mb() -> dict[str, float]:
    torch.cuda.synchronize()
    gc.collect()
    # What the allocator keeps for later is no one's: freed, so that `used_mb` shows what is lost outside it.
    torch.cuda.empty_cache()
    return {
        "used_mb": (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 2**20,
        "allocated_mb": torch.cuda.memory_allocated() / 2**20,
        "rss_mb": psutil.Process().memory_info().rss / 2**20,
    }


def _wave(engine: Engine, rng: np.random.Generator, first: int) -> None:
    requests = []
    for number in range(first, first + WAVE):
        prompt = rng.integers(3, engine.info.num_valid_ids, size=int(rng.integers(4, 60)))
        sampling = SamplingParams(max_new_tokens=int(rng.integers(2, 24)), seed=number, temperature=float(rng.integers(0, 2)))
        requests.append(Request(request_id=number, prompt_ids=prompt, sampling=sampling))
    steps = rng.integers(0, 25, size=WAVE)
    drain(engine, requests, {first + place: int(steps[place]) for place in np.flatnonzero(rng.random(WAVE) < CANCELLED)})


def measure_soak(engine: Engine, model: str, *, requests: int, settle: int) -> dict[str, Any]:
    """Run waves of short requests; return by how much memory grew after the first `settle` of them."""
    rng = np.random.default_rng(0)
    for _ in range(2):
        run_prompts(engine)
    idle: list[dict[str, float]] = []
    for first in range(0, requests, WAVE):
        _wave(engine, rng, first)
        engine.check_integrity()
        if first + WAVE >= settle:
            idle.append(_memory_mb())
    growth = {f"{name.removesuffix('_mb')}_growth_mb": idle[-1][name] - idle[0][name] for name in idle[0]}
    per_1000 = growth["rss_growth_mb"] / max((requests - settle) / 1000, 1e-9)
    stats = engine.stats()
    leaked = engine.info.num_pages - stats["free_pages"] - stats["cached_pages"] + stats["rows_used"]
    return {
        "check": "soak",
        "model": model,
        "requests": requests,
        "settle": settle,
        "cancelled": stats["cancelled"],
        **idle[-1],
        **growth,
        "rss_mb_per_1000": per_1000,
        "leaked": leaked,
        "idle_rss_mb": [round(moment["rss_mb"], 1) for moment in idle],
        "limit": f"allocated 0, used {FREE_LIMIT_MB:g} MB, rss {RSS_LIMIT_MB_PER_1000:g} MB per 1,000",
        "ok": growth["allocated_growth_mb"] <= 0
        and growth["used_growth_mb"] <= FREE_LIMIT_MB
        and per_1000 <= RSS_LIMIT_MB_PER_1000
        and not leaked,
    }
