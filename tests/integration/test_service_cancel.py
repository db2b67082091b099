"""Cancel in every phase, interrupts, abandoned calls: exactly one ending, nothing after it, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import rollout
from rollout.service.calls import MAX_OPEN_CALLS
from rollout.wire.operations import Op
from tests.fakes import StreamReader, WireClient, fake_ids, fake_service
from tests.fixtures_models import write_checkpoint

LONG = 20_000


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with fake_service(tmp_path_factory.mktemp("model"), engine_options={"step_s": 0.002}, max_rows=2) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left(client: Any) -> Iterator[None]:
    yield
    wait_until(lambda: idle(client.stats()))


def idle(stats: dict[str, Any]) -> bool:
    ended = sum(stats[kind] for kind in ("stop", "length", "cancelled", "expired", "failed"))
    assert stats["received"] == stats["refused"] + stats["attached"] + stats["accepted"]
    assert stats["accepted"] == stats["live"] + ended
    gauges = ("live", "deciding", "unacknowledged_endings", "record_pages", "reserved_bytes", "open_calls", "waiting_for_host_or_version")
    return not any(stats[name] for name in gauges) and not stats["engine"]["running"] and not stats["engine"]["waiting"]


def wait_until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_cancel_in_decode_keeps_the_tokens_and_a_second_one_does_nothing(client: Any) -> None:
    stream = client.stream([1], max_new_tokens=LONG, seed=5)
    next(stream)
    assert client.cancel(stream.request_id).cancelled
    last = list(stream)[-1]
    generation = last.finished
    assert generation.finish_reason.kind == "cancelled"
    assert generation.ids.tolist() == fake_ids(5, len(generation.ids)).tolist()
    assert len(generation.logprobs) == len(generation.ids) > 0
    again = client.cancel(stream.request_id)
    assert not again.cancelled
    assert again.state in ("cancelled", "gone")


def test_cancel_while_waiting_ends_with_no_token(client: Any) -> None:
    running = [client.stream([1], max_new_tokens=LONG) for _ in range(2)]
    for stream in running:
        next(stream)
    waiting = client.stream([1], max_new_tokens=5)
    assert client.cancel(waiting.request_id).cancelled
    assert [len(delta.ids) for delta in waiting] == [0]
    for stream in running:
        client.cancel(stream.request_id)
        assert list(stream)[-1].finished.finish_reason.kind == "cancelled"


def test_cancel_of_an_unknown_id_is_answered_as_such(client: Any) -> None:
    result = client.cancel(bytes(15) + b"\1")
    assert (result.cancelled, result.state) == (False, "unknown")


def test_cancel_before_the_request_was_read_ends_it(client: Any) -> None:
    wire, reader = WireClient(client.address), StreamReader()
    try:
        request_id = wire.generate(max_new_tokens=LONG)
        calls = [wire.send(Op.CANCEL, {"target": request_id}) for _ in range(2)]
        results = {}
        while len(results) < 2 or request_id not in reader.endings:
            packet = wire.receive()
            assert packet is not None
            if packet.op is Op.CANCEL_RESULT:
                results[packet.request_id] = packet.body.cancelled  # type: ignore[attr-defined]
            elif packet.op is Op.DELTAS:
                wire.acknowledge(packet, reader.take(packet))
        assert [results[call] for call in calls] == [True, False], "the second one finds the first"
        assert reader.endings[request_id].kind == "cancelled"
    finally:
        wire.close()


def test_random_cancels_give_one_ending_each_and_the_next_request_is_exact(client: Any) -> None:
    draw = np.random.default_rng(0)

    async def one(index: int, tokens: int, delay: float) -> str:
        stream = client.aio.stream([1], max_new_tokens=tokens, seed=index)
        canceller = asyncio.create_task(later(stream.request_id, delay))
        endings = [delta.finished async for delta in stream if delta.finished is not None]
        result = await canceller
        assert len(endings) == 1
        kind = endings[0].finish_reason.kind
        assert kind in ("cancelled", "length")
        assert endings[0].ids.tolist() == fake_ids(index, len(endings[0].ids)).tolist()
        assert result.cancelled == (kind == "cancelled") or result.state in ("gone", "length", "live")
        return str(kind)

    async def later(request_id: bytes, delay: float) -> Any:
        await asyncio.sleep(delay)
        return await client.aio.cancel(request_id)

    async def everything() -> list[str]:
        return await asyncio.gather(*(one(index, int(draw.integers(1, 12)), float(draw.random() * 0.6)) for index in range(200)))

    kinds = asyncio.run(everything())
    assert {"cancelled", "length"} == set(kinds), "both outcomes were tried"
    assert client.generate([1], max_new_tokens=30, seed=31).ids.tolist() == fake_ids(31, 30).tolist()


def test_a_cancelled_await_cancels_its_request(client: Any) -> None:
    before = client.stats()["cancelled"]

    async def cell() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.aio.generate([1], max_new_tokens=LONG), 0.1)
        task = asyncio.create_task(anext(client.aio.stream([1], max_new_tokens=LONG)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cell())
    wait_until(lambda: client.stats()["cancelled"] == before + 2)


def test_a_stream_that_is_left_or_forgotten_cancels_its_request(client: Any) -> None:
    before = client.stats()["cancelled"]
    with client.stream([1], max_new_tokens=LONG) as stream:
        for _ in stream:
            break
    forgotten = client.stream([1], max_new_tokens=LONG)
    next(forgotten)
    del forgotten
    gc.collect()
    wait_until(lambda: client.stats()["cancelled"] == before + 2)


def test_three_interrupts_in_a_row_cancel_three_requests_and_leave_the_client_usable(client: Any) -> None:
    before = client.stats()["cancelled"]
    for _ in range(3):
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            client.generate([1], max_new_tokens=LONG)
    assert client.generate([1], max_new_tokens=4, seed=6).ids.tolist() == fake_ids(6, 4).tolist()
    wait_until(lambda: client.stats()["cancelled"] == before + 3)


def test_an_interrupt_in_a_stream_cancels_it(client: Any) -> None:
    before = client.stats()["cancelled"]
    stream = client.stream([1], max_new_tokens=LONG)
    threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    del stream
    wait_until(lambda: client.stats()["cancelled"] == before + 1)


def test_a_client_in_a_forked_child_says_so(client: Any) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            client.info()
        except Exception as error:
            status = 0 if getattr(error, "code", "") == "forked_client" and "connect in the child" in str(error) else 2
        finally:
            client.close()
            os._exit(status)
    deadline = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert client.generate([1], max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist(), "the parent goes on"


def test_a_stream_that_was_begun_before_a_fork_says_so_in_the_child_and_goes_on_in_the_parent(client: Any) -> None:
    blocking, awaited = client.stream([1], max_new_tokens=400, seed=3), client.aio.stream([1], max_new_tokens=400, seed=4)
    next(blocking)
    child = os.fork()
    if child == 0:
        told = 0
        signal.alarm(8)
        for use in (lambda: list(blocking), lambda: asyncio.run(anext(awaited)), lambda: asyncio.run(anext(awaited))):
            try:
                while True:
                    use()
            except Exception as error:
                told += getattr(error, "code", "") == "forked_client"
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert list(blocking)[-1].finished.ids.tolist() == fake_ids(3, 400).tolist()

    async def rest() -> list[int]:
        return [token async for delta in awaited for token in delta.ids.tolist()]

    assert asyncio.run(rest()) == fake_ids(4, 400).tolist()


def test_more_cancels_at_once_than_calls_may_be_open_lose_none(client: Any) -> None:
    count = MAX_OPEN_CALLS + 400
    before = client.stats()["cancelled"]

    async def leave_all() -> None:
        streams = [client.aio.stream([1], max_new_tokens=LONG // 4) for _ in range(count)]
        while (await client.aio.stats())["live"] < count:
            await asyncio.sleep(0.05)
        host = psutil.Process(psutil.Process(os.getpid()).children()[0].pid).children()[0]
        host.suspend()
        try:
            for stream in streams:
                await stream.aclose()
            await asyncio.sleep(1.0)
        finally:
            host.resume()

    asyncio.run(leave_all())
    wait_until(lambda: client.stats()["cancelled"] == before + count, timeout_s=30.0)


def test_paused_requests_stand_still_and_can_still_be_cancelled_or_expire(client: Any) -> None:
    stream = client.stream([1], max_new_tokens=LONG, seed=3)
    next(stream)
    client.pause()
    client.pause()
    try:
        time.sleep(0.1)
        first = client.stats()["tokens"]
        time.sleep(0.2)
        assert client.stats()["tokens"] == first
        assert client.stats()["paused"]
        expired = client.generate([1], max_new_tokens=5, deadline_s=0.2)
        assert expired.finish_reason.kind == "expired"
        assert client.cancel(stream.request_id).cancelled
        assert list(stream)[-1].finished.finish_reason.kind == "cancelled"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.generate, [1], max_new_tokens=3, seed=7)
            time.sleep(0.1)
            assert not waiting.done()
            client.resume()
            client.resume()
            assert waiting.result(5).ids.tolist() == fake_ids(7, 3).tolist()
    finally:
        client.resume()


@pytest.mark.parametrize("run_ahead", [3, pytest.param(0, marks=pytest.mark.long)])
def test_a_cancel_and_a_deadline_just_before_a_pause_end_during_it(tmp_path: Path, run_ahead: int) -> None:
    """The host is held still while cancel and pause are sent, so that it reads both before its next step."""
    folder = write_checkpoint(tmp_path / "model", "llama")
    service = rollout.local(str(folder), threads=1, run_ahead=run_ahead)
    with service as client, ThreadPoolExecutor(4) as pool:
        assert service.pid is not None
        [host] = psutil.Process(service.pid).children()
        name = b"r" * 16
        running = pool.submit(client.generate, [5, 6, 7], max_new_tokens=400, ignore_eos=True, request_id=name)
        expiring = pool.submit(client.generate, [5, 6, 8], max_new_tokens=400, ignore_eos=True, deadline_s=1.5)
        wait_until(lambda: client.stats()["tokens"] > 5)
        host.suspend()
        cancelling = pool.submit(client.cancel, name)
        time.sleep(0.1)
        pausing = pool.submit(client.pause)
        time.sleep(0.1)
        host.resume()
        try:
            pausing.result(5)
            assert cancelling.result(5).cancelled
            cancelled = running.result(5)
            assert cancelled.finish_reason.kind == "cancelled" and 0 < cancelled.ids.size < 400
            assert expiring.result(10).finish_reason.kind in ("expired", "length")
        finally:
            client.resume()
