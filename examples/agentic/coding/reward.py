"""What a repair is worth: the share of its cases, a little less for each attempt that did not do."""

from __future__ import annotations

COST_OF_ATTEMPT = 0.1


def reward(passed: int, cases: int, attempts: int) -> float:
    """Return the worth of the best attempt; `attempts` counts all. A repair at once is worth 1, nothing repaired 0."""
    if not passed:
        return 0.0
    full = 1.0 if passed == cases else 0.5
    return max(0.0, full * passed / cases - COST_OF_ATTEMPT * (attempts - 1))
