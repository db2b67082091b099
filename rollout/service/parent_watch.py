"""Notices the death of the process that started this one.

The parent holds the other end of our standard input and never writes to it, so its death, even by SIGKILL, reads as
end of file here. A forked child of the parent could keep that pipe open, so a changed parent pid counts as well.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

PARENT_PID_CHECK_S = 2.0


class ParentWatch:
    """A daemon thread that calls `on_death` once; the callback runs in that thread."""

    def __init__(self, on_death: Callable[[], None], pipe_fd: int = 0) -> None:
        self._on_death, self._fd = on_death, pipe_fd
        self._parent = os.getppid()
        threading.Thread(target=self._run, name="parent-watch", daemon=True).start()

    def _run(self) -> None:
        while os.getppid() == self._parent:
            readable, _, _ = select.select([self._fd], [], [], PARENT_PID_CHECK_S)
            if readable and not os.read(self._fd, 4096):
                break
        self._on_death()
