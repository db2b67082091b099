"""The memory that the ranks of one engine share: control words, a ring of records, answers, and a place for bulk data.

One anonymous file that followers inherit by descriptor, so that nothing is left on disk whoever is killed when. A word is an
aligned 64-bit number with one writer: header words belong to the first rank, a rank's words to that rank.

    header | a block of words for each rank | areas of each rank | ring of records | bulk slots

No torch; owners of the protocol in it are `log.py` (ring), `answers.py` (areas) and `watch.py` (beats and phases).
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import time
from dataclasses import dataclass

from areno.ranks.codec import broken_log

LAYOUT = 1
MAGIC = int.from_bytes(b"arenolog", "little")
BLOCK_BYTES = 4096
BULK_SLOTS = 2
BROADCAST = -1
"""Stands for a bulk slot where the bytes come by a broadcast of the group."""
_WORDS = BLOCK_BYTES // 8


class Head(enum.IntEnum):
    """Header words. WRITTEN counts records, ENTRIES whole entries, LAUNCHES the launches among them; BEAT is in nanoseconds."""

    MAGIC = 0
    LAYOUT = 1
    WORLD = 2
    NUM_RECORDS = 3
    BULK_BYTES = 4
    WRITTEN = 8
    ENTRIES = 9
    LAUNCHES = 10
    BEAT = 11


class Own(enum.IntEnum):
    """Words of one rank: what it has read and done, whether it waits in its event, its answer, its state, its last words."""

    PID = 0
    PHASE = 1
    BEAT = 2
    READ = 3
    DONE = 4
    LAUNCHES = 5
    WAITS = 6
    ANSWERED = 8
    ANSWER_BYTES = 9
    CHECKED = 10
    STATE_BYTES = 11
    LAST_WORDS = 12


class Phase(enum.IntEnum):
    """How far a rank is; ENDED and FAILED are final."""

    STARTING = 0
    ATTACHED = 1
    CONNECTING = 2
    RUNNING = 3
    ENDED = 4
    FAILED = 5


class Area(enum.IntEnum):
    """Byte areas of a rank; the value is its index in `_AREA_BYTES`."""

    ANSWER = 0
    STATE = 1
    LAST_WORDS = 2


_AREA_BYTES = (1 << 20, 1 << 18, BLOCK_BYTES)
_AREA_OFFSETS = (0, 1 << 20, (1 << 20) + (1 << 18))
_RANK_AREA_BYTES = sum(_AREA_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSizes:
    """Number of ranks, of records of `BLOCK_BYTES` each in the ring, and bytes of a bulk slot. Memory is taken as it is used."""

    world: int
    num_records: int = 1024
    bulk_bytes: int = 16 << 20

    @property
    def areas_at(self) -> int:
        """Offset of the ranks' areas."""
        return BLOCK_BYTES * (1 + self.world)

    @property
    def ring_at(self) -> int:
        """Offset of the ring."""
        return self.areas_at + _RANK_AREA_BYTES * self.world

    @property
    def bulk_at(self) -> int:
        """Offset of the bulk slots."""
        return self.ring_at + BLOCK_BYTES * self.num_records

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.bulk_at + BULK_SLOTS * self.bulk_bytes


class LogSegment:
    """The mapped segment. `fd` is inherited by followers; `close` gives the mapping back."""

    def __init__(self, fd: int, sizes: SegmentSizes) -> None:
        self.fd, self.sizes = fd, sizes
        self._map = mmap.mmap(fd, sizes.total)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[: BLOCK_BYTES * (1 + sizes.world)].cast("Q")

    @classmethod
    def create(cls, sizes: SegmentSizes) -> LogSegment:
        """Return a new segment."""
        fd = os.memfd_create("areno-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, sizes.total)
        # A segment that shrank under a reader would end it by a signal.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        segment = cls(fd, sizes)
        given = {
            Head.MAGIC: MAGIC,
            Head.LAYOUT: LAYOUT,
            Head.WORLD: sizes.world,
            Head.NUM_RECORDS: sizes.num_records,
            Head.BULK_BYTES: sizes.bulk_bytes,
            Head.BEAT: time.monotonic_ns(),
        }
        for word, value in given.items():
            segment.set_head(word, value)
        return segment

    @classmethod
    def attach(cls, fd: int) -> LogSegment:
        """Return the segment behind an inherited descriptor. Raises: EngineFailure where it is none, or of another layout."""
        size = os.fstat(fd).st_size
        head = memoryview(os.pread(fd, BLOCK_BYTES, 0)).cast("Q") if size >= BLOCK_BYTES else None
        if head is None or head[Head.MAGIC] != MAGIC or head[Head.LAYOUT] != LAYOUT:
            raise broken_log("what was inherited is no segment of this layout")
        sizes = SegmentSizes(world=head[Head.WORLD], num_records=head[Head.NUM_RECORDS], bulk_bytes=head[Head.BULK_BYTES])
        if size != sizes.total:
            raise broken_log(f"the segment has {size} bytes, its header says {sizes.total}")
        return cls(fd, sizes)

    def head(self, word: Head) -> int:
        """Return a header word."""
        return self._words[word]

    def set_head(self, word: Head, value: int) -> None:
        """Store a header word; only the first rank does."""
        self._words[word] = value

    def own(self, rank: int, word: Own) -> int:
        """Return a word of a rank."""
        return self._words[_WORDS * (1 + rank) + word]

    def set_own(self, rank: int, word: Own, value: int) -> None:
        """Store a word of a rank; only that rank does."""
        self._words[_WORDS * (1 + rank) + word] = value

    def area(self, rank: int, area: Area) -> memoryview:
        """Return an area of a rank."""
        begin = self.sizes.areas_at + _RANK_AREA_BYTES * rank + _AREA_OFFSETS[area]
        return self._bytes[begin : begin + _AREA_BYTES[area]]

    def record(self, number: int) -> memoryview:
        """Return the place of a record in the ring, by its number from 0."""
        begin = self.sizes.ring_at + BLOCK_BYTES * (number % self.sizes.num_records)
        return self._bytes[begin : begin + BLOCK_BYTES]

    def bulk(self, slot: int) -> memoryview:
        """Return a bulk slot."""
        begin = self.sizes.bulk_at + self.sizes.bulk_bytes * slot
        return self._bytes[begin : begin + self.sizes.bulk_bytes]

    def say_last_words(self, rank: int, text: str) -> None:
        """Leave the reason of a rank's end, cut to what fits."""
        area = self.area(rank, Area.LAST_WORDS)
        encoded = text.encode("utf-8", "replace")[: len(area)]
        area[: len(encoded)] = encoded
        self.set_own(rank, Own.LAST_WORDS, len(encoded))

    def last_words(self, rank: int) -> str:
        """Return the reason that a rank left, or nothing."""
        size = min(self.own(rank, Own.LAST_WORDS), BLOCK_BYTES)
        return bytes(self.area(rank, Area.LAST_WORDS)[:size]).decode("utf-8", "replace")

    def close(self) -> None:
        """Give the mapping and the descriptor back; nothing may use the segment any more."""
        # Views that somebody still holds keep the mapping until they go.
        with contextlib.suppress(BufferError):
            self._words.release()
            self._bytes.release()
            self._map.close()
        os.close(self.fd)
