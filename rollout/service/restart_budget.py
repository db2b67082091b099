"""How often a dead engine host is replaced, and how soon: a host that dies again and again must not do so for ever.

The supervisor asks at each death. Deaths count until a minute of *service* lies behind them, whatever time passed in loading:
a host was in service while it was ready, provided that it gave what it was asked for, or was asked for nothing. After a host
that was of no service the next one starts later, each time twice as late.
"""

from __future__ import annotations

WINDOW_S = 60.0
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 5.0


class RestartBudget:
    """Owns the deaths that count; see the module. `max_restarts` is how many of them are followed by another start."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._served_s = 0.0
        # Where in the service time each death lies.
        self._deaths: list[float] = []
        self._in_vain = 0

    @property
    def deaths(self) -> int:
        """How many deaths count now."""
        return len(self._deaths)

    def after_death(self, served_s: float | None) -> float | None:
        """Note the death of a host that was in service for so long, None for not at all; return how long the next start waits, None if
        there is to be none.
        """
        self._served_s += served_s or 0.0
        self._deaths = [death for death in self._deaths if self._served_s - death < WINDOW_S] + [self._served_s]
        self._in_vain = self._in_vain + 1 if served_s is None else 0
        if len(self._deaths) > self._max_restarts:
            return None
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self._in_vain - 1, 10)) if self._in_vain else 0.0
