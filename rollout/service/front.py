"""The front process: sockets, sessions and dispatch. No torch in here.

    clients --data----> ROUTER --+                            +--> RequestDesk -> Ledger, Streams --+
    clients --control-> ROUTER --+-> poll -> decode -> session +--> ControlDesk (pause, updates)     +-> engine host
    engine host ------> PAIR ----+   timers: deadlines,       +--> Answers (info, stats, files)     |
          ^                          leases, flushes                                                |
          +------------------------- Supervisor <----------------- STEP, replies -------------------+

One thread owns everything here and waits only in poll; it is woken by sockets, by the engine host's end (a process
handle), by signals and the parent's death (a wake-up pipe), and by the earliest timer. Invariant: every message that
carries a request id gets exactly one reply or terminal event.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from rollout.config import ServiceConfig
from rollout.errors import (
    AccessDenied,
    HostFailed,
    InvalidRequest,
    NoSession,
    RolloutError,
    ServerRestarted,
    ServiceStopping,
    WireError,
    error_fields,
)
from rollout.service.admission import Admission
from rollout.service.answers import Answers
from rollout.service.bound_sockets import BoundSockets
from rollout.service.calls import Calls
from rollout.service.commit_gate import CommitGate
from rollout.service.control import ControlDesk, refusal
from rollout.service.exporter import Exporter
from rollout.service.host_link import HostLink
from rollout.service.host_probe import HostProbe
from rollout.service.ledger import Ledger
from rollout.service.lifecycle import Lifecycle
from rollout.service.logs import set_up_logging
from rollout.service.metrics import FrontMetrics, snapshot
from rollout.service.outbound import Outbound
from rollout.service.parent_watch import ParentWatch
from rollout.service.requests import RequestDesk
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.service.stop_text import StopText
from rollout.service.streams import Streams
from rollout.service.supervisor import OnEvent, Supervisor
from rollout.service.watchdog import Watchdog
from rollout.standstill import StandstillClock
from rollout.tokenizer_files import read_tokenizer_files
from rollout.wire.codec import MAX_FRAMES, NO_REQUEST, PROTOCOL_VERSION, Packet, decode, encode, read_header
from rollout.wire.gate import principal_of
from rollout.wire.generation_messages import Ack, Score, ToolWait
from rollout.wire.operations import CONTROL_REQUESTS, DATA_REQUESTS, Op
from rollout.wire.security import new_token
from rollout.wire.session_messages import Hello
from rollout.wire.transport import Incoming, Poller, Router

log = logging.getLogger("rollout.front")
GENERATIONS = (Op.GENERATE, Op.GENERATE_GROUP)
MAX_MESSAGES_PER_TURN = 1024
RETRY_S = 0.01
HOST_GRACE_S = 5.0
SUSPENSION_S = 1.0


class Front:
    """The service; see the module. `on_event` hears "ready" and "failed". Raises: InvalidConfig and its kind."""

    def __init__(self, config: ServiceConfig, on_event: OnEvent) -> None:
        config = config.resolved()
        self._sockets = BoundSockets(config)
        self._config = config = dataclasses.replace(config, address=self._sockets.address.text)
        self._on_event = on_event
        self._incarnation = new_token()
        self._lifecycle = Lifecycle(config.drain_s)
        routers = self._sockets.routers
        self._access = self._sockets.access
        self._poller = Poller([*routers.values(), self._access.doorway, self._lifecycle.wake_fd])
        self._metrics = FrontMetrics()
        self._sessions = SessionBook(config.lease_s)
        self._outbound = Outbound(routers, self._sessions, self._metrics)
        self._ledger = Ledger(
            config.max_requests,
            config.max_record_bytes,
            max_client_requests=config.max_client_requests,
            max_client_record_bytes=config.max_client_record_bytes,
        )
        self._streams = Streams(
            self._ledger, self._sessions, self._outbound.flush, interval_s=config.flush_interval_s, credit_bytes=config.credit_bytes
        )
        self._link = HostLink(config, self._sockets.context, self._poller, self._access)
        self._calls = Calls(self._link, self._outbound.reply)
        self._admission = Admission(self._refusal)
        files = read_tokenizer_files(Path(config.model))
        self._requests = RequestDesk(
            self._ledger,
            self._streams,
            self._sessions,
            self._link,
            self._calls,
            self._admission,
            self._outbound.reply,
            StopText(files),
            seed=config.seed,
        )
        self._watchdog = Watchdog(self._ledger, self._requests.stage_of, config.stall_s)
        self._probe = HostProbe(self._calls, timeout_s=config.host_timeout_s, start_timeout_s=config.host_start_timeout_s)
        gate = CommitGate(self._admission, self._requests)
        self._control = ControlDesk(self._link, self._calls, self._admission, gate, self._sockets.state.next_version, self._published)
        self._admission.version = self._sockets.state.next_version()
        self._supervisor = Supervisor(
            self._link,
            self._calls,
            self._requests,
            self._control,
            self._admission,
            self._metrics,
            initial_version=self._admission.version,
            max_restarts=config.max_restarts,
            probe=self._probe,
            on_event=self._host_event,
        )
        self._answers = Answers(
            config,
            self._incarnation,
            self._outbound,
            self._calls,
            self._control,
            self._admission,
            self._supervisor,
            files,
            numbers=self._numbers,
            health=lambda: self.health,
        )
        self._handlers = self._table()
        port, wake = config.metrics_port, self._lifecycle.wake
        try:
            self._exporter = None if port is None else Exporter(port, self._numbers, self._calls, wake=wake)
        except RolloutError:
            self._sockets.close()
            raise

    def _table(self) -> dict[Channel, dict[Op, Callable[[Session, Packet], None]]]:
        return {
            Channel.DATA: {
                Op.HEARTBEAT: self._heartbeat,
                Op.GOODBYE: lambda session, _: self._end_session(session, "the client closed"),
                Op.ATTACH: self._requests.attach,
                Op.CANCEL: self._requests.cancel,
                Op.ACK: self._ack,
                Op.TOOL_WAIT: self._tool_wait,
                Op.SCORE: self._score,
                Op.INFO: self._answers.info,
                Op.STATS: self._answers.stats,
                Op.TOKENIZER_FILES: self._answers.tokenizer_files,
            },
            Channel.CONTROL: {
                Op.PAUSE: self._pause,
                Op.RESUME: self._resume,
                Op.WEIGHTS_BEGIN: self._control.begin,
                Op.WEIGHTS_STAGE_FILE: self._control.stage,
                Op.WEIGHTS_STAGE_BUCKET: self._control.stage,
                Op.WEIGHTS_JOIN_GROUP: self._control.stage,
                Op.WEIGHTS_COMMIT: self._control.commit,
                Op.WEIGHTS_ABORT: self._abort,
                Op.SHUTDOWN: self._shutdown,
                Op.EVALUATE_BEGIN: self._control.begin_evaluation,
                Op.EVALUATE_END: self._control.end_evaluation,
                Op.SLEEP: self._control.sleep,
                Op.WAKE: self._control.wake,
            },
        }

    @property
    def health(self) -> str:
        """starting, loading, ready, updating (a commit waits or runs), needs_weights (a host is ready to take them), degraded (the engine
        host died and a new one is not ready yet, or the accounts do not reconcile), failed or stopping.
        """
        if self._lifecycle.refuses:
            return "stopping"
        if self._supervisor.failure is not None:
            return "failed"
        if not self._admission.ready:
            return "degraded" if self._supervisor.was_ready else "loading" if self._supervisor.loading else "starting"
        if self._control.needs_weights is not None:
            return "needs_weights"
        if self._watchdog.accounting_errors:
            return "degraded"
        update = self._control.update
        return "updating" if update is not None and update.committing else "ready"

    def _refusal(self) -> RolloutError | None:
        return refusal(self._control.needs_weights, self._supervisor.failure, self._lifecycle.refuses)

    def _host_event(self, event: str, fields: Mapping[str, object]) -> None:
        if event == "failed":
            self._lifecycle.stop()
        self._on_event(
            event, {"address": self._config.address, "model": self._config.model, "pid": os.getpid(), **self._exported(), **fields}
        )

    def _exported(self) -> dict[str, object]:
        return {} if self._exporter is None else {"metrics": self._exporter.address}

    def _published(self, version: int) -> None:
        self._admission.version = version
        self._requests.submit_held()

    # The loop

    def run(self) -> RolloutError | None:
        """Serve until stopped; return the error if the engine could not be started. Blocks."""
        try:
            self._sockets.announce(self._incarnation, self._config.model)
            self._supervisor.start()
            with self._lifecycle.signals():
                self._loop()
        finally:
            self._close()
        return None if self._supervisor.was_ready else self._supervisor.failure

    def _loop(self) -> None:
        timeout_s: float | None = 0.0
        clock = StandstillClock(min(SUSPENSION_S, self._config.lease_s / 4))
        while not self._lifecycle.is_over:
            ready = self._poller.wait(timeout_s)
            now = time.monotonic()
            self._slept_through(clock.stood_still(now, timeout_s))
            if self._lifecycle.wake_fd in ready:
                self._lifecycle.awake()
                if self._exporter is not None:
                    self._exporter.answer(engine=self._admission.ready)
            self._access.doorway.serve()
            self._drain_clients(now)
            self._supervisor.drain()
            self._slept_through(clock.stood_still(time.monotonic(), 0.0))
            timeout_s = self._tick()

    def _slept_through(self, seconds: float) -> None:
        """Blame nobody for a time in which this process did not run."""
        self._sessions.extend_all(seconds)
        self._probe.stood_still(seconds)

    def _tick(self) -> float | None:
        """Do what is due by time; return how long to wait for the next thing."""
        now = time.monotonic()
        for session in self._sessions.expired(now):
            self._metrics.lapsed_leases += 1
            log.info("lease of %s ended", session.label)
            self._end_session(session, "the client's lease ended")
        times = [
            self._end_denied(now),
            self._requests.expire(now),
            self._sessions.next_expiry(),
            self._control.advance(now),
            self._streams.flush(now),
            self._supervisor.advance(now),
            self._watchdog.advance(now),
            self._lifecycle.advance(now, idle=not (self._ledger.live or self._ledger.deciding or self._ledger.held)),
        ]
        self._link.send_queued()
        if self._outbound.send_waiting():
            times.append(now + RETRY_S)
        known = [one for one in times if one is not None]
        return max(0.0, min(known) - now) if known else None

    def _end_denied(self, now: float) -> float | None:
        """End the sessions of keys that were taken away; return when to look again."""
        changed, again = self._access.advance(now, needed=bool(len(self._sessions)))
        for session in self._sessions.all() if changed else ():
            try:
                for channel in (Channel.DATA, *session.routes):
                    self._access.check(session.principal, channel)
            except AccessDenied as error:
                log.info("the key of %s was taken away", session.label)
                for channel, route in session.routes.items():
                    self._outbound.send(channel, route, encode(Op.ERROR, NO_REQUEST, error_fields(error)))
                self._end_session(session, "the client's key was taken away")
        return again

    def stop(self) -> None:
        """End the loop soon; may be called from any thread."""
        self._lifecycle.stop()

    def _close(self) -> None:
        """End every request, the host and the sockets, and leave no file behind."""
        self._requests.cancel_all("the service stops")
        stopped = ServiceStopping("the service stops", remedy="start it again")
        self._calls.fail_all(stopped)
        self._streams.flush(float("inf"))
        goodbye = encode(Op.ERROR, NO_REQUEST, error_fields(stopped))
        for session in self._sessions.all():
            self._outbound.flush(session, goodbye)
        self._link.stop(HOST_GRACE_S)
        if self._exporter is not None:
            self._exporter.close()
        self._sockets.close()
        self._lifecycle.close()

    # Clients

    def _drain_clients(self, now: float) -> None:
        for channel, router in self._sockets.routers.items():
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
                raise WireError(
                    "a message with too many frames or bytes, or with none",
                    limit=f"at most {MAX_FRAMES} frames of {self._config.max_message_bytes} bytes together",
                    remedy="send less at once; see the protocol in rollout/README.md",
                )
            header = read_header(incoming.frames[0])
            request_id = header.request_id
            if not Router.drew(incoming.route):
                raise NoSession(
                    "the connection chose its own routing id", limit="the service draws them", remedy="leave the socket's identity unset"
                )
            generation = channel is Channel.DATA and header.op in GENERATIONS and header.version == PROTOCOL_VERSION
            packet = decode(incoming.frames, DATA_REQUESTS if channel is Channel.DATA else CONTROL_REQUESTS)
            if packet.op is Op.HELLO:
                self._hello(channel, incoming, packet, now)
                return
            session = self._sessions.heard(channel, incoming.route, now, incoming.user)
            if packet.op in GENERATIONS:
                generation = False
                self._requests.generate(session, packet, _fingerprint(incoming.frames), now)
            elif channel is Channel.DATA or not (self._calls.is_open(session, request_id) or self._control.waits_for(session, request_id)):
                self._handlers[channel][packet.op](session, packet)
        except RolloutError as error:
            if generation:
                self._ledger.refuse_at_door()
            elif isinstance(error, WireError) and not isinstance(error, NoSession):
                self._metrics.malformed += 1
            self._outbound.send(channel, incoming.route, encode(Op.ERROR, request_id, error_fields(error)))
        except Exception as error:
            # One sender's message must not end everybody's service.
            log.exception("a message could not be handled")
            self._outbound.send(channel, incoming.route, encode(Op.ERROR, request_id, error_fields(error)))

    def _hello(self, channel: Channel, incoming: Incoming, packet: Packet, now: float) -> None:
        body, route, user = packet.body, incoming.route, incoming.user
        assert isinstance(body, Hello)
        self._access.check(principal_of(user), channel)
        if (body.session is None) != (body.secret is None):
            raise InvalidRequest(
                "HELLO with one of session and secret",
                field="secret",
                limit="they come together",
                remedy="send both to continue a session, neither to open one",
            )
        if body.session is not None and body.secret is not None:
            session = self._sessions.resume(body.session, body.secret, channel, route, now, user)
            if session is None:
                raise ServerRestarted(
                    "the session is not known here", limit="it ended, or the service was started again", remedy="open a new one"
                )
            if channel is Channel.DATA:
                self._streams.detach(session)
        elif channel is Channel.CONTROL:
            raise NoSession("a session is opened on the data socket", remedy="say HELLO there, then here with session and secret")
        else:
            former = self._sessions.bound_to(channel, route)
            if former is not None:
                self._end_session(former, "the client opened another session on its connection")
            session = self._sessions.open(body.name, channel, route, now, user)
        fields = {
            "incarnation": self._incarnation,
            "session": session.session_id,
            "secret": session.secret,
            "lease_s": float(self._config.lease_s),
            "control_address": self._sockets.routers[Channel.CONTROL].address,
            "max_message_bytes": self._config.max_message_bytes,
        }
        self._outbound.reply(session, channel, Op.WELCOME, packet.request_id, fields)

    def _end_session(self, session: Session, reason: str) -> None:
        self._requests.end_session(session, reason)
        if session.hinted:
            self._link.send(Op.END_HINTS, {"owner": session.session_id.hex()})
        self._control.end_session(session)
        self._outbound.forget(session)
        self._sessions.close(session)

    def _heartbeat(self, session: Session, packet: Packet) -> None:
        fields = {"health": self.health, "version": self._admission.version}
        arrays = {"request_ids": self._requests.unacknowledged(session)}
        self._outbound.reply(session, Channel.DATA, Op.ALIVE, packet.request_id, fields, arrays)

    def _ack(self, session: Session, packet: Packet) -> None:
        assert isinstance(packet.body, Ack)
        self._requests.acknowledge(session, packet, packet.body.seq)

    def _tool_wait(self, session: Session, packet: Packet) -> None:
        """Hand a hint on; without a host there is nothing to keep."""
        body = packet.body
        assert isinstance(body, ToolWait)
        session.hinted = True
        owner = session.session_id.hex()
        fields = {"lineage": f"{owner}:{body.lineage}", "cache_salt": body.cache_salt, "expect_s": body.expect_s, "owner": owner}
        self._link.send(Op.EXPECT_RETURN, fields)
        if packet.request_id != NO_REQUEST:
            self._outbound.reply(session, Channel.DATA, Op.DONE, packet.request_id, {})

    def _score(self, session: Session, packet: Packet) -> None:
        assert isinstance(packet.body, Score)
        stopped = self._admission.refusal()
        if stopped is None and not self._admission.ready:
            stopped = HostFailed("no engine host is ready", remedy="wait until info().health is 'ready'")
        if stopped is not None:
            raise stopped
        self._control.sleepers.check_awake("a score")
        self._calls.pass_on(session, Channel.DATA, packet.request_id, Op.SCORE, packet.body.model_dump(), packet.arrays)

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
        self._lifecycle.stop()

    def _done(self, session: Session, packet: Packet) -> None:
        self._outbound.reply(session, Channel.CONTROL, Op.DONE, packet.request_id, {})

    def _numbers(self) -> dict[str, object]:
        numbers = snapshot(self._metrics, self._ledger, self._sessions, self._streams, held=self._requests.num_held, health=self.health)
        numbers["watched_for_stop_strings"] = self._requests.num_watched
        stall_s, stalled = self._watchdog.oldest(time.monotonic())
        return {
            **numbers,
            **{f"failed_{code}": count for code, count in sorted(self._ledger.failures.items())},
            "accounting_errors": self._watchdog.accounting_errors,
            "oldest_stall_s": stall_s,
            "oldest_stall": stalled,
            "credit_bytes": self._config.credit_bytes,
            "host_credit_bytes": self._config.host_credit_bytes,
            "host_queued_bytes": self._link.queued_bytes,
            "max_record_bytes": self._config.max_record_bytes,
            "max_requests": self._config.max_requests,
            "version": self._admission.version,
            "paused": self._admission.paused,
            "paused_by": ", ".join(self._control.paused_by),
            "held_for_update": self._admission.held,
            "asleep": self._admission.asleep or "",
            "open_calls": len(self._calls),
            "refused_connections": self._access.refused,
        }


def _fingerprint(frames: list[bytes]) -> bytes:
    """Return what tells one request body from another: all frames but the header."""
    digest = xxhash.xxh3_128()
    for frame in frames[1:]:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()


def serve(config: ServiceConfig, on_event: OnEvent) -> RolloutError | None:
    """Run a service in this process until it is stopped; return the error if its engine could not be started. Blocks."""
    # numpy loads it at the first use of some functions; no message of anybody's is to make this process look for code.
    importlib.import_module("numpy.ma")
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
    try:
        config = ServiceConfig.from_json(text)
        set_up_logging("front", config.log_format)
        error = serve(config, _print_event)
    except RolloutError as refused:
        _print_event("failed", {"error": error_fields(refused)})
        return 1
    return 0 if error is None else 1


if __name__ == "__main__":
    sys.exit(main())
