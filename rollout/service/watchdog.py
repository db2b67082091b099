"""Looks at the accounts all the time: do the counters reconcile, and which request has waited longest for progress.

The front calls it once a second while requests are live. A discrepancy or a stall never stops anything: it is logged, counted
and exported, so that an operator hears of a lost request from its counter and not from its client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rollout.service.ledger import Ledger
from rollout.service.records import Record

log = logging.getLogger("rollout.front")
CHECK_S = 1.0


class Watchdog:
    """See the module. `stage_of` says in words where a request stands; `stall_s` is when that is worth a line in the log."""

    def __init__(self, ledger: Ledger, stage_of: Callable[[Record], str], stall_s: float) -> None:
        self._ledger, self._stage_of, self._stall_s = ledger, stage_of, stall_s
        self._due = 0.0
        self._told_at = float("-inf")
        self._was_busy = False
        self.accounting_errors = 0

    def advance(self, now: float) -> float | None:
        """Check what is due; return when to look again, None while nothing is live."""
        busy = bool(self._ledger.live or self._ledger.deciding)
        if busy and now < self._due:
            return self._due
        if busy or self._was_busy:
            self._check(thorough=not busy)
            self._tell_stall(now)
        self._was_busy, self._due = busy, now + CHECK_S
        return self._due if busy else None

    def _check(self, *, thorough: bool) -> None:
        """Compare the counters; every row and page as well where the service has just become idle."""
        try:
            self._ledger.check_counters()
            if thorough:
                self._ledger.check_integrity()
        except AssertionError as error:
            self.accounting_errors += 1
            log.error("the accounts do not reconcile: %s", error)

    def _tell_stall(self, now: float) -> None:
        """Log a stall. A long queue is none: requests without a token count only while nobody at all gets one."""
        if now - self._told_at < self._stall_s:
            return
        moving = now - self._ledger.last_progress < self._stall_s
        seconds, what = self._longest(now, begun=moving)
        if seconds >= self._stall_s:
            self._told_at = now
            log.warning("no progress for %.1f s: %s", seconds, what)

    def oldest(self, now: float) -> tuple[float, str]:
        """Return the longest time without progress and whose it is, request and stage; 0 and "" without requests."""
        return self._longest(now, begun=False)

    def _longest(self, now: float, *, begun: bool) -> tuple[float, str]:
        record, since = self._ledger.least_recent(begun=begun)
        if record is None:
            return 0.0, ""
        return max(0.0, now - since), f"request {record.request_id.hex()} of client #{record.session}: {self._stage_of(record)}"
