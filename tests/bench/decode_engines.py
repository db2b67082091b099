"""Engines of both decode paths over one model and one K/V memory, and what is warmed before they are timed.

A `Company` holds the engine that owns weights and pages; `pair` makes a resident and a rebuilt engine over them, with as many
sampling slots as rows. On a device both use the same buckets, kernels and captured prompts. `warm` compiles and captures all
that a case may come to, so that nothing of it falls into a timed run: every bucket and every number of sampled prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from areno import Engine, EngineConfig, Request, SamplingParams
from areno.commands import DecodeLaunch
from areno.config import RESERVED_PAGES
from areno.decode.deltas import DeltaPacker
from areno.decode.results import ResultRing
from areno.info import EngineInfo
from areno.parallel import TPGroup
from areno.request import MAX_STOP_IDS
from areno.sampling.slot_content import SlotContent
from areno.sampling.variant import Variant
from tests.bench.rank_runs import ranks_of

VARIANTS = ("resident", "rebuilt")
SCRIPTED = Variant(noise=True, slots=True, sums=True)
GREEDY = Variant(sums=True)
MAX_CAPTURED_PROMPT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two engines that differ in their decode path only. `own_bytes` is the device memory that each took for itself."""

    engines: dict[str, Engine]
    own_bytes: dict[str, int]


class Company:
    """Engines over one model. `shared_bytes` is the device memory of weights, pages and buffers that all of them use."""

    warm_runs = 0

    def __init__(
        self,
        model: str,
        *,
        load_format: str,
        device: str,
        max_rows: int,
        longest: int,
        prompts: tuple[int, ...],
        group: TPGroup | None = None,
    ) -> None:
        self._prompts, self.group = prompts, group or TPGroup.single()
        before = _allocated()
        config = EngineConfig(**_options(model, load_format, device, max_rows, longest), sampling_slots=0, graphs=False)
        self._owner = self._in_step(Engine(config, ranks=ranks_of(self.group)))
        self.info = self._owner.info
        self.on_card = self.info.device != "cpu"
        self._roots: dict[str, Engine] = {"eager": self._owner}
        self._warm_prompts(self._owner)
        self.shared_bytes = _allocated() - before

    def root(self, mode: str) -> Engine:
        """Return the engine of a mode whose captured prompts its pairs use."""
        if mode not in self._roots:
            self._roots[mode] = self._in_step(self._owner.twin(graphs=True))
            self._warm_prompts(self._roots[mode])
        return self._roots[mode]

    def pair(self, mode: str, batch: int, variant: Variant) -> Pair:
        """Return two warm engines of `batch` rows."""
        root, engines, own = self.root(mode), {}, {}
        for name in VARIANTS:
            before = _allocated()
            engines[name] = self._in_step(root.twin(decode_tables=name, max_rows=batch, sampling_slots=batch))
            warm(engines[name], variant)
            own[name] = _allocated() - before
        return Pair(engines=engines, own_bytes=own)

    def close(self) -> None:
        """Nothing to end: the engines have no ranks of their own."""

    def _in_step(self, engine: Engine) -> Engine:
        """Let results of an engine that is one of several ranks come alike on all of them."""
        engine._ring.lock_step = self.group.size > 1
        return engine

    def _warm_prompts(self, engine: Engine) -> None:
        """Run prompts of all sizes that refills come to, twice each: the second time they are captured, where that is done."""
        if not self.on_card:
            return
        ids = np.random.default_rng(0).integers(3, self.info.vocab_size, size=max(self._prompts))
        for count in range(1, min(engine.info.max_rows, -(-MAX_CAPTURED_PROMPT // min(self._prompts))) + 1):
            for length in (min(self._prompts), max(self._prompts)) * 2:
                for number in range(count):
                    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
                    engine.submit(Request(request_id=number, prompt_ids=ids[:length], sampling=params))
                while engine.has_work:
                    engine.step()
                engine.collect()


class OwnRanks:
    """Engines with ranks of their own, as anybody uses them: each has weights and pages to itself, and rows for every batch."""

    shared_bytes = 0
    # After these they have compiled and captured what a plan comes to: prompts are captured the second time.
    warm_runs = 3
    group = TPGroup.single()

    def __init__(self, model: str, *, load_format: str, device: str, max_rows: int, longest: int, tp: int) -> None:
        self._options = {**_options(model, load_format, device, max_rows, longest), "sampling_slots": max_rows, "tp": tp}
        self._engines: dict[str, dict[str, Engine]] = {}

    @property
    def info(self) -> EngineInfo:
        """What an engine says of itself."""
        return next(iter(self._of_mode("eager").values())).info

    def _of_mode(self, mode: str) -> dict[str, Engine]:
        if mode not in self._engines:
            self._engines[mode] = {
                name: Engine(EngineConfig(**self._options, decode_tables=name, graphs=mode == "graph")) for name in VARIANTS
            }
        return self._engines[mode]

    def pair(self, mode: str, batch: int, variant: Variant) -> Pair:
        """Return two engines of `batch` rows or more, which runs have yet to warm: what one rank did alone the others would wait for."""
        return Pair(engines=self._of_mode(mode), own_bytes={})

    def close(self) -> None:
        """End all ranks."""
        for engine in (one for of_mode in self._engines.values() for one in of_mode.values()):
            engine.close()


def warm(engine: Engine, variant: Variant) -> None:
    """Compile the sampler for every number of prompts, and compile or capture every bucket's step. Only before the first request."""
    path: Any = engine._path
    if engine.info.device == "cpu":
        return
    buckets = engine._resolved.buckets
    with torch.inference_mode():
        for bucket in reversed(buckets):
            launch = _launch(bucket, 1, variant)
            kind = path.steps.kind_of(launch)
            for _ in range(2):
                path.steps.run(kind, path.memory_of(kind))
        kind = path.steps.kind_of(_launch(buckets[-1], 1, variant))
        logits = torch.zeros_like(path.steps._logits[:1])
        numbers = torch.arange(buckets[-1], dtype=torch.int32, device=engine.info.device)
        for count in range(1, engine.info.max_rows + 1):
            rows = numbers[:count], torch.zeros_like(numbers[:count])
            path.steps.sample_prefill(variant, logits, rows, path.memory_of(kind))
    torch.cuda.synchronize()
    path.steps.counter.zero_()


def step_name(engine: Engine, launches: list[DecodeLaunch]) -> str:
    """Return the kind of step that most of these launches ran, and whether it was a captured one."""
    path: Any = engine._path
    if not launches:
        return "none"
    parts = [(launch.bucket, launch.variant) for launch in launches]
    bucket, variant = max(set(parts), key=parts.count)
    needs = "+".join(name for name in Variant.__slots__ if getattr(variant, name)) or "greedy"
    if engine.info.device == "cpu":
        return f"torch, {bucket} rows, {needs}"
    kind = path.steps.kind_of(next(launch for launch in launches if launch.bucket == bucket and launch.variant == variant))
    how = "graph" if path.steps.graph_of(kind) is not None else "single launches"
    return f"{how}, {bucket} rows up to {kind.span} tokens, {needs}"


def graph_ms(engine: Engine, batch: int, length: int, variant: Variant, *, replays: int = 8, repeats: int = 5) -> float:
    """Return the time of the captured step alone, replayed back to back over rows near a length. The engine rebuilds and is idle.

    Mutates: pages of the pool, which nobody holds.
    """
    path: Any = engine._path
    page_size = engine.info.page_size
    first = length - replays * repeats // 2
    per_row = -(-(length + replays * repeats) // page_size)
    launch = _launch(batch, length + replays * repeats, variant)
    kind = path.steps.kind_of(launch)
    ring = ResultRing(slots=2, lanes=engine._resolved.table_rows, run_ahead=0)
    _, records = ring.take(seats=launch.seats, generations=launch.generations, version=0)
    packer = DeltaPacker()
    for row in range(batch):
        pages = RESERVED_PAGES + engine._resolved.canary_pages + row * per_row + np.arange(per_row)
        fields = {"row": row, "generation": 1, "last_token": 5, "length": first, "remaining": 1 << 20, "top_p": 1.0, "seed": row}
        fields |= {"temperature": float(variant.noise), "sampling_slot": row if variant.slots else -1, "recurrent_slot": -1}
        packer.set_row({**fields, "stop_ids": np.full(MAX_STOP_IDS, -1, np.int32)}, pages, _forced(64) if variant.slots else None)
    with torch.inference_mode():
        _apply(path, packer)
        for _ in range(2):
            path.decode(launch, records)
        graph = path.steps.graph_of(kind)
        assert graph is not None, f"{kind} is not captured"
        walls = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            walls.append(start.elapsed_time(end) / replays)
        for row in range(batch):
            packer.kill(row, 1)
        _apply(path, packer)
    return float(np.median(walls))


def _apply(path: Any, packer: DeltaPacker) -> None:
    for slot in packer.take():
        path.apply(slot)


def _launch(bucket: int, longest: int, variant: Variant) -> DecodeLaunch:
    lanes = np.zeros(bucket, dtype=np.int64)
    return DecodeLaunch(bucket=bucket, longest=longest, seats=lanes, generations=lanes.astype(np.int32), variant=variant)


def _forced(count: int) -> SlotContent:
    nothing = np.zeros(0, dtype=np.int64)
    return SlotContent(
        forced_ids=np.arange(5, 5 + count),
        bias_ids=nothing,
        bias_values=nothing.astype(np.float32),
        repetition=1.0,
        presence=0.0,
        frequency=0.0,
        prompt_ids=nothing,
        output_ids=nothing,
    )


def _options(model: str, load_format: str, device: str, max_rows: int, longest: int) -> dict[str, Any]:
    """Return what engines of either kind are made with."""
    pages = _pages(device, max_rows, longest)
    sizes = {"max_rows": max_rows, "max_model_len": longest, "num_pages": pages}
    return {"model": model, "load_format": load_format, "device": device, "seed": 0, "prefix_cache": False, **sizes}


def _pages(device: str, max_rows: int, longest: int) -> int:
    """Return how many pages all rows may fill, one more each for what is handed out ahead."""
    size = 16 if device == "cpu" or not torch.cuda.is_available() else 64
    return max_rows * (-(-longest // size) + 1) + 2


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
