"""Clients as the front knows them: sessions with a secret, their connections, and the lease that keeps them.

A session is opened by HELLO and continued by a HELLO that shows its secret and comes from the same principal (key or user, by
the gate's word). The connection's routing id is bound to it from then on, together with the gate's name of that one connection,
so that another one under the same routing id is a stranger. Any message of a bound connection renews the lease.
Invariant: a route belongs to at most one session.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from rollout.errors import AccessDenied, Busy, NoSession
from rollout.wire.codec import NO_REQUEST, Frame
from rollout.wire.gate import principal_of
from rollout.wire.security import new_token, same_secret

MAX_SHOWN_NAME = 64
MAX_SESSIONS = 16_384
# Answers to control calls that are kept for a client that asks again; it has few such calls open at a time.
MAX_KEPT_ANSWERS = 48
MAX_KEPT_ANSWER_BYTES = 32 * 2**10


class Channel(enum.Enum):
    """The two sockets of a service."""

    DATA = "data"
    CONTROL = "control"


@dataclass(slots=True, eq=False)
class Session:
    """One client. `principal` is whom the gate let in, `users` the gate's name of each route's connection.

    `unacked` lists (sequence number, bytes) of flushes under way; `stalled` that a send found no room, `hinted` that it said when
    tools will be done.
    """

    number: int
    session_id: bytes
    secret: bytes = field(repr=False)
    name: str
    expires_at: float
    principal: str = ""
    routes: dict[Channel, bytes] = field(default_factory=dict)
    users: dict[Channel, str] = field(default_factory=dict)
    flush_seq: int = 0
    unacked: deque[tuple[int, int]] = field(default_factory=deque)
    unacked_bytes: int = 0
    last_flush: float = 0.0
    stalled: bool = False
    hinted: bool = False
    _answers: OrderedDict[bytes, list[Frame]] = field(default_factory=OrderedDict, repr=False)
    _answer_bytes: int = 0

    @property
    def label(self) -> str:
        """A name for messages to other clients; tells nothing secret."""
        return f"{self.name or 'client'}#{self.number}"

    def reset_flow(self) -> None:
        """Forget flushes under way; a new connection attaches from its own positions."""
        self.unacked.clear()
        self.unacked_bytes = 0
        self.stalled = False

    def acknowledge(self, seq: int) -> None:
        """Take the client's word that flushes up to `seq` arrived."""
        while self.unacked and self.unacked[0][0] <= seq:
            self.unacked_bytes -= self.unacked.popleft()[1]

    def keep_answer(self, request_id: bytes, frames: list[Frame]) -> None:
        """Keep the answer to a control call, which may get lost with its connection; the oldest go for it."""
        if request_id == NO_REQUEST:
            return
        self._answer_bytes -= sum(map(len, self._answers.pop(request_id, ())))
        self._answers[request_id] = frames
        self._answer_bytes += sum(map(len, frames))
        while len(self._answers) > MAX_KEPT_ANSWERS or self._answer_bytes > MAX_KEPT_ANSWER_BYTES:
            self._answer_bytes -= sum(map(len, self._answers.popitem(last=False)[1]))

    def answer_to(self, request_id: bytes) -> list[Frame] | None:
        """Return the answer that a control call of this session had, None if it is not known."""
        return self._answers.get(request_id)


class SessionBook:
    """Owns the sessions and their routes."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._by_id: dict[bytes, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._by_route: dict[tuple[Channel, bytes], Session] = {}
        # Connections that the socket says are gone, whose last messages may still be read: session, and what the gate called them.
        self._leaving: dict[tuple[Channel, bytes], tuple[Session, str]] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[Session]:
        """Return all sessions."""
        return list(self._by_id.values())

    def get(self, number: int) -> Session | None:
        """Return the session with this number, or None."""
        return self._by_number.get(number)

    def open(self, name: str, channel: Channel, route: bytes, now: float, user: str = "") -> Session:
        """Make a session for a new client; `user` is what the gate called the connection. Raises: Busy for too many."""
        if len(self._by_id) >= MAX_SESSIONS:
            raise Busy(
                f"{len(self._by_id)} sessions are open",
                limit=f"at most {MAX_SESSIONS}",
                remedy="end some with GOODBYE (client.close()); one that is silent ends with its lease",
            )
        # Names go into logs and to other clients: nothing in them may pass for something else.
        shown = "".join(one if one.isprintable() else "?" for one in name[:MAX_SHOWN_NAME])
        session = Session(
            number=self._next,
            session_id=new_token(),
            secret=new_token(),
            name=shown,
            expires_at=now + self.lease_s,
            principal=principal_of(user),
        )
        self._next += 1
        self._by_id[session.session_id] = session
        self._by_number[session.number] = session
        self._bind(session, channel, route, user)
        return session

    def bound_to(self, channel: Channel, route: bytes) -> Session | None:
        """Return the session that a connection has, or None."""
        return self._by_route.get((channel, route))

    def resume(self, session_id: bytes, secret: bytes, channel: Channel, route: bytes, now: float, user: str = "") -> Session | None:
        """Bind a new connection to a session; None if the session is not known here.

        Raises: NoSession for a wrong secret, AccessDenied for another principal than the one that opened it.
        """
        session = self._by_id.get(session_id)
        if session is None:
            return None
        if not same_secret(session.secret, secret):
            raise NoSession("the session's secret is wrong", field="secret", remedy="open a session of your own with HELLO")
        if session.principal != principal_of(user):
            raise AccessDenied(
                "the session belongs to another key",
                field="session",
                remedy="continue it with the key that opened it, or open one of your own",
            )
        former = session.routes.get(channel)
        if former is not None and former != route:
            self._by_route.pop((channel, former), None)
        self._bind(session, channel, route, user)
        session.expires_at = now + self.lease_s
        return session

    def _bind(self, session: Session, channel: Channel, route: bytes, user: str) -> None:
        former = self._by_route.get((channel, route))
        if former is not None and former is not session:
            former.routes.pop(channel, None)
        self._forget_leaving(session, channel)
        self._leaving.pop((channel, route), None)
        session.routes[channel], session.users[channel] = route, user
        self._by_route[(channel, route)] = session

    def heard(self, channel: Channel, route: bytes, now: float, user: str = "") -> Session:
        """Return a connection's session and renew its lease. Raises: NoSession."""
        session = self._by_route.get((channel, route))
        if session is not None and session.users[channel] != user:
            # The bound connection is gone, and another one has its routing id: nothing may go there any more.
            self.unbind(session, channel)
            session = None
        if session is None and (left := self._leaving.get((channel, route))) is not None and left[1] == user:
            session = left[0]
        if session is None:
            raise NoSession("this connection has no session", remedy="say HELLO first, with session and secret to continue one")
        session.expires_at = now + self.lease_s
        return session

    def unbind(self, session: Session, channel: Channel) -> None:
        """Send nothing more to a connection that is gone; what it sent before is still heard, and the lease runs on."""
        route, user = session.routes.pop(channel, None), session.users.pop(channel, "")
        if route is not None:
            self._by_route.pop((channel, route), None)
            self._leaving[(channel, route)] = session, user

    def _forget_leaving(self, session: Session, channel: Channel) -> None:
        for place in [place for place, left in self._leaving.items() if left[0] is session and place[0] is channel]:
            del self._leaving[place]

    def extend_all(self, seconds: float, now: float) -> None:
        """Give every lease the time in which this process itself did not run, and enough to read the heartbeats that came meanwhile."""
        if seconds <= 0:
            return
        for session in self._by_id.values():
            session.expires_at = max(session.expires_at + seconds, now + self.lease_s / 2)

    def expired(self, now: float) -> list[Session]:
        """Return the sessions whose lease ended."""
        return [session for session in self._by_id.values() if session.expires_at <= now]

    def next_expiry(self) -> float | None:
        """Return when the next lease ends."""
        return min((session.expires_at for session in self._by_id.values()), default=None)

    def close(self, session: Session) -> None:
        """Forget a session and its connections."""
        for channel in list(session.routes):
            self.unbind(session, channel)
        for channel in Channel:
            self._forget_leaving(session, channel)
        self._by_id.pop(session.session_id, None)
        self._by_number.pop(session.number, None)
