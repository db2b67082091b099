"""Encrypted TCP between real processes: who gets in, who is put out, and what a stranger gets of others."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from typer.testing import CliRunner

import rollout
from rollout.cli import app
from rollout.errors import AccessDenied, InsecureAddress, InvalidConfig, RolloutError, ServerUnavailable
from rollout.keys import KeyFolder, read_client_key
from rollout.wire.codec import encode
from rollout.wire.operations import Op
from tests.fakes import StreamReader, WireClient, fake_ids, fake_service

PROMPT = [31, 41, 59, 26]
MODEL = Path(__file__).resolve().parents[2] / "examples" / "agentic" / "tiny_model"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "s"


@pytest.fixture(scope="module")
def client(state: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = {"state_dir": str(state), "lease_s": 20.0, "engine_options": {"step_s": 0.002}}
    with fake_service(tmp_path_factory.mktemp("model"), address="tcp://127.0.0.1:0", **options) as client:
        yield client


def keys_command(state: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "rollout", "keys", *arguments, "--state-dir", str(state), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout)


def test_a_client_with_the_services_own_key_uses_data_and_control(client: Any) -> None:
    assert client.generate(PROMPT, max_new_tokens=5, seed=3).ids.tolist() == fake_ids(3, 5).tolist()
    client.pause()
    client.resume()


def test_a_service_that_the_state_folder_announces_is_found_with_its_key(client: Any, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARENO_STATE_DIR", str(state))
    for address in (None, client.address):
        with rollout.connect(address) as found:
            assert found.generate(PROMPT, max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()


def test_strangers_are_refused_at_once_and_by_name(client: Any, state: Path, tmp_path: Path) -> None:
    elsewhere = KeyFolder(tmp_path / "keys")
    foreign = read_client_key(elsewhere.new("mallory"), server=KeyFolder(state / "keys").service_pair().public)
    began = time.monotonic()
    with pytest.raises(AccessDenied, match="refuses this key"):
        rollout.connect(client.address, key=foreign, timeout_s=60.0)
    with pytest.raises(AccessDenied, match="encrypted connections only"):
        rollout.connect(client.address, timeout_s=60.0)
    with pytest.raises(AccessDenied, match="copy the key file anew"):
        rollout.connect(client.address, key=elsewhere.path("mallory"), timeout_s=60.0)
    assert time.monotonic() - began < 50.0, "none of them waits for its time-out"
    assert client.stats()["refused_connections"] >= 1


def test_a_key_without_the_right_to_control_generates_and_is_refused_the_rest(client: Any, state: Path) -> None:
    made = keys_command(state, "new", "actor", "--data-only")
    with rollout.connect(client.address, key=made["file"]) as actor:
        assert actor.generate(PROMPT, max_new_tokens=4, seed=2).ids.tolist() == fake_ids(2, 4).tolist()
        with pytest.raises(AccessDenied, match="right to control"):
            actor.pause()
        assert actor.generate(PROMPT, max_new_tokens=4, seed=2).ids.tolist() == fake_ids(2, 4).tolist()
    assert not client.stats()["paused"]


@pytest.mark.parametrize("command", ["revoke", "rotate"])
def test_taking_a_key_away_ends_its_sessions_and_nobody_elses(client: Any, state: Path, command: str) -> None:
    name = f"worker-{command}"
    file = KeyFolder(state / "keys").new(name)
    old = read_client_key(file)
    neighbour = client.stream(PROMPT, max_new_tokens=1000, seed=9)
    worker = rollout.connect(client.address, key=file)
    before = client.stats()
    stream = worker.stream(PROMPT, max_new_tokens=50_000)
    next(stream)
    began = time.monotonic()
    keys_command(state, command, name)
    with pytest.raises(AccessDenied):
        for _ in stream:
            assert time.monotonic() - began < 15.0, "the stream goes on after the key is gone"
    with pytest.raises(AccessDenied):
        worker.generate(PROMPT, max_new_tokens=1)
    with pytest.raises(AccessDenied):
        rollout.connect(client.address, key=old)
    worker.close()
    after = client.stats()
    assert after["cancelled"] == before["cancelled"] + 1
    assert [token for delta in neighbour for token in delta.ids.tolist()] == fake_ids(9, 1000).tolist()
    if command == "rotate":
        with rollout.connect(client.address, key=file) as again:
            assert again.generate(PROMPT, max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()


def test_a_session_cannot_be_continued_with_another_key_even_by_its_secret(client: Any, state: Path) -> None:
    ours = read_client_key(KeyFolder(state / "keys").path("local"))
    theirs = read_client_key(KeyFolder(state / "keys").new("second"))
    victim = WireClient(client.address, key=ours)
    request_id = victim.generate(max_new_tokens=100, seed=4)
    thief = WireClient(client.address, hello=False, key=theirs)
    thief.send(Op.HELLO, {"name": "thief", "session": victim.welcome.session, "secret": victim.welcome.secret})
    assert thief.expect(Op.ERROR).body.code == "access_denied"  # type: ignore[attr-defined]
    thief.send(Op.HELLO, {"name": "thief"})
    thief.welcome = thief.expect(Op.WELCOME).body
    thief.send(Op.CANCEL, {"target": request_id})
    assert thief.expect(Op.CANCEL_RESULT).body.state == "unknown"  # type: ignore[attr-defined]
    reader = StreamReader()
    reader.read(victim, [request_id])
    assert reader.ids[request_id] == fake_ids(4, 100).tolist()
    assert thief.receive(0.1) is None, "nothing of the other one's came"
    thief.close()
    victim.close()


def test_a_plain_or_ancient_greeting_never_reaches_the_service(client: Any, state: Path) -> None:
    wire = WireClient(client.address, key=read_client_key(KeyFolder(state / "keys").path("local")))
    ports = [int(address.rsplit(":", 1)[1]) for address in (client.address, wire.welcome.control_address)]
    wire.close()
    before = client.stats()["messages"]
    ancient = b"\x01\x00" + b"\x06\x00hello" + b"\x06\x00hello"
    signature = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    plain = signature + b"PLAIN".ljust(20, b"\0") + bytes(32) + b"\x04\x0b\x05HELLO\x01a\x01b"
    null = signature + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x06\x05READY" + b"\x00\x03abc"
    curve = signature + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO\x01\0" + bytes(72)
    draw = random.Random(0)
    hellos = [curve + draw.randbytes(draw.choice([120, 120, 7, 300])) for _ in range(40)]
    for number, noise in enumerate((ancient, plain, null, b"GET / HTTP/1.1\r\n\r\n", bytes(5000), *hellos, ancient, plain, null)):
        with socket.create_connection(("127.0.0.1", ports[number % 2]), timeout=5) as raw:
            raw.settimeout(0.02)
            with contextlib.suppress(OSError):
                raw.sendall(noise)
                while raw.recv(4096):
                    pass
    assert client.stats()["messages"] - before < 5, "only our own questions were counted"
    assert client.generate(PROMPT, max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()


def raw_local_peer(path: str, identity: bytes) -> socket.socket:
    """A peer that speaks ZMTP 3.0 by hand and claims a routing id that libzmq's own sockets may not."""

    def named(name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

    ready = b"\x05READY" + named(b"Socket-Type", b"DEALER") + named(b"Identity", identity)
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(5.0)
    raw.connect(path)
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
    greeting = b""
    while b"Identity" not in greeting:
        greeting += raw.recv(4096)
    return raw


def test_a_peer_that_claims_a_routing_id_of_the_sockets_own_kind_has_no_session(tmp_path: Path) -> None:
    with fake_service(tmp_path) as client:
        with raw_local_peer(client.address.removeprefix("ipc://"), b"\0\x01\x02\x03\x04") as raw:
            for frames in (encode(Op.CANCEL, bytes(range(16)), {"target": bytes(16)}), encode(Op.STATS, bytes(range(16)), {})):
                first, second = (bytes(frame) for frame in frames)
                raw.sendall(b"\x01" + bytes([len(first)]) + first + b"\x00" + bytes([len(second)]) + second)
            answer = b""
            while answer.count(b"no_session") < 2:
                answer += raw.recv(65536)
        assert client.generate(PROMPT, max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()


def test_only_the_engine_host_gets_at_its_link(tmp_path: Path) -> None:
    with fake_service(tmp_path, engine_options={"step_s": 0.002}) as client:
        path = Path(client.address.removeprefix("ipc://"))
        (link,) = (one for one in path.parent.glob("service.h*") if one.suffix != ".json")
        stream = client.stream(PROMPT, max_new_tokens=300, seed=5)
        context = zmq.Context()
        intruders = [context.socket(kind) for kind in (zmq.PAIR, zmq.DEALER, zmq.ROUTER)]
        for intruder in intruders:
            intruder.setsockopt(zmq.LINGER, 0)
            intruder.setsockopt(zmq.SNDTIMEO, 100)
            intruder.connect(f"ipc://{link}")
            with contextlib.suppress(zmq.Again):
                intruder.send_multipart([b"x" * 20, b"y"])
        assert [token for delta in stream for token in delta.ids.tolist()] == fake_ids(5, 300).tolist()
        assert client.stats()["refused_connections"] >= 1
        assert client.stats()["host_starts"] == 1
        context.destroy(linger=0)


def test_ipv6_works_encrypted(tmp_path: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with fake_service(tmp_path, address="tcp://[::1]:0") as client:
        assert client.address.startswith("tcp://[::1]:")
        assert client.generate(PROMPT, max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()
        client.pause()
        client.resume()


def test_the_log_holds_neither_keys_nor_what_clients_send(tmp_path: Path) -> None:
    state = tmp_path / "state"
    service = fake_service(tmp_path, address="tcp://127.0.0.1:0", state_dir=str(state))
    secret_text, odd_ids = "xyzzy-plugh-secret", [60_606_061, 70_707_071]
    with service as client:
        keys = KeyFolder(state / "keys")
        client.generate(PROMPT, max_new_tokens=2, seed=1)
        for call in (
            lambda: client.generate(odd_ids, max_new_tokens=2),
            lambda: client.generate(PROMPT, stop=[secret_text]),
            lambda: client.generate(PROMPT, lineage=secret_text, temperature=-1.0),
        ):
            with contextlib.suppress(RolloutError):
                call()
        wire = WireClient(client.address, key=read_client_key(keys.path("local")))
        wire.send(Op.GENERATE, {secret_text: secret_text})
        wire.expect(Op.ERROR)
        secrets = [keys.service_pair().secret, read_client_key(keys.path("local")).pair.secret, wire.welcome.secret.hex(), secret_text]
        wire.close()
        log = (service.folder / "service.log").read_text()
    assert "listening" in log or "engine" in log, "the log was read"
    for word in (*secrets, *map(str, odd_ids)):
        assert word not in log


def test_a_network_address_is_not_used_in_clear_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARENO_STATE_DIR", str(tmp_path / "none"))
    with pytest.raises(InsecureAddress, match="key=FILE"):
        rollout.connect("tcp://192.0.2.1:5000")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        rollout.connect("tcp://192.0.2.1:5000", key=tmp_path / "absent.key")
    for own in ("tcp://127.0.0.1:9", "tcp://0.0.0.0:9"):
        with pytest.raises(ServerUnavailable):
            rollout.connect(own, timeout_s=0.3)
    refused = CliRunner().invoke(app, ["info", "--address", "tcp://192.0.2.1:5000"])
    assert refused.exit_code == 1 and "`--insecure`" in refused.output
    tried = CliRunner().invoke(app, ["info", "--address", "tcp://192.0.2.1:5000", "--insecure", "--timeout-s", "0.2"])
    assert tried.exit_code == 1 and "no answer" in tried.output


def test_a_local_service_listens_on_no_port(tmp_path: Path) -> None:
    service = fake_service(tmp_path)
    with service:
        front = psutil.Process(service.pid)
        processes = [front, *front.children(recursive=True)]
        assert len(processes) >= 2
        assert [connection for process in processes for connection in process.net_connections("inet")] == []


def test_serve_over_tcp_makes_the_keys_and_its_snippet_and_info_find_them(tmp_path: Path) -> None:
    state, elsewhere = tmp_path / "served", {**os.environ, "ARENO_STATE_DIR": str(tmp_path / "elsewhere")}
    command = [sys.executable, "-m", "rollout", "serve", "--model", str(MODEL), "--state-dir", str(state), "--address", "tcp://127.0.0.1:0"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--max-rows", "2", "--metrics-port", "0", "--json"], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        address = ready["address"]
        deadline = time.monotonic() + 20
        while "Stop it" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        lines = (tmp_path / "log").read_text().splitlines()
        assert f"Metrics for Prometheus: {ready['metrics']}" in lines
        assert f"loading {MODEL}" in lines[0]
        snippet = "\n".join(line.strip() for line in lines if line.startswith("    "))
        done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=60, env=elsewhere, check=True)
        assert done.stdout.startswith("[")
        ask = [sys.executable, "-m", "rollout", "info", "--address", address, "--json"]
        told = subprocess.run([*ask, "--key", str(state / "keys" / "local.key")], capture_output=True, text=True, timeout=60, env=elsewhere)
        assert json.loads(told.stdout)["address"] == address
        refused = subprocess.run(ask, capture_output=True, text=True, timeout=60, env=elsewhere)
        assert refused.returncode == 1 and json.loads(refused.stdout)["error"]["code"] == "access_denied"
    finally:
        process.terminate()
        process.communicate(timeout=20)
