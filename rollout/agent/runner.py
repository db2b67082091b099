"""Many episodes at once: bounded concurrency, a time-out for each phase, and every ending accounted for.

`run_episode` turns whatever happens to one episode into an `EpisodeResult` (`episode_run.py`). What the policy did badly is scored;
what broke around it has no reward, never 0. `run_episodes` runs many over a fixed number of workers. Invariant: as many results as
tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.agent.chat import ChatFormat
from rollout.agent.episode import PolicyClient
from rollout.agent.episode_run import EpisodeRun, check_options
from rollout.agent.errors import InvalidEpisode
from rollout.agent.limits import EpisodeLimits
from rollout.agent.option_values import check_count, check_kind
from rollout.agent.outcomes import EpisodeResult, EpisodeTask, PhaseTimeouts, calls_of
from rollout.agent.standing import EpisodeStatus
from rollout.agent.turn import TurnSampling
from rollout.option_names import checks_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is; `total` is None while tasks are still being drawn from an iterator."""

    finished: int
    running: int
    total: int | None
    failed: int
    sampled_tokens: int
    seconds: float


@checks_names(InvalidEpisode)
async def run_episode(
    client: PolicyClient,
    task: EpisodeTask,
    *,
    format: ChatFormat | None = None,
    info: Any = None,
    sampling: TurnSampling | None = None,
    limits: EpisodeLimits | None = None,
    timeouts: PhaseTimeouts | None = None,
) -> EpisodeResult:
    """Run one episode to its end, whatever that is. Pass `format` and `info` to fetch them once for many.

    Raises: InvalidEpisode, what the client raises while `format` or `info` is fetched, TokenizerMismatch; afterwards nothing but
    cancellation.
    """
    check_options(client, format=format, sampling=sampling, limits=limits, timeouts=timeouts)
    check_kind("task", task, EpisodeTask)
    if info is None:
        info = await client.info()
    if format is None:
        format = await ChatFormat.of(client)
    format.check_served(info.tokenizer_digest)
    run = EpisodeRun(client, task, format, info, sampling or TurnSampling(), limits or EpisodeLimits(), timeouts or PhaseTimeouts())
    return await run.run()


@checks_names(InvalidEpisode)
async def run_episodes(
    client: PolicyClient,
    tasks: Iterable[EpisodeTask],
    *,
    concurrency: int = 64,
    format: ChatFormat | None = None,
    info: Any = None,
    sampling: TurnSampling | None = None,
    limits: EpisodeLimits | None = None,
    timeouts: PhaseTimeouts | None = None,
    on_result: Callable[[EpisodeResult], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[EpisodeResult]:
    """Run tasks with at most `concurrency` episodes at once and return their results in the order of the tasks.

    Tasks are drawn when a worker is free. The callbacks run in the event loop after each episode; an error in one ends the run.
    Cancelling the caller cancels every running request. Warns with `NoToolCalls` where tools were on offer and no call could be read.
    Raises: as `run_episode`.
    """
    check_options(client, format=format, sampling=sampling, limits=limits, timeouts=timeouts)
    check_count("concurrency", concurrency, 1)
    for number, task in enumerate(tasks if isinstance(tasks, Sequence) else ()):
        check_kind(f"tasks[{number}]", task, EpisodeTask)
    if info is None:
        info = await client.info()
    if format is None:
        format = await ChatFormat.of(client)
    format.check_served(info.tokenizer_digest)
    total = len(tasks) if isinstance(tasks, Sequence) else None
    waiting = enumerate(tasks)
    results: dict[int, EpisodeResult] = {}
    counts: Counter[str] = Counter()
    started = time.perf_counter()

    async def work() -> None:
        for number, task in waiting:
            counts["running"] += 1
            result = await run_episode(client, task, format=format, info=info, sampling=sampling, limits=limits, timeouts=timeouts)
            results[number] = result
            counts["running"] -= 1
            counts["failed"] += result.status is EpisodeStatus.FAILED
            counts["tokens"] += sum(row.num_sampled for row in result.rows)
            if on_result is not None:
                on_result(result)
            if on_progress is not None:
                on_progress(
                    Progress(
                        finished=len(results),
                        running=counts["running"],
                        total=total,
                        failed=counts["failed"],
                        sampled_tokens=counts["tokens"],
                        seconds=time.perf_counter() - started,
                    )
                )

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency if total is None else min(concurrency, total)):
            workers.create_task(work())
    calls_of(results.values()).warn_if_none_parsed()
    return [results[number] for number in sorted(results)]
