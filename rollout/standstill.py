"""Tells time in which a loop's process did not run (stopped, suspended, starved) from time that it waited.

Front and client measure leases and silence by it: a peer must not be blamed for what a process itself slept through.
"""

from __future__ import annotations

import time


class StandstillClock:
    """Asked at several points of each turn of a loop; `threshold_s` is what a turn may take without being one."""

    def __init__(self, threshold_s: float) -> None:
        self._threshold_s = threshold_s
        self._before = time.monotonic()

    def stood_still(self, now: float, planned_s: float | None) -> float:
        """Return the seconds since the last call beyond a planned wait, or 0.0 if they are few or the wait had no limit."""
        beyond = 0.0 if planned_s is None else now - self._before - planned_s
        self._before = now
        return beyond if beyond > self._threshold_s else 0.0
