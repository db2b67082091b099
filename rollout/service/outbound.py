"""Everything that leaves for clients: replies that must arrive, and flushes that may be made again.

The front and its desks send through here. A reply that finds no room waits for it; a flush is the caller's to repeat.
A connection that is gone is unbound, so that its client's HELLO starts afresh.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from rollout.errors import Busy
from rollout.service.metrics import FrontMetrics
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.wire.codec import Arrays, Frame, encode
from rollout.wire.operations import Op
from rollout.wire.transport import Router, Sent

MAX_UNSENT_REPLIES = 4096
# Of one connection; a call whose answer is large is refused beyond it.
MAX_UNSENT_BYTES = 64 * 2**20
ASK_AGAIN_S = 0.5


def _size(frames: list[Frame]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


class Outbound:
    """Owns the replies that wait for room."""

    def __init__(self, routers: Mapping[Channel, Router], sessions: SessionBook, metrics: FrontMetrics) -> None:
        self._routers, self._sessions, self._metrics = routers, sessions, metrics
        self._unsent: dict[tuple[Channel, bytes], deque[list[Frame]]] = {}
        self._unsent_bytes: Counter[tuple[Channel, bytes]] = Counter()

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the replies that wait for room, of all connections."""
        return self._unsent_bytes.total()

    def check_room(self, session: Session) -> None:
        """Raises: Busy for a session that leaves its answers unread; the next one would only wait behind them."""
        route = session.routes.get(Channel.DATA)
        waiting = 0 if route is None else self._unsent_bytes[Channel.DATA, route]
        if waiting >= MAX_UNSENT_BYTES:
            busy = Busy(
                f"{waiting} bytes of answers wait for this client to read",
                limit=f"at most {MAX_UNSENT_BYTES} wait",
                remedy="read answers before you ask for more",
            )
            busy.retry_after_s = ASK_AGAIN_S
            raise busy

    def flush(self, session: Session, frames: list[Frame]) -> Sent:
        """Try to send a flush to a session's data connection."""
        route = session.routes.get(Channel.DATA)
        if route is None:
            return Sent.GONE
        sent = self._routers[Channel.DATA].send(route, frames)
        if sent is Sent.GONE:
            self._sessions.unbind(session, Channel.DATA)
        return sent

    def reply(
        self,
        session: Session,
        channel: Channel,
        op: Op,
        request_id: bytes,
        fields: Mapping[str, object],
        arrays: Arrays | None = None,
    ) -> None:
        """Send a reply to a session. One to a control call is kept for the case that it gets lost."""
        route = session.routes.get(channel)
        control = channel is Channel.CONTROL and op is not Op.WELCOME
        frames = encode(op, request_id, fields, arrays) if control or route is not None else []
        if control:
            session.keep_answer(request_id, frames)
        if route is None:
            self._metrics.undeliverable += 1
        else:
            self.send(channel, route, frames)

    def send(self, channel: Channel, route: bytes, frames: list[Frame]) -> None:
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
            self._unsent_bytes[channel, route] += _size(frames)
        else:
            self._metrics.undeliverable += 1

    def send_waiting(self) -> bool:
        """Send replies that found no room before; True if some still wait."""
        for (channel, route), waiting in list(self._unsent.items()):
            sent = Sent.OK
            while waiting and sent is Sent.OK:
                sent = self._routers[channel].send(route, waiting[0])
                if sent is Sent.OK:
                    self._unsent_bytes[channel, route] -= _size(waiting.popleft())
            if sent is Sent.GONE:
                self._metrics.undeliverable += len(waiting)
            if sent is Sent.GONE or not waiting:
                del self._unsent[channel, route], self._unsent_bytes[channel, route]
        return bool(self._unsent)

    def forget(self, session: Session) -> None:
        """Drop what waits for a session that ended."""
        for channel, route in session.routes.items():
            self._unsent.pop((channel, route), None)
            self._unsent_bytes.pop((channel, route), None)
