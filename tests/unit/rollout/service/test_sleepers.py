"""Sleeps and wakes whose orders and answers cross: whoever holds a sleep has it, and an engine sleeps for nobody else."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import cast

import pytest

from rollout.errors import HostFailed
from rollout.service.admission import Admission
from rollout.service.calls import Calls
from rollout.service.host_link import HostLink
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.service.sleepers import LEVELS, Sleepers
from rollout.wire.codec import NO_REQUEST, Packet, decode, encode
from rollout.wire.operations import CONTROL_REQUESTS, HOST_REPLIES, Op
from rollout.wire.security import new_token


class Played:
    """The host: it takes orders in turn, some time after they were sent, and its answers come back some time after that."""

    def __init__(self) -> None:
        self.orders: deque[tuple[Op, Mapping[str, object], bytes]] = deque()
        self.answers: deque[tuple[Op, bytes, Mapping[str, object]]] = deque()
        self.level: str | None = None
        self.wakes_again = False

    def send(self, op: Op, fields: Mapping[str, object], arrays: object = None, call_id: bytes = NO_REQUEST) -> None:
        self.orders.append((op, fields, call_id))

    def obey(self, *, refuses: bool) -> None:
        """Take the next order; `refuses` says that there is no memory, or that it cannot be given back."""
        op, fields, call_id = self.orders.popleft()
        if op is Op.SLEEP and not (refuses and call_id != NO_REQUEST):
            self.level, self.wakes_again = str(fields["level"]), False
        elif op is Op.WAKE and not refuses:
            self.level, self.wakes_again = None, False
        elif op is Op.WAKE and call_id == NO_REQUEST:
            self.wakes_again = True
        if call_id != NO_REQUEST:
            error = {"code": "asleep", "what": "there is no memory"}
            self.answers.append((Op.ERROR, call_id, error) if refuses else (Op.DONE, call_id, {}))


class Desk:
    """Sleepers with clients; `asked` is what each client asked for in its order, with how that ended."""

    def __init__(self) -> None:
        self.host, self.admission, self.awakenings = Played(), Admission(lambda: None), 0
        self.admission.ready = True
        self.calls = Calls(cast(HostLink, self.host), self._reply)
        self.sleepers = Sleepers(cast(HostLink, self.host), self.calls, self.admission, self._awake)
        self.book = SessionBook(30.0)
        self.asked: dict[int, dict[bytes, tuple[Op, str]]] = {}
        self.outcomes: dict[bytes, Op] = {}

    def _awake(self) -> None:
        self.awakenings += 1

    def client(self) -> Session:
        session = self.book.open("client", Channel.DATA, new_token(), 0.0)
        self.asked[session.number] = {}
        return session

    def _reply(self, session: Session, channel: Channel, op: Op, request_id: bytes, fields: object, arrays: object = None) -> None:
        self.outcomes[request_id] = op

    def ask(self, session: Session, op: Op, level: str = "kv") -> None:
        packet = self._packet(op, {"level": level} if op is Op.SLEEP else {})
        self.asked[session.number][packet.request_id] = op, level
        if op is Op.SLEEP:
            self.sleepers.sleep(session, packet, None)
        elif not self.sleepers.wake(session, packet):
            self.outcomes[packet.request_id] = Op.DONE

    @staticmethod
    def _packet(op: Op, fields: Mapping[str, object]) -> Packet:
        return decode([bytes(frame) for frame in encode(op, new_token(), fields)], CONTROL_REQUESTS)

    def hear(self) -> None:
        """Let the next answer of the host arrive."""
        op, call_id, fields = self.host.answers.popleft()
        self.calls.answer(decode([bytes(frame) for frame in encode(op, call_id, fields)], HOST_REPLIES))

    def settle(self) -> None:
        """Let the host obey every order, and every answer arrive; there is memory."""
        while self.host.orders or self.host.answers:
            if self.host.orders:
                self.host.obey(refuses=False)
            else:
                self.hear()
        if self.host.wakes_again:
            self.host.level, self.host.wakes_again = None, False

    def host_dies(self) -> None:
        """Let another host take the place of this one."""
        self.sleepers.host_died()
        self.host.orders.clear()
        self.host.answers.clear()
        self.host.level, self.host.wakes_again = None, False
        self.calls.fail_all(HostFailed("it died", remedy="ask again"))
        self.sleepers.host_ready()

    def leave(self, session: Session) -> None:
        self.sleepers.end_session(session)
        del self.asked[session.number]

    def check(self) -> None:
        """Assert that what is settled is as the clients were told."""
        assert self.admission.asleep == self.host.level, f"the front says {self.admission.asleep}, the engine {self.host.level}"
        held: list[str] = []
        for calls in self.asked.values():
            holds: list[str] = []
            for call_id, (op, level) in calls.items():
                if self.outcomes[call_id] is Op.DONE:
                    holds = [*holds, level] if op is Op.SLEEP else []
            held += holds
        depth = -1 if self.host.level is None else LEVELS.index(self.host.level)
        assert bool(held) == (depth >= 0) and all(LEVELS.index(level) <= depth for level in held), f"{held} are held in {self.host.level}"


def test_a_sleep_that_crosses_anothers_wake_holds_until_its_own() -> None:
    desk = Desk()
    one, other = desk.client(), desk.client()
    desk.ask(one, Op.SLEEP)
    desk.settle()
    desk.ask(one, Op.WAKE)
    desk.ask(other, Op.SLEEP)
    desk.settle()
    desk.check()
    assert desk.admission.asleep == "kv"
    desk.ask(other, Op.WAKE)
    desk.settle()
    assert desk.admission.asleep is None and desk.host.level is None


def test_a_sleep_outlives_its_host_only_while_somebody_holds_it() -> None:
    desk = Desk()
    one = desk.client()
    desk.ask(one, Op.SLEEP)
    desk.settle()
    desk.ask(one, Op.SLEEP)
    desk.host_dies()
    desk.settle()
    desk.check()
    assert desk.host.level == "kv", "the call that failed was its second one"
    desk.leave(one)
    desk.settle()
    assert desk.admission.asleep is None and desk.host.level is None


def test_a_wake_that_is_refused_after_its_client_ended_is_tried_again_for_nobody() -> None:
    desk = Desk()
    one, other = desk.client(), desk.client()
    desk.ask(one, Op.SLEEP)
    desk.settle()
    desk.ask(one, Op.WAKE)
    desk.leave(one)
    desk.host.obey(refuses=True)
    desk.settle()
    assert desk.admission.asleep is None and desk.host.level is None
    desk.ask(other, Op.SLEEP, "weights")
    desk.settle()
    desk.check()


@pytest.mark.parametrize("seed", range(300))
def test_whatever_crosses_the_engine_sleeps_for_those_who_hold_it_and_for_nobody_else(seed: int) -> None:
    draw, desk = random.Random(seed), Desk()
    clients = [desk.client() for _ in range(3)]
    for _ in range(draw.randrange(5, 60)):
        what = draw.choice(("sleep", "sleep", "wake", "wake", "obey", "obey", "obey", "hear", "hear", "leave", "die", "settle"))
        place = draw.randrange(len(clients))
        if what == "sleep":
            desk.ask(clients[place], Op.SLEEP, draw.choice(LEVELS))
        elif what == "wake":
            desk.ask(clients[place], Op.WAKE)
        elif what == "obey" and desk.host.orders:
            desk.host.obey(refuses=draw.random() < 0.2)
        elif what == "hear" and desk.host.answers:
            desk.hear()
        elif what == "leave" and draw.random() < 0.4:
            desk.leave(clients[place])
            clients[place] = desk.client()
        elif what == "die" and draw.random() < 0.2:
            desk.host_dies()
        elif what == "settle" and draw.random() < 0.3:
            desk.settle()
            desk.check()
    desk.settle()
    desk.check()
    for client in clients:
        desk.leave(client)
    desk.settle()
    assert desk.admission.asleep is None and desk.host.level is None and not desk.calls
