"""Groups of episodes with one beginning: members that failed are played again, the rest is let go once enough is known.

    group -> members side by side -> each over? -> passing failure: another attempt of that member
                                               '-> `cancel_when(finished)` or enough members: the others are released

`run_groups` plays many groups over a fixed number of episodes at once, in the order in which they come. Members start together and
their prompts are equal, so the engine computes the prompt once. Invariant: each member has exactly one result, and a
member without a reward is in no mean.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rollout.agent.chat import ChatFormat
from rollout.agent.environment import Environment
from rollout.agent.episode import PolicyClient
from rollout.agent.episode_run import RELEASE_WAIT_S, EpisodeRun, check_options
from rollout.agent.errors import InvalidEpisode
from rollout.agent.limits import EpisodeLimits
from rollout.agent.option_values import check_count, check_environment_maker, check_kind
from rollout.agent.outcomes import EpisodeResult, EpisodeTask, PhaseTimeouts, calls_of
from rollout.agent.standing import EpisodeStatus
from rollout.agent.tools import CallCounts
from rollout.agent.turn import TurnSampling
from rollout.option_names import checks_names

CancelWhen: TypeAlias = Callable[[Sequence[EpisodeResult]], bool]
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0


def k_done(k: int) -> CancelWhen:
    """Return a rule that lets the rest of a group go once `k` members were scored. Raises: InvalidEpisode."""
    check_count("k", k, 1)
    return lambda finished: sum(result.reward is not None for result in finished) >= k


def all_equal_bounded(low: float, high: float, *, at_least: int = 4) -> CancelWhen:
    """Return a rule that lets the rest of a group go once `at_least` members were scored and all lost or all won.

    All lost: no reward above `low`; all won: none below `high`. Such a group most likely teaches nothing. Raises: InvalidEpisode.
    """
    check_count("at_least", at_least, 1)
    if not low < high:
        raise InvalidEpisode(
            f"low={low!r}, high={high!r}", field="low", value=low, limit="low is below high", remedy="pass the reward's bounds"
        )

    def decided(finished: Sequence[EpisodeResult]) -> bool:
        rewards = [result.reward for result in finished if result.reward is not None]
        return len(rewards) >= at_least and (max(rewards) <= low or min(rewards) >= high)

    return decided


@checks_names(InvalidEpisode)
@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeGroup:
    """One group to play. All members begin with `seed` and draw their own tokens.

    `members` are wanted, `extra` more are started; once `members` were scored the others are let go. `attempt` counts earlier tries of
    the whole group. `kv_policy` and `max_kv_lag` as in `EpisodeTask`; `info` is the caller's own. Raises: InvalidEpisode.
    """

    make_environment: Callable[[], Environment]
    members: int
    seed: int = 0
    group: Hashable = 0
    extra: int = 0
    attempt: int = 0
    kv_policy: str = "keep"
    max_kv_lag: int = 4
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_environment_maker(self.make_environment)
        for name, least in (("members", 1), ("extra", 0), ("attempt", 0)):
            check_count(name, getattr(self, name), least)

    def task(self, member: int, attempt: int) -> EpisodeTask:
        """Return one member's task; its draws follow from seed, member and attempt."""
        return EpisodeTask(
            make_environment=self.make_environment,
            seed=self.seed,
            group=self.group,
            member=member,
            attempt=attempt,
            kv_policy=self.kv_policy,
            max_kv_lag=self.max_kv_lag,
            info=self.info,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStatistics:
    """How many episodes were scored, let go and failed, and how long they were on average. Units: sampled tokens, NaN for none.

    Where episodes are let go because others were faster, the kept ones are the short ones: compare the two means. `cached_share` is the
    share of prompt tokens whose KV the engine had, of all turns and by the turn's number. `calls` counts tool calls of all episodes.
    """

    kept: int = 0
    cancelled: int = 0
    failed: int = 0
    mean_kept_tokens: float = math.nan
    mean_cancelled_tokens: float = math.nan
    mean_kept_turns: float = math.nan
    mean_cancelled_turns: float = math.nan
    failures: Mapping[str, int] = field(default_factory=dict)
    cached_share: float = math.nan
    cached_share_by_turn: tuple[float, ...] = ()
    calls: CallCounts = field(default_factory=CallCounts)

    @classmethod
    def of(cls, results: Iterable[EpisodeResult]) -> EpisodeStatistics:
        """Count results, of one group or of many."""
        kept: list[EpisodeResult] = []
        cancelled: list[EpisodeResult] = []
        failures: dict[str, int] = {}
        prompts: Counter[int] = Counter()
        cached: Counter[int] = Counter()
        calls = CallCounts()
        for result in results:
            calls.add(calls_of([result]))
            for turn in (turn for row in result.rows for turn in row.turns):
                prompts[turn.index] += turn.prompt_tokens
                cached[turn.index] += turn.cached_tokens
            if result.status is EpisodeStatus.CANCELLED:
                cancelled.append(result)
            elif result.reward is not None:
                kept.append(result)
            else:
                cause = f"{result.failure.kind}_{result.failure.phase}" if result.failure else "not_scored"
                failures[cause] = failures.get(cause, 0) + 1
        return cls(
            kept=len(kept),
            cancelled=len(cancelled),
            failed=sum(failures.values()),
            mean_kept_tokens=_mean([sampled_tokens(result) for result in kept]),
            mean_cancelled_tokens=_mean([sampled_tokens(result) for result in cancelled]),
            mean_kept_turns=_mean([result.num_turns for result in kept]),
            mean_cancelled_turns=_mean([result.num_turns for result in cancelled]),
            failures=failures,
            cached_share=cached.total() / prompts.total() if prompts.total() else math.nan,
            cached_share_by_turn=tuple(cached[turn] / prompts[turn] for turn in sorted(prompts) if prompts[turn]),
            calls=calls,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupResult:
    """How a group went: `results` by member, each member's last attempt; `superseded` are attempts that were played again.

    `kept` are the members that count, in the order in which they ended: scored, and at most as many as were wanted. The mean and
    the spread are over them alone; NaN without any.
    """

    group: EpisodeGroup
    results: tuple[EpisodeResult, ...]
    kept: tuple[EpisodeResult, ...]
    superseded: tuple[EpisodeResult, ...] = ()

    @property
    def rewards(self) -> list[float]:
        """The rewards of the members that count."""
        return [result.reward for result in self.kept if result.reward is not None]

    @property
    def mean_reward(self) -> float:
        """The mean over the members that count."""
        return _mean(self.rewards)

    @property
    def reward_spread(self) -> float:
        """The population standard deviation over the members that count."""
        mean = self.mean_reward
        return math.sqrt(_mean([(reward - mean) ** 2 for reward in self.rewards]))

    @property
    def statistics(self) -> EpisodeStatistics:
        """Counts and lengths of the members."""
        return EpisodeStatistics.of(self.results)


class _GroupRun:
    """One group being played; owns its members' runs and decides when the rest is let go."""

    def __init__(self, group: EpisodeGroup, slots: asyncio.Semaphore, cancel_when: CancelWhen | None, max_attempts: int) -> None:
        self._group, self._slots = group, slots
        self._cancel_when, self._max_attempts = cancel_when, max_attempts
        self._runs: dict[int, EpisodeRun] = {}
        self._finished: list[EpisodeResult] = []
        self._superseded: list[EpisodeResult] = []
        self._decided = asyncio.Event()

    async def play(self, make_run: Callable[[EpisodeTask], EpisodeRun]) -> GroupResult:
        group = self._group
        async with asyncio.TaskGroup() as tasks:
            members = [tasks.create_task(self._member(member, make_run)) for member in range(group.members + group.extra)]
            releasing = tasks.create_task(self._release_when_decided())
            await asyncio.wait(members)
            releasing.cancel()
        kept = [result for result in self._finished if result.reward is not None][: group.members]
        return GroupResult(
            group=group, results=tuple(member.result() for member in members), kept=tuple(kept), superseded=tuple(self._superseded)
        )

    async def _member(self, member: int, make_run: Callable[[EpisodeTask], EpisodeRun]) -> EpisodeResult:
        """Play one member until it has a result that stays."""
        first, retry_s = self._group.attempt * self._max_attempts, FIRST_RETRY_S
        for attempt in range(first, first + self._max_attempts):
            run = self._runs[member] = make_run(self._group.task(member, attempt))
            if not await self._until_decided(self._slots.acquire()):
                return run.as_cancelled()
            try:
                result = run.as_cancelled() if self._decided.is_set() else await run.run()
            finally:
                self._slots.release()
            again = result.failure is not None and result.failure.passing and attempt + 1 < first + self._max_attempts
            if not again or self._decided.is_set():
                break
            self._superseded.append(result)
            await self._until_decided(asyncio.sleep(retry_s))
            retry_s = min(2 * retry_s, LAST_RETRY_S)
        if result.status is not EpisodeStatus.CANCELLED:
            self._finished.append(result)
            if self._is_decided():
                self._decided.set()
        return result

    async def _until_decided(self, waited: Any) -> bool:
        """Wait for something unless the group is decided before; return whether it came."""
        waiting = asyncio.ensure_future(waited)
        decided = asyncio.ensure_future(self._decided.wait())
        try:
            await asyncio.wait({waiting, decided}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.done()
        finally:
            decided.cancel()
            if not waiting.done():
                waiting.cancel()

    def _is_decided(self) -> bool:
        if self._decided.is_set():
            return True
        enough = sum(result.reward is not None for result in self._finished) >= self._group.members
        return enough or (self._cancel_when is not None and bool(self._cancel_when(tuple(self._finished))))

    async def _release_when_decided(self) -> None:
        await self._decided.wait()
        await asyncio.gather(*(run.release() for run in self._runs.values()))
        await asyncio.sleep(RELEASE_WAIT_S)
        for run in self._runs.values():
            run.interrupt()


@checks_names(InvalidEpisode)
async def run_groups(
    client: PolicyClient,
    groups: Iterable[EpisodeGroup],
    *,
    concurrency: int = 64,
    cancel_when: CancelWhen | None = None,
    max_attempts: int = 3,
    format: ChatFormat | None = None,
    info: Any = None,
    sampling: TurnSampling | None = None,
    limits: EpisodeLimits | None = None,
    timeouts: PhaseTimeouts | None = None,
    on_group: Callable[[GroupResult], None] | None = None,
) -> list[GroupResult]:
    """Play groups with at most `concurrency` episodes at once and return their results in the order of the groups.

    `cancel_when(finished)` is asked after each member's end, with the results of those that ended (scored or failed) in their order;
    True lets the rest of the group go. A member that failed for reasons of the infrastructure that may pass is played again, with other
    draws, up to `max_attempts` times in all. Groups are drawn when there is room. An error in a callback ends the run.
    Warns and raises: as `run_episodes`.
    """
    check_options(client, format=format, sampling=sampling, limits=limits, timeouts=timeouts)
    check_count("concurrency", concurrency, 1)
    check_count("max_attempts", max_attempts, 1)
    for number, group in enumerate(groups if isinstance(groups, Sequence) else ()):
        check_kind(f"groups[{number}]", group, EpisodeGroup)
    if info is None:
        info = await client.info()
    if format is None:
        format = await ChatFormat.of(client)
    format.check_served(info.tokenizer_digest)
    shared = (format, info, sampling or TurnSampling(), limits or EpisodeLimits(), timeouts or PhaseTimeouts())
    slots = asyncio.Semaphore(concurrency)
    results: dict[int, GroupResult] = {}

    async def one(number: int, group: EpisodeGroup) -> None:
        run = _GroupRun(group, slots, cancel_when, max_attempts)
        results[number] = await run.play(lambda task: EpisodeRun(client, task, *shared))
        if on_group is not None:
            on_group(results[number])

    async with asyncio.TaskGroup() as playing:
        for number, group in enumerate(groups):
            async with slots:
                playing.create_task(one(number, group))
            # The members line up before the next group is drawn.
            for _ in range(2):
                await asyncio.sleep(0)
    calls_of(result for group in results.values() for result in group.results).warn_if_none_parsed()
    return [results[number] for number in sorted(results)]


@checks_names(InvalidEpisode)
async def run_group(client: PolicyClient, group: EpisodeGroup, **options: Any) -> GroupResult:
    """Play one group, all members at once; options as in `run_groups`. Warns and raises: as `run_groups`."""
    check_kind("group", group, EpisodeGroup)
    options.setdefault("concurrency", group.members + group.extra)
    return (await run_groups(client, [group], **options))[0]


def sampled_tokens(result: EpisodeResult) -> int:
    """Return how many tokens an episode sampled."""
    return sum(row.num_sampled for row in result.rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
