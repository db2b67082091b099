"""One engine host as the front sees it: a child process, a private socket, and what is queued for it.

The front starts the host by argv and a JSON file, each time on a fresh socket, so that nothing of a former host can
arrive later; the gate lets only that process take the other end. The host's standard input is a pipe from the front: it
ends itself when that closes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout.child_python import child_command, child_environment
from rollout.config import ServiceConfig
from rollout.errors import RolloutError
from rollout.service.access import Access
from rollout.state import socket_files
from rollout.wire.codec import NO_REQUEST, Arrays, Frame, Packet, decode, encode, read_header
from rollout.wire.operations import HOST_REPLIES, Op
from rollout.wire.security import parse_address
from rollout.wire.transport import Context, Peer, Poller, Sent

log = logging.getLogger("rollout.front")
LAST_WORDS_S = 0.1
# A link carries whole prompts and steps of a trusted process; the limit only stops a runaway.
LINK_MESSAGE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class LostWeights:
    """A version whose weights died with a host, and the digests that prove them, if its commits brought those of all tensors."""

    version: int
    digests: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class BadMessage:
    """A message of the host that is none; `call_id` is zeros if it answered no call."""

    call_id: bytes
    error: RolloutError


class HostLink:
    """Owns the process and the socket of one engine host; see the module."""

    def __init__(self, config: ServiceConfig, context: Context, poller: Poller, access: Access, index: int = 0) -> None:
        self._config, self._context, self._poller, self._access, self.index = config, context, poller, access, index
        self._domain = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._peer: Peer | None = None
        self._exit_fd: int | None = None
        self._unsent: deque[list[Frame]] = deque()
        self._files: list[Path] = []

    @property
    def pid(self) -> int | None:
        """The host's process id while it runs."""
        return self._process.pid if self._process is not None else None

    @property
    def queued_bytes(self) -> int:
        """Bytes of the messages that found no room yet."""
        return sum(memoryview(frame).nbytes for frames in self._unsent for frame in frames)

    def _endpoint(self) -> str:
        address = parse_address(str(self._config.address))
        base = self._config.state.host_base(address)
        parse_address(f"ipc://{base}")
        return f"ipc://{base}.h{self.index}{secrets.token_hex(2)}"

    def start(self, initial_version: int, lost: LostWeights | None = None) -> None:
        """Start the process and bind its socket; `lost` are weights that it may take up from the kept file."""
        if lost is not None and lost.digests is None and self._config.keep_last is not None:
            log.warning(
                "version %d is not taken up from %s: nothing proves it, since not all of its tensors came with digests; push it again",
                lost.version,
                self._config.keep_last,
            )
        endpoint = self._endpoint()
        config_path = Path(endpoint.removeprefix("ipc://") + ".json")
        address = parse_address(str(self._config.address))
        state = self._config.state
        self._files = [Path(endpoint.removeprefix("ipc://")), config_path]
        fields = {
            "endpoint": endpoint,
            "engine": self._config.engine,
            "engine_arguments": {**self._config.engine_arguments(), "initial_version": initial_version},
            "weights_dir": self._config.weights_dir,
            "keep_last": self._config.keep_last,
            "lost": None if lost is None or lost.digests is None else {"version": lost.version, "digests": dict(lost.digests)},
            "threads": self._config.threads,
            "max_message_bytes": LINK_MESSAGE_BYTES,
            "credit_bytes": self._config.host_credit_bytes,
            "log_format": self._config.log_format,
            "own_files": [str(path) for path in self._files],
            "service_lock": str(state.lock_path(address)),
            "service_files": [str(path) for path in [*socket_files(address), state.announcement_path(address.text)]],
        }
        with os.fdopen(os.open(config_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump(fields, file)
        self._domain = self._access.host_domain()
        self._peer = self._context.pair_bound(endpoint, LINK_MESSAGE_BYTES, domain=self._domain)
        self._process = subprocess.Popen(
            child_command("rollout.service.engine_host", "--config", str(config_path)),
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=2,
            start_new_session=True,
        )
        self._access.expect_host(self._domain, self._process.pid)
        self._exit_fd = os.pidfd_open(self._process.pid)
        self._poller.watch(self._peer)
        self._poller.watch(self._exit_fd)

    def send(self, op: Op, fields: Mapping[str, object], arrays: Arrays | None = None, call_id: bytes = NO_REQUEST) -> None:
        """Send to the host, or queue; without a host the message is dropped, because its death answers everything."""
        if self._peer is None:
            return
        frames = encode(op, call_id, fields, arrays)
        if self._unsent or self._peer.send(frames) is not Sent.OK:
            self._unsent.append(frames)
            self._poller.watch(self._peer, writable=True)

    def send_queued(self) -> None:
        """Send what found no room before."""
        if self._peer is None or not self._unsent:
            return
        while self._unsent and self._peer.send(self._unsent[0]) is Sent.OK:
            self._unsent.popleft()
        self._poller.watch(self._peer, writable=bool(self._unsent))

    def receive(self) -> Packet | BadMessage | None:
        """Return the host's next message, or None."""
        incoming = self._peer.receive() if self._peer is not None else None
        if incoming is None:
            return None
        call_id = NO_REQUEST
        try:
            call_id = read_header(incoming.frames[0]).request_id
            return decode(incoming.frames, HOST_REPLIES)
        except RolloutError as error:
            return BadMessage(call_id, error)

    def exited(self) -> int | None:
        """Return the exit status of a host that ended, None while it runs or none was started."""
        return self._process.poll() if self._process is not None else None

    def show_stacks(self) -> None:
        """Let a host that is ready write the stacks of its threads to standard error; one that is not yet so far would end by it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End a host that cannot be trusted any more; its exit is noticed as any other."""
        if self._process is not None:
            self._process.kill()

    def last_words(self) -> list[Packet]:
        """Return what an ended host still sent. Blocks: a moment, for what is under way inside the socket."""
        packets: list[Packet] = []
        waiting = Poller([self._peer]) if self._peer is not None else None
        while waiting is not None and waiting.wait(LAST_WORDS_S):
            packet = self.receive()
            if isinstance(packet, Packet):
                packets.append(packet)
            elif packet is not None and packet.call_id == NO_REQUEST:
                # A step that cannot be read: what comes behind it would stand in its place.
                break
        return packets

    def clear(self) -> None:
        """Release everything of an ended host."""
        self._access.forget_host(self._domain)
        if self._peer is not None:
            self._poller.forget(self._peer)
            self._peer.close()
            self._peer = None
        if self._exit_fd is not None:
            self._poller.forget(self._exit_fd)
            os.close(self._exit_fd)
            self._exit_fd = None
        if self._process is not None:
            assert self._process.poll() is not None, "clear comes after the end"
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None
        self._unsent.clear()
        for path in self._files:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def stop(self, grace_s: float) -> None:
        """End the host: ask, wait, then kill; without a grace, kill. Blocks: at most the grace and a little."""
        if self._process is None:
            return
        self.send(Op.SHUTDOWN, {})
        deadline = time.monotonic() + grace_s
        assert self._exit_fd is not None, "a process that was started has its descriptor"
        while self._process.poll() is None and time.monotonic() < deadline:
            self._access.doorway.serve()
            self.send_queued()
            select.select([self._exit_fd], [], [], 0.05)
        if self._process.poll() is None:
            if grace_s:
                log.warning("engine host %d did not end within %.1f s and is killed", self._process.pid, grace_s)
            self._process.kill()
            self._process.wait()
        self.clear()
