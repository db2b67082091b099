"""What a service holds of the machine: its folders, its lock, its two sockets and who may use them, its announcement.

Made before an engine is loaded, so that an occupied address or a wrong folder is refused at once. Invariant: whoever
holds the lock of a local address is the only one that binds it, since binding silently takes over a socket file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rollout.config import ServiceConfig
from rollout.errors import AddressInUse, InvalidConfig, RolloutError
from rollout.keys import KeyFolder
from rollout.service.access import DOMAINS, Access
from rollout.service.sessions import Channel
from rollout.state import Announcement, FileLock, make_folder, private_folder, remove_host_files, remove_socket_files
from rollout.wire.security import Address, parse_address
from rollout.wire.transport import Context, Router


def _no_folder(model: str) -> InvalidConfig:
    return InvalidConfig(
        f"model {model!r} is not a folder",
        field="model",
        value=model,
        limit="a model is a local folder with config.json and safetensors files; nothing is downloaded by its name",
        remedy="pass the folder's path; `hf download OWNER/NAME --local-dir FOLDER` (huggingface_hub) makes one from a name",
    )


class BoundSockets:
    """The address and everything that can be refused before an engine is loaded: folders, lock, sockets."""

    def __init__(self, config: ServiceConfig) -> None:
        if not Path(config.model).is_dir():
            raise _no_folder(config.model)
        address = parse_address(str(config.address))
        self.state = config.state.make()
        private_folder(self.state.root / "run")
        private_folder(Path(str(config.weights_dir)), "weights_dir")
        lock: FileLock | None = None
        if address.path:
            make_folder(Path(address.path).parent, "address")
            lock = self.state.lock(address)
            remove_socket_files(address)
        self.context = Context()
        try:
            self.access = Access(self.context, address, KeyFolder(self.state.keys), insecure=config.insecure)
            self.routers = {
                channel: self._router(channel, text, config.max_message_bytes)
                for channel, text in ((Channel.DATA, address.text), (Channel.CONTROL, address.control))
            }
            # A TCP port of 0 is known only now.
            self.address: Address = parse_address(self.routers[Channel.DATA].address)
            self.lock: FileLock = lock or self.state.lock(self.address)
            remove_host_files(self.state.host_base(self.address))
        except RolloutError:
            self.context.close()
            if lock is not None:
                lock.release()
            raise

    def _router(self, channel: Channel, text: str, max_message_bytes: int) -> Router:
        try:
            return self.context.router(text, max_message_bytes, domain=DOMAINS[channel], keys=self.access.pair)
        except AddressInUse as error:
            if channel is Channel.DATA:
                raise
            raise AddressInUse(
                error.what,
                field="address",
                value=text,
                limit="the control socket of a service takes the address next to that of its data socket",
                remedy="choose another address, the next port of which is free too",
            ) from None

    def announce(self, incarnation: bytes, model: str) -> None:
        """Publish the service in the state folder."""
        self.state.announce(
            Announcement(
                address=self.address.text,
                lock=str(self.lock.path),
                pid=os.getpid(),
                incarnation=incarnation.hex(),
                model=model,
                server_key=None if self.access.pair is None else self.access.pair.public,
            )
        )

    def close(self) -> None:
        """Close the sockets and remove every file, the lock's last and while it is held."""
        for router in self.routers.values():
            router.close()
        self.context.close()
        remove_socket_files(self.address)
        with contextlib.suppress(FileNotFoundError):
            self.state.announcement_path(self.address.text).unlink()
        self.lock.release(remove=True)
