"""Whether the service lives: when it was last heard, whether it is silent past the time-out, and whether it said that it stops."""

from __future__ import annotations

import time

from rollout.errors import RolloutError, ServerUnavailable, ServiceStopping
from rollout.wire.security import missing_socket

# How long a call waits for a service that has been silent past the time-out, or has said that it stops.
PROBE_S = 0.5


class Liveness:
    """See the module. Units: `last_heard` in seconds of the monotonic clock."""

    __slots__ = ("_address", "_timeout_s", "last_heard", "silent", "stopped")

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self.last_heard = time.monotonic()
        self.silent = False
        self.stopped: RolloutError | None = None

    @property
    def in_doubt(self) -> bool:
        """Whether an answer is not to be expected."""
        return self.silent or self.stopped is not None

    @property
    def is_gone(self) -> bool:
        """Whether a service that is silent or stopped has no socket any more, so that nothing can be answered."""
        return self.in_doubt and missing_socket(self._address) is not None

    @property
    def wait_s(self) -> float:
        """How long anybody waits for a sign of life: once it failed to come, later calls only look whether it is back."""
        return min(PROBE_S, self._timeout_s) if self.in_doubt else self._timeout_s

    def heard(self) -> None:
        """Take note of a message."""
        self.last_heard, self.silent = time.monotonic(), False

    def look(self, now: float) -> None:
        """Find out whether the service is silent by now."""
        self.silent = self.silent or now - self.last_heard > self._timeout_s

    def overdue(self, now: float, since: float) -> RolloutError | None:
        """Return the error of a call that began at `since`, if it has waited long enough."""
        waited_s = now - max(self.last_heard, since)
        return self.no_answer(waited_s) if waited_s > self.wait_s else None

    def no_answer(self, waited_s: float) -> RolloutError:
        """Return the error for a call that waited in vain."""
        if self.stopped is not None:
            return ServiceStopping(
                f"the service at {self._address} has stopped", value=self._address, remedy="start it again, then call again"
            )
        quiet_s = time.monotonic() - self.last_heard
        known = f"; silent for {quiet_s:.1f} s before, so this call waited {waited_s:.1f} s only" if quiet_s > waited_s + PROBE_S else ""
        return ServerUnavailable(
            f"no answer from {self._address} within {waited_s:.1f} s",
            field="address",
            value=self._address,
            limit=f"timeout_s is {self._timeout_s:g}{known}",
            remedy="check that the service runs (python -m rollout check), then connect again",
        )
