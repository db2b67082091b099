"""One message of a client: read, given to whom it is for, and answered by a typed error where anything is wrong with it.

    frames -> header -> operation allowed on this socket -> session -> handler
       what fails on the way goes back under the message's request id and changes nothing else

The front's thread calls it. Invariant: a message never ends the service, and a refused generation is counted once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import xxhash

from rollout.errors import NoSession, RolloutError, WireError, error_fields
from rollout.service.calls import Calls
from rollout.service.control import ControlDesk
from rollout.service.ledger import Ledger
from rollout.service.metrics import FrontMetrics
from rollout.service.outbound import Outbound
from rollout.service.requests import RequestDesk
from rollout.service.session_desk import SessionDesk
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.wire.codec import MAX_FRAMES, NO_REQUEST, PROTOCOL_VERSION, Packet, decode, encode, read_header
from rollout.wire.operations import CONTROL_REQUESTS, DATA_REQUESTS, Op
from rollout.wire.transport import Incoming, Router

log = logging.getLogger("rollout.front")
GENERATIONS = (Op.GENERATE, Op.GENERATE_GROUP)

Handlers = Mapping[Channel, Mapping[Op, Callable[[Session, Packet], None]]]


class Dispatch:
    """See the module. `handlers` are for all operations but HELLO and generations."""

    def __init__(
        self,
        handlers: Handlers,
        *,
        max_message_bytes: int,
        desk: SessionDesk,
        sessions: SessionBook,
        requests: RequestDesk,
        calls: Calls,
        control: ControlDesk,
        ledger: Ledger,
        outbound: Outbound,
        metrics: FrontMetrics,
    ) -> None:
        self._handlers, self._max_message_bytes, self._desk, self._sessions = handlers, max_message_bytes, desk, sessions
        self._requests, self._calls, self._control = requests, calls, control
        self._ledger, self._outbound, self._metrics = ledger, outbound, metrics

    def take(self, channel: Channel, incoming: Incoming, now: float) -> None:
        """Handle one message; whatever is wrong with it becomes a typed reply to its sender."""
        request_id = NO_REQUEST
        generation = False
        try:
            if not incoming.whole or not incoming.frames:
                raise WireError(
                    "a message with too many frames or bytes, or with none",
                    limit=f"at most {MAX_FRAMES} frames of {self._max_message_bytes} bytes together",
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
                self._desk.hello(channel, incoming, packet, now)
                return
            session = self._sessions.heard(channel, incoming.route, now, incoming.user)
            if packet.op in GENERATIONS:
                generation = False
                self._requests.generate(session, packet, _fingerprint(incoming.frames), now)
            elif channel is Channel.DATA:
                self._handlers[channel][packet.op](session, packet)
            elif (answer := session.answer_to(request_id)) is not None:
                # It got lost with a connection: nothing is done twice.
                self._outbound.send(channel, incoming.route, answer)
            elif not (self._calls.is_open(session, request_id) or self._control.waits_for(session, request_id)):
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


def _fingerprint(frames: list[bytes]) -> bytes:
    """Return what tells one request body from another: all frames but the header."""
    digest = xxhash.xxh3_128()
    for frame in frames[1:]:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()
