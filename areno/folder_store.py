"""The store in which the ranks of one host find each other: keys are files of a folder, written whole or not at all.

torch's own FileStore locks its one file for every call, and waits for that lock inside its constructor with the interpreter's lock held.
A rank that stands still while it has the file's lock, stopped or swapped out, then holds up every thread of the others, the one that
watches over the ranks among them, for as long as it stands still. Here nothing is locked, and every wait has an end.

Invariant: a process that ends or stands still anywhere in here leaves all keys readable, and no other process waits for it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
_SOON_S, _LATER_S = 0.001, 0.02
_temporary = itertools.count()


class FolderStore(dist.Store):
    """A store of torch.distributed over `folder`, which is made, for its user alone, where it is not there. See the module.

    It must have been empty when the first of the ranks came. `given_up`, once set, ends all waits. Methods raise dist.DistStoreError,
    a RuntimeError.
    """

    def __init__(self, folder: Path, timeout: datetime.timedelta, given_up: threading.Event | None = None) -> None:
        super().__init__()
        self._folder, self._timeout, self._given_up = folder, timeout, given_up or threading.Event()
        self.set_timeout(timeout)
        with self._told():
            folder.mkdir(mode=0o700, exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key, for all to see at once."""
        with self._told(), self._written(value.encode() if isinstance(value, str) else value) as made:
            made.replace(self._file(key))

    def get(self, key: str) -> bytes:
        """Return what a key was set to. Blocks: until it is there, at most the time-out."""
        found = self._until(lambda: self._read(key), f"{key!r} was not set", self._timeout)
        return b"" if found is None else found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0, and return it; `get` does not tell of counters."""
        number, total = 0, amount
        with self._told():
            while True:
                while (last := self._read(f"{key}\n{number + 1}")) is not None:
                    number, total = number + 1, int(last) + amount
                # Whoever makes the next file of the row has counted.
                with self._written(str(total).encode()) as made, contextlib.suppress(FileExistsError):
                    os.link(made, self._file(f"{key}\n{number + 1}"))
                    return total

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return all(self._file(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are set. Blocks: at most that long, by default the store's time-out."""
        self._until(lambda: True if self.check(keys) else None, f"not all of {list(keys)} were set", timeout or self._timeout)

    def _until(self, look: Callable[[], T | None], missing: str, timeout: datetime.timedelta) -> T | None:
        deadline, pause_s = time.monotonic() + timeout.total_seconds(), _SOON_S
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"{missing} within {timeout.total_seconds():g} s")
            if self._given_up.wait(pause_s):
                raise dist.DistStoreError(f"{missing} before the meeting was given up")
            pause_s = min(2 * pause_s, _LATER_S)
        return found

    def _file(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()

    def _read(self, key: str) -> bytes | None:
        try:
            return self._file(key).read_bytes()
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _written(self, content: bytes) -> Iterator[Path]:
        """Yield a file that no key has yet."""
        made = self._folder / f"{os.getpid()}-{next(_temporary)}"
        try:
            made.write_bytes(content)
            yield made
        finally:
            made.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Tell what the file system says as an error of a store."""
        try:
            yield
        except OSError as error:
            raise dist.DistStoreError(f"the store at {self._folder}: {error}") from error
