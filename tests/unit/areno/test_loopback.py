"""Strangers at the loopback ports of ranks: while they meet, and afterwards. Real processes over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from areno.errors import EngineFailure
from areno.loopback import _proof, close_ports, listen_by, prove_ranks

TIMEOUT_S = 3
# In every rank a stranger connects as soon as the rank listens, before any other can, and says what gloo's connections say first:
# a place in the group, here all there may be. Then comes what the test wants.
RANK = """
import os, socket, struct, sys, time
import torch
import torch.distributed as dist
import areno.loopback as loopback
from areno.parallel import TPGroup

rank, store, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
gloo, strangers = dist.ProcessGroupGloo, []
create = gloo.create_device


def connect(place, port):
    one = socket.create_connection(("127.0.0.1", port), 2.0)
    one.sendall(struct.pack("<q", place))
    if what == "noise":
        one.sendall(os.urandom(4096))
    strangers.append(one)


def with_strangers(hostname):
    before = set(loopback._ports())
    device = create(hostname=hostname)
    [descriptor] = [fd for inode, fd in loopback._ports().items() if inode not in before]
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        port = listener.getsockname()[1]
    if what != "late":
        for place in range(8):
            connect(place, port)
        time.sleep(0.3)
    with_strangers.port = port
    return device


gloo.create_device = staticmethod(with_strangers)
loopback._PROOF_S = float(sys.argv[4])
group = TPGroup.connect(rank=rank, size=2, init_method="file://" + store, backend="gloo", timeout_s=60.0)
print("met", flush=True)
if what == "late":
    files = len(os.listdir("/proc/self/fd"))
    for place in range(3):
        try:
            socket.create_connection(("127.0.0.1", with_strangers.port), 0.3)
        except TimeoutError:
            pass
        else:
            raise AssertionError("a stranger got in")
    assert len(os.listdir("/proc/self/fd")) == files
for _ in range(50):
    assert group.all_reduce_(torch.full((5,), rank + 1.0)).tolist() == [3.0] * 5
group.close()
print("end", flush=True)
"""


def run_ranks(folder: Path, what: str) -> list[subprocess.CompletedProcess[str]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder / "store"), what, str(TIMEOUT_S)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [subprocess.CompletedProcess(one.args, one.wait(60), *one.communicate()) for one in started]
    finally:
        for one in started:
            one.kill()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("what", ["silence", "noise"])
def test_a_stranger_in_a_ranks_place_is_found_out_in_time_and_before_any_tensor_travels(what: str, tmp_path: Path) -> None:
    for rank, ended in enumerate(run_ranks(tmp_path, what)):
        assert ended.returncode == 1 and ended.stdout == "", ended
        assert f"rank {rank} did not find rank {1 - rank} behind its port" in ended.stderr, ended.stderr[-2000:]
        assert "another program of this machine" in ended.stderr and "share the machine only with whom you trust" in ended.stderr


@pytest.mark.timeout(90)
def test_once_the_ranks_have_met_nobody_gets_in_and_nothing_is_held_for_who_tries(tmp_path: Path) -> None:
    for ended in run_ranks(tmp_path, "late"):
        assert (ended.returncode, ended.stdout) == (0, "met\nend\n"), ended


def test_a_port_that_is_closed_keeps_the_connections_that_it_has() -> None:
    listener, ports = listen_by(lambda: socket.create_server(("127.0.0.1", 0)))
    other = socket.create_server(("127.0.0.1", 0))
    with listener, other:
        with socket.create_connection(listener.getsockname(), 2.0) as early:
            accepted, _ = listener.accept()
            close_ports(ports)
            early.sendall(b"still here")
            assert accepted.recv(16) == b"still here"
            accepted.sendall(b"yes")
            assert early.recv(16) == b"yes"
            with pytest.raises(TimeoutError):
                socket.create_connection(listener.getsockname(), 0.3)
            accepted.close()
        socket.create_connection(other.getsockname(), 2.0).close()


class Work:
    """A transfer that is done."""

    def wait(self, timeout: timedelta) -> None:
        """Return at once."""


class PlayedPeer:
    """A backend whose other rank answers with given bytes, or with what it was sent."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        self._answer = tensors[0].numpy().tobytes() if self._answer is None else self._answer
        return Work()

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        assert self._answer is not None
        tensors[0].copy_(torch.frombuffer(bytearray(self._answer), dtype=torch.uint8))
        return Work()


class Store:
    """A store with the secret alone."""

    secret = bytes(range(32))

    def get(self, name: str) -> bytes:
        assert name == "secret"
        return self.secret.hex().encode()


def test_only_who_has_the_secret_and_the_place_proves_itself() -> None:
    right = _proof(Store.secret, 1, 0).numpy().tobytes()
    prove_ranks(PlayedPeer(right), Store(), 0, 2, timedelta(seconds=1))
    others = [None, bytes(32), os.urandom(32), right[:-1] + bytes([right[-1] ^ 1])]
    for answer in [*others, _proof(Store.secret, 2, 0).numpy().tobytes(), _proof(Store.secret, 1, 2).numpy().tobytes()]:
        with pytest.raises(EngineFailure, match="rank 0 did not find rank 1 behind its port"):
            prove_ranks(PlayedPeer(answer), Store(), 0, 2, timedelta(seconds=1))
