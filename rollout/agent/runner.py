"""Many episodes at once: bounded concurrency, a time-out for each phase, and every ending accounted for.

    task -> reset -> act -> (tools | step) -> act -> ... -> score -> EpisodeResult
            env      policy  tool    env                    env

`run_episode` turns whatever happens to one episode into an `EpisodeResult` and attributes a failure once, here; only the
cancellation of its own task passes through. What the policy did badly is scored; what broke around it has no reward, never 0.
`run_episodes` runs many over a fixed number of workers. Invariant: as many results as tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rollout.agent.chat import ChatFormat
from rollout.agent.deadline import call_within
from rollout.agent.environment import ENVIRONMENTS, Environment, Start, Step
from rollout.agent.episode import Episode, EpisodeStatus, PolicyClient
from rollout.agent.errors import InfrastructureFailure, InvalidEnvironment, InvalidEpisode
from rollout.agent.limits import EpisodeLimits, Limit
from rollout.agent.record import EpisodeRow
from rollout.agent.tools import CallCounts
from rollout.agent.turn import Turn, TurnSampling
from rollout.seeds import derive_seed

# Shorter waits are over before anything would have been evicted.
LEAST_WAIT_S = 0.05
# What a released episode's turn may take to give back what it sampled.
RELEASE_WAIT_S = 5.0


class FailureKind(enum.StrEnum):
    """Who is answerable for an ending. Policy failures and limits are scored; the others have no reward."""

    ENVIRONMENT = "environment"
    TOOL = "tool"
    POLICY = "policy"
    LIMIT = "limit"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an episode did not end as done: whose doing, in which phase, and the error's code (None for a stranger's) and text.

    `passing`: the infrastructure's, and another attempt may succeed; a request that was refused for its values stays refused.
    """

    kind: FailureKind
    phase: str
    text: str
    code: str | None = None
    passing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    """One episode to run. Members of a group share `seed` and begin equally; each draws its own tokens.

    `attempt` counts earlier tries of this member; a new attempt draws other tokens. `kv_policy` and `max_kv_lag` say what becomes
    of its KV when weights change (as in `Episode`). `info` is the caller's own.
    """

    make_environment: Callable[[], Environment]
    seed: int = 0
    group: Hashable = 0
    member: int = 0
    attempt: int = 0
    kv_policy: str = "keep"
    max_kv_lag: int = 4
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def episode_seed(self) -> int:
        """Return the seed of this member's draws."""
        return derive_seed(self.seed, self.member, self.attempt)


def group_tasks(make_environment: Callable[[], Environment], *, seed: int, members: int, group: Hashable = 0) -> list[EpisodeTask]:
    """Return the tasks of one group: equal beginnings, draws of their own."""
    return [EpisodeTask(make_environment=make_environment, seed=seed, group=group, member=member) for member in range(members)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimeouts:
    """The most that one call in each phase may take. Units: seconds. Tools carry their own."""

    reset_s: float = 60.0
    act_s: float = 600.0
    step_s: float = 60.0
    score_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("reset_s", "act_s", "step_s", "score_s"):
            if not getattr(self, name) > 0:
                raise InvalidEpisode(
                    f"{name}={getattr(self, name)}", field=name, value=getattr(self, name), limit="above 0", remedy=f"set {name} in seconds"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeResult:
    """How one episode went. `reward` is None unless the environment scored it; `rows` hold what was sampled in any case.

    Units: `seconds` by phase. `good_calls` and `bad_calls` count tool calls, `call_turns` the turns that held any,
    `turns_without_calls` those that held none although tools were on offer.
    """

    task: EpisodeTask
    status: EpisodeStatus
    limit: Limit | None = None
    failure: Failure | None = None
    reward: float | None = None
    rows: tuple[EpisodeRow, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    num_turns: int = 0
    good_calls: int = 0
    bad_calls: int = 0
    call_turns: int = 0
    turns_without_calls: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is; `total` is None while tasks are still being drawn from an iterator."""

    finished: int
    running: int
    total: int | None
    failed: int
    sampled_tokens: int
    seconds: float


class _Broken(Exception):
    def __init__(self, failure: Failure):
        self.failure = failure


class _Released(Exception):
    """The episode was released: it ends as cancelled."""


class EpisodeRun:
    """The state of one running episode: its environment, its episode once it began, and what was counted.

    `released` says that somebody let the episode go before its end (`release`); it then ends as cancelled, with what was sampled.
    """

    __slots__ = (
        "_interrupting",
        "_task",
        "client",
        "counts",
        "environment",
        "episode",
        "format",
        "info",
        "limits",
        "phase_name",
        "released",
        "sampling",
        "seconds",
        "task",
        "timeouts",
    )

    def __init__(
        self,
        client: PolicyClient,
        task: EpisodeTask,
        format: ChatFormat,
        info: Any,
        sampling: TurnSampling,
        limits: EpisodeLimits,
        timeouts: PhaseTimeouts,
    ):
        self.client, self.task, self.format, self.info = client, task, format, info
        self.sampling, self.limits, self.timeouts = sampling, limits, timeouts
        self.environment: Any = None
        self.episode: Episode | None = None
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.phase_name: str | None = None
        self.released = self._interrupting = False
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> EpisodeResult:
        """Play the episode to its end, close the environment and return the result. Raises: nothing but cancellation."""
        self._task = asyncio.current_task()
        reward, failure = None, None
        try:
            if not self.released:
                reward = await self.play()
        except _Released:
            reward = None
        except _Broken as broken:
            failure = broken.failure
        finally:
            await self.close()
        return self.result(reward, failure)

    async def release(self) -> None:
        """Let the episode end as cancelled now, in whatever phase it is; idempotent, and too late once it was scored.

        A running turn gives back what it had sampled, any other phase is interrupted.
        """
        if self.released or self.phase_name == "close":
            return
        self.released = True
        if self.phase_name == "act" and self.episode is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.episode.cancel(), RELEASE_WAIT_S)
        else:
            self.interrupt()

    def interrupt(self) -> None:
        """Break off the phase of a released episode."""
        if self._task is not None and self.phase_name not in (None, "close") and not self._interrupting:
            self._interrupting = True
            self._task.cancel()

    async def phase(self, kind: FailureKind, name: str, timeout_s: float | None, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a phase returns; its failure becomes `_Broken` with whose it is."""
        started, self.phase_name = time.perf_counter(), name
        try:
            return await call_within(timeout_s, f"{kind} {name}", function, *arguments)
        except asyncio.CancelledError:
            if not self._interrupting or self._task is None or self._task.uncancel():
                raise
            self._interrupting = False
            raise _Released from None
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:500]}"
            # What failed in the engine says more than that a request failed.
            code = getattr(error, "reason_code", None) or getattr(error, "code", None)
            kind = FailureKind.INFRASTRUCTURE if isinstance(error, InfrastructureFailure) else kind
            passing = kind is FailureKind.INFRASTRUCTURE and not isinstance(error, ValueError)
            raise _Broken(Failure(kind=kind, phase=name, text=text, code=code, passing=passing)) from error
        finally:
            self.seconds[name] += time.perf_counter() - started

    async def play(self) -> float | None:
        """Run the episode to its end and return its reward, None if it was cancelled."""
        env, limit = FailureKind.ENVIRONMENT, self.timeouts
        environment = await self.phase(env, "make", limit.reset_s, self.task.make_environment)
        await self.phase(env, "make", limit.reset_s, _inline(ENVIRONMENTS.claim), environment)
        self.environment = environment
        start = await self.phase(env, "reset", limit.reset_s, self.environment.reset, self.task.seed)
        self.episode = episode = await self.phase(env, "reset", limit.reset_s, self.begin, start)
        if hasattr(environment, "attach"):
            await self.phase(env, "reset", limit.reset_s, environment.attach, episode)
        while episode.running:
            turn = await self.phase(FailureKind.INFRASTRUCTURE, "act", limit.act_s, episode.act)
            self.count(turn)
            if self.released:
                raise _Released
            if not episode.running:
                break
            if turn.calls_tools:
                results = await self.answered(FailureKind.TOOL, "tools", None, episode.run_tools, turn)
                await self.phase(FailureKind.TOOL, "observe", limit.step_s, _inline(episode.observe), results)
                continue
            step = await self.answered(env, "step", limit.step_s, self.environment.step, turn)
            await self.phase(env, "step", limit.step_s, _inline(self.advance), step)
        if episode.status is EpisodeStatus.CANCELLED:
            return None
        if episode.status is EpisodeStatus.FAILED:
            raise _Broken(Failure(kind=FailureKind.INFRASTRUCTURE, phase="act", text=episode.reason or "failed", passing=True))
        score = await self.phase(env, "score", limit.score_s, self.environment.score, episode)
        return await self.phase(env, "score", limit.score_s, _inline(_checked_reward), score)

    async def begin(self, start: Any) -> Episode:
        """Return the episode that an environment's start asks for."""
        begun = start if isinstance(start, Start) else Start(messages=_checked_messages("reset", start))
        return Episode(
            self.client,
            info=self.info,
            format=self.format,
            messages=_checked_messages("reset", begun.messages),
            tools=begun.tools,
            seed=self.task.episode_seed,
            sampling=self.sampling,
            limits=self.limits,
            kv_policy=self.task.kv_policy,
            max_kv_lag=self.task.max_kv_lag,
        )

    def advance(self, step: Any) -> None:
        """Give the episode what followed its turn."""
        assert self.episode is not None, "an episode advances after it began"
        if not isinstance(step, Step):
            raise _invalid("step", step, "a Step")
        if step.done:
            self.episode.finish()
        elif step.retry:
            self.episode.retry()
        elif step.compact is not None:
            self.episode.compact(_checked_messages("step", step.compact, also=Turn))
        else:
            self.episode.observe(list(_checked_messages("step", step.messages)))

    async def answered(self, kind: FailureKind, name: str, timeout_s: float | None, function: Callable[..., Any], turn: Turn) -> Any:
        """Return what answers a turn; the service is told how long that will take, where it has shown to take its time."""
        expect_s = ENVIRONMENTS.usual_wait_s(self.environment, name)
        if expect_s >= LEAST_WAIT_S and self.episode is not None:
            self.episode.tool_wait(expect_s)
        started = time.perf_counter()
        answer = await self.phase(kind, name, timeout_s, function, turn)
        ENVIRONMENTS.waited(self.environment, name, time.perf_counter() - started)
        return answer

    def count(self, turn: Turn) -> None:
        """Count the turn's tool calls."""
        self.counts.update(good=len(turn.tool_calls), bad=len(turn.bad_calls), turns=int(turn.calls_tools))

    def result(self, reward: float | None, failure: Failure | None) -> EpisodeResult:
        """Return the episode's result as it stands."""
        episode = self.episode
        if self.released and reward is None:
            return self.as_cancelled()
        if episode is not None and failure is None:
            failure = _soft_failure(episode)
        elif episode is not None and failure is not None:
            episode.fail(failure.text)
        broken = failure is not None and failure.kind not in (FailureKind.POLICY, FailureKind.LIMIT)
        status = EpisodeStatus.FAILED if broken or episode is None else episode.status
        return self._result(status, episode.limit if episode else None, reward, failure)

    def as_cancelled(self) -> EpisodeResult:
        """Return the result of an episode that was released."""
        return self._result(EpisodeStatus.CANCELLED, None, None, None)

    def _result(self, status: EpisodeStatus, limit: Limit | None, reward: float | None, failure: Failure | None) -> EpisodeResult:
        episode = self.episode
        return EpisodeResult(
            task=self.task,
            status=status,
            limit=limit,
            failure=failure,
            reward=reward,
            rows=tuple(episode.rows()) if episode else (),
            messages=tuple(episode.messages) if episode else (),
            num_turns=episode.num_turns if episode else 0,
            good_calls=self.counts["good"],
            bad_calls=self.counts["bad"],
            call_turns=self.counts["turns"],
            turns_without_calls=episode.call_counts.absent if episode else 0,
            seconds=dict(self.seconds),
        )

    async def close(self) -> None:
        """Give the environment its last call; a failure in it changes nothing that was already decided."""
        self.phase_name = "close"
        ENVIRONMENTS.release(self.environment)
        close = getattr(self.environment, "close", None)
        if close is not None:
            try:
                await self.phase(FailureKind.ENVIRONMENT, "close", self.timeouts.step_s, close)
            except _Broken:
                self.counts["close_failures"] += 1


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

    Raises: what the client raises while `format` or `info` is fetched, TokenizerMismatch; afterwards nothing but cancellation.
    """
    if info is None:
        info = await client.info()
    if format is None:
        format = await ChatFormat.of(client)
    format.check_served(info.tokenizer_digest)
    run = EpisodeRun(client, task, format, info, sampling or TurnSampling(), limits or EpisodeLimits(), timeouts or PhaseTimeouts())
    return await run.run()


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
    Raises: as `run_episode`; InvalidEpisode.
    """
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidEpisode(
            f"concurrency={concurrency!r}",
            field="concurrency",
            value=concurrency,
            limit="an integer of at least 1",
            remedy="set concurrency",
        )
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


def calls_of(results: Iterable[EpisodeResult]) -> CallCounts:
    """Return the tool calls of a run's episodes."""
    counts = CallCounts()
    for result in results:
        counts.add(CallCounts(result.good_calls, result.bad_calls, result.turns_without_calls))
    return counts


def _soft_failure(episode: Episode) -> Failure | None:
    """Return the failure of an episode that ended by the policy's doing or by a limit, None for the others."""
    if episode.status is EpisodeStatus.BAD_CALLS:
        return Failure(kind=FailureKind.POLICY, phase="tools", text=f"{episode.limit}: {episode.reason}")
    if episode.status is EpisodeStatus.TRUNCATED:
        return Failure(kind=FailureKind.LIMIT, phase="act", text=str(episode.limit))
    return None


def _inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a coroutine function of a quick call of our own, so that it gets no thread."""

    async def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


def _checked_messages(phase: str, messages: Any, *, also: type | None = None) -> Sequence[Any]:
    """Return messages; those of type `also` may be among them."""
    kinds = (Mapping,) if also is None else (Mapping, also)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not all(isinstance(message, kinds) for message in messages):
        raise _invalid(phase, messages, "a sequence of messages")
    return messages


def _checked_reward(score: Any) -> float:
    if isinstance(score, bool) or not isinstance(score, Real) or not math.isfinite(score):
        raise _invalid("score", score, "a finite number")
    return float(score)


def _invalid(phase: str, value: Any, wanted: str) -> InvalidEnvironment:
    return InvalidEnvironment(
        f"the environment's {phase} returned {str(value)[:100]!r}",
        field=phase,
        value=type(value).__name__,
        limit=f"{wanted} is needed",
        remedy=f"mend {phase}",
    )
