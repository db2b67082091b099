"""A client's connection as its facades use it: checked, thread-safe, closed when nobody holds it any more.

The facades share one; it owns the I/O thread. A connection made before a fork refuses to work in the child, where its
thread does not exist and its sockets must not be touched.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping

import numpy as np

from rollout.client.endpoint import KeySource, find_service
from rollout.client.io_thread import IoThread
from rollout.client.parameters import Prepared
from rollout.client.pending import Call, Pending, StreamRecord
from rollout.errors import Conflict, ForkedClient, InvalidConfig, ServerUnavailable, shown
from rollout.wire.codec import NO_REQUEST, Packet, encode
from rollout.wire.operations import Op
from rollout.wire.security import missing_socket, new_token

CLOSE_WAIT_S = 3.0
# The sockets linger for half a second at most; more only where this process gets no time.
GOODBYE_WAIT_S = 2.0
# Calls whose answer says what was opened, to be closed where nobody waits for it.
OPENING = (Op.WEIGHTS_BEGIN, Op.EVALUATE_BEGIN)
# Threads whose service may still wait for a goodbye when the interpreter ends.
_OPEN: weakref.WeakSet[IoThread] = weakref.WeakSet()


def _stop(io: IoThread, pid: int) -> None:
    if os.getpid() == pid:
        io.close()


def _check_timeout(timeout_s: object) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        raise InvalidConfig(
            f"timeout_s={shown(timeout_s)} is refused",
            field="timeout_s",
            value=timeout_s,
            limit="allowed: a positive, finite number of seconds",
            remedy="leave timeout_s out, or pass the seconds that a silent service may take",
        )


def _say_goodbye() -> None:
    """Let every connection that was never closed end its session, or its pause would outlive this process by a lease."""
    alive = [io for io in _OPEN if io.thread.is_alive()]
    for io in alive:
        io.close()
    deadline = time.monotonic() + GOODBYE_WAIT_S
    for io in alive:
        io.thread.join(max(0.0, deadline - time.monotonic()))


class Connection:
    """See the module. Methods may be called from any thread."""

    def __init__(self, address: str | None, *, timeout_s: float, name: str | None, key: KeySource = None, insecure: bool = False) -> None:
        _check_timeout(timeout_s)
        found, client_key = find_service(address, key, insecure=insecure)
        missing = missing_socket(found)
        if missing is not None:
            raise ServerUnavailable(
                f"there is no socket at {missing}",
                field="address",
                value=found,
                limit="a running service has one at its address",
                remedy="start the service, or see the addresses of running ones with python -m rollout check",
            )
        self.address = found
        self._pid = os.getpid()
        self._io = IoThread(found, name or f"{socket.gethostname()}:{os.getpid()}", timeout_s, client_key)
        # Once for the process, however many connections it makes.
        atexit.unregister(_say_goodbye)
        atexit.register(_say_goodbye)
        _OPEN.add(self._io)
        self._submitting = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop, self._io, self._pid)

    @property
    def connected(self) -> Pending:
        """Ends when the service said WELCOME, or with the reason why not."""
        return self._io.connected

    @property
    def state(self) -> str:
        """connected, silent, stopped or closed, for logs."""
        if self._io.closed is not None or os.getpid() != self._pid:
            return "closed"
        return self._io.state

    @property
    def session(self) -> str | None:
        """The session's id in hex, for logs."""
        welcome = self._io.welcome
        return welcome.session.hex() if welcome is not None else None

    def check_process(self) -> None:
        """Raises: ForkedClient, also for a stream that was begun before the fork: nothing will ever come of it here."""
        if os.getpid() != self._pid:
            raise ForkedClient(
                f"this client was made in process {self._pid}",
                value=os.getpid(),
                limit="a forked child has neither its I/O thread nor its sockets",
                remedy="connect in the child, or start workers with the spawn method",
            )

    def check(self) -> None:
        """Raises: ForkedClient, ClientClosed."""
        self.check_process()
        if self._io.closed is not None:
            raise self._io.closed

    def call(self, op: Op, fields: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None, *, control: bool) -> Call:
        """Send a call and return what to wait for."""
        self.check()
        request_id = new_token()
        call = Call(request_id, encode(op, request_id, fields, arrays), time.monotonic(), opens=op in OPENING)
        self._io.call(call, control=control)
        self._ended_meanwhile(call)
        return call

    def submit(self, prepared: Prepared) -> list[StreamRecord]:
        """Send a generation or a group; the same ids and body as under way return those. Raises: Conflict."""
        self.check()
        frames = encode(prepared.op, prepared.request_id, prepared.fields, prepared.arrays)
        group_id = prepared.request_id if prepared.op is Op.GENERATE_GROUP else None
        # Whether an id is taken and taking it are one step, also for two threads that send the same request.
        with self._submitting:
            known = {request_id: self._io.streams.get(request_id) for request_id in prepared.members}
            for record in known.values():
                if record is not None and [bytes(frame) for frame in record.frames] != [bytes(frame) for frame in frames]:
                    raise Conflict(
                        f"request {record.request_id.hex()} is under way with another body",
                        field="request_id",
                        value=record.request_id.hex(),
                        remedy="draw a new request id",
                    )
            fresh = [
                StreamRecord(
                    request_id,
                    frames,
                    time.monotonic(),
                    prompt_ids=prepared.prompt_ids,
                    wants=prepared.wants,
                    group_id=group_id,
                    prepared=prepared,
                    listening=self._io.listening,
                )
                for request_id, record in known.items()
                if record is None
            ]
            self._io.streams.update((record.request_id, record) for record in fresh)
        if fresh:
            self._io.submit(fresh)
        for record in fresh:
            self._ended_meanwhile(record)
        begun = {record.request_id: record for record in fresh}
        return [known[request_id] or begun[request_id] for request_id in prepared.members]

    def _ended_meanwhile(self, pending: Pending) -> None:
        """Fail what was posted while the I/O thread was ending and may not look any more."""
        if self._io.closed is not None and not pending.done:
            pending.error, pending.done = self._io.closed, True

    def forget(self, call: Call) -> None:
        """Wait for a call's answer no more; what it opens is closed when it comes. Idempotent, never raises."""
        if os.getpid() == self._pid:
            self._io.forget(call)

    def abandon(self, record: StreamRecord) -> None:
        """Cancel a generation that nobody waits for any more; idempotent, never raises."""
        if not record.done:
            self.cancel(record.request_id)

    def cancel(self, request_id: bytes) -> None:
        """Ask for a generation's end without waiting; no effect on one that ended, was never sent, or in a forked child."""
        if os.getpid() == self._pid:
            self._io.cancel(request_id)

    def say(self, op: Op, fields: Mapping[str, object]) -> None:
        """Send what has no answer."""
        self.check()
        self._io.say(encode(op, NO_REQUEST, fields))

    def to_cancel(self, request_id: bytes) -> bytes:
        """Return the id to cancel a generation by; it differs from the caller's once an update has cut it."""
        return self._io.to_cancel(request_id) if os.getpid() == self._pid else request_id

    def close(self) -> None:
        """End the session. Blocks: until the I/O thread ended, a few seconds at most. No effect in a forked child."""
        if os.getpid() == self._pid:
            self._io.close()
            if threading.current_thread() is not self._io.thread:
                self._io.thread.join(CLOSE_WAIT_S)


def wait_blocking(pending: Pending, timeout_s: float | None = None) -> bool:
    """Wait in this thread for an outcome; a KeyboardInterrupt gets through at once. Returns whether it is there. Blocks."""
    woken = threading.Event()
    listener = pending.listen(woken.set)
    try:
        return woken.wait(timeout_s)
    finally:
        pending.unlisten(listener)


async def wait_async(pending: Pending) -> None:
    """Wait in the running event loop for an outcome."""
    if pending.done:
        return
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    listener = pending.listen(woken.set, loop)
    try:
        await woken.wait()
    finally:
        pending.unlisten(listener)


def answer(call: Call) -> Packet:
    """Return a call's answer or raise its error, with this caller's traceback only."""
    try:
        return call.result()
    finally:
        if call.error is not None:
            call.error.__traceback__ = None
