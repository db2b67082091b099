"""Who may connect to a service, and stays allowed to: the gate's rules, the service's keys, the list of clients' keys.

    libzmq asks about every new connection -> doorway -> gate -> rules made here
    the list changed on disk (keys rotate, keys revoke) -> `advance` says so -> the front ends the sessions of keys that are gone

Local sockets take what the file system lets through, and the host link only the process that the front started. TCP takes keys
of the list, for data and for control apart; or anybody, if the operator said `--insecure`. The front polls `doorway` and calls
the rest. Invariant: a session's principal was judged by the gate, for this socket, when it connected.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct

from rollout.errors import AccessDenied, InvalidConfig
from rollout.keys import AllowList, KeyFolder
from rollout.service.sessions import Channel
from rollout.wire.curve import KeyPair, require_curve
from rollout.wire.gate import Gate, LocalPeer
from rollout.wire.security import Address, warn_of_clear_tcp
from rollout.wire.transport import Context, Doorway

log = logging.getLogger("rollout.front")
# How soon a key that was taken away loses its sessions; only looked at while sessions with keys are there.
REVOKED_WITHIN_S = 1.0
DOMAINS = {Channel.DATA: b"areno.data", Channel.CONTROL: b"areno.control"}


def _kernel_tells_pids() -> bool:
    """Tell whether the other end of a local socket is known by its process id here; not every sandbox's kernel says it."""
    one, other = socket.socketpair()
    with one, other:
        try:
            pid = struct.unpack("iII", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))[0]
        except OSError:
            return False
        return bool(pid == os.getpid())


class Access:
    """See the module. Raises: InvalidConfig, InsecureAddress for keys that cannot be used."""

    def __init__(self, context: Context, address: Address, folder: KeyFolder, *, insecure: bool) -> None:
        self._gate = Gate()
        self.doorway: Doorway = context.doorway(self._gate)
        self.pair: KeyPair | None = None
        self._list: AllowList | None = None
        self._next_look = 0.0
        if address.scheme == "tcp" and not insecure:
            require_curve()
            self.pair = folder.service_pair()
            self._list = AllowList(folder.allowed_path)
            self._refresh()
            self._gate.allow_keys(DOMAINS[Channel.DATA], lambda key: self._knows(key, Channel.DATA))
            self._gate.allow_keys(DOMAINS[Channel.CONTROL], lambda key: self._knows(key, Channel.CONTROL))
            return
        if address.scheme == "tcp":
            warn_of_clear_tcp(address)
        for domain in DOMAINS.values():
            self._gate.allow_plain(domain)

    @property
    def refused(self) -> int:
        """Connections that were turned away since the start."""
        return self._gate.refused

    def host_domain(self) -> bytes:
        """Return a domain for a fresh host link; nobody gets in before `expect_host`."""
        return b"areno.host." + secrets.token_hex(4).encode()

    def expect_host(self, domain: bytes, pid: int) -> None:
        """Let this process, and no other, take the other end of a host link."""

        told = _kernel_tells_pids()

        def may(peer: LocalPeer | None) -> bool:
            # Without the kernel's word the folder's rights alone guard the socket.
            return peer is not None and (peer.pid == pid or not told)

        self._gate.allow_plain(domain, may)

    def forget_host(self, domain: bytes) -> None:
        """Let nobody take this link any more."""
        self._gate.close(domain)

    def _refresh(self) -> bool:
        assert self._list is not None
        try:
            return self._list.refresh()
        except InvalidConfig as error:
            log.error("nobody is let in, since the list of keys is broken: %s", error)
            return True

    def _knows(self, key: str, channel: Channel) -> bool:
        assert self._list is not None
        self._refresh()
        return self._list.may_connect(key, control=channel is Channel.CONTROL)

    def check(self, principal: str, channel: Channel) -> None:
        """Raises: AccessDenied for a key that may not, or no longer, use this socket."""
        if self._list is not None and not self._list.may_connect(principal, control=channel is Channel.CONTROL):
            raise AccessDenied(
                f"this key may not use the {channel.value} socket",
                field="key",
                limit="it was replaced, taken away, or made without the right to control",
                remedy="connect with a key that `python -m rollout keys list` shows as allowed",
            )

    def advance(self, now: float, *, needed: bool) -> tuple[bool, float | None]:
        """Look for a changed list when that is due; returns whether it changed, and when to look again if `needed`."""
        if self._list is None or not needed:
            return False, None
        if now < self._next_look:
            return False, self._next_look
        self._next_look = now + REVOKED_WITHIN_S
        return self._refresh(), self._next_look
