"""Sleep as a lease of the sessions that hold it: the engine gives memory back while one of them does.

The control desk hands SLEEP and WAKE over. A session's sleep ends with it, so that a trainer that died leaves no engine
without its memory; the engine host tries again where memory is not free at once. The deepest level that was asked for
holds until nobody sleeps any more.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.errors import Asleep, HostFailed, UpdateBusy
from rollout.service.admission import Admission
from rollout.service.calls import Calls
from rollout.service.host_link import HostLink
from rollout.service.sessions import Channel, Session
from rollout.wire.codec import Packet
from rollout.wire.control_messages import Sleep
from rollout.wire.fields import Message
from rollout.wire.operations import Op

LEVELS = ("kv", "weights")


class Sleepers:
    """Owns who lets the engine sleep; see the module. `on_awake` is called when requests may go on."""

    def __init__(self, link: HostLink, calls: Calls, admission: Admission, on_awake: Callable[[], None]) -> None:
        self._link, self._calls, self._admission, self._on_awake = link, calls, admission, on_awake
        self._holders: dict[int, str] = {}

    def check_awake(self, what: str) -> None:
        """Refuse a call that needs the engine's memory. Raises: Asleep."""
        if self._admission.asleep is not None:
            raise Asleep(
                f"{what} is refused",
                field="asleep",
                value=self._admission.asleep,
                limit="the engine has given its memory back",
                remedy="wake it first; its sleep ends with the client that asked for it, or with its lease (info().lease_s)",
            )

    def host_ready(self) -> None:
        """Tell a new host."""
        if self._holders and self._admission.asleep is not None:
            self._link.send(Op.SLEEP, {"level": self._admission.asleep})

    def sleep(self, session: Session, packet: Packet, update_holder: str | None) -> None:
        """Let the engine sleep for a session. Raises: UpdateBusy, HostFailed."""
        body = packet.body
        assert isinstance(body, Sleep)
        if update_holder is not None:
            raise UpdateBusy(
                "a weight update is open",
                field="update",
                value=update_holder,
                limit=f"held by {update_holder}; an engine that sleeps can prove no weights",
                remedy="sleep after its commit or abort",
            )
        if not self._admission.ready:
            raise HostFailed("no engine host is ready", remedy="wait until info().health is 'ready'")
        former = self._admission.asleep
        self._holders[session.number] = max(body.level, self._holders.get(session.number, body.level), key=LEVELS.index)
        level = self._admission.asleep = max((body.level, former or body.level), key=LEVELS.index)

        def refused(_: object) -> None:
            # The engine said no: nothing has changed there.
            self._holders.pop(session.number, None)
            if former is None and not self._holders:
                self._awake()

        self._calls.pass_on(session, Channel.CONTROL, packet.request_id, Op.SLEEP, {"level": level}, on_error=refused)

    def wake(self, session: Session, packet: Packet) -> bool:
        """Drop a session's sleep; False if the engine has nothing to do, else it answers the call."""
        self._holders.pop(session.number, None)
        if self._holders or self._admission.asleep is None:
            return False

        def awake(_: Message) -> None:
            self._awake()

        def refused(_: object) -> None:
            self._holders.setdefault(session.number, self._admission.asleep or "kv")

        self._calls.pass_on(session, Channel.CONTROL, packet.request_id, Op.WAKE, {}, on_result=awake, on_error=refused)
        return True

    def end_session(self, session: Session) -> None:
        """Let the engine wake if it slept for this session alone; it goes on as soon as its memory is free."""
        if self._holders.pop(session.number, None) is not None and not self._holders and self._admission.asleep is not None:
            self._link.send(Op.WAKE, {})
            self._awake()

    def _awake(self) -> None:
        self._admission.asleep = None
        self._on_awake()
