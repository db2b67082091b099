"""Only time beyond a planned wait, and only enough of it, counts as a standstill."""

from __future__ import annotations

import time

from rollout.standstill import StandstillClock


def test_a_planned_wait_is_no_standstill_and_a_longer_one_is() -> None:
    clock = StandstillClock(1.0)
    start = time.monotonic()
    assert clock.stood_still(start + 5.0, 5.0) == 0.0
    assert clock.stood_still(start + 10.9, 5.0) == 0.0
    assert 2.9 < clock.stood_still(start + 18.9, 5.0) < 3.1
    assert clock.stood_still(start + 18.95, 0.0) == 0.0
    assert 3.9 < clock.stood_still(start + 22.9, 0.0) < 4.1


def test_a_wait_without_limit_says_nothing() -> None:
    clock = StandstillClock(1.0)
    assert clock.stood_still(time.monotonic() + 100.0, None) == 0.0
