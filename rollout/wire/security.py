"""Session secrets and the rule about which addresses a service may bind.

The front makes one 128-bit secret for each session; whoever continues a session must show it. Until connections
are encrypted, only local sockets are bound: `ipc://`, and loopback TCP when the operator says `--insecure`.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import warnings
from dataclasses import dataclass

from rollout.errors import InsecureAddress, InvalidConfig

SECRET_BYTES = 16
# sockaddr_un.sun_path holds 108 bytes with the terminating zero.
MAX_IPC_PATH = 107
# The name of the longest socket beside the data socket, which must fit as well.
IPC_SUFFIX_ROOM = len(".control")


def new_token() -> bytes:
    """Return 16 unpredictable bytes: a session id, a secret, an incarnation or a request id."""
    return secrets.token_bytes(SECRET_BYTES)


def same_secret(left: bytes, right: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(left, right)


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed service address; `path` for ipc, `host` and `port` for tcp."""

    text: str
    scheme: str
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def control(self) -> str:
        """The address of the control socket that goes with this data address."""
        if self.scheme == "ipc":
            return f"{self.text}.control"
        return f"tcp://{self.host}:{self.port + 1}" if self.port else f"tcp://{self.host}:0"


def parse_address(text: str) -> Address:
    """Return the parts of an address. Raises: InvalidConfig."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "ipc" and rest.startswith("/"):
        room = MAX_IPC_PATH - IPC_SUFFIX_ROOM
        if len(rest.encode()) > room:
            raise InvalidConfig(
                f"address {text!r} has a path of {len(rest.encode())} bytes",
                field="address",
                value=text,
                limit=f"a local socket's path holds {room} bytes here",
                remedy="choose a shorter address, for example below /tmp, or set ARENO_STATE_DIR to a short path",
            )
        return Address(text=text, scheme="ipc", path=rest)
    if separator and scheme == "tcp":
        host, colon, port = rest.rpartition(":")
        if colon and host and port.isdigit() and int(port) < 65535:
            return Address(text=text, scheme="tcp", host=host, port=int(port))
    raise InvalidConfig(
        f"address {text!r} is not understood",
        field="address",
        value=text,
        limit="known forms: ipc:///absolute/path, tcp://host:port",
        remedy="leave address out to use the local socket in the state folder",
    )


def missing_socket(text: str) -> str | None:
    """Return the path of a local address at which there is no socket, else None."""
    path = parse_address(text).path
    return path if path and not os.path.exists(path) else None


def check_bind_address(text: str, *, insecure: bool) -> Address:
    """Return the parsed address if a service may bind it. Raises: InsecureAddress, InvalidConfig. Warns on clear TCP."""
    address = parse_address(text)
    if address.scheme == "ipc":
        return address
    try:
        loopback = ipaddress.ip_address(address.host.strip("[]")).is_loopback
    except ValueError:
        loopback = address.host == "localhost"
    if not loopback:
        raise InsecureAddress(
            f"address {text!r} is reachable from the network",
            field="address",
            value=text,
            limit="connections are not encrypted, so only local ones are taken",
            remedy="use ipc://, or tcp://127.0.0.1:PORT with insecure=True (--insecure) behind an ssh tunnel",
        )
    if not insecure:
        raise InsecureAddress(
            f"address {text!r} is TCP without encryption",
            field="address",
            value=text,
            limit="every local user could read and send on it",
            remedy="use ipc://, or accept the risk with insecure=True (--insecure)",
        )
    warnings.warn(f"{text} is TCP without encryption: every user of this machine can use the service", stacklevel=2)
    return address
