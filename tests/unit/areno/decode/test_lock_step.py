"""The result ring on a device that is ahead of or behind the host: lock step, slots in flight, and the time spent waiting."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from areno.decode.results import ResultRing


class SlowEvent:
    """An event that passes when somebody waits for it, or when it is told to; waiting takes a moment."""

    def __init__(self) -> None:
        self.passed, self.waits = True, 0

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        if not self.passed:
            self.waits += 1
            time.sleep(0.002)
        self.passed = True


def _ring(*, slots: int, run_ahead: int) -> tuple[ResultRing, list[SlowEvent]]:
    ring, events = ResultRing(slots=slots, lanes=4, run_ahead=run_ahead), [SlowEvent() for _ in range(slots)]
    holder: Any = ring
    holder._events = events
    return ring, events


def _launch(ring: ResultRing) -> int:
    lanes = np.zeros(4, dtype=np.int64)
    launch, records = ring.take(seats=lanes, generations=lanes.astype(np.int32), version=0)
    records.words[2, :4] = launch.number
    ring.launched()
    return launch.slot


def _numbers(ring: ResultRing, *, drain: bool = False) -> list[int]:
    return [result.launch.number for result in ring.ready(drain=drain)]


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
def test_in_lock_step_a_fast_device_tells_no_more_than_the_cpu_would(run_ahead: int) -> None:
    ring, events = _ring(slots=8, run_ahead=run_ahead)
    ring.lock_step = True
    seen: list[int] = []
    for number in range(1, 20):
        events[_launch(ring)].passed = True
        seen += _numbers(ring)
        assert seen == list(range(1, max(number - run_ahead, 0) + 1))
    ring.lock_step = False
    assert seen + _numbers(ring) == list(range(1, 20)), "out of lock step what has passed is read at once"


def test_a_slow_device_is_waited_for_before_its_slot_is_used_again_and_the_wait_is_counted() -> None:
    ring, events = _ring(slots=4, run_ahead=2)
    seen: list[int] = []
    for number in range(1, 13):
        slot = _launch(ring)
        seen += _numbers(ring)
        assert not events[slot].passed, "the newest launch is never waited for while others may run"
        assert seen == list(range(1, max(number - 2, 0) + 1))
    assert sum(event.waits for event in events) == 10
    assert 10 * 0.002 <= ring.waited_s < 1.0
    assert _numbers(ring, drain=True) == [11, 12]


def test_nothing_is_waited_for_on_the_cpu() -> None:
    ring = ResultRing(slots=4, lanes=4, run_ahead=1)
    for _ in range(6):
        _launch(ring)
        ring.ready(drain=False)
    assert ring.waited_s == 0.0
