"""Sleep as a lease of the sessions that hold it: the engine gives memory back while one of them does.

The control desk hands SLEEP and WAKE over. A session's sleep ends with it, so that a trainer that died leaves no engine
without its memory; the engine host tries again where memory is not free at once. The deepest level that was asked for
holds until nobody sleeps any more.

Orders of several sessions cross their answers, so nothing is concluded from one order alone: the engine counts as asleep while a
session holds a sleep or has asked for one, and while its last word was that it sleeps. Invariant: an engine that sleeps has a
holder, or an order on its way to it.
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
        # By session number: what it was told that it holds.
        self._holders: dict[int, str] = {}
        # Open calls by session number and request id: levels that are asked for, and wakes.
        self._sleeping: dict[tuple[int, bytes], str] = {}
        self._waking: set[tuple[int, bytes]] = set()
        # What the engine has given back by its last word, and which order that was about; it answers them in their order.
        self._given: str | None = None
        self._orders = self._told_about = 0

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

    def host_died(self) -> None:
        """Forget what it had given back; a new one is awake. Its open calls are answered next, with its death."""
        self._told_about, self._given = self._order(), None

    def host_ready(self) -> None:
        """Tell a new host."""
        level = self._admission.asleep
        if level is not None:
            self._link.send(Op.SLEEP, {"level": level})
            self._told(self._order(), level)

    def sleep(self, session: Session, packet: Packet, update_holder: str | None) -> None:
        """Let the engine sleep for a session. Raises: UpdateBusy, HostFailed, Busy."""
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
        call, order = (session.number, packet.request_id), self._order()
        level = _deepest(body.level, self._admission.asleep) or body.level

        def slept(_: Message) -> None:
            asked = self._sleeping.pop(call, None)
            if asked is not None:
                self._holders[session.number] = _deepest(asked, self._holders.get(session.number)) or asked
            self._told(order, level)

        def refused(_: object) -> None:
            self._sleeping.pop(call, None)
            self._settle()

        self._calls.pass_on(session, Channel.CONTROL, packet.request_id, Op.SLEEP, {"level": level}, on_result=slept, on_error=refused)
        self._sleeping[call] = body.level
        self._settle()

    def wake(self, session: Session, packet: Packet) -> bool:
        """Drop a session's sleep; False if the engine has nothing to do, else it answers the call. Raises: Busy."""
        number = session.number
        if self._is_held(apart_from=number) or self._admission.asleep is None:
            self._drop(number)
            return False
        call, order = (number, packet.request_id), self._order()

        def awake(_: Message) -> None:
            # What the session asked for since is answered later.
            self._waking.discard(call)
            self._holders.pop(number, None)
            self._told(order, None)

        def refused(_: object) -> None:
            self._waking.discard(call)
            self._settle()

        self._calls.pass_on(session, Channel.CONTROL, packet.request_id, Op.WAKE, {}, on_result=awake, on_error=refused)
        self._waking.add(call)
        return True

    def end_session(self, session: Session) -> None:
        """Let the engine wake if it slept for this session alone; it goes on as soon as its memory is free."""
        self._waking = {call for call in self._waking if call[0] != session.number}
        self._drop(session.number)
        if not self._is_held() and not self._waking and self._admission.asleep is not None:
            self._let_go()

    def _is_held(self, *, apart_from: int | None = None) -> bool:
        """Tell whether a session holds a sleep, or has asked for one."""
        return any(number != apart_from for number in (*self._holders, *(number for number, _ in self._sleeping)))

    def _drop(self, number: int) -> None:
        """Let a session hold nothing, and not what it has asked for either."""
        self._holders.pop(number, None)
        self._sleeping = {call: level for call, level in self._sleeping.items() if call[0] != number}

    def _order(self) -> int:
        self._orders += 1
        return self._orders

    def _told(self, order: int, given: str | None) -> None:
        """Take the engine's word about an order, unless that about a later one is known."""
        if order > self._told_about:
            self._told_about, self._given = order, given
        self._settle()

    def _settle(self) -> None:
        """Conclude whether the engine counts as asleep; one that sleeps for nobody is woken."""
        if self._given is not None and not self._is_held() and not self._waking:
            self._let_go()
            return
        former, self._admission.asleep = self._admission.asleep, _deepest(self._given, *self._holders.values(), *self._sleeping.values())
        if former is not None and self._admission.asleep is None:
            self._on_awake()

    def _let_go(self) -> None:
        """Let the engine wake as soon as it can; nobody waits for its answer."""
        self._link.send(Op.WAKE, {})
        self._told(self._order(), None)


def _deepest(*levels: str | None) -> str | None:
    """Return the level that gives back most, None of none."""
    return max((level for level in levels if level is not None), key=LEVELS.index, default=None)
