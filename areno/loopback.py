"""Who sits behind the loopback ports of a CPU engine's ranks: gloo takes whom it gets, so the ranks look to it themselves.

Any program of the machine can connect to a port of 127.0.0.1. One that comes before a rank does gets that rank's place in the
group; one that comes later keeps a file of the process open for as long as it likes. Therefore (1) ranks listen only once all
are there, which leaves a stranger milliseconds, (2) each proves to each by the secret in their store, which lies in a folder of
their user, that it has its place, before any tensor travels, and (3) afterwards the kernel drops whatever comes to the port.

Invariant: a group is handed out only if every rank has proven itself to this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from areno.errors import EngineFailure

_ALL_THERE, _ARRIVED, _SECRET = "all-there", "arrived", "secret"
_PROOF_BYTES = 32
# All ranks are there and connected by then: only who is none takes longer.
_PROOF_S = 30.0
_TAG = 7
# Not among Python's names. The program: return 0, which keeps nothing of a packet.
_SO_ATTACH_FILTER = getattr(socket, "SO_ATTACH_FILTER", 26)
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
# Two groups made at once would each take the other's port for its own.
_making = threading.Lock()


def wait_for_all(store: Any, rank: int, size: int) -> None:
    """Return once every rank is at the store. Blocks: at most the store's time-out. Raises: RuntimeError."""
    if rank == 0:
        store.set(_SECRET, secrets.token_hex(32))
    if store.add(_ARRIVED, 1) == size:
        store.set(_ALL_THERE, "1")
    store.get(_ALL_THERE)


def listen_by(make: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return what `make` returns and the inodes of the ports on loopback that it opened."""
    with _making:
        before = set(_ports())
        made = make()
        return made, [inode for inode in _ports() if inode not in before]


def _ports() -> dict[int, int]:
    """Return the sockets of this process that listen on loopback: inode to descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _opened(int(name)) as one:
            listens = one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and one.getsockname()[0] in ("127.0.0.1", "::1"):
                found[os.fstat(one.fileno()).st_ino] = int(name)
    return found


@contextlib.contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket over a copy of a descriptor. Raises: OSError for one that is no socket."""
    copy = os.dup(descriptor)
    try:
        one = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with one:
        yield one


def close_ports(inodes: list[int]) -> None:
    """Let nobody in any more, for good; connections that are there stay. Where the kernel cannot do it the ports stay open.

    The library wants its port as long as it lives, so the port is not closed: packets to it are dropped.
    """
    program = ctypes.create_string_buffer(_DROP_ALL)
    option = struct.pack("HP", 1, ctypes.addressof(program))
    ports = _ports()
    for inode in inodes:
        if inode in ports:
            with contextlib.suppress(OSError), _opened(ports[inode]) as one:
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _proof(secret: bytes, giver: int, taker: int) -> torch.Tensor:
    """Return what rank `giver` shows rank `taker`: another one in each direction, so that nobody can give back what he got."""
    digest = hmac.digest(secret, f"{giver}>{taker}".encode(), hashlib.sha256)
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def prove_ranks(backend: Any, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Exchange proofs with every other rank. Blocks: at most the group's time-out for each of them, and half a minute.

    Raises: EngineFailure naming the rank.
    """
    timeout = min(timeout, datetime.timedelta(seconds=_PROOF_S))
    secret = bytes.fromhex(store.get(_SECRET).decode())
    others = [other for other in range(size) if other != rank]
    given = {other: _proof(secret, rank, other) for other in others}
    sent = [(other, backend.send([given[other]], other, _TAG)) for other in others]
    shown = {other: torch.zeros(_PROOF_BYTES, dtype=torch.uint8) for other in others}
    got = [(other, backend.recv([shown[other]], other, _TAG)) for other in others]
    for other, work in [*got, *sent]:
        try:
            work.wait(timeout)
        except RuntimeError as error:
            raise _stranger(rank, other, str(error)[:200]) from error
    for other in others:
        if not hmac.compare_digest(shown[other].numpy().tobytes(), _proof(secret, other, rank).numpy().tobytes()):
            raise _stranger(rank, other, "what it showed is not that rank's")


def _stranger(rank: int, other: int, cause: str) -> EngineFailure:
    return EngineFailure(
        f"rank {rank} did not find rank {other} behind its port",
        field="tp",
        limit=f"it is lost, or another program of this machine connected in its place: {cause}",
        remedy="start the engine again; share the machine only with whom you trust",
    )
