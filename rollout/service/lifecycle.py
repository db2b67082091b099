"""Whether a service serves, drains or stops, and who may change that: signals, clients, the parent's death.

The front asks in its loop. A first SIGTERM or SIGINT lets running requests end for `drain_s` seconds while new ones are
refused; a second one, or `stop`, ends the loop at once. Invariant: a phase only moves forward.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import signal
import socket
import time
from collections.abc import Iterator

log = logging.getLogger("rollout.front")


class Phase(enum.Enum):
    """Where a service stands; STOPPING is terminal."""

    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


class Lifecycle:
    """Owns the phase and the pipe that wakes the loop; see the module."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self.phase = Phase.SERVING
        self._deadline = 0.0
        self._told = False
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)

    @property
    def wake_fd(self) -> int:
        """Becomes readable when the loop is to look around."""
        return self._wake_in.fileno()

    @property
    def is_over(self) -> bool:
        """Whether the loop is to end."""
        return self.phase is Phase.STOPPING

    @property
    def refuses(self) -> bool:
        """Whether nothing new is taken."""
        return self.phase is not Phase.SERVING

    def wake(self) -> None:
        """Get the loop out of its sleep; from any thread."""
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    def awake(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)

    def stop(self) -> None:
        """End the loop soon; from any thread."""
        self.phase = Phase.STOPPING
        self.wake()

    def drain(self) -> None:
        """Refuse what is new and let the rest end within `drain_s`; asked again, stop."""
        if self.phase is Phase.SERVING and self._drain_s > 0:
            self._deadline = time.monotonic() + self._drain_s
            self.phase = Phase.DRAINING
        else:
            self.phase = Phase.STOPPING

    def advance(self, now: float, *, idle: bool) -> float | None:
        """Stop when a drain is done or too late; return when to look again."""
        if self.phase is not Phase.DRAINING:
            return None
        if not self._told:
            # Not in the signal's handler, which may have interrupted another line.
            self._told = True
            log.info("draining for up to %.1f s; a second signal stops at once", self._deadline - now)
        if idle or now >= self._deadline:
            self.phase = Phase.STOPPING
            return now
        return self._deadline

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT drain, then stop; the pipe gets poll out of its sleep."""

        def asked(number: int, frame: object) -> None:
            self.drain()

        wake_before = signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wake_before)

    def close(self) -> None:
        """Close the pipe."""
        self._wake_in.close()
        self._wake_out.close()
