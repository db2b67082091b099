"""The gate: decides which connections the service's sockets take, before a byte of theirs is read as a message.

libzmq asks it about every connection of a socket with a domain (ZAP, ZeroMQ RFC 27), local ones included; the front answers in
its own loop. A domain has one rule: NULL for local sockets and for TCP that the operator left open, CURVE with a list of keys
for all other TCP. Because it is asked, libzmq also refuses the oldest greetings (ZMTP 1 and 2), whose raw bytes would reach a
ROUTER. An accepted connection gets a user id of its own, `principal#number`; each of its messages carries it, whatever routing
id the peer claims. Invariant: what cannot be read, or names another mechanism or domain, is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout.wire.curve import key_text

log = logging.getLogger("rollout.gate")
VERSION = b"1.0"
MAX_REQUEST_FRAMES = 8
MAX_FRAME_BYTES = 255
LOG_EVERY_S = 1.0
# Who a connection is, as far as anybody can tell: a key, a local process, or nobody in particular.
ANYONE = "anyone"
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """A process of this machine, by the kernel's word."""

    uid: int
    gid: int
    pid: int


# Tells whether a CURVE key (text) may connect, or whether a local process may; None: unknown, as on TCP.
MayKey = Callable[[str], bool]
MayPeer = Callable[[LocalPeer | None], bool]


def principal_of(user: str) -> str:
    """Return whom a connection's user id names."""
    return user.rpartition("#")[0]


def local_peer(address: bytes) -> LocalPeer | None:
    """Return the process behind a local connection, None for one over a network or without the kernel's word."""
    parts = address.split(b":")
    if len(parts) == 4 and parts[0] == b"localhost" and all(part.isdigit() and len(part) < 12 for part in parts[1:]):
        return LocalPeer(*(int(part) for part in parts[1:]))
    return None


class Gate:
    """Judges connections; see the module. The rules of its domains are set before their sockets are bound."""

    def __init__(self) -> None:
        self._keys: dict[bytes, MayKey] = {}
        self._peers: dict[bytes, MayPeer] = {}
        self._accepted = 0
        self._told_at = float("-inf")
        self.refused = 0

    def allow_keys(self, domain: bytes, may: MayKey) -> None:
        """Let this domain's sockets take CURVE connections whose key passes."""
        self._keys[domain] = may

    def allow_plain(self, domain: bytes, may: MayPeer = lambda peer: True) -> None:
        """Let this domain's sockets take connections without encryption whose process passes."""
        self._peers[domain] = may

    def close(self, domain: bytes) -> None:
        """Forget a domain; nobody gets in there any more."""
        self._keys.pop(domain, None)
        self._peers.pop(domain, None)

    def judge(self, frames: Sequence[bytes]) -> list[bytes]:
        """Return the answer to one question of libzmq."""
        request_id = frames[1] if len(frames) > 1 and len(frames[1]) <= MAX_FRAME_BYTES else b""
        principal = self._principal(frames)
        if principal is None:
            self.refused += 1
            return [VERSION, request_id, b"400", b"not allowed", b"", b""]
        self._accepted += 1
        return [VERSION, request_id, b"200", b"OK", f"{principal}#{self._accepted}".encode(), b""]

    def _principal(self, frames: Sequence[bytes]) -> str | None:
        if not 6 <= len(frames) <= MAX_REQUEST_FRAMES or frames[0] != VERSION or any(len(frame) > MAX_FRAME_BYTES for frame in frames):
            return None
        domain, address, mechanism, credentials = frames[2], frames[3], frames[5], frames[6:]
        if mechanism == b"NULL" and domain in self._peers and not credentials:
            peer = local_peer(address)
            if self._peers[domain](peer):
                return ANYONE if peer is None else f"{LOCAL}:{peer.uid}"
        elif mechanism == b"CURVE" and domain in self._keys and len(credentials) == 1:
            key = key_text(credentials[0])
            if key is not None and self._keys[domain](key):
                return key
        self._tell(domain)
        return None

    def _tell(self, domain: bytes) -> None:
        """Log a refusal, however many there are: a line a second at most."""
        now = time.monotonic()
        if now - self._told_at >= LOG_EVERY_S:
            log.warning("a connection was refused (%s), %d since the start", domain.decode("ascii", "replace"), self.refused + 1)
            self._told_at = now
