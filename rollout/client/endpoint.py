"""Where a client's service is, and by which key it is reached.

    no address           the one service that the state folder announces
    ipc://               no key: the file system guards it
    tcp:// and a key     the key file that was named, or `ClientKey`; else, for a service that the state folder announces, its key `local`
    tcp:// without one   in clear: on this machine, or where the caller says `insecure`

The service's announcement names its public key, so that its restart under a new one is known here at once.
"""

from __future__ import annotations

import os

from rollout.errors import AccessDenied, InsecureAddress
from rollout.keys import LOCAL, KeyFolder, read_client_key
from rollout.state import Announcement, StateFolder, default_state_dir
from rollout.wire.curve import ClientKey
from rollout.wire.security import is_own_machine, parse_address
from rollout.wire.transport import Handshake

KeySource = str | os.PathLike[str] | ClientKey | None


def find_service(address: str | None, key: KeySource, *, insecure: bool) -> tuple[str, ClientKey | None]:
    """Return a service's address and the key to reach it by, None for clear text. Raises: NoService, InvalidConfig, InsecureAddress."""
    state = StateFolder(default_state_dir())
    announced = state.find() if address is None else _announced(state, address)
    found = parse_address(announced.address if announced is not None else str(address))
    if found.scheme != "tcp":
        return found.text, None
    if isinstance(key, ClientKey):
        return found.text, key
    server = None if announced is None else announced.server_key
    if key is not None:
        return found.text, read_client_key(key, server)
    if server is not None:
        return found.text, read_client_key(KeyFolder(state.keys).path(LOCAL), server)
    if not insecure and not is_own_machine(found.host):
        raise InsecureAddress(
            f"address {found.text!r} would be used without encryption",
            field="key",
            limit="a service on another machine is reached with a key",
            remedy="pass key=FILE, made there with `python -m rollout keys new NAME`, or accept the risk with insecure=True (`--insecure`)",
        )
    return found.text, None


def _announced(state: StateFolder, address: str) -> Announcement | None:
    """Return what the service at an address says of itself here; None if it runs elsewhere."""
    if not state.services.is_dir():
        return None
    return next((service for service in state.running() if service.address == address), None)


def denial(ended: Handshake, address: str, *, with_key: bool) -> AccessDenied:
    """Return the error of a connection that did not come about."""
    if ended is Handshake.REFUSED:
        return AccessDenied(
            f"the service at {address} refuses this key",
            field="key",
            value=address,
            limit="it is not on the service's list, or lacks the right to control",
            remedy="have one made there with `python -m rollout keys new NAME`, and pass its file as key=",
        )
    if not with_key:
        return AccessDenied(
            f"the service at {address} takes encrypted connections only",
            field="key",
            value=address,
            limit="no key was shown",
            remedy="pass key=FILE, made there with `python -m rollout keys new NAME`",
        )
    return AccessDenied(
        f"no encrypted connection to {address} comes about",
        field="key",
        value=address,
        limit="it is not the service whose public key the key file names, or it runs with insecure=True",
        remedy="copy the key file anew from the service's machine, or connect without key= to an insecure one",
    )
