"""Hostile messages on every bound socket of a running service, beside a request that must not notice.

About a minute's worth beside other tests; `make fuzz` sends more: FUZZ_MUTATIONS says how many, FUZZ_SEED which.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import rollout
from rollout.errors import RolloutError
from rollout.wire.codec import HEADER, decode
from rollout.wire.operations import CLIENT_REPLIES, CONTROL_REQUESTS, DATA_REQUESTS, HOST_REPLIES, HOST_REQUESTS, Op
from tests.contract.golden_frames import GOLDEN, Golden
from tests.fakes import WireClient, fake_ids
from tests.fuzz.audited import AuditedService, audited_service
from tests.fuzz.mutations import Mutator
from tests.unit.rollout.agent.byte_tokenizer import files

MUTATIONS = int(os.environ.get("FUZZ_MUTATIONS", "60000"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
BURST = 50
# What a client with a session may rightly do to all others, or to a host elsewhere.
STOPPING = {Op.PAUSE, Op.SHUTDOWN, Op.SLEEP, Op.WEIGHTS_JOIN_GROUP}
GROWTH_BYTES = 150 * 2**20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditedService]:
    options = {"lease_s": 3.0, "metrics_port": 0, "engine_options": {"step_s": 0.002}}
    folder = tmp_path_factory.mktemp("m")
    for name, content in files().items():
        (folder / name).write_bytes(content)
    with audited_service(folder, **options) as service:
        yield service


class Neighbour:
    """A request that runs meanwhile, read by a thread of its own."""

    def __init__(self, client: Any, seed: int) -> None:
        self._stream = client.stream([1, 2, 3], max_new_tokens=90_000, seed=seed)
        self._ids: list[int] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for delta in self._stream:
            self._ids.extend(delta.ids.tolist())

    @property
    def ids(self) -> list[int]:
        """What came so far; more may come while somebody looks."""
        return self._ids.copy()

    def grown(self, timeout_s: float = 20.0) -> bool:
        """Wait for a token that comes after this call."""
        before, deadline = len(self._ids), time.monotonic() + timeout_s
        while len(self._ids) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(self._ids) > before

    def end(self) -> None:
        self._stream.close()
        self._thread.join(20)


def operation(frames: Sequence[bytes]) -> int | None:
    return HEADER.unpack(frames[0])[1] if frames and len(frames[0]) == HEADER.size else None


def replies(peer: WireClient, wanted: int, timeout_s: float = 10.0) -> int:
    """Read until so many replies came, or until it is quiet if none in particular are wanted; every one is a typed message."""
    count, deadline = 0, time.monotonic() + timeout_s
    while (wanted == 0 or count < wanted) and time.monotonic() < deadline:
        packet = peer.receive(0.02 if wanted == 0 else 1.0)
        if packet is None and wanted == 0:
            break
        count += packet is not None
    return count


def of_update(update_id: str) -> list[Golden]:
    """Return the golden control messages with a real update's name in them."""
    named = [one for one in GOLDEN if "update_id" in one.fields and one.op is not Op.WEIGHTS_JOIN_GROUP]
    return [one._replace(fields={**one.fields, "update_id": update_id}) for one in named]


def begun(control: WireClient, timeout_s: float = 20.0) -> str:
    """Return the id of a fresh update. The former client's ends with its goodbye, or, where it became another by a HELLO of the
    mutations, with its lease.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        control.send(Op.WEIGHTS_BEGIN, {})
        packet = control.receive(5.0)
        assert packet is not None
        if packet.op is Op.WEIGHTS_TICKET:
            return str(packet.body.update_id)  # type: ignore[attr-defined]
        assert packet.body.code == "update_busy"  # type: ignore[attr-defined]
        time.sleep(0.02)
    raise AssertionError("no update within the time")


def strangers(service: AuditedService, control_address: str, count: int) -> None:
    """Send to both sockets without a session: each message gets one reply, and it is an error."""
    for number, address in enumerate((service.address, control_address)):
        peer = WireClient(address, hello=False)
        messages = [one for one in Mutator(SEED + number).messages(count) if operation(one) != Op.HELLO]
        for start in range(0, len(messages), BURST):
            burst = messages[start : start + BURST]
            for frames in burst:
                peer.send_frames(frames)
            assert replies(peer, len(burst)) == len(burst), "each message gets its reply"
        assert peer.receive(0.05) is None, "and no second one"
        peer.close()


def clients(service: AuditedService, count: int) -> None:
    """Send with sessions: what comes out right by chance is a client's own business."""
    draw = random.Random(SEED)
    on_data, on_control = Mutator(SEED + 2).messages(count), Mutator(SEED + 3).messages(count // 2)
    for round_number in range(max(1, count // (4 * BURST))):
        peer = WireClient(service.address)
        control = WireClient(peer.welcome.control_address, session=peer.welcome.session, secret=peer.welcome.secret)
        on_update = Mutator(SEED + 100 + round_number, of_update(begun(control))).messages(2 * BURST)
        for source, target, share in ((on_data, peer, 4 * BURST), (on_control, control, 2 * BURST), (on_update, control, 2 * BURST)):
            for _, frames in zip(range(share), source):
                if operation(frames) not in STOPPING:
                    target.send_frames(frames)
                    if draw.random() < 0.02:
                        replies(target, 0)
            replies(target, 0)
        control.close()
        peer.close()


def greetings(paths: Sequence[Path], count: int) -> None:
    """Speak ZMTP by hand, and badly, to the socket files."""
    draw = random.Random(SEED)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x05\0abcd"
    whole = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04" + bytes([len(ready)]) + ready
    whole += b"\x01\x14" + HEADER.pack(1, Op.GENERATE, bytes(range(16))) + b"\x00\x02\x92\x80"
    for number in range(count):
        data = bytearray(whole)
        for _ in range(draw.randrange(4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.3:
            data[64:64] = struct.pack(">BQ", draw.choice([0x02, 0x03, 0x06]), draw.choice([2**63, 2**40, 70_000]))
        with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
            raw.settimeout(0.02)
            raw.connect(str(paths[number % len(paths)]))
            raw.sendall(bytes(data[: draw.randrange(len(data) + 1)] if draw.random() < 0.3 else data))
            raw.recv(4096)


def web_requests(count: int) -> Iterator[bytes]:
    """Yield what no scraper sends: mutated requests, long lines, many headers, bodies, other versions and encodings."""
    draw = random.Random(SEED)
    whole = b"GET /metrics?name[]=x HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text; version=1.0.0; escaping=values\r\n"
    whole += b"Accept-Encoding: gzip\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\nhello"
    odd = [
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n",
        b"GET / HTTP/1.1\r\nAccept: application/openmetrics-text; version=" + b"9" * 5000 + b"\r\n\r\n",
        b"GET //metrics/../../etc/passwd HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01" + bytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\n\r\n",
    ]
    yield from odd
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        yield bytes(data[: draw.randrange(len(data))] if draw.random() < 0.2 else data)


def test_whatever_comes_to_the_metrics_port_costs_no_files_and_nobody_else_notices(service: AuditedService) -> None:
    assert service.metrics is not None
    place = ("127.0.0.1", int(service.metrics.split(":")[2].split("/")[0]))
    front = psutil.Process(service.pid)
    with rollout.connect(service.address) as client, contextlib.ExitStack() as stack:
        neighbour = Neighbour(client, seed=13)
        neighbour.grown()
        files, threads = front.num_fds(), front.num_threads()
        for data in web_requests(min(400, MUTATIONS // 200)):
            with socket.create_connection(place, 5.0) as raw, contextlib.suppress(OSError):
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65_536):
                    pass
        for _ in range(100):
            stack.enter_context(socket.create_connection(place, 5.0)).sendall(b"GET /met")
        assert neighbour.grown(), "it runs on"
        assert front.num_fds() - files < 40 and front.num_threads() - threads < 40, "who holds connections open gets few"
        stack.close()
        deadline = time.monotonic() + 10.0
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(service.metrics, timeout=5) as answer:
                assert b"rollout_tokens_total" in answer.read()
                break
            assert time.monotonic() < deadline, "and then a scrape works as ever"
        ids = neighbour.ids
        assert ids == fake_ids(13, len(ids)).tolist()
        neighbour.end()
    assert service.findings == ""
    assert "etc/passwd" not in service.log and "Traceback" not in service.log


@pytest.mark.timeout(max(120, MUTATIONS // 100))
def test_hostile_messages_run_nothing_break_nothing_and_are_answered_by_name(service: AuditedService) -> None:
    with rollout.connect(service.address) as client:
        front = psutil.Process(service.pid)
        neighbour = Neighbour(client, seed=12)
        warm = WireClient(service.address)
        control_address = warm.welcome.control_address
        warm.close()
        strangers(service, control_address, 200)
        before, memory = client.stats(), front.memory_info().rss
        path = Path(service.address.removeprefix("ipc://"))
        links = [one for one in path.parent.glob("*.h*") if one.suffix != ".json"]
        assert len(links) == 1
        greetings([path, path.with_name(f"{path.name}.control"), *links], min(600, MUTATIONS // 20))
        strangers(service, control_address, MUTATIONS // 4)
        clients(service, MUTATIONS // 3)
        assert neighbour.grown(), "it runs on"
        ids = neighbour.ids
        assert ids == fake_ids(12, len(ids)).tolist()
        after = client.stats()
        assert after["host_starts"] == 1 and after["health"] == "ready"
        assert after["malformed"] - before["malformed"] > MUTATIONS // 5
        assert front.memory_info().rss - memory < GROWTH_BYTES
        neighbour.end()
        deadline = time.monotonic() + 20
        while (stats := client.stats())["live"] + stats["unacknowledged_endings"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert stats["live"] == 0 and stats["engine"]["running"] == 0, "nothing is left behind"
        assert stats["received"] == stats["refused"] + stats["attached"] + stats["accepted"]
        assert stats["accepted"] == sum(stats[kind] for kind in ("stop", "length", "cancelled", "expired", "failed"))
    surprise = service.log.partition("could not be handled")[2]
    assert not surprise, f"whatever comes, somebody has thought of it: {surprise[:4000]}"
    assert service.findings == ""


def test_the_audit_finds_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import tests.fuzz.audit as audit; audit.arm(); import marshal, ast; marshal.loads(b'N'); eval('1')"
    environment = {**os.environ, "AUDIT_FINDINGS": str(tmp_path / "found")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=30)
    found = (tmp_path / "found").read_text()
    assert all(f"{event} " in found for event in ("import", "marshal.loads", "compile", "exec"))


@pytest.mark.parametrize("allowed", [DATA_REQUESTS, CONTROL_REQUESTS, CLIENT_REPLIES, HOST_REQUESTS, HOST_REPLIES])
def test_no_mutation_gets_anything_but_a_message_or_a_typed_error_out_of_the_decoder(allowed: frozenset[Op]) -> None:
    taken = refused = 0
    for frames in Mutator(SEED, [one for one in GOLDEN if one.op in allowed]).messages(1500):
        try:
            assert decode(frames, allowed).op in allowed
            taken += 1
        except RolloutError as error:
            assert error.code in ("malformed", "protocol_version", "unknown_operation", "invalid_request")
            refused += 1
    assert taken > 20 and refused > 200
