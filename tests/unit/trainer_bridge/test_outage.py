"""A service that is away costs no prompt an attempt, is waited for, and is named when it stays away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from rollout.errors import Busy, HostFailed, NeedsWeights, RequestFailed, ServerRestarted, ServerUnavailable, Unavailable
from tests.unit.trainer_bridge.fakes import failed_sample, make_sample
from trainer_bridge.errors import GroupShortfall, InvalidOption, RolloutShortfall, ServiceOutage
from trainer_bridge.groups import GroupTask, each_member
from trainer_bridge.outage import OutageWatch, outage_code
from trainer_bridge.samples import TrainingSample
from trainer_bridge.source import RolloutSource


class Service:
    """Plays groups while it is up; otherwise every member meets `error`, raised or written into its failed sample."""

    def __init__(self, error: Exception | None = None, *, as_samples: bool = False):
        self.error, self.as_samples = error, as_samples
        self.attempts: list[tuple[int, int]] = []

    async def __call__(self, task: GroupTask[Any]) -> Sequence[TrainingSample]:
        self.attempts.append((task.index, task.attempt))
        await asyncio.sleep(0)
        if self.error is None:
            return [make_sample(group_id=task.index, member=member) for member in range(task.group_size)]
        if not self.as_samples:
            raise self.error
        info = {"cause": "infrastructure_act", "error": str(self.error), "code": getattr(self.error, "code", None)}
        return [failed_sample(group_id=task.index, member=member, info=info) for member in range(task.group_size)]


def make_source(run_group: Any, **options: Any) -> RolloutSource[Any]:
    made: dict[str, Any] = {"group_size": 2, "version": lambda: 0, "max_ahead": 4, "poll_s": 0.02} | options
    return RolloutSource(range(8), run_group, **made)


@pytest.mark.parametrize("as_samples", [False, True])
@pytest.mark.parametrize("kind", [NeedsWeights, HostFailed, ServerUnavailable, ServerRestarted, Busy, Unavailable])
def test_an_outage_costs_no_attempt_and_the_safe_point_can_end_it(kind: type[Exception], as_samples: bool) -> None:
    service = Service(kind("away"), as_samples=as_samples)
    calls = 0

    def push() -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            service.error = None

    with make_source(service, max_attempts=1, safe_point=push) as source:
        groups = source.next(4)
    assert [(group.index, group.attempt) for group in groups] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert calls >= 8 and len(service.attempts) > 8


def test_the_safe_point_is_called_while_an_async_next_waits() -> None:
    service = Service(NeedsWeights("away"))
    calls = 0

    def push() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            service.error = None

    async def take(source: RolloutSource[Any]) -> int:
        return len(await source.next_async(2))

    with make_source(service, safe_point=push) as source:
        assert asyncio.run(take(source)) == 2
    assert calls >= 5


def test_an_outage_without_end_is_named_after_the_bound_and_loses_no_prompt() -> None:
    service = Service(NeedsWeights("the engine waits for weights"))
    with make_source(service, outage_s=0.3) as source:
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(
                ServiceOutage, match=r"away with needs_weights; outage_s=0.3 is over.*waits for weights.*safe_point"
            ) as caught:
                source.next(1)
            assert time.monotonic() - started >= 0.3, "every next gets the whole time"
            assert caught.value.cause == "needs_weights" and isinstance(caught.value.__cause__, NeedsWeights)
        service.error = None
        assert [(group.index, group.attempt) for _ in range(2) for group in source.next(4)] == [(index, 0) for index in range(8)]


def test_prompts_are_tried_less_and_less_often_during_an_outage() -> None:
    service = Service(HostFailed("away"))
    with make_source(service, outage_s=0.7, max_ahead=1) as source:
        with pytest.raises(ServiceOutage):
            source.next(1)
    assert 3 <= len(service.attempts) <= 6


def test_failures_of_the_prompt_still_count_and_a_request_failed_by_its_own_doing_is_one() -> None:
    service = Service(RequestFailed("broken request"))
    with make_source(service, max_attempts=2) as source:
        with pytest.raises(RolloutShortfall, match="failed 2 times") as caught:
            source.next(1)
    assert not isinstance(caught.value, ServiceOutage)


def test_a_group_that_falls_short_by_its_own_members_is_no_outage() -> None:
    async def broken(task: GroupTask[Any]) -> list[TrainingSample]:
        away, own = {"cause": "infrastructure_act", "code": "host_failed"}, {"cause": "environment_step"}
        return [failed_sample(group_id=task.index, member=member, info=away if member == 0 else own) for member in range(4)]

    with make_source(broken, group_size=4, max_attempts=2) as source:
        with pytest.raises(RolloutShortfall, match="failed 2 times") as caught:
            source.next(1)
    assert isinstance(caught.value.__cause__, GroupShortfall) and caught.value.__cause__.outage is None


def test_the_code_is_found_in_exception_groups_and_as_the_reason_of_a_failed_request() -> None:
    async def play(task: GroupTask[Any], member: int) -> TrainingSample:
        raise HostFailed("gone") if member else NeedsWeights("gone")

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(each_member(play)(GroupTask(index=0, prompt=0, group_size=2, seed=0)))  # type: ignore[arg-type]
    assert outage_code(caught.value) in ("needs_weights", "host_failed")
    failed = RequestFailed("ended")
    assert outage_code(failed) is None
    failed.reason_code = "host_failed"
    assert outage_code(failed) == "host_failed"


def test_a_busy_service_that_plays_other_groups_is_waited_for() -> None:
    watch = OutageWatch(limit_s=10.0)
    for now in range(0, 12):
        watch.fail("busy", Busy("full"), float(now))
    assert watch.is_too_long(waiting_since=0.0, in_flight=0) and not watch.is_too_long(waiting_since=0.0, in_flight=1)
    assert not watch.is_too_long(waiting_since=5.0, in_flight=0)
    watch.end()
    assert not watch.is_too_long(waiting_since=0.0, in_flight=0)


def test_a_failure_long_after_the_last_begins_another_outage_a_bounded_number_of_times() -> None:
    watch = OutageWatch(limit_s=10.0)
    late = []
    for now in range(0, 100, 20):
        watch.fail("host_failed", HostFailed("gone"), float(now))
        late.append(watch.is_too_long(waiting_since=0.0, in_flight=0))
    assert late == [False, False, False, False, True]


@pytest.mark.parametrize("value", [0, -1.0, True, float("inf"), float("nan"), "60"])
def test_an_outage_bound_that_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        make_source(Service(), outage_s=value)
    assert caught.value.field == "outage_s"
