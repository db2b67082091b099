"""Sockets tell what became of a send, keep other users out, and lose nothing that was taken."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.errors import AddressInUse
from rollout.wire.codec import MAX_FRAMES
from rollout.wire.transport import Context, Poller, Router, Sent


@pytest.fixture
def context() -> Iterator[Context]:
    context = Context()
    yield context
    context.close()


def test_a_message_makes_the_round(context: Context, tmp_path: Path) -> None:
    router = context.router(f"ipc://{tmp_path}/r", 2**20)
    dealer = context.dealer(router.address, 2**20)
    assert dealer.send([b"a", b"b"]) is Sent.OK
    assert Poller([router]).wait(5) == [router]
    incoming = router.receive()
    assert incoming is not None
    assert incoming.frames == [b"a", b"b"]
    assert incoming.whole
    assert Router.drew(incoming.route)
    assert router.send(incoming.route, [b"c"]) is Sent.OK
    assert Poller([dealer]).wait(5) == [dealer]
    back = dealer.receive()
    assert back is not None
    assert back.frames == [b"c"]
    assert dealer.receive() is None


def test_an_unknown_peer_is_reported_gone(context: Context, tmp_path: Path) -> None:
    router = context.router(f"ipc://{tmp_path}/r", 2**20)
    assert router.send(b"\0nope", [b"x"]) is Sent.GONE


def test_a_peer_that_reads_nothing_is_reported_full_and_loses_nothing(context: Context, tmp_path: Path) -> None:
    router = context.router(f"ipc://{tmp_path}/r", 2**20)
    dealer = context.dealer(router.address, 2**20)
    dealer.send([b"hello"])
    assert Poller([router]).wait(5)
    incoming = router.receive()
    assert incoming is not None
    taken = 0
    while router.send(incoming.route, [taken.to_bytes(4, "little"), b"x" * 4096]) is Sent.OK:
        taken += 1
        assert taken < 100_000, "a slow reader must fill up at some point"
    arrived = []
    while Poller([dealer]).wait(0.5):
        message = dealer.receive()
        if message is not None:
            arrived.append(int.from_bytes(message.frames[0], "little"))
    assert arrived == list(range(taken))


def test_frames_beyond_the_bound_are_dropped_and_the_message_says_so(context: Context, tmp_path: Path) -> None:
    router = context.router(f"ipc://{tmp_path}/r", 2**20)
    dealer = context.dealer(router.address, 2**20)
    dealer.send([b"x"] * (MAX_FRAMES + 5))
    dealer.send([b"y"])
    assert Poller([router]).wait(5)
    first = router.receive()
    assert first is not None
    assert not first.whole
    assert len(first.frames) == MAX_FRAMES
    assert Poller([router]).wait(5)
    second = router.receive()
    assert second is not None
    assert second.frames == [b"y"]


def test_frames_that_are_too_many_bytes_together_are_dropped_and_the_message_says_so(context: Context, tmp_path: Path) -> None:
    router = context.router(f"ipc://{tmp_path}/r", 2**20)
    dealer = context.dealer(router.address, 2**20)
    dealer.send([b"x" * 2**19] * 5)
    assert Poller([router]).wait(5)
    first = router.receive()
    assert first is not None and not first.whole
    assert sum(map(len, first.frames)) <= 2**20


def test_a_message_over_the_size_limit_does_not_arrive_and_the_socket_lives(context: Context, tmp_path: Path) -> None:
    router = context.router(f"ipc://{tmp_path}/r", 2**20)
    large, small = context.dealer(router.address, 2**26), context.dealer(router.address, 2**26)
    large.send([b"x" * (2**20 + 1)])
    small.send([b"ok"])
    assert Poller([router]).wait(5)
    incoming = router.receive()
    assert incoming is not None
    assert incoming.frames == [b"ok"]
    assert not Poller([router]).wait(0.2)


@pytest.mark.parametrize("network", ["ipc", "tcp"])
@pytest.mark.parametrize("kind", ["router", "dealer"])
def test_a_process_that_reads_nothing_outlives_a_peer_that_filled_its_queue_and_went(tmp_path: Path, kind: str, network: str) -> None:
    address = f"ipc://{tmp_path}/r" if network == "ipc" else "tcp://127.0.0.1:0"
    context = Context()
    router = context.router(address, 2**20) if kind == "dealer" else None
    command = [sys.executable, "-m", "tests.unit.rollout.wire.full_queue", kind, address if router is None else router.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        said = other.stdout.readline().strip()
        route = b""
        if router is None:
            dealer = context.dealer(said, 2**20)
        else:
            assert Poller([router]).wait(5)
            incoming = router.receive()
            assert incoming is not None
            route = incoming.route
        taken, deadline = 0, time.monotonic() + 1.0
        while time.monotonic() < deadline and taken < 20_000:
            sent = dealer.send([b"x"]) if router is None else router.send(route, [b"x"])
            taken += sent is Sent.OK
        assert taken >= 2_000
        context.close()
        # Longer than the library waits between two heartbeats, where it sends any.
        time.sleep(2.5)
        assert other.poll() is None, f"it ended with {other.returncode}"
        print(file=other.stdin, flush=True)
        assert int(other.stdout.readline()) >= 1_000, "what came before is still there"
        if router is None:
            again = Context()
            again.dealer(said, 2**20).send([b"hello"])
            print(file=other.stdin, flush=True)
            assert int(other.stdout.readline()) == 1, "and others find it"
            again.close()
    assert other.returncode == 0


def test_socket_files_are_for_their_owner_only(context: Context, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        context.router(f"ipc://{tmp_path}/r", 2**20)
        assert os.umask(0) == 0, "the caller's umask comes back"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) & 0o077 == 0


def test_an_occupied_port_is_refused_with_the_address(context: Context) -> None:
    first = context.router("tcp://127.0.0.1:0", 2**20)
    with pytest.raises(AddressInUse, match=first.address):
        context.router(first.address, 2**20)
