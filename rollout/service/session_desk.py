"""Sessions as clients see them: opened or continued by HELLO, and ended with all that they hold.

The front's thread calls it. Invariant: what ends a session (its client, its lease, its key) ends it everywhere at once.
"""

from __future__ import annotations

import logging

from rollout.config import ServiceConfig
from rollout.errors import AccessDenied, InvalidRequest, NoSession, ServerRestarted, error_fields
from rollout.service.access import Access
from rollout.service.control import ControlDesk
from rollout.service.host_link import HostLink
from rollout.service.outbound import Outbound
from rollout.service.requests import RequestDesk
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.service.streams import Streams
from rollout.wire.codec import NO_REQUEST, Packet, encode
from rollout.wire.gate import principal_of
from rollout.wire.operations import Op
from rollout.wire.session_messages import Hello
from rollout.wire.transport import Incoming

log = logging.getLogger("rollout.front")


class SessionDesk:
    """See the module. `control_address` is what WELCOME tells a client."""

    def __init__(
        self,
        config: ServiceConfig,
        incarnation: bytes,
        control_address: str,
        *,
        access: Access,
        sessions: SessionBook,
        streams: Streams,
        requests: RequestDesk,
        control: ControlDesk,
        outbound: Outbound,
        link: HostLink,
    ) -> None:
        self._config, self._incarnation, self._control_address = config, incarnation, control_address
        self._access, self._sessions, self._streams, self._requests = access, sessions, streams, requests
        self._control, self._outbound, self._link = control, outbound, link

    def hello(self, channel: Channel, incoming: Incoming, packet: Packet, now: float) -> None:
        """Answer HELLO. Raises: InvalidRequest, AccessDenied, NoSession, ServerRestarted."""
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
                self.end(former, "the client opened another session on its connection")
            session = self._sessions.open(body.name, channel, route, now, user)
        fields = {
            "incarnation": self._incarnation,
            "session": session.session_id,
            "secret": session.secret,
            "lease_s": float(self._config.lease_s),
            "control_address": self._control_address,
            "max_message_bytes": self._config.max_message_bytes,
        }
        self._outbound.reply(session, channel, Op.WELCOME, packet.request_id, fields)

    def end(self, session: Session, reason: str) -> None:
        """End a session and all that it holds: requests, hints, its pause, its update."""
        self._requests.end_session(session, reason)
        if session.hinted:
            self._link.send(Op.END_HINTS, {"owner": session.session_id.hex()})
        self._control.end_session(session)
        self._outbound.forget(session)
        self._sessions.close(session)

    def end_denied(self, now: float) -> float | None:
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
                self.end(session, "the client's key was taken away")
        return again
