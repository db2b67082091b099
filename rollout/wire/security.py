"""Session secrets, and addresses: their forms and who reaches them.

The front makes one 128-bit secret for each session; whoever continues a session must show it. Local sockets (`ipc://`) are
guarded by the file system; TCP is encrypted (see `curve` and `gate`) unless the operator says `--insecure`.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import warnings
from dataclasses import dataclass

from rollout.errors import InvalidConfig

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
        plain = ":" not in host or (host.startswith("[") and host.endswith("]"))
        if colon and host and plain and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65535:
            return Address(text=text, scheme="tcp", host=host, port=int(port))
    raise InvalidConfig(
        f"address {text!r} is not understood",
        field="address",
        value=text,
        limit="known forms: ipc:///absolute/path, tcp://host:port, tcp://[IPv6]:port; a port is 65534 at most, control takes the next",
        remedy="leave address out to use the local socket in the state folder",
    )


def missing_socket(text: str) -> str | None:
    """Return the path of a local address at which there is no socket, else None."""
    path = parse_address(text).path
    return path if path and not os.path.exists(path) else None


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_machine(host: str) -> bool:
    """Tell whether a client that connects to a host stays on its machine: loopback, or the wildcard, which Linux takes for it."""
    return is_loopback(host) or (host != "*" and is_wildcard(host))


def is_wildcard(host: str) -> bool:
    """Tell whether a host stands for every interface."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == "*"


def warn_of_clear_tcp(address: Address) -> None:
    """Warn the operator who chose TCP without encryption, of what that means."""
    who = "every user of this machine" if is_loopback(address.host) else "every machine that reaches it"
    warnings.warn(f"{address.text} is TCP without encryption: {who} can read, use and stop the service", stacklevel=3)


def control_address_for(address: str, announced: str) -> str:
    """Return where a client that reached `address` finds the control socket; a wildcard is replaced by the host it used itself."""
    control, own = parse_address(announced), parse_address(address)
    if control.scheme == "tcp" and own.scheme == "tcp" and is_wildcard(control.host):
        return f"tcp://{own.host}:{control.port}"
    return announced
