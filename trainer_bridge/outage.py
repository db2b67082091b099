"""Telling a service that is away from a prompt that fails, and how long that may last.

`flight.GroupFlight` owns one `OutageWatch` and reports failures and successes to it; times are passed in. Invariant: an outage
begins with a failure by the service itself and ends with the next finished group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Codes by which the service says that it, and not the request, is at fault, and that asking again may help.
OUTAGE_CODES = frozenset({"needs_weights", "host_failed", "server_unavailable", "server_restarted", "busy", "unavailable"})
BUSY = "busy"
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 1.0
MAX_RENEWALS = 3


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside (nested) groups, or the exception itself."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error


def outage_code(error: BaseException) -> str | None:
    """Return the code by which an error says that the service is away, None for every other error."""
    for leaf in leaves(error):
        for name in ("code", "reason_code", "outage"):
            code = getattr(leaf, name, None)
            if isinstance(code, str) and code in OUTAGE_CODES:
                return code
    return None


@dataclass(slots=True, kw_only=True)
class OutageWatch:
    """The outage under way, if any. Units: seconds; moments are of one monotonic clock."""

    limit_s: float
    code: str | None = None
    error: BaseException | None = None
    since: float = 0.0
    latest: float = 0.0
    waves: int = 0
    renewals: int = 0

    def fail(self, code: str, error: BaseException, now: float) -> None:
        """Note a failure by the service."""
        if self.code is None:
            self.since = now
        elif now - self.latest > self.limit_s and self.renewals < MAX_RENEWALS:
            # Groups have been running that long without a failure: this is another outage, not the same one. Bounded, as
            # calls that need longer than the limit to fail look alike.
            self.since, self.waves = now, 0
            self.renewals += 1
        self.code, self.error, self.latest = code, error, now

    def end(self) -> None:
        """Note that a group finished: the service is there."""
        self.code = self.error = None
        self.waves = self.renewals = 0

    def next_delay(self) -> float:
        """Return how long to hold the prompts before they are tried again; doubles up to a bound."""
        delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.waves, 16))
        self.waves += 1
        return delay

    def is_too_long(self, *, waiting_since: float, in_flight: int) -> bool:
        """Return whether failures have gone on for the limit while somebody waited (and could have mended it)."""
        if self.code is None or self.latest - max(self.since, waiting_since) < self.limit_s:
            return False
        # A busy service that plays other groups is at work.
        return self.code != BUSY or not in_flight
