"""Readers in event loops and threads are given each token of their streams once, in order, however news and they come together."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time

import numpy as np
import pytest

from rollout.client.client import AsyncStream
from rollout.client.flush import Flush, read_flush
from rollout.client.loop_posts import LoopPosts
from rollout.client.parameters import Wants
from rollout.client.pending import DeltaCursor, StreamRecord
from rollout.client.roster import Changes, Roster
from rollout.errors import RolloutError
from rollout.wire.generation_messages import Deltas

IDS = [bytes([number]) * 16 for number in range(1, 9)]


class Quiet:
    """A connection that notes what was abandoned."""

    def __init__(self) -> None:
        self.abandoned: list[StreamRecord] = []

    def abandon(self, record: StreamRecord) -> None:
        self.abandoned.append(record)

    def check_process(self) -> None:
        """This is no forked child."""


class Desk:
    """The part of the I/O thread that takes flushes."""

    def __init__(self, *, streams: int) -> None:
        self.coming, self.listening, self.posts = Changes(), Changes(), LoopPosts()
        self.roster = Roster(self.coming, self.listening)
        self.connection = Quiet()
        prompt, wants = np.array([1], np.int32), Wants(logprobs=True, kept_ids=False)
        self.records = {one: StreamRecord(one, [], 0.0, prompt_ids=prompt, wants=wants, listening=self.listening) for one in IDS[:streams]}

    def stream(self, place: int) -> AsyncStream:
        return AsyncStream(self.connection, self.records[IDS[place]])  # type: ignore[arg-type]

    def flush(self, *parts: tuple[int, int, int], behaviour: float = float("nan")) -> None:
        """Take a flush of (stream, first token, how many); a token's id is its number."""
        counts = np.array([count for _, _, count in parts], np.int32)
        ids = np.concatenate([np.arange(first, first + count, dtype=np.int32) for _, first, count in parts])
        arrays = {
            "request_ids": np.frombuffer(b"".join(IDS[place] for place, _, _ in parts), np.uint8).reshape(-1, 16),
            "offsets": np.array([first for _, first, _ in parts], np.int64),
            "counts": counts,
            "token_ids": ids,
            "logprobs": -ids.astype(np.float32),
            "raw_logprobs": -ids.astype(np.float32),
            "behaviour_logprobs": np.full(ids.size, behaviour, np.float32),
            "version_values": np.zeros(1, np.int64),
            "version_counts": np.array([ids.size], np.int64),
        }
        flush = read_flush(arrays, Deltas(seq=1))
        assert isinstance(flush, Flush)
        self.roster.look_up(flush.ids, self.records.get)
        firsts, _ = self.roster.take(flush)
        self.posts.tell_flush(self.roster, flush, firsts)

    def turn(self) -> None:
        self.posts.send()


async def waiting(*streams: AsyncStream) -> list[asyncio.Task[list[int]]]:
    """Return tasks that wait for the next delta of each stream."""

    async def next_ids(stream: AsyncStream) -> list[int]:
        return list((await anext(stream)).ids)

    tasks = [asyncio.create_task(next_ids(stream)) for stream in streams]
    await asyncio.sleep(0)
    return tasks


def test_readers_that_wait_are_given_the_tokens_of_a_flush_and_those_that_lag_one_larger_delta() -> None:
    desk = Desk(streams=3)

    async def run() -> None:
        streams = [desk.stream(place) for place in range(3)]
        tasks = await waiting(*streams[:2])
        desk.flush((0, 0, 1), (1, 0, 2), (2, 0, 3))
        desk.turn()
        await asyncio.sleep(0)
        assert [task.result() for task in tasks] == [[0], [0, 1]], "they go on in the call that brings the tokens"
        tasks = await waiting(*streams)
        assert await tasks[2] == [0, 1, 2], "it had not begun to wait when they came"
        desk.flush((0, 1, 1), (1, 2, 1))
        desk.turn()
        desk.flush((0, 2, 1), (2, 3, 1))
        desk.turn()
        await asyncio.sleep(0)
        assert [task.result() for task in tasks[:2]] == [[1, 2], [2]]
        desk.flush((0, 3, 1), (1, 3, 1))
        desk.flush((1, 4, 2))
        desk.turn()
        assert await asyncio.gather(*await waiting(*streams)) == [[3], [3, 4, 5], [3]]

    asyncio.run(run())


def test_what_overlaps_or_leaves_a_gap_or_has_another_behaviour_reaches_a_waiting_reader_as_its_record_has_it() -> None:
    desk = Desk(streams=1)

    async def run() -> None:
        stream = desk.stream(0)
        for flush, expected in (((0, 0, 3), [0, 1, 2]), ((0, 1, 4), [3, 4]), ((0, 5, 1), [5])):
            [task] = await waiting(stream)
            desk.flush((0, 9, 1))
            desk.turn()
            await asyncio.sleep(0)
            assert not task.done(), "a gap brings nothing"
            desk.flush(flush)
            desk.turn()
            assert await task == expected
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        desk.flush((0, 6, 2), behaviour=-0.5)
        desk.turn()
        delta = await reading
        assert delta.behaviour_logprobs is not None and delta.behaviour_logprobs.tolist() == [-0.5, -0.5]

    asyncio.run(run())


@pytest.mark.parametrize("sent_before", [False, True])
def test_a_reader_that_is_cancelled_leaves_its_tokens_to_the_next(sent_before: bool) -> None:
    desk = Desk(streams=1)

    async def run() -> None:
        stream = desk.stream(0)
        [task] = await waiting(stream)
        desk.flush((0, 0, 2))
        if sent_before:
            desk.turn()
        task.cancel()
        desk.turn()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert desk.connection.abandoned == [desk.records[IDS[0]]]
        desk.flush((0, 2, 1))
        desk.turn()
        assert list((await anext(stream)).ids) == [0, 1, 2]

    asyncio.run(run())


def test_a_reader_that_is_thrown_away_while_it_waits_leaves_its_tokens_to_the_next() -> None:
    desk = Desk(streams=1)

    async def run() -> None:
        stream = desk.stream(0)
        waits = stream.__anext__()
        waits.send(None)
        waits.close()
        desk.flush((0, 0, 2))
        desk.turn()
        await asyncio.sleep(0)
        assert list((await anext(stream)).ids) == [0, 1]

    asyncio.run(run())


def test_a_reader_goes_on_as_its_own_task_and_in_its_own_context() -> None:
    desk, name = Desk(streams=2), contextvars.ContextVar("name", default="")

    async def run() -> None:
        async def read(place: int) -> tuple[str, bool]:
            name.set(str(place))
            await anext(desk.stream(place))
            return name.get(), asyncio.current_task() is tasks[place]

        tasks = [asyncio.create_task(read(place)) for place in range(2)]
        await asyncio.sleep(0)
        desk.flush((0, 0, 1), (1, 0, 1))
        desk.turn()
        assert await asyncio.gather(*tasks) == [("0", True), ("1", True)]
        assert name.get() == "" and asyncio.current_task() is not None

    asyncio.run(run())


def test_an_interrupt_in_one_reader_keeps_no_other_from_its_tokens() -> None:
    desk, loop = Desk(streams=3), asyncio.new_event_loop()

    async def interrupted() -> None:
        await anext(desk.stream(1))
        raise KeyboardInterrupt

    async def next_ids(place: int) -> list[int]:
        return list((await anext(desk.stream(place))).ids)

    first, broken, last = (loop.create_task(one) for one in (next_ids(0), interrupted(), next_ids(2)))
    loop.run_until_complete(asyncio.sleep(0))
    desk.flush((0, 0, 1), (1, 0, 1), (2, 0, 1))
    desk.turn()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.sleep(1))
    assert loop.run_until_complete(asyncio.wait_for(asyncio.gather(first, last), 5)) == [[0], [0]]
    assert isinstance(broken.exception(), KeyboardInterrupt)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def test_a_loop_that_stands_still_keeps_one_flush_at_most() -> None:
    desk = Desk(streams=2)

    async def run() -> None:
        stream, other = desk.stream(0), desk.stream(1)
        tasks = await waiting(stream, other)
        for number in range(100):
            desk.flush((0, number, 1), (1, number, 1))
            desk.turn()
        [inbox] = desk.posts._inboxes.values()
        assert inbox._news is None and len(inbox._late) == 2
        assert [await task for task in tasks] == [list(range(100))] * 2
        desk.turn()
        assert not desk.posts._inboxes

    asyncio.run(run())


def test_streams_that_come_and_go_are_looked_up_again() -> None:
    desk = Desk(streams=3)
    seen = [DeltaCursor(record) for record in desk.records.values()]
    desk.flush((0, 0, 1), (1, 0, 1))
    gone = desk.records.pop(IDS[1])
    desk.coming.count()
    desk.flush((0, 1, 1), (1, 1, 1))
    desk.records[IDS[1]] = gone
    desk.coming.count()
    desk.flush((0, 2, 1), (1, 1, 1))
    desk.flush((1, 2, 1), (0, 3, 1), (2, 0, 1))
    assert [list(delta.ids) for cursor in seen if (delta := cursor.read())] == [[0, 1, 2, 3], [0, 1, 2], [0]]


def test_threads_that_begin_and_cease_to_listen_at_any_time_miss_nothing() -> None:
    """Each listens anew for every piece, as blocking streams do, while flushes come."""
    desk, total, missed = Desk(streams=4), 3000, []

    def read(record: StreamRecord) -> None:
        cursor, seen = DeltaCursor(record), 0
        while seen < total:
            woken = threading.Event()
            listener = record.listen(woken.set, each=True)
            while (delta := cursor.read()) is None:
                if not woken.wait(5):
                    missed.append(seen)
                    return
                woken.clear()
            record.unlisten(listener)
            if list(delta.ids) != list(range(seen, seen + len(delta.ids))):
                missed.append(seen)
            seen += len(delta.ids)

    threads = [threading.Thread(target=read, args=(record,)) for record in desk.records.values()]
    for thread in threads:
        thread.start()
    for number in range(total):
        desk.flush(*((place, number, 1) for place in range(4)))
        if number % 7 == 0:
            time.sleep(0)
    for thread in threads:
        thread.join(20)
    assert not missed and not any(thread.is_alive() for thread in threads)


def test_a_roster_lets_streams_go_that_ended() -> None:
    desk = Desk(streams=2)
    desk.flush((0, 0, 1), (1, 0, 1))
    desk.roster.let_go()
    assert len(desk.roster.records) == 2, "they still go on"
    ended = desk.records.pop(IDS[0])
    desk.coming.count()
    assert any(referrer is desk.roster.records for referrer in gc.get_referrers(ended))
    desk.roster.let_go()
    assert not desk.roster.records and not any(isinstance(one, (list, dict)) for one in gc.get_referrers(ended, ended._log))
    desk.flush((1, 1, 1))
    assert desk.records[IDS[1]].length == 2


@pytest.mark.parametrize("phase", range(3))
def test_a_stream_that_ends_before_its_reader_looks_or_waits_or_while_it_waits_ends_the_reader(phase: int) -> None:
    desk = Desk(streams=1)
    record = desk.records[IDS[0]]

    def end(now: int) -> None:
        if now == phase:
            record.error, record.done = RolloutError("over"), True
            desk.posts.tell(record)
            desk.turn()

    async def run() -> None:
        stream = desk.stream(0)
        end(0)
        task = asyncio.ensure_future(anext(stream))
        end(1)
        await asyncio.sleep(0)
        end(2)
        with pytest.raises(RolloutError, match="over"):
            await asyncio.wait_for(task, 5)

    asyncio.run(run())
