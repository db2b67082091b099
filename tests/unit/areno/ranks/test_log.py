"""The ring: order, entries longer than a record or the whole ring, both bounds on the writer, sleep, and damage."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from areno.commands import ClearPages, DecodeLaunch
from areno.errors import EngineFailure
from areno.ranks.log import RECORD_PAYLOAD, LogReader, LogWriter
from areno.ranks.operations import PublishUpdate
from areno.ranks.segment import BLOCK_BYTES, Head, LogSegment, Own, SegmentSizes
from areno.sampling.variant import Variant

LAUNCH = DecodeLaunch(bucket=4, longest=9, seats=np.arange(4), generations=np.ones(4, np.int32), variant=Variant(noise=True))


class Ring:
    """A writer and its readers in one process."""

    def __init__(self, *, readers: int = 1, num_records: int = 8, launches_ahead: int = 2) -> None:
        self.segment = LogSegment.create(SegmentSizes(world=readers + 1, num_records=num_records, bulk_bytes=4096))
        self.lost: EngineFailure | None = None
        self.events = {rank: os.eventfd(0, os.EFD_NONBLOCK) for rank in range(1, readers + 1)}
        self.writer = LogWriter(self.segment, self.events, launches_ahead=launches_ahead, check=self.check)
        self.readers = [LogReader(LogSegment.attach(os.dup(self.segment.fd)), rank, event) for rank, event in self.events.items()]

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        for event in self.events.values():
            os.close(event)
        for reader in self.readers:
            reader._segment.close()
        self.segment.close()


@pytest.fixture
def rings() -> Iterator[list[Ring]]:
    made: list[Ring] = []
    yield made
    for ring in made:
        ring.close()


def make(rings: list[Ring], **options: int) -> Ring:
    rings.append(Ring(**options))
    return rings[-1]


def take(reader: LogReader) -> ClearPages:
    message = reader.next(2.0)
    assert message is not None
    reader.executed(message)
    assert isinstance(message.entry, ClearPages)
    return message.entry


@pytest.mark.timeout(20)
def test_readers_follow_in_order_through_many_turns_of_the_ring(rings: list[Ring]) -> None:
    ring = make(rings, readers=2)
    for number in range(40):
        assert ring.writer.append(ClearPages(pages=np.full(number, number))) == number + 1
        for reader in ring.readers:
            assert take(reader).pages.tolist() == [number] * number
    assert ring.readers[0].next(0.0) is None
    assert ring.writer.executed(40) and not ring.writer.executed(41)


@pytest.mark.timeout(20)
def test_an_entry_longer_than_the_ring_goes_through_while_it_is_read(rings: list[Ring]) -> None:
    ring = make(rings, num_records=4)
    pages = np.arange(10 * RECORD_PAYLOAD // 8)
    got: list[ClearPages] = []
    thread = threading.Thread(target=lambda: got.append(take(ring.readers[0])))
    thread.start()
    ring.writer.append(ClearPages(pages=pages))
    thread.join(10)
    assert np.array_equal(got[0].pages, pages)


@pytest.mark.timeout(20)
def test_the_writer_waits_for_the_slowest_reader_and_writes_nothing_over(rings: list[Ring]) -> None:
    ring = make(rings, readers=2, num_records=4)
    entries = [ClearPages(pages=np.array([number])) for number in range(9)]
    thread = threading.Thread(target=lambda: [ring.writer.append(entry) for entry in entries])
    thread.start()
    fast, slow = ring.readers
    assert [take(fast).pages[0] for _ in range(4)] == [0, 1, 2, 3]
    assert fast.next(0.1) is None, "the writer passed a reader that has read nothing"
    assert [take(slow).pages[0] for _ in range(8)] == list(range(8))
    assert slow.next(0.1) is None, "the writer passed the other reader"
    assert [take(fast).pages[0] for _ in range(5)] == [4, 5, 6, 7, 8]
    assert take(slow).pages[0] == 8
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.timeout(20)
def test_no_launch_is_appended_beyond_the_bound(rings: list[Ring]) -> None:
    ring = make(rings, launches_ahead=2)
    thread = threading.Thread(target=lambda: [ring.writer.append(LAUNCH) for _ in range(6)])
    thread.start()
    reader = ring.readers[0]
    for done in range(6):
        time.sleep(0.05)
        assert ring.segment.head(Head.LAUNCHES) == min(done + 3, 6), "three launches are in the log before the first is done"
        message = reader.next(2.0)
        assert message is not None and isinstance(message.entry, DecodeLaunch)
        reader.executed(message)
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.timeout(20)
def test_a_writer_that_finds_a_reader_lost_raises_instead_of_waiting(rings: list[Ring]) -> None:
    ring = make(rings, launches_ahead=0)
    ring.writer.append(LAUNCH)
    threading.Timer(0.1, lambda: setattr(ring, "lost", EngineFailure("rank 1 is lost"))).start()
    with pytest.raises(EngineFailure, match="rank 1 is lost"):
        ring.writer.append(LAUNCH)


@pytest.mark.timeout(20)
def test_a_reader_that_waits_sleeps_and_is_woken(rings: list[Ring]) -> None:
    ring = make(rings)
    delays: list[float] = []
    spent: list[float] = []

    def follow() -> None:
        before = resource.getrusage(resource.RUSAGE_THREAD)
        for _ in range(5):
            message = ring.readers[0].next()
            assert message is not None and isinstance(message.entry, PublishUpdate)
            delays.append(time.monotonic() - message.entry.version / 1e9)
            ring.readers[0].executed(message)
        after = resource.getrusage(resource.RUSAGE_THREAD)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    thread = threading.Thread(target=follow)
    thread.start()
    for _ in range(5):
        time.sleep(0.2)
        ring.writer.append(PublishUpdate(version=time.monotonic_ns()))
    thread.join(10)
    assert sorted(delays)[2] < 0.03, f"it slept on for {delays} s"
    assert spent[0] < 0.3, f"it used {spent[0]:.2f} s of a core in 1 s of waiting"


@pytest.mark.timeout(20)
def test_a_damaged_record_is_refused(rings: list[Ring]) -> None:
    ring = make(rings)
    ring.writer.append(ClearPages(pages=np.arange(5)))
    ring.segment.record(0)[40] ^= 1
    with pytest.raises(EngineFailure, match="record 1 is not what its checksum says"):
        ring.readers[0].next(1.0)


def test_a_descriptor_of_something_else_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, BLOCK_BYTES)
    with pytest.raises(EngineFailure, match="no segment of this layout"):
        LogSegment.attach(fd)
    os.close(fd)
    segment = LogSegment.create(SegmentSizes(world=2, num_records=4, bulk_bytes=64))
    segment.set_head(Head.NUM_RECORDS, 5)
    with pytest.raises(EngineFailure, match="its header says"):
        LogSegment.attach(segment.fd)
    segment.say_last_words(1, "ä" * 5000)
    assert len(segment.last_words(1)) > 2000 and segment.own(1, Own.LAST_WORDS) == BLOCK_BYTES
    segment.close()
