"""Ctrl-C and SIGTERM as an ordinary end of a run: the first one stops the training, none disturbs the clearing up.

`train.py` makes one, arms it around the training, and asks it for the exit code. Invariant: a signal raises at most once, and only
while armed; otherwise it is remembered.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop."""


class Interrupts:
    """Takes over SIGINT and SIGTERM of the process. Mutates: its signal handlers."""

    def __init__(self) -> None:
        self._armed = False
        self._number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._number is None:
            self._number = number
        if self._armed:
            self._armed = False
            raise Interrupted

    def arm(self) -> None:
        """Let a signal raise `Interrupted` from now on. Raises: Interrupted when one came before."""
        if self._number is not None:
            raise Interrupted
        self._armed = True

    @contextlib.contextmanager
    def until_here(self) -> Iterator[None]:
        """Disarm when the block ends, so that what ends around it is not cut short."""
        try:
            yield
        finally:
            self._armed = False

    @property
    def exit_code(self) -> int:
        """Return the process's exit code: 0, or 128 and the signal's number."""
        return 0 if self._number is None else 128 + self._number
