"""Runs plans on engines for the decode benchmarks: what was said, how long it took, and how two runs differ.

`run_plan` drives one engine through a plan, keeping references to what came and nothing else while the clock runs. In lock step
(`lock_step`) results are read a fixed number of launches late whatever the device does, so two decode paths see the same news
at the same step and must give the same bits.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from areno import Engine, Finished, StepOutput
from areno.commands import Command, DecodeLaunch
from areno.executor import Executor
from tests.bench.decode_scenarios import Plan

CONTRACT = {"float32": (1e-4, 1e-4), "bfloat16": (0.05, 0.01)}
"""Allowed distances of log-probabilities between runs that saw their news at other steps: largest and mean, by dtype."""


@dataclass(slots=True)
class Journal:
    """All outputs of one run, in order; nothing is copied while it runs."""

    outputs: list[StepOutput] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)

    def add(self, output: StepOutput) -> None:
        """Take one step's output."""
        if output.token_ids.size:
            self.outputs.append(output)
        for end in output.finished:
            self.finished[end.request_id] = end

    def by_request(self) -> dict[int, np.ndarray]:
        """Return what each request got. Shapes: float64 [n, 4], ids and three log-probabilities (ids are exact in it)."""
        names = ("token_ids", "logprobs", "raw_logprobs", "behaviour_logprobs")
        if not self.outputs:
            return {}
        numbers = np.concatenate([output.request_ids for output in self.outputs])
        columns = np.stack(
            [np.concatenate([getattr(output, name) for output in self.outputs]).astype(np.float64) for name in names], axis=1
        )
        order = np.argsort(numbers, kind="stable")
        found, starts = np.unique(numbers[order], return_index=True)
        return dict(zip(found.tolist(), np.split(columns[order], starts[1:])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a plan. Shapes: `steps_s` [steps]; `host_s` is the time of the steps outside launches and waits for the device."""

    journal: Journal
    wall_s: float
    steps_s: np.ndarray
    tokens: int
    host_s: float
    launch_s: float
    waited_s: float
    peak_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Delivered tokens by the wall, prefill included."""
        return self.tokens / self.wall_s


def run_plan(engine: Engine, plan: Plan, *, rounds: int | None = None) -> Run:
    """Run a plan from start to end, as often as it says, without garbage collections; the journal is of the last round."""
    on_card = engine.info.device != "cpu"
    rounds = plan.rounds if rounds is None else rounds
    steps_s: list[float] = []
    wall_s, tokens, held = 0.0, 0, 0
    gc.disable()
    try:
        if on_card:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        before, waited_s = engine.stats(), engine._ring.waited_s
        for _ in range(rounds):
            journal = Journal()
            started = time.perf_counter()
            tokens += _round(engine, plan, journal, steps_s)
            wall_s += time.perf_counter() - started
        launch_s, waited_s = engine.stats()["launch_s"] - before["launch_s"], engine._ring.waited_s - waited_s
        _drop(engine, journal)
        peak = torch.cuda.max_memory_allocated() - held if on_card else 0
    finally:
        gc.enable()
    return Run(
        journal=journal,
        wall_s=wall_s,
        steps_s=np.array(steps_s),
        tokens=tokens,
        host_s=sum(steps_s) - launch_s - waited_s,
        launch_s=launch_s,
        waited_s=waited_s,
        peak_bytes=peak,
    )


def _round(engine: Engine, plan: Plan, journal: Journal, steps_s: list[float]) -> int:
    """Follow a plan until all has ended, or until enough tokens came; return their number."""
    submitted, tokens, clock = plan.at_once, 0, time.perf_counter
    for request in plan.requests[:submitted]:
        engine.submit(request)
    counts = np.zeros(len(plan.requests), dtype=np.int64)
    due_at = np.full(len(plan.requests), np.iinfo(np.int64).max)
    due_at[list(plan.cancel_after)] = list(plan.cancel_after.values())
    while engine.has_work:
        started = clock()
        output = engine.step()
        steps_s.append(clock() - started)
        journal.add(output)
        tokens += output.token_ids.size
        if plan.target_tokens is not None and tokens >= plan.target_tokens:
            break
        for request in plan.requests[submitted : submitted + len(output.finished)]:
            engine.submit(request)
        submitted = min(submitted + len(output.finished), len(plan.requests))
        if plan.cancel_after:
            np.add.at(counts, output.request_ids, 1)
            for number in np.flatnonzero(counts >= due_at).tolist():
                due_at[number] = np.iinfo(np.int64).max
                engine.cancel(number)
    return tokens


def _drop(engine: Engine, journal: Journal) -> None:
    """Cancel what is left and read all launches, so that the next run starts from nothing."""
    for number in list(engine._scheduler._live):
        engine.cancel(number)
    while engine.has_work:
        journal.add(engine.step())
    engine.collect()


class _RecordingExecutor:
    """Stands before an executor and keeps the decode launches that pass."""

    def __init__(self, executor: Executor, launches: list[DecodeLaunch]) -> None:
        self._executor, self._launches = executor, launches

    def execute(self, command: Command) -> None:
        if isinstance(command, DecodeLaunch):
            self._launches.append(command)
        self._executor.execute(command)

    @property
    def launch_s(self) -> float:
        return self._executor.launch_s

    @property
    def version(self) -> int:
        return self._executor.version


@contextmanager
def recorded(engine: Engine) -> Iterator[list[DecodeLaunch]]:
    """Collect the decode launches that an engine makes."""
    launches: list[DecodeLaunch] = []
    executor = engine._executor
    engine._executor = _RecordingExecutor(executor, launches)  # type: ignore[assignment]
    try:
        yield launches
    finally:
        engine._executor = executor


@contextmanager
def lock_step(engine: Engine, run_ahead: int) -> Iterator[None]:
    """Let an idle engine's results come exactly `run_ahead` launches late, on a device too."""
    ring = engine._ring
    usual = ring.run_ahead, ring.lock_step
    ring.run_ahead, ring.lock_step = run_ahead, True
    try:
        yield
    finally:
        ring.run_ahead, ring.lock_step = usual


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How two runs of one plan differ: numbers of requests, of steps, and distances of log-probabilities in nats."""

    ids: int
    reasons: int
    steps: int
    largest: float
    mean: float

    @property
    def is_zero(self) -> bool:
        """Whether nothing differs."""
        return not (self.ids or self.reasons or self.steps or self.largest)


def compare(first: Run, second: Run, plan: Plan, *, lock_step: bool) -> Gap:
    """Return how two runs of a plan differ.

    In lock step all must be equal. Otherwise a request that was cancelled may have got more in one of them, the number of steps
    does not count, and behind an id that differs log-probabilities say nothing.
    """
    told, other = first.journal.by_request(), second.journal.by_request()
    ends, other_ends = ({number: end.reason for number, end in run.journal.finished.items()} for run in (first, second))
    differing, reasons, gaps = 0, 0, [np.zeros(1)]
    for number in sorted(set(ends) | set(other_ends)):
        cut = not lock_step and any(reason is None or reason.kind == "cancelled" for reason in (ends.get(number), other_ends.get(number)))
        reasons += not (cut and plan.target_tokens is not None) and ends.get(number) != other_ends.get(number)
        mine, theirs = told.get(number, np.zeros((0, 4))), other.get(number, np.zeros((0, 4)))
        common = min(len(mine), len(theirs))
        same = mine[:common, 0] == theirs[:common, 0]
        differing += not same.all() or (len(mine) != len(theirs) and not cut)
        agreed = common if same.all() else int(same.argmin())
        gaps.append(_distances(mine[:agreed, 1:], theirs[:agreed, 1:]))
    gap = np.concatenate(gaps)
    steps = abs(first.steps_s.size - second.steps_s.size) if lock_step else 0
    return Gap(ids=differing, reasons=reasons, steps=steps, largest=float(gap.max()), mean=float(gap.sum() / max(gap.size - 1, 1)))


def _distances(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return absolute distances; NaN against NaN is none, against a number infinite."""
    gone = np.isnan(mine), np.isnan(theirs)
    distance = np.where(gone[0] & gone[1], 0.0, np.abs(mine - theirs))
    return np.where(gone[0] ^ gone[1], np.inf, distance).reshape(-1)
