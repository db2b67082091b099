"""The client's I/O thread against a front that a test plays: overlaps, gaps, lost connections, restarts, silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import numpy as np
import pytest

from rollout.client.blocking import Client, connect
from rollout.errors import (
    Busy,
    ClientClosed,
    Conflict,
    Gone,
    InternalError,
    InvalidConfig,
    InvalidRequest,
    ProtocolMismatch,
    RequestFailed,
    ServerRestarted,
    ServerUnavailable,
    ServiceStopping,
)
from rollout.wire.codec import HEADER, Packet
from rollout.wire.operations import Op
from tests.fakes import ScriptedFront


@pytest.fixture
def front(tmp_path: Path) -> Iterator[ScriptedFront]:
    front = ScriptedFront(tmp_path)
    yield front
    front.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def connected(front: ScriptedFront, pool: ThreadPoolExecutor, timeout_s: float = 5.0) -> Client:
    future = pool.submit(connect, front.address, timeout_s=timeout_s)
    front.welcome(front.expect(Op.HELLO))
    return future.result(5)


def test_overlap_is_trimmed_and_the_ending_is_acknowledged(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate, [1], max_new_tokens=5)
        request_id = front.expect(Op.GENERATE).request_id
        front.deltas(request_id, 0, [11, 12, 13], seq=1)
        assert front.expect(Op.ACK).body.seq == 1  # type: ignore[attr-defined]
        front.deltas(request_id, 1, [12, 13, 14], seq=2)
        front.deltas(request_id, 2, [13, 14, 15], seq=3, kind="length")
        assert future.result(5).ids.tolist() == [11, 12, 13, 14, 15]
        # Flushes close to each other may be acknowledged together, an ending always at once.
        while (ack := front.expect(Op.ACK)).body.seq < 3:  # type: ignore[attr-defined]
            assert "request_ids" not in ack.arrays
        assert ack.arrays["request_ids"].tobytes() == request_id


def test_flushes_that_follow_each_other_are_acknowledged_together_and_large_ones_at_once(
    front: ScriptedFront, pool: ThreadPoolExecutor
) -> None:
    with connected(front, pool) as client:
        pool.submit(client.generate, [1], max_new_tokens=100_000)
        request_id = front.expect(Op.GENERATE).request_id
        sent = 0
        for seq in range(1, 101):
            front.deltas(request_id, sent, [11], seq=seq)
            sent += 1
        large = [7] * 4000
        front.deltas(request_id, sent, large, seq=101)
        acks = 0
        while front.expect(Op.ACK).body.seq < 101:  # type: ignore[attr-defined]
            acks += 1
        assert acks < 50


def test_a_gap_makes_the_client_attach_from_its_own_position(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate, [1], max_new_tokens=4)
        request_id = front.expect(Op.GENERATE).request_id
        front.deltas(request_id, 0, [11], seq=1)
        front.deltas(request_id, 3, [14], seq=2, kind="length")
        attach = front.expect(Op.ATTACH)
        assert attach.arrays["request_ids"].tobytes() == request_id
        assert attach.arrays["offsets"].tolist() == [1]
        front.deltas(request_id, 1, [12, 13, 14], seq=3, kind="length")
        assert future.result(5).ids.tolist() == [11, 12, 13, 14]


def test_an_ending_that_counts_more_tokens_than_came_is_not_believed(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate, [1], max_new_tokens=4)
        request_id = front.expect(Op.GENERATE).request_id
        front.deltas(request_id, 0, [11, 12], seq=1)
        front.deltas(request_id, 2, [], seq=2, kind="length")
        assert future.result(5).ids.tolist() == [11, 12]
        future = pool.submit(client.generate, [1], max_new_tokens=4)
        request_id = front.expect(Op.GENERATE).request_id
        front.deltas(request_id, 0, [11], seq=3)
        arrays_end = {"index": 0, "kind": "length", "output_tokens": 3, "prompt_tokens": 1}
        front.deltas(request_id, 1, [12], seq=4)
        front.send(Op.DELTAS, bytes(16), {"seq": 5, "finished": [arrays_end]}, _empty_delta(request_id, 2))
        assert front.expect(Op.ATTACH).arrays["offsets"].tolist() == [2]
        front.deltas(request_id, 2, [13], seq=6, kind="length")
        assert future.result(5).ids.tolist() == [11, 12, 13]


def _empty_delta(request_id: bytes, offset: int) -> dict:  # type: ignore[type-arg]
    import numpy as np

    return {
        "request_ids": np.frombuffer(request_id, np.uint8).reshape(1, 16),
        "offsets": np.array([offset], np.int64),
        "counts": np.array([0], np.int32),
        "token_ids": np.empty(0, np.int32),
        "version_values": np.empty(0, np.int64),
        "version_counts": np.empty(0, np.int64),
    }


def test_a_lost_session_binding_is_continued_and_streams_attach_where_they_were(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        begun = pool.submit(client.generate, [1], max_new_tokens=4)
        begun_id = front.expect(Op.GENERATE).request_id
        front.deltas(begun_id, 0, [11, 12], seq=1)
        front.expect(Op.ACK)
        fresh = pool.submit(client.generate, [1, 2], max_new_tokens=1)
        fresh_id = front.expect(Op.GENERATE).request_id
        info = pool.submit(client.stats)
        call_id = front.expect(Op.STATS).request_id
        front.send(Op.ERROR, call_id, {"code": "no_session", "what": "who are you"})
        hello = front.expect(Op.HELLO)
        assert hello.body.session == front.session  # type: ignore[attr-defined]
        assert hello.body.secret == front.secret  # type: ignore[attr-defined]
        front.welcome(hello)
        assert front.expect(Op.GENERATE).request_id == fresh_id, "no token yet: the idempotent request again"
        attach = front.expect(Op.ATTACH)
        assert attach.arrays["offsets"].tolist() == [2]
        assert attach.arrays["request_ids"].tobytes() == begun_id
        assert front.expect(Op.STATS).request_id == call_id, "the refused call is sent again"
        front.send(Op.STATS_RESULT, call_id, {"values": {"live": 2}, "engine": None})
        front.deltas(begun_id, 2, [13, 14], seq=2, kind="length")
        front.deltas(fresh_id, 0, [21], seq=3, kind="length")
        assert begun.result(5).ids.tolist() == [11, 12, 13, 14]
        assert fresh.result(5).ids.tolist() == [21]
        assert info.result(5) == {"live": 2, "engine": None}


@pytest.mark.parametrize("again", [1, 2])
def test_a_hello_that_was_lost_with_its_connection_is_said_again(front: ScriptedFront, pool: ThreadPoolExecutor, again: int) -> None:
    connecting = pool.submit(connect, front.address, timeout_s=20.0)
    for _ in range(again):
        front.expect(Op.HELLO)
    front.welcome(front.expect(Op.HELLO))
    with connecting.result(5) as client:
        future = pool.submit(client.generate, [1], max_new_tokens=2)
        request_id = front.expect(Op.GENERATE).request_id
        front.deltas(request_id, 0, [11], seq=1)
        front.expect(Op.ACK)
        front.send(Op.ERROR, bytes(range(16)), {"code": "no_session", "what": "who are you"})
        for _ in range(again):
            front.expect(Op.HELLO)
        front.welcome(front.expect(Op.HELLO))
        assert front.expect(Op.ATTACH).arrays["offsets"].tolist() == [1]
        front.deltas(request_id, 1, [12], seq=2, kind="length")
        assert future.result(5).ids.tolist() == [11, 12]
        with pytest.raises(AssertionError, match="no HELLO"):
            front.expect(Op.HELLO, timeout_s=1.5)


def test_a_cancel_that_was_lost_with_its_connection_is_asked_again(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        stream = client.stream([1], max_new_tokens=9)
        request_id = front.expect(Op.GENERATE).request_id
        front.deltas(request_id, 0, [11], seq=1)
        front.expect(Op.ACK)
        closing = pool.submit(stream.close)
        assert front.expect(Op.CANCEL).body.target == request_id  # type: ignore[attr-defined]
        info = pool.submit(client.stats)
        call_id = front.expect(Op.STATS).request_id
        front.send(Op.ERROR, call_id, {"code": "no_session", "what": "who are you"})
        front.welcome(front.expect(Op.HELLO))
        front.expect(Op.ATTACH)
        assert front.expect(Op.CANCEL).body.target == request_id  # type: ignore[attr-defined]
        front.send(Op.STATS_RESULT, front.expect(Op.STATS).request_id, {"values": {}, "engine": None})
        front.deltas(request_id, 1, [], seq=2, kind="cancelled")
        closing.result(5)
        info.result(5)


def test_another_incarnation_fails_what_was_under_way_and_the_client_goes_on(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        lost = pool.submit(client.generate, [1], max_new_tokens=4)
        request = front.expect(Op.GENERATE)
        front.send(Op.ERROR, request.request_id, {"code": "no_session", "what": "who are you"})
        hello = front.expect(Op.HELLO)
        front.send(Op.ERROR, hello.request_id, {"code": "server_restarted", "what": "started again"})
        with pytest.raises(ServerRestarted, match="submit the request again"):
            lost.result(5)
        hello = front.expect(Op.HELLO)
        assert hello.body.session is None  # type: ignore[attr-defined]
        front.welcome(hello)
        again = pool.submit(client.generate, [1], max_new_tokens=1)
        front.deltas(front.expect(Op.GENERATE).request_id, 0, [5], seq=1, kind="length")
        assert again.result(5).ids.tolist() == [5]


def test_what_is_asked_after_a_restart_was_told_does_not_fail_with_it_again(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    """Both connections are refused their session, and the second refusal comes when the caller has gone on already."""
    with connected(front, pool) as client:
        lost = pool.submit(client.generate, [1], max_new_tokens=4)
        request = front.expect(Op.GENERATE)
        front.send(Op.ERROR, request.request_id, {"code": "no_session", "what": "who are you"})
        front.send(Op.ERROR, front.expect(Op.HELLO).request_id, {"code": "server_restarted", "what": "started again"})
        with pytest.raises(ServerRestarted):
            lost.result(5)
        hello = front.expect(Op.HELLO)
        again = pool.submit(client.generate, [1], max_new_tokens=1)
        front.refuse_on_control("server_restarted")
        time.sleep(0.1)
        assert not again.done()
        front.welcome(hello)
        front.deltas(front.expect(Op.GENERATE).request_id, 0, [5], seq=1, kind="length")
        assert again.result(5).ids.tolist() == [5]


def test_a_heartbeat_answer_recovers_an_ending_that_was_lost(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    import numpy as np

    with connected(front, pool, timeout_s=1.0) as client:
        future = pool.submit(client.generate, [1], max_new_tokens=2)
        request_id = front.expect(Op.GENERATE).request_id
        unknown = bytes(range(16))
        ids = np.frombuffer(request_id + unknown, np.uint8).reshape(2, 16)
        front.send(Op.ALIVE, front.expect(Op.HEARTBEAT).request_id, {"health": "ready", "version": 0}, {"request_ids": ids})
        assert front.expect(Op.ATTACH).arrays["request_ids"].tobytes() == request_id
        assert front.expect(Op.ACK).arrays["request_ids"].tobytes() == unknown
        front.deltas(request_id, 0, [1, 2], seq=1, kind="length")
        assert future.result(5).ids.tolist() == [1, 2]


def test_a_service_that_never_answers_is_named_within_the_time_out(tmp_path: Path) -> None:
    (tmp_path / "nobody").touch()
    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match=f"{tmp_path}/nobody.*rollout check"):
        connect(f"ipc://{tmp_path}/nobody", timeout_s=0.5)
    assert 0.4 < time.monotonic() - began < 2.0


def test_an_address_without_a_socket_is_named_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match=f"no socket at {tmp_path}/nobody.*rollout check"):
        connect(f"ipc://{tmp_path}/nobody", timeout_s=30.0)
    assert time.monotonic() - began < 0.5


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), True])
def test_a_time_out_that_is_no_length_of_time_is_refused(tmp_path: Path, timeout_s: float) -> None:
    with pytest.raises(InvalidConfig, match="timeout_s"):
        connect(f"ipc://{tmp_path}/nobody", timeout_s=timeout_s)


def test_after_a_silence_later_calls_only_look_whether_the_service_is_back(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool, timeout_s=1.5) as client:
        with pytest.raises(ServerUnavailable, match="within 1"):
            client.stats()
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match=r"within 0\..*silent for"):
            client.info()
        assert time.monotonic() - began < 1.2
        back = pool.submit(client.stats)
        calls = [front.expect(Op.STATS) for _ in range(2)]
        front.send(Op.STATS_RESULT, calls[1].request_id, {"values": {"live": 2}, "engine": None})
        assert back.result(5) == {"live": 2, "engine": None}


def test_after_a_goodbye_calls_fail_at_once_by_name(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool, timeout_s=30.0) as client:
        waiting = pool.submit(client.stats)
        front.expect(Op.STATS)
        front.send(Op.ERROR, bytes(16), {"code": "service_stopping", "what": "the service stops"})
        began = time.monotonic()
        with pytest.raises(ServiceStopping, match=r"has stopped.*start it again"):
            waiting.result(5)
        with pytest.raises(ServiceStopping):
            client.info()
        assert time.monotonic() - began < 2.5


def test_a_service_that_falls_silent_fails_every_waiting_call_within_the_time_out(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool, timeout_s=0.6) as client:
        began = time.monotonic()
        futures = [pool.submit(client.generate, [1]), pool.submit(client.info), pool.submit(client.pause)]
        for future in futures:
            with pytest.raises(ServerUnavailable, match=r"timeout_s is 0\.6"):
                future.result(5)
        assert time.monotonic() - began < 2.0


def test_heartbeats_answered_keep_a_long_wait_alive(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool, timeout_s=0.6) as client:
        future = pool.submit(client.generate, [1], max_new_tokens=1)
        request_id = front.expect(Op.GENERATE).request_id
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            front.send(Op.ALIVE, front.expect(Op.HEARTBEAT).request_id, {"health": "ready", "version": 0})
        front.deltas(request_id, 0, [9], seq=1, kind="length")
        assert future.result(5).ids.tolist() == [9]


def test_the_first_heartbeat_comes_within_a_lease_that_is_shorter_than_the_time_out(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    future = pool.submit(connect, front.address, timeout_s=60.0)
    front.welcome(front.expect(Op.HELLO), lease_s=0.4)
    with future.result(5):
        for _ in range(3):
            front.expect(Op.HEARTBEAT, timeout_s=0.4)


def test_a_service_of_another_protocol_version_is_named_at_connect(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    future = pool.submit(connect, front.address, timeout_s=5.0)
    hello = front.expect(Op.HELLO)
    front.send_frames([HEADER.pack(7, Op.ERROR, hello.request_id), msgpack.packb([{"code": "protocol_version", "what": "x"}, []])])
    with pytest.raises(ProtocolMismatch, match="version 7"):
        future.result(5)


def test_garbage_from_the_service_does_not_disturb_the_client(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate, [1], max_new_tokens=1)
        request_id = front.expect(Op.GENERATE).request_id
        for frames in ([b""], [b"x" * 20, b"y"], [b"\1\0\x14\0" + bytes(16), b"\xc1"]):
            front.send_frames(frames)
        front.deltas(request_id, 0, [3], seq=1, kind="length")
        assert future.result(5).ids.tolist() == [3]


def test_an_error_reply_becomes_its_class_with_all_its_parts(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.info)
        fields = {"code": "internal_error", "what": "w", "field": "f", "value": 3, "limit": "l", "remedy": "r"}
        front.send(Op.ERROR, front.expect(Op.INFO).request_id, fields)
        with pytest.raises(InternalError, match="w; l; r") as raised:
            future.result(5)
        assert (raised.value.field, raised.value.value) == ("f", 3)


def test_a_closed_client_says_so_and_says_goodbye(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    client = connected(front, pool)
    waiting = pool.submit(client.generate, [1])
    front.expect(Op.GENERATE)
    client.close()
    front.expect(Op.GOODBYE)
    with pytest.raises(ClientClosed):
        waiting.result(5)
    with pytest.raises(ClientClosed, match="connect again"):
        client.info()
    client.close()


def test_an_error_under_a_groups_id_is_every_members_and_one_under_a_members_is_its_own(
    front: ScriptedFront, pool: ThreadPoolExecutor
) -> None:
    with connected(front, pool) as client:
        streams = client.stream_group([1], 3, max_new_tokens=4)
        message = front.expect(Op.GENERATE_GROUP)
        members = [row.tobytes() for row in message.arrays["member_ids"]]
        assert [stream.request_id for stream in streams] == members and message.request_id not in members
        front.send(Op.ERROR, members[0], {"code": "gone", "what": "it ended"})
        with pytest.raises(Gone):
            next(streams[0])
        front.deltas(members[1], 0, [7], seq=1, kind="length")
        assert next(streams[1]).ids.tolist() == [7]
        front.send(Op.ERROR, message.request_id, {"code": "invalid_request", "what": "no", "field": "top_p"})
        with pytest.raises(InvalidRequest) as refused:
            next(streams[2])
        assert refused.value.field == "top_p"


def test_a_member_that_fails_ends_the_others(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate_group, [1], 3, max_new_tokens=4)
        members = [row.tobytes() for row in front.expect(Op.GENERATE_GROUP).arrays["member_ids"]]
        front.deltas(members[0], 0, [7], seq=1, kind="length")
        front.deltas(members[1], 0, [8], seq=2, kind="failed")
        assert front.expect(Op.CANCEL).body.target == members[2]  # type: ignore[attr-defined]
        with pytest.raises(RequestFailed):
            future.result(5)


def test_the_members_of_a_group_continue_on_a_new_connection_with_one_message(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate_group, [1], 3, max_new_tokens=2)
        message = front.expect(Op.GENERATE_GROUP)
        members = [row.tobytes() for row in message.arrays["member_ids"]]
        front.deltas(members[0], 0, [7], seq=1)
        assert front.expect(Op.ACK).body.seq == 1  # type: ignore[attr-defined]
        front.send(Op.ERROR, bytes(range(16)), {"code": "no_session", "what": "who are you"})
        front.welcome(front.expect(Op.HELLO))
        assert front.expect(Op.GENERATE_GROUP).request_id == message.request_id
        attach = front.expect(Op.ATTACH)
        assert attach.arrays["request_ids"].tobytes() == members[0] and attach.arrays["offsets"].tolist() == [1]
        for place, member in enumerate(members):
            front.deltas(member, 0, [7, place], seq=2 + place, kind="length")
        assert [generation.ids.tolist() for generation in future.result(5)] == [[7, 0], [7, 1], [7, 2]]


def test_a_conflict_cancels_nothing_of_the_request_that_has_the_id(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate, [1], request_id=bytes([1] * 16), max_new_tokens=1)
        front.expect(Op.GENERATE)
        with pytest.raises(Conflict):
            client.generate_group([1], 2, request_ids=[bytes([1] * 16), bytes([2] * 16)])
        client.stream([1], request_id=bytes([2] * 16)).close()
        assert front.expect(Op.CANCEL).body.target == bytes([2] * 16), "the first cancel that was ever sent"  # type: ignore[attr-defined]
        front.deltas(bytes([1] * 16), 0, [5], seq=1, kind="length")
        assert future.result(5).ids.tolist() == [5]


def test_an_ending_without_its_prompt_score_makes_the_client_attach_again(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate, [1, 2, 3], max_new_tokens=1, prompt_logprobs_from=1)
        request_id = front.expect(Op.GENERATE).request_id
        ending = {"index": 0, "kind": "length", "output_tokens": 1, "prompt_tokens": 3, "prompt_scored": True}
        score = {"prompt_scores": [[0, 1, 2, 4]], "prompt_logprobs": [-1.0, -2.0], "prompt_raw_logprobs": [-3.0, -4.0]}
        front.deltas(request_id, 0, [9], seq=1, ending=ending)
        assert front.expect(Op.ATTACH).arrays["offsets"].tolist() == [1]
        front.deltas(request_id, 1, [], seq=2, ending=ending, extra=score)
        found = future.result(5).prompt_logprobs
        assert (found.start, found.version, found.logprobs.tolist(), found.raw_logprobs.tolist()) == (1, 4, [-1, -2], [-3, -4])


def test_an_answer_that_is_not_understood_fails_its_call_and_leaves_the_client_usable(
    front: ScriptedFront, pool: ThreadPoolExecutor
) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.stats)
        call = front.expect(Op.STATS).request_id
        front.send(Op.STATS_RESULT, call, {"values": {}, "bogus": 1})
        with pytest.raises(InternalError, match="not understood: unknown field 'bogus'"):
            future.result(5)
        again = pool.submit(client.stats)
        front.send(Op.STATS_RESULT, front.expect(Op.STATS).request_id, {"values": {"live": 0}})
        assert again.result(5)["live"] == 0


@pytest.mark.parametrize("lie", [{"counts": np.array([2**31 - 1], np.int32)}, {"version_counts": np.array([2**40], np.int64)}])
def test_a_flush_that_claims_more_tokens_than_it_has_costs_no_memory(
    front: ScriptedFront, pool: ThreadPoolExecutor, lie: dict[str, np.ndarray]
) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate, [1], max_new_tokens=2)
        request_id = front.expect(Op.GENERATE).request_id
        whole = {
            "request_ids": np.frombuffer(request_id, np.uint8).reshape(1, 16),
            "offsets": np.zeros(1, np.int64),
            "counts": np.ones(1, np.int32),
            "token_ids": np.ones(1, np.int32),
            "version_values": np.zeros(1, np.int64),
            "version_counts": np.ones(1, np.int64),
        }
        began = time.monotonic()
        front.send(Op.DELTAS, bytes(16), {"seq": 1}, {**whole, **lie})
        front.deltas(request_id, 0, [11, 12], seq=2, kind="length")
        assert future.result(5).ids.tolist() == [11, 12]
        assert time.monotonic() - began < 2.0


def test_a_stream_is_read_on_in_another_event_loop_and_has_one_reader_at_a_time(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        stream = client.aio.stream([1], max_new_tokens=3)
        request_id = front.expect(Op.GENERATE).request_id

        async def next_ids(send: bool) -> list[int]:
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.05)
            with pytest.raises(RuntimeError, match="one reader at a time"):
                await anext(stream)
            front.deltas(request_id, 2 * send, [11 + send] if send else [10, 11], seq=1 + send, kind="length" if send else None)
            return list((await reading).ids)

        assert asyncio.run(next_ids(False)) == [10, 11]
        assert pool.submit(lambda: asyncio.run(next_ids(True))).result(10) == [12]


def cut(front: ScriptedFront, request_id: bytes, offset: int, ids: Sequence[int], seq: int) -> Packet:
    """Let an update cut a generation after these tokens; returns the message of its rest."""
    ending = {"index": 0, "kind": "cancelled", "output_tokens": offset + len(ids), "prompt_tokens": 1, "detail": "update", "seed": 5}
    front.deltas(request_id, offset, ids, seq=seq, ending=ending)
    return front.expect(Op.GENERATE)


def no_room(front: ScriptedFront, rest: Packet, retry_after_s: float) -> None:
    front.send(Op.ERROR, rest.request_id, {"code": "busy", "what": "others have your room", "retry_after_s": retry_after_s})


def test_the_rest_of_a_cut_generation_waits_where_others_have_its_room(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate, [1], max_new_tokens=5)
        rest = cut(front, front.expect(Op.GENERATE).request_id, 0, [11, 12], 1)
        for _ in range(2):
            no_room(front, rest, 0.05)
            former, rest = rest, front.expect(Op.GENERATE)
            assert rest.request_id != former.request_id and rest.arrays["prompt_ids"].tolist() == [1, 11, 12]
            assert (rest.body.prior_output_tokens, rest.body.seed) == (2, 5)  # type: ignore[attr-defined]
        rest = cut(front, rest.request_id, 0, [13], 2)
        no_room(front, rest, 0.05)
        rest = front.expect(Op.GENERATE)
        assert rest.body.prior_output_tokens == 3  # type: ignore[attr-defined]
        front.deltas(rest.request_id, 0, [14, 15], seq=3, kind="length")
        generation = future.result(5)
        assert generation.ids.tolist() == [11, 12, 13, 14, 15] and generation.kv_rebuilt_at == (3, 4)
        no_room(front, rest, 0.05)
        with pytest.raises(Busy):
            busy = pool.submit(client.generate, [1])
            no_room(front, front.expect(Op.GENERATE), 0.05)
            busy.result(5)


def test_a_cut_generation_without_room_is_not_sent_twice_on_a_new_connection(front: ScriptedFront, pool: ThreadPoolExecutor) -> None:
    with connected(front, pool) as client:
        future = pool.submit(client.generate, [1], max_new_tokens=3)
        no_room(front, cut(front, front.expect(Op.GENERATE).request_id, 0, [11, 12], 1), 0.5)
        front.send(Op.ERROR, bytes(range(16)), {"code": "no_session", "what": "who are you"})
        front.welcome(front.expect(Op.HELLO))
        rest = front.expect(Op.GENERATE)
        with pytest.raises(AssertionError, match="no GENERATE"):
            front.expect(Op.GENERATE, timeout_s=0.7)
        front.deltas(rest.request_id, 0, [13], seq=2, kind="length")
        assert future.result(5).ids.tolist() == [11, 12, 13]


@pytest.mark.parametrize("end", ["cancel", "cancelled before", "deadline"])
def test_a_cut_generation_that_waits_for_room_can_be_cancelled_and_expires(
    front: ScriptedFront, pool: ThreadPoolExecutor, end: str
) -> None:
    with connected(front, pool) as client:
        stream = client.stream([1], max_new_tokens=5, **({"deadline_s": 0.3} if end == "deadline" else {}))
        future = pool.submit(list, stream)
        rest = cut(front, front.expect(Op.GENERATE).request_id, 0, [11, 12], 1)
        if end == "cancelled before":
            client._connection.cancel(stream.request_id)
            front.expect(Op.CANCEL)
        no_room(front, rest, 0.4 if end == "deadline" else 1.5)
        if end == "cancel":
            time.sleep(0.1)
            client._connection.cancel(stream.request_id)
        generation = future.result(1)[-1].finished
        assert generation.ids.tolist() == [11, 12] and generation.kv_rebuilt_at == ()
        assert generation.finish_reason.kind == ("expired" if end == "deadline" else "cancelled")
        with pytest.raises(AssertionError, match="no GENERATE"):
            front.expect(Op.GENERATE, timeout_s=0.3)


@pytest.mark.parametrize("busy_s", [0.0, 0.3])
@pytest.mark.parametrize("before", [0, 2])
def test_a_stream_that_fails_with_its_last_tokens_gives_them_and_then_the_failure(
    front: ScriptedFront, pool: ThreadPoolExecutor, before: int, busy_s: float
) -> None:
    async def read(client: Client) -> list[int]:
        ids: list[int] = []
        with pytest.raises(RequestFailed) as failed:
            async for delta in client.aio.stream([1], max_new_tokens=9):
                ids += delta.ids.tolist()
                await asyncio.sleep(busy_s)
        assert failed.value.generation.ids.tolist() == ids  # type: ignore[union-attr]
        return ids

    with connected(front, pool) as client:
        future = pool.submit(asyncio.run, read(client))
        request_id = front.expect(Op.GENERATE).request_id
        for offset in range(before):
            front.deltas(request_id, offset, [11 + offset], seq=1 + offset)
            time.sleep(0.05)
        front.deltas(request_id, before, [20, 21], seq=9, kind="failed")
        assert future.result(5) == [*[11, 12][:before], 20, 21]
