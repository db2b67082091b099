"""The ordered log in the ring: the first rank appends, each other rank follows by sequence number.

An entry takes one record or several. A reader gives a record back as soon as it has copied it, so that an entry may be longer
than the ring. Two bounds hold the writer back: no record is written over that some reader has not read, and no launch is
appended while a reader is more than `launches_ahead` launches behind. A reader spins for a moment, then sleeps in its event.

Invariant: entries are executed on every rank in the order of the log, each once.
"""

from __future__ import annotations

import os
import select
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from areno.commands import DecodeLaunch, PrefillLaunch
from areno.ranks.codec import broken_log, pack, unpack
from areno.ranks.operations import Entry
from areno.ranks.segment import BLOCK_BYTES, Head, LogSegment, Own

# sequence number, checksum, length, kind, whether it ends its entry
_RECORD = struct.Struct("<QIIHH")
RECORD_PAYLOAD = BLOCK_BYTES - _RECORD.size
SPIN_S = 50e-6
_SLEEPS_MS = 50
_LOOK_AGAIN_S = 0.05


def is_launch(entry: Entry) -> bool:
    """Whether an entry counts as a launch."""
    return isinstance(entry, PrefillLaunch | DecodeLaunch)


class LogWriter:
    """The first rank's end. `events` wake readers by rank; `check` raises when a rank is lost, and is asked while waiting.

    `waited_s` adds up the time in which readers that were behind held the writer back. `torn` says that an entry was begun and not
    finished: an interrupt may come between any two steps, and readers count on what this end no longer knows.
    """

    def __init__(self, segment: LogSegment, events: Mapping[int, int], *, launches_ahead: int, check: Callable[[], None]) -> None:
        self._segment, self._events, self._check = segment, events, check
        self.launches_ahead = launches_ahead
        self._written = self._entries = self._launches = 0
        self.waited_s = 0.0
        self.torn = False

    @property
    def entries(self) -> int:
        """Number of the newest entry, counted from 1."""
        return self._entries

    def append(self, entry: Entry) -> int:
        """Append an entry and return its number. Blocks: while a reader is too far behind. Raises: what `check` raises."""
        self._check()
        launch = is_launch(entry)
        if launch:
            self._hold_back(lambda: self._slowest(Own.LAUNCHES) >= self._launches - self.launches_ahead)
        kind, body = pack(entry)
        self.torn = True
        for begin in range(0, max(len(body), 1), RECORD_PAYLOAD):
            self._write(kind, body[begin : begin + RECORD_PAYLOAD], last=begin + RECORD_PAYLOAD >= len(body))
        self._entries += 1
        self._launches += launch
        self._segment.set_head(Head.ENTRIES, self._entries)
        self._segment.set_head(Head.LAUNCHES, self._launches)
        self.torn = False
        self._wake()
        return self._entries

    def executed(self, number: int) -> bool:
        """Whether every rank has executed the entry of this number."""
        return self._slowest(Own.DONE) >= number

    def wait(self, reached: Callable[[], bool], *, spin_s: float = SPIN_S) -> None:
        """Wait until something is true, for `spin_s` without sleeping. Blocks. Raises: what `check` raises."""
        self._wake()
        started, pause_s = time.perf_counter(), SPIN_S
        while not reached():
            self._check()
            if time.perf_counter() - started > spin_s:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1e-3)

    def _hold_back(self, may_go_on: Callable[[], bool]) -> None:
        """Wait for readers that are too far behind, and count the time."""
        if may_go_on():
            return
        started = time.perf_counter()
        self.wait(may_go_on)
        self.waited_s += time.perf_counter() - started

    def _write(self, kind: int, payload: bytes, *, last: bool) -> None:
        room = self._segment.sizes.num_records
        self._hold_back(lambda: self._written - self._slowest(Own.READ) < room)
        record = self._segment.record(self._written)
        record[_RECORD.size : _RECORD.size + len(payload)] = payload
        self._written += 1
        _RECORD.pack_into(record, 0, self._written, zlib.crc32(payload), len(payload), kind, last)
        self._segment.set_head(Head.WRITTEN, self._written)

    def _slowest(self, word: Own) -> int:
        return min((self._segment.own(rank, word) for rank in self._events), default=self._written)

    def _wake(self) -> None:
        for rank, event in self._events.items():
            if self._segment.own(rank, Own.WAITS):
                os.eventfd_write(event, 1)


@dataclass(frozen=True, slots=True)
class Message:
    """An entry and its number."""

    number: int
    entry: Entry


class LogReader:
    """A follower's end. Mutates: its rank's words."""

    def __init__(self, segment: LogSegment, rank: int, event: int) -> None:
        self._segment, self._rank, self._event = segment, rank, event
        self._poll = select.poll()
        self._poll.register(event, select.POLLIN)
        self._read = self._done = self._launches = 0

    def next(self, timeout_s: float | None = None) -> Message | None:
        """Return the next entry, or None after `timeout_s`. Blocks. Raises: EngineFailure where the log is broken."""
        kind, parts = 0, []
        while True:
            if not self._await_record(timeout_s):
                return None
            kind, payload, last = self._take()
            parts.append(payload)
            if last:
                return Message(self._done + 1, unpack(kind, parts[0] if len(parts) == 1 else b"".join(parts)))
            # The rest of an entry is on its way.
            timeout_s = None

    def executed(self, message: Message) -> None:
        """Tell that the entry is done; called once for each, in order."""
        assert message.number == self._done + 1, "entries are executed in order, each once"
        self._done = message.number
        if is_launch(message.entry):
            self._launches += 1
            self._segment.set_own(self._rank, Own.LAUNCHES, self._launches)
        self._segment.set_own(self._rank, Own.DONE, self._done)

    def _await_record(self, timeout_s: float | None) -> bool:
        segment, started = self._segment, time.perf_counter()
        while segment.head(Head.WRITTEN) <= self._read:
            waited_s = time.perf_counter() - started
            if timeout_s is not None and waited_s >= timeout_s:
                return False
            if waited_s < SPIN_S:
                continue
            segment.set_own(self._rank, Own.WAITS, 1)
            # Looks once more now that the writer would wake it; what slips through all the same costs one time-out of the poll.
            if segment.head(Head.WRITTEN) <= self._read and self._poll.poll(_SLEEPS_MS):
                os.eventfd_read(self._event)
            segment.set_own(self._rank, Own.WAITS, 0)
        return True

    def _take(self) -> tuple[int, bytes, bool]:
        record = self._segment.record(self._read)
        deadline = time.perf_counter() + _LOOK_AGAIN_S
        while True:
            number, checksum, length, kind, last = _RECORD.unpack_from(record)
            payload = bytes(record[_RECORD.size : _RECORD.size + min(length, RECORD_PAYLOAD)])
            if number == self._read + 1 and zlib.crc32(payload) == checksum:
                break
            # A processor may show the count before the bytes that it counts.
            if time.perf_counter() > deadline:
                raise broken_log(f"record {self._read + 1} is not what its checksum says, it calls itself {number}")
        self._read += 1
        self._segment.set_own(self._rank, Own.READ, self._read)
        return kind, payload, bool(last)
