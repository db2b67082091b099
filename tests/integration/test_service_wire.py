"""The service from the wire: idempotent ids, attaching, slow readers, leases, and bytes that are no messages."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from rollout.wire.codec import HEADER, PROTOCOL_VERSION, decode, encode
from rollout.wire.operations import CLIENT_REPLIES, Op
from tests.fakes import StreamReader, WireClient, code_that_makes, fake_ids, fake_service

LEASE_S = 0.8
LONG = 20_000


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = {"lease_s": LEASE_S, "credit_bytes": 2**16, "max_rows": 128, "engine_options": {"step_s": 0.002}}
    with fake_service(tmp_path_factory.mktemp("model"), **options) as client:
        yield client


@pytest.fixture
def wire(client: Any) -> Iterator[WireClient]:
    wire = WireClient(client.address)
    yield wire
    wire.close()


def wait_until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_the_same_id_and_body_attaches_and_another_body_conflicts(client: Any, wire: WireClient) -> None:
    before, reader = client.stats(), StreamReader()
    request_id = wire.generate(max_new_tokens=200, seed=3)
    reader.take(wire.expect(Op.DELTAS))
    wire.generate(request_id=request_id, max_new_tokens=200, seed=3)
    wire.generate(request_id=request_id, max_new_tokens=201, seed=3)
    while (error := wire.receive()) is not None and error.op is Op.DELTAS:
        reader.take(error)
    assert error is not None
    assert (error.request_id, error.body.code) == (request_id, "conflict")  # type: ignore[attr-defined]
    reader.read(wire, [request_id])
    assert reader.ids[request_id] == fake_ids(3, 200).tolist()
    wire.generate(request_id=request_id, max_new_tokens=200, seed=3)
    assert wire.expect(Op.ERROR).body.code == "gone"  # type: ignore[attr-defined]
    after = client.stats()
    counts = {name: after[name] - before[name] for name in ("received", "accepted", "attached", "refused")}
    assert counts == {"received": 4, "accepted": 1, "attached": 1, "refused": 2}


def test_a_new_connection_attaches_from_its_own_position_with_the_secret(client: Any) -> None:
    first, reader = WireClient(client.address), StreamReader()
    request_id = first.generate(max_new_tokens=150, seed=4)
    while len(reader.ids.get(request_id, [])) < 20:
        reader.take(first.expect(Op.DELTAS))
    first.vanish()
    second = WireClient(client.address, session=first.welcome.session, secret=first.welcome.secret)
    have = len(reader.ids[request_id])
    arrays = {"request_ids": np.frombuffer(request_id, np.uint8).reshape(1, 16), "offsets": np.array([have], np.int64)}
    second.send(Op.ATTACH, {}, arrays)
    packet = second.expect(Op.DELTAS)
    assert packet.arrays["offsets"].tolist() == [have], "nothing is repeated"
    second.acknowledge(packet, reader.take(packet))
    reader.read(second, [request_id])
    assert reader.ids[request_id] == fake_ids(4, 150).tolist()
    second.close()


def test_attaching_to_what_is_not_there_is_answered_for_each_id(client: Any, wire: WireClient) -> None:
    request_id = wire.generate(max_new_tokens=3)
    reader = StreamReader()
    reader.take(wire.expect(Op.DELTAS))
    ids = np.frombuffer(bytes(range(16)) + request_id, np.uint8).reshape(2, 16)
    wire.send(Op.ATTACH, {}, {"request_ids": ids, "offsets": np.array([0, 10**6], np.int64)})
    errors = {packet.request_id: packet.body for packet in (wire.expect(Op.ERROR), wire.expect(Op.ERROR))}
    assert errors[bytes(range(16))].code == "gone"  # type: ignore[attr-defined]
    assert errors[request_id].field == "offsets"  # type: ignore[attr-defined]
    call = wire.send(Op.ATTACH, {}, {"request_ids": ids, "offsets": np.array([0], np.int64)})
    error = wire.expect(Op.ERROR)
    assert (error.request_id, error.body.code) == (call, "invalid_request")  # type: ignore[attr-defined]


def test_nobody_gets_at_a_session_without_its_secret(client: Any, wire: WireClient) -> None:
    request_id = wire.generate(max_new_tokens=LONG)
    wire.expect(Op.DELTAS)
    thief = WireClient(client.address, hello=False)
    thief.send(Op.HELLO, {"name": "thief", "session": wire.welcome.session, "secret": bytes(16)})
    assert thief.expect(Op.ERROR).body.code == "no_session"  # type: ignore[attr-defined]
    thief.send(Op.CANCEL, {"target": request_id})
    assert thief.expect(Op.ERROR).body.code == "no_session"  # type: ignore[attr-defined]
    thief.send(Op.HELLO, {"name": "thief"})
    thief.welcome = thief.expect(Op.WELCOME).body
    thief.send(Op.CANCEL, {"target": request_id})
    result = thief.expect(Op.CANCEL_RESULT).body
    assert (result.cancelled, result.state) == (False, "unknown")  # type: ignore[attr-defined]
    thief.close()
    wire.expect(Op.DELTAS)


def test_a_hello_with_half_of_what_continues_a_session_is_refused(client: Any, wire: WireClient) -> None:
    half = WireClient(client.address, hello=False)
    for fields in ({"session": wire.welcome.session}, {"secret": wire.welcome.secret}):
        half.send(Op.HELLO, fields)
        assert half.expect(Op.ERROR).body.field == "secret"  # type: ignore[attr-defined]
    half.close()


def test_a_second_hello_on_a_connection_ends_its_first_session_and_its_requests(client: Any) -> None:
    before, twice = client.stats(), WireClient(client.address)
    twice.generate(max_new_tokens=LONG)
    twice.expect(Op.DELTAS)
    twice.send(Op.HELLO, {"name": "again"})
    twice.welcome = twice.expect(Op.WELCOME).body
    wait_until(lambda: client.stats()["live"] == before["live"])
    assert client.stats()["sessions"] == before["sessions"] + 1
    twice.close()


def test_control_operations_need_a_session_on_the_control_socket(client: Any, wire: WireClient) -> None:
    control = WireClient(wire.welcome.control_address, hello=False)
    control.send(Op.PAUSE, {})
    assert control.expect(Op.ERROR).body.code == "no_session"  # type: ignore[attr-defined]
    control.send(Op.HELLO, {"name": "x"})
    assert control.expect(Op.ERROR).body.code == "no_session"  # type: ignore[attr-defined]
    control.send(Op.GENERATE, {}, {"prompt_ids": np.array([1], np.int32)})
    assert control.expect(Op.ERROR).body.code == "unknown_operation"  # type: ignore[attr-defined]
    wire.send(Op.PAUSE, {})
    assert wire.expect(Op.ERROR).body.code == "unknown_operation"  # type: ignore[attr-defined]
    control.close()


def test_a_control_call_whose_answer_was_lost_with_its_connection_is_answered_again_and_not_done_twice(
    client: Any, wire: WireClient
) -> None:
    def control() -> WireClient:
        return WireClient(wire.welcome.control_address, session=wire.welcome.session, secret=wire.welcome.secret)

    def twice(op: Op, **fields: object) -> Any:
        before = control()
        request_id = before.send(op, fields)
        kept = before.receive()
        before.vanish()
        # Had it not been read here, it would be lost: the client asks on another connection.
        after = control()
        after.send(op, fields, request_id=request_id)
        again = after.receive()
        assert kept is not None and again is not None
        assert (again.op, again.request_id, again.body) == (kept.op, request_id, kept.body)
        after.vanish()
        return again.body

    version = client.info().version
    ticket = twice(Op.WEIGHTS_BEGIN, partial=True)
    report = twice(Op.WEIGHTS_COMMIT, update_id=ticket.update_id, digests=None, canary_temperatures=[])
    assert report.version == ticket.version == client.info().version > version
    evaluation = twice(Op.EVALUATE_BEGIN, deadline_s=60.0)
    twice(Op.EVALUATE_END, evaluation_id=evaluation.evaluation_id)
    twice(Op.PAUSE)
    assert len(client.info().paused_by) == 1
    twice(Op.RESUME)
    ticket = client.weights_begin(None, partial=True)
    assert client.weights_commit(ticket.update_id, timeout_s=5.0).version == ticket.version, "no evaluation is left"


def test_a_connection_that_chose_its_own_routing_id_is_refused(client: Any) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, b"mine")
    socket.connect(client.address)
    socket.send_multipart([bytes(frame) for frame in encode(Op.HELLO, bytes(16), {"name": "x"})])
    assert socket.poll(5000)
    packet = decode(socket.recv_multipart(), CLIENT_REPLIES)
    assert packet.body.code == "no_session"  # type: ignore[attr-defined]
    socket.close(linger=0)
    context.term()


def test_another_protocol_version_is_refused_by_name_under_the_request_id(client: Any) -> None:
    wire = WireClient(client.address, hello=False)
    request_id = bytes(range(16))
    wire.send_frames([HEADER.pack(PROTOCOL_VERSION + 1, Op.HELLO, request_id), b"\x92\x80\x90"])
    error = wire.expect(Op.ERROR)
    assert (error.request_id, error.body.code, error.body.value) == (request_id, "protocol_version", 2)  # type: ignore[attr-defined]
    wire.close()


def test_a_reader_that_sleeps_loses_nothing_and_costs_nobody_else(client: Any, wire: WireClient) -> None:
    wanted = [wire.generate(max_new_tokens=600, seed=seed) for seed in range(60)]
    until = time.monotonic() + 2.0
    latencies = []
    while time.monotonic() < until:
        began = time.monotonic()
        assert client.generate([1], max_new_tokens=4, seed=1).ids.tolist() == fake_ids(1, 4).tolist()
        latencies.append(time.monotonic() - began)
        wire.send(Op.HEARTBEAT, {})
        unacknowledged = client.stats()["unacknowledged_bytes"]
        assert unacknowledged <= 2**16 + 60 * 600 * 20, "what is under way is bounded"
    assert np.median(latencies) < 0.3
    flushes_before = client.stats()["flushes"]
    reader = StreamReader()
    reader.read(wire, wanted)
    assert [reader.ids[request_id] for request_id in wanted] == [fake_ids(seed, 600).tolist() for seed in range(60)]
    assert {ending.kind for ending in reader.endings.values()} == {"length"}
    assert client.stats()["flushes"] - flushes_before < 60 * 600 / 10, "late news came in large pieces"


def test_a_client_that_falls_silent_loses_its_requests_and_its_pause_with_its_lease(client: Any, wire: WireClient) -> None:
    before = client.stats()
    wire.generate(max_new_tokens=LONG)
    wire.expect(Op.DELTAS)
    control = WireClient(wire.welcome.control_address, session=wire.welcome.session, secret=wire.welcome.secret)
    control.send(Op.PAUSE, {})
    control.expect(Op.DONE)
    assert client.stats()["paused"]
    began = time.monotonic()
    wait_until(lambda: client.stats()["lapsed_leases"] == before["lapsed_leases"] + 1)
    assert LEASE_S * 0.5 < time.monotonic() - began < LEASE_S * 3
    wait_until(lambda: client.stats()["live"] == 0)
    after = client.stats()
    assert after["cancelled"] == before["cancelled"] + 1
    assert not after["paused"]
    assert client.generate([1], max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()
    control.vanish()


def test_heartbeats_keep_a_session_and_name_its_unacknowledged_endings(client: Any, wire: WireClient) -> None:
    request_id = wire.generate(max_new_tokens=2)
    until = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < until:
        wire.send(Op.HEARTBEAT, {})
        alive = wire.expect(Op.ALIVE)
        time.sleep(LEASE_S / 5)
    assert alive.arrays["request_ids"].tobytes() == request_id
    assert client.stats()["unacknowledged_endings"] == 1
    wire.send(Op.ACK, {"seq": 10}, {"request_ids": alive.arrays["request_ids"]})
    wire.send(Op.HEARTBEAT, {})
    assert wire.expect(Op.ALIVE).arrays["request_ids"].size == 0


def test_a_caller_that_computes_for_longer_than_its_lease_loses_nothing(client: Any) -> None:
    stream = client.stream([1], max_new_tokens=400, seed=2)
    until = time.monotonic() + 3 * LEASE_S
    while time.monotonic() < until:
        pass
    generation = list(stream)[-1].finished
    assert generation.finish_reason.kind == "length"
    assert generation.ids.tolist() == fake_ids(2, 400).tolist()


CLIENT_PROCESS = """
import sys, rollout
client = rollout.connect(sys.argv[1])
streams = [client.stream([1], max_new_tokens=20000) for _ in range(4)]
for stream in streams:
    next(stream)
print("running", flush=True)
while True:
    for stream in streams:
        next(stream)
"""


def start_client(address: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", CLIENT_PROCESS, address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


def test_a_killed_client_loses_its_requests_within_its_lease(client: Any) -> None:
    before = client.stats()
    process = start_client(client.address)
    try:
        assert client.stats()["live"] == 4
    finally:
        process.kill()
        process.communicate(timeout=10)
    wait_until(lambda: client.stats()["live"] == 0, timeout_s=LEASE_S * 4)
    after = client.stats()
    assert after["cancelled"] == before["cancelled"] + 4
    assert after["sessions"] == 1
    assert after["engine"]["running"] == 0


def test_a_client_that_stalls_shorter_than_its_lease_loses_nothing(client: Any) -> None:
    before = client.stats()
    process = start_client(client.address)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(LEASE_S / 2)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(LEASE_S / 2)
        stats = client.stats()
        assert stats["live"] == 4
        assert stats["lapsed_leases"] == before["lapsed_leases"]
    finally:
        process.kill()
        process.communicate(timeout=10)
    wait_until(lambda: client.stats()["live"] == 0)


def test_hostile_bytes_on_every_socket_run_nothing_and_disturb_nobody(client: Any, wire: WireClient, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    evil = code_that_makes(marker)
    draw = random.Random(0)
    neighbour = client.stream([1], max_new_tokens=250, seed=12)
    golden = [
        bytes(frame) for frame in encode(Op.GENERATE, bytes(range(16)), {"max_new_tokens": 3}, {"prompt_ids": np.array([1, 2], np.int32)})
    ]
    messages: list[list[bytes]] = [
        [],
        [b""],
        [evil],
        [golden[0], evil],
        [golden[0], golden[1], evil],
    ]
    for _ in range(400):
        frames = [bytearray(frame) for frame in golden]
        frame = draw.choice(frames)
        frame[draw.randrange(len(frame))] = draw.randrange(256)
        messages.append([bytes(one)[: draw.choice([None, 3, 19])] for one in frames])
    sessions = [wire, WireClient(client.address, hello=False), WireClient(wire.welcome.control_address, hello=False)]
    for peer in sessions:
        for frames in messages:
            if frames:
                peer.send_frames(frames)
                while (reply := peer.receive(0)) is not None:
                    assert reply.op in CLIENT_REPLIES
    assert [token for delta in neighbour for token in delta.ids.tolist()] == fake_ids(12, 250).tolist()
    assert client.stats()["malformed"] > 100
    assert not marker.exists()
    for peer in sessions[1:]:
        peer.close()


def test_endless_zmtp_garbage_on_the_socket_file_is_shrugged_off(client: Any) -> None:
    import socket

    for noise in (b"\0" * 4096, b"\xff" * 10 + b"\x7f" + b"\x03NULL" + b"\0" * 200, os.urandom(5000), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(2.0)
            raw.connect(client.address.removeprefix("ipc://"))
            try:
                raw.sendall(noise)
            except (BrokenPipeError, ConnectionResetError):
                continue
    assert client.generate([1], max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()


def test_a_client_that_asks_and_never_reads_costs_no_memory_for_each_answer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b" " * 2**22)
    service = fake_service(tmp_path)
    with service as client:
        front = psutil.Process(service.pid)
        context = zmq.Context()
        greedy = context.socket(zmq.DEALER)
        # Its own queue must not take what it does not read.
        greedy.setsockopt(zmq.RCVHWM, 1)
        greedy.connect(client.address)
        greedy.send_multipart([bytes(frame) for frame in encode(Op.HELLO, bytes(range(16)), {"name": "greedy"})])
        assert greedy.poll(5000) and greedy.recv_multipart()
        before = front.memory_info().rss
        for number in range(300):
            greedy.send_multipart([bytes(frame) for frame in encode(Op.TOKENIZER_FILES, number.to_bytes(16, "big"), {})])
        wait_until(lambda: client.stats()["messages"] > 300)
        assert len(client.tokenizer_files()["tokenizer.json"]) == 2**22
        assert front.memory_info().rss - before < 100 * 2**20, "300 answers of 4 MiB wait"
        greedy.close(linger=0)
        context.term()


def test_prompts_of_megabytes_hold_nobody_up(client: Any, wire: WireClient) -> None:
    wanted = 20
    for number in range(wanted):
        wire.generate([1] * 1_250_000, stop=["x"] if number % 2 else [], prior_output_tokens=number % 2)
    latencies = []
    for _ in range(20):
        began = time.monotonic()
        assert client.generate([1], max_new_tokens=1, seed=1).ids.tolist() == fake_ids(1, 1).tolist()
        latencies.append(time.monotonic() - began)
    assert np.median(latencies) < 0.3
    codes = {wire.expect(Op.ERROR).body.code for _ in range(wanted)}  # type: ignore[attr-defined]
    assert codes <= {"request_too_long", "invalid_request"}
