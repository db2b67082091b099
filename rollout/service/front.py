"""The front process: sockets, sessions, dispatch and the engine host's supervision. No torch in here.

    clients --data--> ROUTER --+                            +--> RequestDesk -> Ledger, Streams --+
    clients --control-> ROUTER +-> poll -> decode -> session +--> ControlDesk (pause, updates)     +-> engine host
    engine host -----> PAIR ---+                            +--> info, stats, tokenizer files     |
            timers: deadlines, leases, flushes  <------------------ STEP, replies ----------------+

One thread owns everything here and waits only in poll; it is woken by sockets, by the engine host's end (a process
handle), by signals and the parent's death (a wake-up pipe), and by the earliest timer. Invariant: every message that
carries a request id gets exactly one reply or terminal event.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import xxhash

from rollout.config import ServiceConfig
from rollout.errors import HostFailed, InvalidConfig, NoSession, RolloutError, ServerRestarted, ServiceStopping, WireError, error_fields
from rollout.service.calls import Calls
from rollout.service.control import ControlDesk, refusal
from rollout.service.host_link import HostLink
from rollout.service.ledger import Ledger
from rollout.service.metrics import FrontMetrics, snapshot
from rollout.service.parent_watch import ParentWatch
from rollout.service.requests import Admission, RequestDesk
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.service.streams import Streams
from rollout.state import Announcement, private_folder, remove_socket_files
from rollout.tokenizer_files import chat_template_digest, read_tokenizer_files, tokenizer_digest
from rollout.wire.codec import NO_REQUEST, PROTOCOL_VERSION, Arrays, Frame, Packet, decode, encode, read_header
from rollout.wire.messages import (
    CONTROL_REQUESTS,
    DATA_REQUESTS,
    Ack,
    EngineFacts,
    Hello,
    HostReady,
    Message,
    Op,
    Score,
    StatsResult,
)
from rollout.wire.messages import (
    HostFailed as HostFailedBody,
)
from rollout.wire.security import check_bind_address, new_token
from rollout.wire.transport import Context, Incoming, Poller, Router, Sent

log = logging.getLogger("rollout.front")
MAX_MESSAGES_PER_TURN = 1024
MAX_UNSENT_REPLIES = 4096
RETRY_S = 0.01
HOST_GRACE_S = 5.0
# A turn of the loop that took this much longer than planned means that the process itself stood still.
SUSPENSION_S = 1.0
RESTART_WINDOW_S = 60.0

OnEvent = Callable[[str, Mapping[str, object]], None]


class Front:
    """The service; see the module. `on_event` hears "ready" and "failed"."""

    def __init__(self, config: ServiceConfig, on_event: OnEvent) -> None:
        self._config = config.resolved()
        self._on_event = on_event
        self._incarnation = new_token()
        self._metrics = FrontMetrics()
        self._bind()
        self._build()

    def _bind(self) -> None:
        """Take the address and everything else that can be refused before an engine is loaded."""
        config = self._config
        if not Path(config.model).is_dir():
            raise InvalidConfig(
                f"model {config.model!r} is not a folder", field="model", value=config.model, remedy="pass --model PATH of a model folder"
            )
        address = check_bind_address(str(config.address), insecure=config.insecure)
        self._state = config.state.make()
        private_folder(self._state.root / "run")
        if address.path:
            Path(address.path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        private_folder(Path(str(config.weights_dir)))
        self._lock = self._state.lock(address.text)
        remove_socket_files(address)
        self._context = Context()
        try:
            self._routers = {
                Channel.DATA: self._context.router(address.text, config.max_message_bytes),
                Channel.CONTROL: self._context.router(address.control, config.max_message_bytes),
            }
        except RolloutError:
            self._context.close()
            self._lock.release()
            raise
        self._address = address
        self._files = read_tokenizer_files(Path(config.model))

    def _build(self) -> None:
        config = self._config
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._poller = Poller([*self._routers.values(), self._wake_in.fileno()])
        self._ledger = Ledger(config.max_requests, config.max_record_bytes)
        self._sessions = SessionBook(config.lease_s)
        self._streams = Streams(
            self._ledger, self._sessions, self._send_data, interval_s=config.flush_interval_s, credit_bytes=config.credit_bytes
        )
        self._link = HostLink(config, self._context, self._poller)
        self._calls = Calls(self._link, self._reply)
        self._admission = Admission()
        self._requests = RequestDesk(self._ledger, self._streams, self._sessions, self._link, self._calls, self._admission, self._reply)
        self._control = ControlDesk(self._link, self._calls, self._admission, self._state.next_version, self._published)
        self._admission.refusal = lambda: refusal(self._control.needs_weights, self._failure, self._stopping)
        self._facts: EngineFacts | None = None
        self._failure: RolloutError | None = None
        self._host_error: RolloutError | None = None
        self._host_starts: list[float] = []
        self._was_ready = False
        self._stopping = False
        self._unsent: dict[tuple[Channel, bytes], deque[list[Frame]]] = {}
        self._initial_version = self._state.next_version()
        self._admission.version = self._initial_version
        self._handlers: dict[Channel, dict[Op, Callable[[Session, Packet], None]]] = {
            Channel.DATA: {
                Op.HEARTBEAT: self._heartbeat,
                Op.GOODBYE: lambda session, _: self._end_session(session, "the client closed"),
                Op.ATTACH: self._requests.attach,
                Op.CANCEL: self._requests.cancel,
                Op.ACK: self._ack,
                Op.SCORE: self._score,
                Op.INFO: self._info,
                Op.STATS: self._stats,
                Op.TOKENIZER_FILES: self._tokenizer_files,
            },
            Channel.CONTROL: {
                Op.PAUSE: self._pause,
                Op.RESUME: self._resume,
                Op.WEIGHTS_BEGIN: self._control.begin,
                Op.WEIGHTS_STAGE_FILE: self._control.stage_file,
                Op.WEIGHTS_COMMIT: self._control.commit,
                Op.WEIGHTS_ABORT: self._abort,
                Op.SHUTDOWN: self._shutdown,
            },
        }

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self._routers[Channel.DATA].address

    @property
    def health(self) -> str:
        """starting, ready, needs_weights, failed or stopping."""
        if self._stopping:
            return "stopping"
        if self._failure is not None:
            return "failed"
        if self._control.needs_weights is not None:
            return "needs_weights"
        return "ready" if self._admission.ready else "starting"

    # The loop

    def run(self) -> RolloutError | None:
        """Serve until stopped; return the error if the engine could not be started. Blocks."""
        self._announce()
        self._start_host()
        try:
            with self._signals():
                self._loop()
        finally:
            self._close()
        return self._failure if not self._was_ready else None

    def _loop(self) -> None:
        timeout_s: float | None = 0.0
        before = time.monotonic()
        while not self._stopping:
            ready = self._poller.wait(timeout_s)
            now = time.monotonic()
            if now - before - (timeout_s or 0.0) > SUSPENSION_S and timeout_s is not None:
                self._sessions.extend_all(now - before - timeout_s)
            before = now
            if self._wake_in.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(4096)
            self._drain_clients(now)
            self._drain_host()
            if self._link.exited() is not None:
                self._host_exited()
            timeout_s = self._tick()

    def _tick(self) -> float | None:
        """Do what is due by time; return how long to wait for the next thing."""
        now = time.monotonic()
        for session in self._sessions.expired(now):
            self._metrics.lapsed_leases += 1
            log.info("lease of %s ended", session.label)
            self._end_session(session, "the client's lease ended")
        times = [self._requests.expire(now), self._sessions.next_expiry(), self._streams.flush(now)]
        self._link.send_queued()
        if self._send_unsent():
            times.append(now + RETRY_S)
        known = [one for one in times if one is not None]
        return max(0.0, min(known) - now) if known else None

    @contextlib.contextmanager
    def _signals(self):  # type: ignore[no-untyped-def]
        """Let SIGTERM and SIGINT end the loop; the wake-up pipe gets poll out of its sleep."""

        def stop(number: int, frame: object) -> None:
            self._stopping = True

        wake_before = signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wake_before)

    def stop(self) -> None:
        """End the loop soon; may be called from any thread."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    def _announce(self) -> None:
        self._state.announce(
            Announcement(address=self.address, pid=os.getpid(), incarnation=self._incarnation.hex(), model=self._config.model)
        )

    def _close(self) -> None:
        """End every request, the host and the sockets, and leave no file behind."""
        self._requests.cancel_all("the service stops")
        self._calls.fail_all(ServiceStopping("the service stops", remedy="start it again"))
        self._streams.flush(float("inf"))
        goodbye = encode(Op.ERROR, NO_REQUEST, error_fields(ServiceStopping("the service stops", remedy="start it again")))
        for session in self._sessions.all():
            self._send_data(session, goodbye)
        self._link.stop(HOST_GRACE_S)
        for router in self._routers.values():
            router.close()
        self._context.close()
        self._wake_in.close()
        self._wake_out.close()
        remove_socket_files(self._address)
        with contextlib.suppress(FileNotFoundError):
            self._state.announcement_path(self._address.text).unlink()
        self._lock.release()

    # Clients

    def _drain_clients(self, now: float) -> None:
        for channel, router in self._routers.items():
            for _ in range(MAX_MESSAGES_PER_TURN):
                incoming = router.receive()
                if incoming is None:
                    break
                self._metrics.messages += 1
                self._take(channel, incoming, now)

    def _take(self, channel: Channel, incoming: Incoming, now: float) -> None:
        """Handle one message; whatever is wrong with it becomes a typed reply to its sender."""
        request_id = NO_REQUEST
        generation = False
        try:
            if not incoming.whole or not incoming.frames:
                raise WireError("a message with too many frames or none", remedy="see the protocol in rollout/README.md")
            header = read_header(incoming.frames[0])
            request_id = header.request_id
            if not Router.drew(incoming.route):
                raise NoSession(
                    "the connection chose its own routing id", limit="the service draws them", remedy="leave the socket's identity unset"
                )
            generation = channel is Channel.DATA and header.op == Op.GENERATE and header.version == PROTOCOL_VERSION
            packet = decode(incoming.frames, DATA_REQUESTS if channel is Channel.DATA else CONTROL_REQUESTS)
            if packet.op is Op.HELLO:
                self._hello(channel, incoming.route, packet, now)
                return
            session = self._sessions.heard(channel, incoming.route, now)
            generation = False
            if packet.op is Op.GENERATE:
                self._requests.generate(session, packet, _fingerprint(incoming.frames), now)
            else:
                self._handlers[channel][packet.op](session, packet)
        except RolloutError as error:
            if generation:
                self._ledger.refuse_at_door()
            elif isinstance(error, WireError) and not isinstance(error, NoSession):
                self._metrics.malformed += 1
            self._send(channel, incoming.route, encode(Op.ERROR, request_id, error_fields(error)))

    def _hello(self, channel: Channel, route: bytes, packet: Packet, now: float) -> None:
        body = packet.body
        assert isinstance(body, Hello)
        if body.session is not None and body.secret is not None:
            session = self._sessions.resume(body.session, body.secret, channel, route, now)
            if session is None:
                raise ServerRestarted(
                    "the session is not known here", limit="it ended, or the service was started again", remedy="open a new one"
                )
            if channel is Channel.DATA:
                self._streams.detach(session)
        elif channel is Channel.CONTROL:
            raise NoSession("a session is opened on the data socket", remedy="say HELLO there, then here with session and secret")
        else:
            session = self._sessions.open(body.name, channel, route, now)
        fields = {
            "incarnation": self._incarnation,
            "session": session.session_id,
            "secret": session.secret,
            "lease_s": float(self._config.lease_s),
            "control_address": self._routers[Channel.CONTROL].address,
            "max_message_bytes": self._config.max_message_bytes,
        }
        self._reply(session, channel, Op.WELCOME, packet.request_id, fields, None)

    def _end_session(self, session: Session, reason: str) -> None:
        self._requests.end_session(session, reason)
        self._control.end_session(session)
        for channel, route in session.routes.items():
            self._unsent.pop((channel, route), None)
        self._sessions.close(session)

    def _heartbeat(self, session: Session, packet: Packet) -> None:
        arrays = {"request_ids": self._requests.unacknowledged(session)}
        self._reply(session, Channel.DATA, Op.ALIVE, packet.request_id, {"health": self.health, "version": self._admission.version}, arrays)

    def _ack(self, session: Session, packet: Packet) -> None:
        assert isinstance(packet.body, Ack)
        self._requests.acknowledge(session, packet, packet.body.seq)

    def _score(self, session: Session, packet: Packet) -> None:
        assert isinstance(packet.body, Score)
        stopped = self._admission.refusal()
        if stopped is None and not self._admission.ready:
            stopped = HostFailed("no engine host is ready", remedy="wait until info().health is 'ready'")
        if stopped is not None:
            raise stopped
        self._calls.pass_on(session, Channel.DATA, packet.request_id, Op.SCORE, packet.body.model_dump(), packet.arrays)

    def _info(self, session: Session, packet: Packet) -> None:
        fields = {
            "protocol_version": PROTOCOL_VERSION,
            "incarnation": self._incarnation,
            "address": self.address,
            "model": self._config.model,
            "health": self.health,
            "version": self._admission.version,
            "needs_weights": self._control.needs_weights,
            "weights_dir": str(self._config.weights_dir),
            "tokenizer_digest": tokenizer_digest(self._files),
            "chat_template_digest": chat_template_digest(self._files),
            "lease_s": float(self._config.lease_s),
            "max_message_bytes": self._config.max_message_bytes,
            "engine": None if self._facts is None else self._facts.model_dump(),
        }
        self._reply(session, Channel.DATA, Op.INFO_RESULT, packet.request_id, fields, None)

    def _numbers(self) -> dict[str, object]:
        numbers = snapshot(self._metrics, self._ledger, self._sessions, self._streams, held=self._requests.num_held, health=self.health)
        return {**numbers, "version": self._admission.version, "paused": self._admission.paused, "open_calls": len(self._calls)}

    def _stats(self, session: Session, packet: Packet) -> None:
        if not self._admission.ready:
            self._reply(session, Channel.DATA, Op.STATS_RESULT, packet.request_id, {"values": self._numbers(), "engine": None}, None)
            return

        def joined(body: Message) -> Mapping[str, object]:
            assert isinstance(body, StatsResult)
            return {"values": self._numbers(), "engine": body.engine}

        self._calls.pass_on(session, Channel.DATA, packet.request_id, Op.STATS, {}, on_result=joined)

    def _tokenizer_files(self, session: Session, packet: Packet) -> None:
        content = np.frombuffer(b"".join(self._files.values()), np.uint8)
        entries = [{"name": name, "size": len(data)} for name, data in self._files.items()]
        self._reply(session, Channel.DATA, Op.TOKENIZER_FILES_RESULT, packet.request_id, {"files": entries}, {"content": content})

    def _done(self, session: Session, packet: Packet) -> None:
        self._reply(session, Channel.CONTROL, Op.DONE, packet.request_id, {}, None)

    def _pause(self, session: Session, packet: Packet) -> None:
        self._control.pause(session)
        self._done(session, packet)

    def _resume(self, session: Session, packet: Packet) -> None:
        self._control.resume(session)
        self._done(session, packet)

    def _abort(self, session: Session, packet: Packet) -> None:
        if not self._control.abort(session, packet):
            self._done(session, packet)

    def _shutdown(self, session: Session, packet: Packet) -> None:
        log.info("%s asks for the end", session.label)
        self._done(session, packet)
        self._stopping = True

    # Sending

    def _send_data(self, session: Session, frames: list[Frame]) -> Sent:
        """Send a flush; a connection that is gone waits for its client to say HELLO again."""
        route = session.routes.get(Channel.DATA)
        if route is None:
            return Sent.GONE
        sent = self._routers[Channel.DATA].send(route, frames)
        if sent is Sent.GONE:
            self._sessions.unbind(session, Channel.DATA)
        return sent

    def _reply(
        self, session: Session, channel: Channel, op: Op, request_id: bytes, fields: Mapping[str, object], arrays: Arrays | None
    ) -> None:
        route = session.routes.get(channel)
        if route is None:
            self._metrics.undeliverable += 1
        else:
            self._send(channel, route, encode(op, request_id, fields, arrays))

    def _send(self, channel: Channel, route: bytes, frames: list[Frame]) -> None:
        """Send a reply, or keep it until its peer has room; a peer that never has loses its replies at a bound."""
        waiting = self._unsent.get((channel, route))
        if not waiting:
            sent = self._routers[channel].send(route, frames)
            if sent is Sent.OK:
                return
            if sent is Sent.GONE:
                self._metrics.undeliverable += 1
                return
            waiting = self._unsent.setdefault((channel, route), deque())
        if len(waiting) < MAX_UNSENT_REPLIES:
            waiting.append(frames)
        else:
            self._metrics.undeliverable += 1

    def _send_unsent(self) -> bool:
        """Send replies that found no room before; True if some still wait."""
        for (channel, route), waiting in list(self._unsent.items()):
            sent = Sent.OK
            while waiting and sent is Sent.OK:
                sent = self._routers[channel].send(route, waiting[0])
                if sent is Sent.OK:
                    waiting.popleft()
            if sent is Sent.GONE:
                self._metrics.undeliverable += len(waiting)
            if sent is Sent.GONE or not waiting:
                del self._unsent[(channel, route)]
        return bool(self._unsent)

    # The engine host

    def _start_host(self) -> None:
        self._metrics.host_starts += 1
        self._host_starts.append(time.monotonic())
        self._host_error = None
        self._link.start(self._initial_version)

    def _drain_host(self) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            packet = self._link.receive()
            if packet is None:
                return
            self._take_host(packet)

    def _take_host(self, packet: Packet) -> None:
        if packet.op is Op.STEP:
            self._requests.take_step(packet)
        elif packet.op is Op.HOST_READY:
            self._host_ready(packet.body)
        elif packet.op is Op.HOST_FAILED:
            assert isinstance(packet.body, HostFailedBody)
            error = packet.body.error
            self._host_error = RolloutError(
                error.what, field=error.field, value=error.value, limit=error.limit, remedy=error.remedy, code=error.code
            )
        else:
            self._calls.answer(packet)

    def _host_ready(self, body: Message) -> None:
        assert isinstance(body, HostReady)
        self._facts = body.engine
        self._admission.ready = True
        self._admission.max_model_len = body.engine.max_model_len
        self._control.host_ready()
        self._requests.submit_held()
        if not self._was_ready:
            self._was_ready = True
            self._on_event(
                "ready", {"address": self.address, "model": self._config.model, "version": self._admission.version, "pid": os.getpid()}
            )

    def _published(self, version: int) -> None:
        self._admission.version = version
        self._requests.submit_held()

    def _host_exited(self) -> None:
        """Give every live request its typed end, then start the host again if that can help."""
        status = self._link.exited()
        for packet in self._link.last_words():
            self._take_host(packet)
        cause = self._host_error
        error = HostFailed(
            f"the engine host ended with status {status}" + (f": {cause.what}" if cause else ""),
            limit=cause.limit if cause else None,
            remedy="submit the request again; the service starts a new engine host",
        )
        log.error("%s", error.what)
        self._admission.ready = False
        self._requests.fail_submitted(error)
        self._calls.fail_all(error)
        self._control.host_died()
        self._link.clear()
        now = time.monotonic()
        recent = [start for start in self._host_starts if now - start < RESTART_WINDOW_S]
        if self._was_ready and len(recent) <= self._config.max_restarts:
            self._start_host()
            return
        self._failure = cause or error
        self._requests.refuse_held(self._failure)
        if not self._was_ready:
            self._on_event("failed", {"error": error_fields(self._failure)})
            self._stopping = True

    def check_integrity(self) -> None:
        """Assert the invariants of everything that the front owns."""
        self._ledger.check_integrity()


def _fingerprint(frames: list[bytes]) -> bytes:
    """Return what tells one request body from another: all frames but the header."""
    digest = xxhash.xxh3_128()
    for frame in frames[1:]:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()


def serve(config: ServiceConfig, on_event: OnEvent) -> RolloutError | None:
    """Run a service in this process until it is stopped; return the error if its engine could not be started. Blocks."""
    front = Front(config, on_event)
    if config.watch_parent:
        ParentWatch(front.stop)
    return front.run()


def _print_event(event: str, fields: Mapping[str, object]) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run a service from a JSON file; one JSON line on standard output says ready or failed."""
    parser = argparse.ArgumentParser(prog="python -m rollout.service.front", description="A rollout service from a JSON config.")
    parser.add_argument("--config", required=True, help="JSON file, see ServiceConfig.to_json")
    text = Path(parser.parse_args(arguments).config).read_text()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s front %(levelname)s %(message)s")
    try:
        error = serve(ServiceConfig.from_json(text), _print_event)
    except RolloutError as refused:
        _print_event("failed", {"error": error_fields(refused)})
        return 1
    return 0 if error is None else 1


if __name__ == "__main__":
    sys.exit(main())
