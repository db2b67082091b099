"""Groups: who is played again, who is let go and when, and that only members with a reward count."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import pytest

from rollout.agent import (
    EpisodeGroup,
    EpisodeStatistics,
    EpisodeStatus,
    FailureKind,
    InfrastructureFailure,
    InvalidEpisode,
    Step,
    all_equal_bounded,
    derive_seed,
    k_done,
    run_group,
    run_groups,
)
from rollout.agent.groups import sampled_tokens
from rollout.errors import InvalidRequest, RequestFailed
from tests.unit.rollout.agent.byte_tokenizer import control_id, spelled
from tests.unit.rollout.agent.fake_client import FakeClient, FakeFinish

END = control_id("<|im_end|>")
SEED = 9


def first_seed(member: int, attempt: int = 0) -> int:
    """Return the seed of the first turn of a member's attempt."""
    return derive_seed(derive_seed(SEED, member, attempt), 0)


class Client(FakeClient):
    """Says "ok" to everyone; draws with a seed in `slow` hang until they are cancelled, those in `broken` raise."""

    def __init__(self, *, slow: Any = (), broken: Any = None) -> None:
        super().__init__(lambda prompt, options: [*spelled("ok"), END])
        self.slow, self.broken = set(slow), dict(broken or {})

    async def generate(self, prompt_ids: Any, **options: Any) -> Any:
        if options["seed"] in self.broken:
            raise self.broken[options["seed"]]
        if options["seed"] in self.slow:
            self.requests.append((list(map(int, prompt_ids)), options))
            self.waiting[options["request_id"]] = asyncio.Event()
            await self.waiting[options["request_id"]].wait()
            return self._generation(prompt_ids, options, [5, 6], FakeFinish("cancelled"))
        return await super().generate(prompt_ids, **options)


class Room:
    """Two turns of talk. What happens to the n-th environment that is made is in `trouble[n]`: a phase and an error or a wait."""

    made = 0
    closed = 0
    trouble: dict[int, tuple[str, Any]] = {}
    rewards: dict[int, float] = {}

    def __init__(self) -> None:
        self.number = type(self).made
        type(self).made += 1

    async def _meet(self, phase: str) -> None:
        where, what = self.trouble.get(self.number, ("", None))
        if where == phase:
            if isinstance(what, BaseException):
                raise what
            await asyncio.sleep(60)

    async def reset(self, seed: int) -> Any:
        await self._meet("reset")
        return [{"role": "user", "content": f"room {seed}"}]

    async def step(self, turn: Any) -> Step:
        await self._meet("step")
        return Step(messages=[{"role": "user", "content": "again"}], done=turn.index >= 1)

    async def score(self, episode: Any) -> float:
        await self._meet("score")
        return self.rewards.get(self.number, 1.0)

    def close(self) -> None:
        type(self).closed += 1


def rooms(trouble: Any = None, rewards: Any = None) -> type[Room]:
    return type("Rooms", (Room,), {"made": 0, "closed": 0, "trouble": dict(trouble or {}), "rewards": dict(rewards or {})})


def play(environment: Any, client: FakeClient | None = None, *, members: int = 4, extra: int = 0, **options: Any) -> Any:
    group = EpisodeGroup(make_environment=environment, members=members, extra=extra, seed=SEED, group="g")
    return asyncio.run(asyncio.wait_for(run_group(client or Client(), group, **options), 20))


def statuses(result: Any) -> list[str]:
    return [str(one.status) for one in result.results]


def test_all_members_of_a_quiet_group_count() -> None:
    result = play(rooms(rewards={0: 1.0, 1: 2.0, 2: 3.0, 3: 6.0}))
    assert statuses(result) == ["done"] * 4 and [one.task.member for one in result.results] == [0, 1, 2, 3]
    assert result.mean_reward == 3.0 and result.reward_spread == pytest.approx(math.sqrt(3.5))
    assert (result.statistics.kept, result.statistics.cancelled, result.statistics.mean_kept_tokens) == (4, 0, 6.0)
    assert result.superseded == ()
    assert result.statistics.cached_share == pytest.approx(0.5, abs=0.02) and len(result.statistics.cached_share_by_turn) == 2


@pytest.mark.parametrize("phase", ["reset", "step", "score"])
@pytest.mark.parametrize("what", ["raises", "hangs"])
def test_a_broken_environment_is_in_no_mean_and_is_not_played_again(phase: str, what: str) -> None:
    from rollout.agent import PhaseTimeouts

    environment = rooms({1: (phase, ValueError("boom") if what == "raises" else None)}, rewards={0: 0.0, 2: 1.0, 3: 2.0})
    timeouts = PhaseTimeouts(reset_s=0.2, act_s=5, step_s=0.2, score_s=0.2)
    result = play(environment, timeouts=timeouts)
    assert statuses(result) == ["done", "failed", "done", "done"] and environment.made == 4
    failed = result.results[1]
    assert failed.reward is None and (failed.failure.kind, failed.failure.phase) == (FailureKind.ENVIRONMENT, phase)
    assert result.mean_reward == 1.0 and result.reward_spread == pytest.approx(math.sqrt(2 / 3))
    assert result.statistics.failures == {f"environment_{phase}": 1}


def test_a_group_without_any_reward_has_no_mean() -> None:
    result = play(rooms({number: ("score", ValueError()) for number in range(4)}))
    assert result.kept == () and math.isnan(result.mean_reward) and result.statistics.failed == 4


@pytest.mark.parametrize("error", [ConnectionError("gone"), RequestFailed("the engine died", remedy="again")])
def test_a_member_that_the_infrastructure_failed_is_played_again_with_other_draws(error: Exception) -> None:
    client = Client(broken={first_seed(1): error, first_seed(1, 1): error})
    result = play(rooms(), client)
    assert statuses(result) == ["done"] * 4 and result.results[1].task.attempt == 2
    assert [one.task.attempt for one in result.superseded] == [0, 1]
    assert first_seed(1, 2) in {options["seed"] for _, options in client.requests}
    assert result.statistics.kept == 4 and result.statistics.failed == 0


def test_attempts_are_bounded_and_the_last_failure_stays() -> None:
    client = Client(broken={first_seed(0, attempt): ConnectionError("gone") for attempt in range(2)})
    result = play(rooms(), client, max_attempts=2)
    assert statuses(result) == ["failed", "done", "done", "done"] and len(result.superseded) == 1
    assert result.results[0].failure.kind is FailureKind.INFRASTRUCTURE and result.results[0].reward is None


def test_a_refused_request_is_not_sent_again() -> None:
    client = Client(broken={first_seed(0): InvalidRequest("top_p=7", field="top_p", remedy="lower it")})
    result = play(rooms(), client)
    assert statuses(result)[0] == "failed" and result.superseded == () and not result.results[0].failure.passing


def test_an_environment_may_say_that_its_infrastructure_failed() -> None:
    environment = rooms({1: ("step", InfrastructureFailure("the sandbox is away", remedy="start it"))})
    result = play(environment)
    assert statuses(result) == ["done"] * 4 and len(result.superseded) == 1 and environment.made == 5 and environment.closed == 5
    assert result.superseded[0].failure.kind is FailureKind.INFRASTRUCTURE and result.superseded[0].failure.phase == "step"


@pytest.mark.parametrize("phase", ["reset", "act", "step", "score"])
def test_members_in_every_phase_are_let_go_with_what_they_sampled(phase: str) -> None:
    if phase == "act":
        client, environment = Client(slow=[first_seed(2), first_seed(3)]), rooms()
    else:
        client, environment = Client(), rooms({2: (phase, None), 3: (phase, None)})
    result = play(environment, client, cancel_when=k_done(2))
    assert statuses(result) == ["done", "done", "cancelled", "cancelled"]
    assert all(one.reward is None and one.failure is None for one in result.results[2:])
    assert [sampled_tokens(one) for one in result.results[2:]] == [{"reset": 0, "act": 2, "step": 3, "score": 6}[phase]] * 2
    assert len(client.cancelled) == (2 if phase == "act" else 0) and environment.closed == environment.made
    assert len(result.kept) == 2 and result.statistics.cancelled == 2 and client.live == 0


def test_nobody_is_let_go_unless_asked() -> None:
    assert play(rooms(rewards=dict.fromkeys(range(4), 0.0))).statistics.cancelled == 0


def test_more_are_started_than_wanted_and_the_slow_ones_are_let_go() -> None:
    client = Client(slow=[first_seed(0), first_seed(4)])
    result = play(rooms(), client, members=4, extra=2)
    assert statuses(result) == ["cancelled", "done", "done", "done", "cancelled", "done"]
    assert len(result.kept) == 4 and len(client.cancelled) == 2
    assert result.statistics.mean_kept_tokens == 6.0 and result.statistics.mean_cancelled_tokens == 2.0


def test_extra_members_stand_in_for_failed_ones() -> None:
    result = play(rooms({0: ("reset", ValueError()), 1: ("score", ValueError())}), members=3, extra=2)
    assert len(result.kept) == 3 and statuses(result)[:2] == ["failed", "failed"]


def test_at_most_the_wanted_number_counts() -> None:
    result = play(rooms(), members=2, extra=2, concurrency=4)
    assert len(result.kept) == 2 and result.mean_reward == 1.0


def test_a_member_that_had_not_begun_is_let_go_too() -> None:
    environment = rooms()
    result = play(environment, cancel_when=k_done(1), concurrency=1)
    assert statuses(result) == ["done", "cancelled", "cancelled", "cancelled"] and environment.made == 1


@pytest.mark.parametrize(
    ("rewards", "cancelled"), [([0, 0, 0, 0], True), ([1, 1, 1, 2], True), ([0, 0, 1, 0], False), ([0.5, 0.5, 0.5, 0.5], False)]
)
def test_a_group_that_lost_or_won_throughout_is_let_go(rewards: list[float], cancelled: bool) -> None:
    client = Client(slow=[first_seed(4)])
    environment = rooms(rewards=dict(enumerate(rewards)))
    rule = all_equal_bounded(0, 1)
    asked: list[int] = []

    def watched(finished: Any) -> bool:
        asked.append(len(finished))
        return rule(finished)

    if not cancelled:
        client.slow = set()
    result = play(environment, client, members=5, cancel_when=watched)
    assert statuses(result) == ["done"] * 4 + ["cancelled" if cancelled else "done"]
    assert asked == [1, 2, 3, 4]  # the fifth member decides by itself


def test_an_error_in_the_rule_ends_the_run() -> None:
    def rule(finished: Any) -> bool:
        raise LookupError("my bug")

    with pytest.raises(ExceptionGroup) as caught:
        play(rooms(), cancel_when=rule)
    assert caught.group_contains(LookupError)


def test_many_groups_share_the_places_and_come_back_in_order() -> None:
    client, ended = Client(), []
    groups = [EpisodeGroup(make_environment=rooms(), members=3, seed=seed, group=seed) for seed in range(10)]
    results = asyncio.run(run_groups(client, iter(groups), concurrency=4, on_group=ended.append))
    assert [result.group.group for result in results] == list(range(10)) and len(ended) == 10
    assert 1 < client.most_live <= 4 and all(len(result.kept) == 3 for result in results)
    everything = EpisodeStatistics.of(one for result in results for one in result.results)
    assert everything.kept == 30 and everything.mean_kept_turns == 2.0 and math.isnan(everything.mean_cancelled_tokens)


def test_cancelling_the_run_cancels_the_episodes() -> None:
    client = Client(slow=[first_seed(member) for member in range(4)])

    async def cancel() -> None:
        task = asyncio.create_task(run_group(client, EpisodeGroup(make_environment=rooms(), members=4, seed=SEED)))
        while len(client.waiting) < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancel(), 20))
    assert len(client.cancelled) == 4


def test_an_environment_is_played_once() -> None:
    only = Room()
    result = play(lambda: only, members=2, concurrency=1)
    assert sorted(statuses(result)) == ["done", "failed"]
    failed = next(one for one in result.results if one.status is EpisodeStatus.FAILED)
    assert (
        failed.failure.phase == "make"
        and "make a new one in each call" in failed.failure.text
        and failed.failure.code == "invalid_environment"
    )


@pytest.mark.parametrize("change", [{"members": 0}, {"extra": -1}, {"members": True}, {"attempt": 1.5}])
def test_counts_are_checked(change: Any) -> None:
    with pytest.raises(InvalidEpisode, match=f"set {next(iter(change))}"):
        dataclasses.replace(EpisodeGroup(make_environment=Room, members=2), **change)


def test_rules_are_checked() -> None:
    for make in (lambda: k_done(0), lambda: all_equal_bounded(1, 1), lambda: all_equal_bounded(0, 1, at_least=0)):
        with pytest.raises(InvalidEpisode):
            make()


def test_a_run_in_which_no_call_could_be_read_warns() -> None:
    from rollout.agent import NoToolCalls, Start, Tool

    def look() -> str:
        """Look."""
        return "nothing"

    class Tooled(Room):
        async def reset(self, seed: int) -> Any:
            return Start(messages=[{"role": "user", "content": "look"}], tools=[Tool.from_function(look)])

    with pytest.warns(NoToolCalls):
        play(type("Rooms", (Tooled,), {"made": 0, "closed": 0}), members=8)
