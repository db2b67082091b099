"""One episode being played: phase by phase, each for a bounded time, and whatever happens becomes its result.

    make -> reset -> act -> (tools | step) -> act -> ... -> score -> close
    env     env      policy  tool    env                     env      env

The runner and groups make an `EpisodeRun` for each attempt. A failure is attributed once, here; only the cancellation of the run's
own task passes through. Invariant: `run` returns a result, and a reward only where the environment scored an episode to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from rollout.agent.chat import ChatFormat
from rollout.agent.deadline import call_within
from rollout.agent.environment import ENVIRONMENTS, Start, Step
from rollout.agent.episode import Episode, PolicyClient
from rollout.agent.errors import InfrastructureFailure, InvalidEnvironment
from rollout.agent.limits import EpisodeLimits, Limit
from rollout.agent.option_values import check_client, check_kind
from rollout.agent.outcomes import EpisodeResult, EpisodeTask, Failure, FailureKind, PhaseTimeouts
from rollout.agent.standing import EpisodeStatus
from rollout.agent.turn import Turn, TurnSampling

# Shorter waits are over before anything would have been evicted.
LEAST_WAIT_S = 0.05
# What a released episode's turn may take to give back what it sampled.
RELEASE_WAIT_S = 5.0


class _Broken(Exception):
    def __init__(self, failure: Failure):
        self.failure = failure


class _Released(Exception):
    """The episode was released: it ends as cancelled."""


def check_options(client: Any, *, format: Any, sampling: Any, limits: Any, timeouts: Any) -> None:
    """Check what all episodes of a call share, before anything is fetched or played. Raises: InvalidEpisode."""
    check_client(client)
    check_kind("format", format, ChatFormat, absent=True)
    check_kind("sampling", sampling, TurnSampling, absent=True)
    check_kind("limits", limits, EpisodeLimits, absent=True)
    check_kind("timeouts", timeouts, PhaseTimeouts, absent=True)


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
        if episode.subagents:
            await self.phase(FailureKind.INFRASTRUCTURE, "subagents", None, episode.end_subagents)
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
        """End subagents that still run and give the environment its last call; a failure in it changes nothing that was decided."""
        self.phase_name = "close"
        if self.episode is not None:
            await self.episode.end_subagents()
        ENVIRONMENTS.release(self.environment)
        close = getattr(self.environment, "close", None)
        if close is not None:
            try:
                await self.phase(FailureKind.ENVIRONMENT, "close", self.timeouts.step_s, close)
            except _Broken:
                self.counts["close_failures"] += 1


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
