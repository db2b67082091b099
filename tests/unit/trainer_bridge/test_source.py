"""The source loses and repeats no prompt, bounds staleness at take time, and says so when it cannot deliver."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from rollout.agent import derive_seed as agent_derive_seed
from tests.unit.trainer_bridge.fakes import failed_sample, make_sample
from trainer_bridge.errors import GroupShortfall, InvalidOption, InvalidState, RolloutShortfall, SourceClosed, VersionBehind
from trainer_bridge.groups import GroupTask, RolloutGroup, derive_seed, each_member
from trainer_bridge.samples import TrainingSample
from trainer_bridge.source import RolloutSource

Runner = Callable[[GroupTask[Any]], Awaitable[Sequence[TrainingSample]]]


class Play:
    """A group runner under the test's control: the version it samples with, and a gate that holds groups back."""

    def __init__(self) -> None:
        self.version = 0
        self.started: list[tuple[int, int]] = []
        self.cancelled: list[int] = []
        self.held: set[int] = set()
        self.failing: dict[int, Exception] = {}

    async def __call__(self, task: GroupTask[Any]) -> list[TrainingSample]:
        version = self.version
        self.started.append((task.index, task.attempt))
        try:
            while task.index in self.held:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(task.index)
            raise
        if task.index in self.failing:
            raise self.failing[task.index]
        return [make_sample(version=version, group_id=task.index, member=member, reward=float(member)) for member in range(task.group_size)]


@pytest.fixture
def play() -> Play:
    return Play()


def make_source(prompts: Any, play: Runner, **options: Any) -> RolloutSource[Any]:
    options = {"group_size": 2, "version": lambda: getattr(play, "version", 0)} | options
    return RolloutSource(prompts, play, **options)


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


def test_every_prompt_is_delivered_once_with_its_group(play: Play) -> None:
    with make_source([f"p{i}" for i in range(10)], play, max_ahead=3) as source:
        groups = [group for _ in range(5) for group in source.next(2)]
        assert sorted(group.index for group in groups) == list(range(10))
        assert all(group.prompt == f"p{group.index}" and len(group.samples) == 2 for group in groups)
        with pytest.raises(RolloutShortfall, match="used up with 0 groups ready"):
            source.next(1)


def test_never_more_groups_than_allowed_are_in_flight_or_ready(play: Play) -> None:
    play.held = set(range(50))
    with make_source(range(50), play, max_ahead=4) as source:
        source.start()
        wait_for(lambda: len(play.started) == 4)
        time.sleep(0.05)
        assert len(play.started) == 4
        play.held -= {0, 1}
        wait_for(lambda: source.stats().ready == 2)
        assert source.stats().in_flight == 2 and len(play.started) == 4
        play.held.clear()
        assert [group.index for group in source.next(2)] == [0, 1]
        wait_for(lambda: len(play.started) == 6)


def test_asking_for_more_groups_than_can_ever_be_ready_is_refused(play: Play) -> None:
    with make_source(range(5), play, max_ahead=2) as source:
        with pytest.raises(InvalidOption, match=r"1 to max_ahead=2.*raise max_ahead"):
            source.next(3)


def test_groups_over_the_staleness_bound_are_dropped_counted_and_played_again(play: Play) -> None:
    with make_source(range(4), play, max_ahead=4, max_staleness=1) as source:
        source.start()
        wait_for(lambda: source.stats().ready == 4)
        play.version = 1
        assert [(group.index, group.staleness) for group in source.next(2)] == [(0, 1), (1, 1)]
        play.version = 2
        late = source.next(2)
        assert [(group.index, group.staleness, group.attempt) for group in late] == [(2, 0, 1), (3, 0, 1)]
        assert source.stats().dropped_stale == 2


class Pushed:
    """A push whose service was started again while it had version 5: the folder's weights are 6, and what it pushes then is 7."""

    def __init__(self, play: Play) -> None:
        self.version, self._play, self.asked = 5, play, 0

    def owns(self, version: int) -> bool:
        return version != 6

    def push(self) -> None:
        self.version = self._play.version = 7

    def push_if_needed(self) -> None:
        self.asked += 1


@pytest.mark.parametrize("max_staleness", [1, 5])
def test_what_a_service_played_on_its_folders_weights_after_a_restart_is_dropped_whoever_pushed_again(
    play: Play, max_staleness: int
) -> None:
    push = Pushed(play)
    play.version = 6
    options = {"group_size": 2, "max_ahead": 2, "max_staleness": max_staleness, "push": push, "poll_s": 0.01}
    with RolloutSource(range(2), play, **options) as source:
        source.start()
        wait_for(lambda: source.stats().ready == 2)
        threading.Timer(0.1, push.push).start()
        groups = source.next(2)
        assert [(group.index, group.staleness, group.attempt) for group in groups] == [(0, 0, 1), (1, 0, 1)]
        assert source.stats().dropped_stale == 2 and push.asked > 1


def test_a_source_is_made_with_a_push_or_with_a_version(play: Play) -> None:
    for given in ({}, {"push": Pushed(play), "version": lambda: 0}, {"push": lambda: 3}):
        with pytest.raises(InvalidOption, match="push") as refused:
            RolloutSource(range(2), play, group_size=2, **given)  # type: ignore[arg-type]
        assert refused.value.field == "push" and "WeightPush" in str(refused.value.remedy)


def test_staleness_counts_from_the_oldest_sampled_token_of_the_group(play: Play) -> None:
    async def mixed(task: GroupTask[Any]) -> list[TrainingSample]:
        versions = (3, 5) if task.attempt == 0 else (5, 5)
        return [make_sample(version=version, group_id=task.index, member=member) for member, version in enumerate(versions)]

    with make_source(range(1), mixed, max_staleness=1, version=lambda: 5) as source:
        (group,) = source.next(1)
        assert (group.attempt, group.staleness) == (1, 0) and source.stats().dropped_stale == 1
    with make_source(range(1), mixed, max_staleness=2, version=lambda: 5) as source:
        (group,) = source.next(1)
        assert (group.attempt, group.staleness) == (0, 2)


def test_with_staleness_zero_nothing_runs_while_the_trainer_works(play: Play) -> None:
    with make_source(range(6), play, max_ahead=6, max_staleness=0) as source:
        assert [group.index for group in source.next(2)] == [0, 1]
        time.sleep(0.05)
        assert len(play.started) == 2
        play.version = 1
        assert [(group.index, group.staleness) for group in source.next(2)] == [(2, 0), (3, 0)]
        assert source.stats().dropped_stale == 0


def test_fresh_groups_start_only_when_a_next_waits(play: Play) -> None:
    with make_source(range(8), play, max_ahead=4, fresh_groups=1) as source:
        source.start()
        wait_for(lambda: source.stats().ready == 3)
        time.sleep(0.05)
        assert len(play.started) == 3
        play.version = 1
        assert [(group.index, group.staleness) for group in source.next(4)] == [(0, 1), (1, 1), (2, 1), (3, 0)]
        wait_for(lambda: len(play.started) == 7)
        time.sleep(0.05)
        assert len(play.started) == 7


def test_tokens_newer_than_the_trainers_version_are_an_error_after_a_grace(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_bridge.flight.VERSION_GRACE_S", 0.1)
    play.version = 3
    known = 3
    with make_source(range(2), play, version=lambda: known) as source:
        source.next(1)
        known = 2
        with pytest.raises(VersionBehind, match=r"sampled under version 3.*version of the last committed push"):
            source.next(1)
        known = 3
        assert source.next(1)[0].index == 1


def test_a_version_published_a_moment_earlier_than_known_is_waited_for(play: Play) -> None:
    play.version = 1
    known = 0

    def learn() -> None:
        nonlocal known
        known = 1

    with make_source(range(1), play, version=lambda: known) as source:
        timer = threading.Timer(0.1, learn)
        timer.start()
        assert source.next(1)[0].staleness == 0
        timer.join()


def test_failures_are_counted_by_cause_and_the_prompt_runs_again() -> None:
    tries: Counter[int] = Counter()

    async def flaky(task: GroupTask[int]) -> list[TrainingSample]:
        tries[task.index] += 1
        if tries[task.index] == 1:
            raise TimeoutError("slow") if task.index % 2 else RolloutShortfall("no", failures={})
        return [make_sample(group_id=task.index, member=member) for member in range(2)]

    with make_source(range(4), flaky, max_ahead=4) as source:
        assert sorted(group.index for group in source.next(4)) == [0, 1, 2, 3]
        assert source.stats().failures == {"rollout_shortfall": 2, "TimeoutError": 2}
    assert set(tries.values()) == {2}


def test_a_prompt_that_keeps_failing_raises_with_its_cause_and_is_not_lost(play: Play) -> None:
    play.failing = {1: ConnectionError("the service is gone")}
    with make_source(range(3), play, max_ahead=3, max_attempts=2) as source:
        with pytest.raises(RolloutShortfall, match=r"failed 2 times, last with.*the service is gone") as caught:
            source.next(3)
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert caught.value.failures == {"ConnectionError": 2}
        play.failing.clear()
        assert [group.index for group in source.next(3)] == [0, 1, 2]


def test_a_shortfall_keeps_the_ready_groups(play: Play) -> None:
    with make_source(range(3), play, max_ahead=4) as source:
        with pytest.raises(RolloutShortfall, match="used up with 3 groups ready"):
            source.next(4)
        assert len(source.next(3)) == 3


def test_a_next_that_times_out_takes_nothing(play: Play) -> None:
    play.held = {1}
    with make_source(range(2), play, max_ahead=2, poll_s=0.01) as source:
        with pytest.raises(RolloutShortfall, match=r"timeout_s=0.05 is over"):
            source.next(2, timeout_s=0.05)
        play.held.clear()
        assert [group.index for group in source.next(2)] == [0, 1]
        assert source.stats().delivered == 2


def test_takers_that_give_up_at_any_moment_lose_no_group(play: Play) -> None:
    with make_source(range(200), play, max_ahead=4, poll_s=0.001) as source:
        taken: list[int] = []
        timeouts = 0
        deadline = time.monotonic() + 60
        for turn in itertools.count():
            if len(taken) == 200:
                break
            assert time.monotonic() < deadline, f"{len(taken)} groups after {turn} attempts"
            try:
                taken += [group.index for group in source.next(2, timeout_s=(turn % 7) * 1e-4)]
            except RolloutShortfall:
                timeouts += 1
        assert sorted(taken) == list(range(200))
        assert timeouts > 0


def test_a_group_with_too_few_trainable_members_is_a_failure(play: Play) -> None:
    async def broken(task: GroupTask[int]) -> list[TrainingSample]:
        valid = 1 if task.attempt == 0 else 2
        info = {"cause": "environment_error"}
        return [make_sample(member=member) if member < valid else failed_sample(member=member, info=info) for member in range(3)]

    with make_source(range(1), broken, group_size=3) as source:
        (group,) = source.next(1)
        stats = source.stats()
    assert group.attempt == 1 and sum(sample.is_trainable for sample in group.samples) == 2
    assert stats.failures == {"environment_error": 1} and stats.failed_members == {"environment_error": 3}


def test_a_shortfall_says_what_the_members_said_and_counts_by_their_cause() -> None:
    async def broken(task: GroupTask[int]) -> list[TrainingSample]:
        step = {"cause": "environment_step", "error": "step returned 7; a Step is needed"}
        act = {"cause": "infrastructure_act", "error": "the service is gone"}
        return [failed_sample(member=member, group_id=task.index, info=act if member == 0 else step) for member in range(3)]

    with make_source(range(1), broken, group_size=3, max_attempts=2, max_ahead=1) as source:
        with pytest.raises(RolloutShortfall) as caught:
            source.next(1)
        stats = source.stats()
    text = str(caught.value)
    assert text.count("step returned 7; a Step is needed") == 1
    assert "failed 2 times, last with: 2 of the 3 members of group 0 failed with environment_step (step" in text
    assert caught.value.failures == stats.failures == {"environment_step": 2}
    assert stats.failed_members == {"environment_step": 4, "infrastructure_act": 2}
    assert stats.last_errors == {"environment_step": "step returned 7; a Step is needed", "infrastructure_act": "the service is gone"}
    cause = caught.value.__cause__
    assert isinstance(cause, GroupShortfall) and cause.failures == {"environment_step": 2, "infrastructure_act": 1}
    assert "lower min_valid_members" in str(cause)


def test_a_next_that_times_out_names_the_most_frequent_failure(play: Play) -> None:
    play.failing = {0: ConnectionError("the service is gone")}
    with make_source(range(1), play, max_attempts=1_000_000, poll_s=0.01) as source:
        with pytest.raises(RolloutShortfall, match=r"timeout_s=0.1 is over; most frequent of \d+ failures.*the service is gone"):
            source.next(1, timeout_s=0.1)


def test_the_state_goes_on_without_losing_or_repeating_a_prompt(play: Play) -> None:
    play.held = {3, 6}
    source = make_source(range(12), play, max_ahead=4)
    delivered = [group.index for group in source.next(2)]
    wait_for(lambda: source.stats().ready == 3)
    state = json.loads(json.dumps(source.state_dict()))
    source.close()
    play.held.clear()
    with make_source(range(12), play, max_ahead=4) as resumed:
        resumed.load_state_dict(state)
        while len(delivered) < 12:
            delivered += [group.index for group in resumed.next(2)]
        with pytest.raises(RolloutShortfall):
            resumed.next(1)
    assert sorted(delivered) == list(range(12))


def test_an_iterator_is_passed_over_to_the_saved_place(play: Play) -> None:
    def letters() -> Iterator[str]:
        yield from "abcdefgh"

    source = make_source(letters(), play, max_ahead=3)
    delivered = [group.prompt for group in source.next(3)]
    state = source.state_dict()
    source.close()
    with make_source(letters(), play, max_ahead=3) as resumed:
        resumed.load_state_dict(state)
        delivered += [group.prompt for _ in range(5) for group in resumed.next(1)]
    assert sorted(delivered) == list("abcdefgh")


def test_a_state_is_refused_by_a_source_that_has_begun_and_by_fewer_prompts(play: Play) -> None:
    with make_source(range(8), play) as source:
        source.next(1)
        state = source.state_dict()
        with pytest.raises(InvalidState, match="load into a fresh source"):
            source.load_state_dict(state)
    with make_source(iter(range(2)), play) as shorter:
        with pytest.raises(InvalidState, match="the prompts end at 2"):
            shorter.load_state_dict(state)
    with make_source(range(8), play) as other:
        with pytest.raises(InvalidState, match="format"):
            other.load_state_dict({"format": 99})


def test_a_sequence_is_read_again_for_each_epoch_under_new_numbers(play: Play) -> None:
    with make_source("ab", play, epochs=2, max_ahead=4) as source:
        assert [(group.index, group.prompt) for group in source.next(4)] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    with make_source("ab", play, epochs=None, max_ahead=4) as endless:
        assert len([endless.next(4) for _ in range(5)]) == 5


def test_close_cancels_what_is_in_flight_and_ends_a_waiting_next(play: Play) -> None:
    play.held = {0, 1}
    source = make_source(range(2), play, max_ahead=2)
    caught: list[BaseException] = []

    def take() -> None:
        try:
            source.next(2)
        except BaseException as error:
            caught.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    wait_for(lambda: len(play.started) == 2)
    source.close()
    taker.join(10)
    assert sorted(play.cancelled) == [0, 1]
    assert [type(error) for error in caught] == [SourceClosed]
    source.close()
    with pytest.raises(SourceClosed):
        source.next(1)
    assert not any(thread.name == "rollout-source" for thread in threading.enumerate())


def test_groups_are_played_while_the_trainers_thread_is_busy(play: Play) -> None:
    with make_source(range(10), play, max_ahead=4) as source:
        source.next(1)
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            sum(range(1000))
        assert source.stats().ready == 4


def test_the_async_form_gives_the_same_groups_and_survives_cancellation(play: Play) -> None:
    async def train(source: RolloutSource[Any]) -> list[int]:
        play.held = {0}
        waiting = asyncio.create_task(source.next_async(2))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        play.held.clear()
        return [group.index for group in await source.next_async(2)]

    with make_source(range(2), play, max_ahead=2) as source:
        assert asyncio.run(train(source)) == [0, 1]


def test_next_reaches_the_safe_point_in_the_callers_thread_while_it_waits(play: Play) -> None:
    reached: list[threading.Thread] = []

    def safe_point() -> None:
        reached.append(threading.current_thread())
        if len(reached) == 3:
            play.held.clear()

    play.held = {0}
    with make_source(range(1), play, safe_point=safe_point, poll_s=0.01) as source:
        source.next(1)
    assert len(reached) >= 3 and set(reached) == {threading.current_thread()}


def test_each_member_runs_all_members_at_once_and_flattens_forked_rows() -> None:
    together = 0
    most = 0

    async def episode(task: GroupTask[str], member: int) -> TrainingSample | list[TrainingSample]:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.01)
        together -= 1
        sample = make_sample(member=member, seed=task.member_seed(member) % 1000)
        return [sample, sample] if member == 1 else sample

    task = GroupTask(index=0, prompt="p", group_size=3, seed=1)
    samples = asyncio.run(each_member(episode)(task))  # type: ignore[arg-type]
    assert most == 3 and [sample.member for sample in samples] == [0, 1, 1, 2]


def test_a_member_that_raises_fails_the_group_under_its_own_cause(play: Play) -> None:
    async def episode(task: GroupTask[int], member: int) -> TrainingSample:
        if member == 1 and task.attempt == 0:
            raise TimeoutError
        await asyncio.sleep(0.001)
        return make_sample(group_id=task.index, member=member)

    with make_source(range(1), each_member(episode)) as source:
        assert source.next(1)[0].attempt == 1
        assert source.stats().failures == {"TimeoutError": 1}


def test_seeds_are_golden_and_differ_by_member_and_attempt() -> None:
    assert (derive_seed(0, 0), derive_seed(12345, 3, 2)) == (0x250ACE564724C2EC, 0xCCB00C9098F2025E)
    seeds = {derive_seed(seed, index, attempt) for seed in range(5) for index in range(5) for attempt in range(5)}
    assert len(seeds) == 125


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("group_size", 0),
        ("max_staleness", -1),
        ("max_ahead", 0),
        ("max_attempts", True),
        ("epochs", 0),
        ("min_valid_members", 3),
        ("fresh_groups", 9),
    ],
)
def test_options_outside_their_domain_are_refused_by_name(play: Play, option: str, value: int) -> None:
    with pytest.raises(InvalidOption) as caught:
        make_source(range(3), play, **{option: value})
    assert caught.value.field == option and caught.value.remedy


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [("version", 3, "version=lambda: ..."), ("safe_point", 1, "push.push_if_needed"), ("prompts", 5, "[prompt]")],
)
def test_what_is_no_function_and_no_list_of_prompts_is_refused_at_once(play: Play, option: str, value: int, remedy: str) -> None:
    given: dict[str, Any] = {"prompts": range(4), "run_group": play, "group_size": 2, "version": lambda: 0} | {option: value}
    with pytest.raises(InvalidOption, match=f"{option}={value}") as caught:
        RolloutSource(**given)
    assert caught.value.field == option and remedy in str(caught.value)


def test_a_sample_of_another_group_is_refused() -> None:
    async def careless(task: GroupTask[int]) -> list[TrainingSample]:
        return [make_sample(group_id=0, member=member) for member in range(2)]

    with make_source(range(2), careless) as source:
        with pytest.raises(RolloutShortfall, match=r"make samples with group_id=task\.index"):
            source.next(2)


def test_a_cancellation_inside_a_group_is_a_failure_like_any_other() -> None:
    async def cancelled(task: GroupTask[int]) -> list[TrainingSample]:
        if task.attempt == 0:
            raise asyncio.CancelledError
        return [make_sample(group_id=task.index, member=member) for member in range(2)]

    with make_source(range(2), cancelled) as source:
        assert len(source.next(2)) == 2
        assert source.stats().failures == {"CancelledError": 2}


def test_prompts_that_raise_are_told_to_the_taker(play: Play) -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise OSError("disk")

    with make_source(broken(), play) as source:
        assert source.next(1)[0].index == 0
        with pytest.raises(RolloutShortfall, match=r"the prompts raised.*disk"):
            source.next(1)


def test_the_mean_reward_of_a_group_counts_each_trainable_member_once() -> None:
    samples = (
        make_sample(member=0, reward=1.0),
        make_sample(member=0, reward=1.0),
        make_sample(member=1, reward=0.0),
        failed_sample(member=2),
    )
    group = RolloutGroup(index=0, prompt=7, samples=samples, staleness=0, attempt=0)
    assert group.mean_reward == 0.5
    assert math.isnan(RolloutGroup(index=0, prompt=7, samples=samples[3:], staleness=0, attempt=0).mean_reward)


def test_bridge_and_agent_derive_equal_seeds_of_parts() -> None:
    for seed in (0, 1, 2**63, 2**64 - 1):
        for index in (0, 1, 511, 2**40):
            for attempt in (0, 1, 9):
                assert derive_seed(seed, index, attempt) == agent_derive_seed(seed, index, attempt)
    task = GroupTask(index=3, prompt=0, group_size=2, seed=42)
    assert task.member_seed(1) == agent_derive_seed(42, 1)
