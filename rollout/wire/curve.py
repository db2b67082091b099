"""CURVE keys as values: pairs, what a client needs to reach a service, and their text forms.

Key files hold them (`rollout.keys`), sockets take them (`transport`), the gate compares them. A key is 32 bytes, written as 40
characters of Z85. Invariant: no repr shows a secret key.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from rollout.errors import InsecureAddress, InvalidConfig

KEY_BYTES = 32
KEY_CHARACTERS = 40


def has_curve() -> bool:
    """Tell whether this build of libzmq can encrypt."""
    return bool(zmq.has("curve"))


def require_curve() -> None:
    """Raises: InsecureAddress where libzmq was built without CURVE."""
    if not has_curve():
        raise InsecureAddress(
            "this build of libzmq has no CURVE",
            field="address",
            limit="TCP is encrypted with CURVE",
            remedy="install pyzmq from a wheel, use ipc://, or accept the risk with insecure=True (--insecure)",
        )


def checked_key(text: object, field_name: str) -> str:
    """Return a key's text form if it is one. Raises: InvalidConfig; the message does not hold the text."""
    if isinstance(text, str) and len(text) == KEY_CHARACTERS:
        try:
            if len(z85.decode(text.encode("ascii"))) == KEY_BYTES:
                return text
        except (KeyError, ValueError, UnicodeEncodeError):
            pass
    raise InvalidConfig(
        f"{field_name} is not a CURVE key",
        field=field_name,
        limit=f"a key is {KEY_CHARACTERS} characters of Z85",
        remedy="make one with `python -m rollout keys new NAME`",
    )


def key_text(raw: bytes) -> str | None:
    """Return the text form of 32 raw bytes, None for anything else."""
    return z85.encode(raw).decode("ascii") if len(raw) == KEY_BYTES else None


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret, as text."""

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        checked_key(self.public, "public")
        checked_key(self.secret, "secret")


def new_key_pair() -> KeyPair:
    """Draw a key pair. Raises: InsecureAddress without CURVE."""
    require_curve()
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


@dataclass(frozen=True, slots=True)
class ClientKey:
    """What a client shows and what it expects: its own pair, and the public key of the service."""

    pair: KeyPair
    server: str

    def __post_init__(self) -> None:
        checked_key(self.server, "server")
