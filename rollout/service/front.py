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
import gc
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rollout.config import ServiceConfig
from rollout.errors import (
    HostFailed,
    RolloutError,
    ServiceStopping,
    error_fields,
)
from rollout.service.admission import Admission
from rollout.service.answers import Answers
from rollout.service.bound_sockets import BoundSockets
from rollout.service.calls import Calls
from rollout.service.commit_gate import CommitGate
from rollout.service.control import ControlDesk, refusal
from rollout.service.dispatch import Dispatch, Handlers
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
from rollout.service.session_desk import SessionDesk
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.service.stop_text import StopText
from rollout.service.streams import Streams
from rollout.service.supervisor import OnEvent, Supervisor
from rollout.service.watchdog import Watchdog
from rollout.standstill import StandstillClock
from rollout.tokenizer_files import read_tokenizer_files
from rollout.wire.codec import NO_REQUEST, Packet, encode
from rollout.wire.generation_messages import Ack, Score, ToolWait
from rollout.wire.operations import Op
from rollout.wire.security import new_token
from rollout.wire.transport import Poller

log = logging.getLogger("rollout.front")
MAX_MESSAGES_PER_TURN = 1024
RETRY_S = 0.01
HOST_GRACE_S = 5.0
SUSPENSION_S = 1.0
MAX_FAILURE_TEXT = 1000


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
        self._desk = SessionDesk(
            config,
            self._incarnation,
            routers[Channel.CONTROL].address,
            access=self._access,
            sessions=self._sessions,
            streams=self._streams,
            requests=self._requests,
            control=self._control,
            outbound=self._outbound,
            link=self._link,
        )
        self._dispatch = Dispatch(
            self._table(),
            max_message_bytes=config.max_message_bytes,
            desk=self._desk,
            sessions=self._sessions,
            requests=self._requests,
            calls=self._calls,
            control=self._control,
            ledger=self._ledger,
            outbound=self._outbound,
            metrics=self._metrics,
        )
        port, wake = config.metrics_port, self._lifecycle.wake
        try:
            self._exporter = None if port is None else Exporter(port, self._numbers, self._calls, wake=wake)
        except RolloutError:
            self._sockets.close()
            self._lifecycle.close()
            raise

    def _table(self) -> Handlers:
        return {
            Channel.DATA: {
                Op.HEARTBEAT: self._heartbeat,
                Op.GOODBYE: lambda session, _: self._desk.end(session, "the client closed"),
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
        self._sessions.extend_all(seconds, time.monotonic())
        self._probe.stood_still(seconds)

    def _tick(self) -> float | None:
        """Do what is due by time; return how long to wait for the next thing."""
        now = time.monotonic()
        for session in self._sessions.expired(now):
            self._metrics.lapsed_leases += 1
            log.info("lease of %s ended", session.label)
            self._desk.end(session, "the client's lease ended")
        times = [
            self._desk.end_denied(now),
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
        # One that still loads has nothing to finish, and would hold up everybody who asks meanwhile.
        self._link.stop(HOST_GRACE_S if self._admission.ready else 0.0)
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
                self._dispatch.take(channel, incoming, now)

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
            death = self._supervisor.death
            stopped = HostFailed(
                "no engine host is ready",
                limit=None if death is None else f"the last one: {death.what}",
                remedy="wait until info().health is 'ready'",
            )
        if stopped is not None:
            raise stopped
        self._control.sleepers.check_awake("a score")
        self._outbound.check_room(session)
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
            "unsent_bytes": self._outbound.unsent_bytes,
            "host_failure": "" if self._supervisor.death is None else str(self._supervisor.death)[:MAX_FAILURE_TEXT],
            "refused_connections": self._access.refused,
        }


def serve(config: ServiceConfig, on_event: OnEvent) -> RolloutError | None:
    """Run a service in this process until it is stopped; return the error if its engine could not be started. Blocks."""
    # numpy loads it at the first use of some functions; no message of anybody's is to make this process look for code.
    importlib.import_module("numpy.ma")
    front = Front(config, on_event)
    if config.watch_parent:
        ParentWatch(front.stop)
    # What is loaded now stays. A collection that went through all of it would hold every stream up, for as long as some flushes.
    gc.collect()
    gc.freeze()
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
