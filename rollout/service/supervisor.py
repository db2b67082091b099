"""The engine host's life: start, ready, messages, death, restart.

The front calls it in its loop. When the host dies every request that it had ends as failed, every open call gets the
cause, and a new host is started, at once or a little later, unless hosts have died too often (`RestartBudget`) or the first
start never got ready. The weights decide what follows: a model that nobody ever updated serves on, an updated one waits for
its trainer.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping

from rollout.errors import HostFailed, InternalError, RolloutError, error_fields, plain_text
from rollout.service.admission import Admission
from rollout.service.calls import Calls
from rollout.service.control import ControlDesk
from rollout.service.host_link import BadMessage, HostLink
from rollout.service.host_probe import HostProbe
from rollout.service.metrics import FrontMetrics
from rollout.service.requests import RequestDesk
from rollout.service.restart_budget import WINDOW_S, RestartBudget
from rollout.wire.codec import NO_REQUEST, Packet
from rollout.wire.host_messages import HostFailed as HostFailedBody
from rollout.wire.host_messages import HostReady
from rollout.wire.operations import Op
from rollout.wire.session_messages import EngineFacts

log = logging.getLogger("rollout.front")
MAX_MESSAGES_PER_TURN = 1024
STACKS_S = 0.2
# What a host brings that proves it of use; that it takes orders does not.
SERVICE = (Op.SCORED, Op.WEIGHTS_REPORT)

# What a host whom nobody here killed may have met, by the signal that ended it.
SIGNALS: dict[int, str] = {
    signal.SIGKILL: "from outside: by a person, by another rank (the log names it), or by the kernel for want of memory (dmesg)",
    signal.SIGSEGV: "a library of its process broke; the log has the place",
    signal.SIGABRT: "a library of its process gave up; the log has its last words",
    signal.SIGBUS: "memory that it had mapped is gone, as when /dev/shm is full",
}

OnEvent = Callable[[str, Mapping[str, object]], None]


def how_ended(status: int) -> str:
    """Say in words how a process ended: `Popen`'s return code, negative for a signal."""
    if status >= 0:
        return f"ended with status {status}"
    known = -status in set(signal.Signals)
    return f"was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"


class Supervisor:
    """Owns what is known of the host; see the module. `on_event` hears "ready" and "failed", once."""

    def __init__(
        self,
        link: HostLink,
        calls: Calls,
        requests: RequestDesk,
        control: ControlDesk,
        admission: Admission,
        metrics: FrontMetrics,
        *,
        initial_version: int,
        max_restarts: int,
        probe: HostProbe,
        on_event: OnEvent,
    ) -> None:
        self._link, self._calls, self._requests, self._control = link, calls, requests, control
        self._admission, self._metrics, self._on_event = admission, metrics, on_event
        self._initial_version, self._budget, self._probe = initial_version, RestartBudget(max_restarts), probe
        self._start_at: float | None = None
        self._ready_at: float | None = None
        self._of_use = False
        self._cause: RolloutError | None = None
        self._broken = False
        self._kill_at: float | None = None
        self.facts: EngineFacts | None = None
        self.failure: RolloutError | None = None
        # How the last host died, until another one is ready.
        self.death: HostFailed | None = None
        self.was_ready = self.loading = False

    def start(self) -> None:
        """Start a host."""
        self._metrics.host_starts += 1
        self._cause = self._kill_at = self._start_at = self._ready_at = None
        self._broken = self.loading = self._of_use = False
        self._probe.forget()
        self._link.start(self._initial_version, self._control.lost)

    def drain(self) -> None:
        """Take the host's messages, and its death."""
        for _ in range(MAX_MESSAGES_PER_TURN):
            packet = self._link.receive()
            if packet is None:
                break
            self._probe.heard(time.monotonic())
            if self._broken:
                # What comes behind a step that was not taken would stand in that one's place.
                continue
            if isinstance(packet, BadMessage):
                self._bad_message(packet)
            elif not self._took(packet):
                self._link.kill()
                break
        status = self._link.exited()
        if status is not None:
            self._exited(status)

    def advance(self, now: float) -> float | None:
        """Start a host that is due, kill one that gives no sign of life though one is; return when to look again.

        One that was ready is asked for its stacks first, and has a moment to write them.
        """
        if self.failure is not None:
            return None
        if self._start_at is not None:
            if now < self._start_at:
                return self._start_at
            self.start()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill_at = None
                self._link.kill()
            return self._kill_at
        expected = self._requests.engine_owes or bool(len(self._calls))
        cause, again = self._probe.judge(now, loading=not self._admission.ready, expected=expected)
        if cause is not None:
            log.error("%s", cause)
            self._cause = cause
            self._probe.forget()
            if self._admission.ready:
                self._link.show_stacks()
                self._kill_at = again = now + STACKS_S
            else:
                self._link.kill()
        return again

    def _bad_message(self, bad: BadMessage) -> None:
        """Fail the call that got a broken answer; a broken step has lost tokens, so its host cannot go on."""
        log.error("the engine host sent what is no message: %s", bad.error)
        if bad.call_id == NO_REQUEST:
            self._cause, self._broken = bad.error, True
            self._link.kill()
        else:
            self._calls.fail(bad.call_id, InternalError(f"the engine host's answer is broken: {bad.error.what}", limit=bad.error.limit))

    def _took(self, packet: Packet) -> bool:
        """Take a message; False if that is not possible, after which its host is of no use: clients need not suffer for its faults."""
        try:
            self._take(packet)
        except Exception as error:
            log.exception("a message of the engine host could not be taken")
            self._broken = True
            self._cause = InternalError(
                f"the engine host sent what does not fit together: {type(error).__name__}: {plain_text(str(error), 300)}"
            )
            return False
        return True

    def _take(self, packet: Packet) -> None:
        body = packet.body
        if packet.op is Op.STEP:
            self._requests.take_step(packet)
            self._of_use = self._of_use or packet.arrays["token_ids"].size > 0
        elif isinstance(body, HostReady):
            self._ready(body)
        elif packet.op is Op.HOST_LOADING:
            self.loading = True
        elif isinstance(body, HostFailedBody):
            error = body.error
            self._cause = RolloutError(
                error.what, field=error.field, value=error.value, limit=error.limit, remedy=error.remedy, code=error.code
            )
        else:
            self._of_use = self._of_use or packet.op in SERVICE
            self._calls.answer(packet)

    def _ready(self, body: HostReady) -> None:
        self.facts, self.death, self._ready_at = body.engine, None, time.monotonic()
        self._admission.ready, self.loading = True, False
        self._probe.forget()
        self._admission.max_model_len = body.engine.max_model_len
        self._admission.vocab_size = body.engine.vocab_size
        self._control.host_ready(body.version)
        self._requests.submit_held()
        if not self.was_ready:
            self.was_ready = True
            self._on_event("ready", {"version": self._admission.version})

    def _exited(self, status: int) -> None:
        for packet in self._link.last_words():
            if self._broken or not self._took(packet):
                break
        cause, pid = self._cause, self._link.pid
        wait_s = self._budget.after_death(self._served_s()) if self.was_ready else None
        self._control.host_died()
        self.death = error = HostFailed(
            f"the engine host (pid {pid}) {how_ended(status)}" + (f": {cause.what}" if cause else ""),
            limit=cause.limit if cause else SIGNALS.get(-status),
            remedy=self._remedy(cause, restarts=wait_s is not None),
        )
        if self.was_ready or cause is None:
            log.error("%s", error)
        self._admission.ready = False
        self._requests.fail_submitted(error)
        self._calls.fail_all(error)
        self._link.clear()
        if wait_s is None:
            self._give_up(cause, error)
        elif wait_s:
            log.warning("a new engine host starts in %.1f s", wait_s)
            self._start_at = time.monotonic() + wait_s
        else:
            self.start()

    def _served_s(self) -> float | None:
        """Return how long the host that ended was in service, None if it was not."""
        owed = self._requests.engine_owes or bool(len(self._calls))
        if self._ready_at is None or (owed and not self._of_use):
            return None
        return time.monotonic() - self._ready_at

    def _give_up(self, cause: RolloutError | None, error: HostFailed) -> None:
        """Start no more hosts; what waits is refused, as is what comes."""
        if self.was_ready:
            deaths = f"{self._budget.deaths} engine hosts died within {WINDOW_S:.0f} s of service (max_restarts)"
            self.failure = HostFailed(
                error.what, field="max_restarts", limit="; ".join(filter(None, (error.limit, deaths))), remedy=error.remedy
            )
            log.error("no more engine hosts are started: %s", deaths)
        else:
            self.failure = cause or error
        self._requests.refuse_held(self.failure)
        if not self.was_ready:
            self._on_event("failed", {"error": error_fields(self.failure)})

    def _remedy(self, cause: RolloutError | None, *, restarts: bool) -> str:
        """Say what to do about a host's death: by a caller, then by whoever runs the service."""
        advice = f"; the host's advice: {cause.remedy}" if cause and cause.remedy else ""
        if not restarts:
            return f"see the service's log, then start it again{advice}"
        needed = self._control.needs_weights
        if needed is None:
            return f"submit the request again; the service starts a new engine host{advice}"
        return f"push the trainer's weights, since the new engine host waits for version {needed}, then submit the request again{advice}"
