"""Calls that the front passes on to the engine host and whose answer it passes back.

Each call has an id of its own on the host's link. Every call gets exactly one answer: the host's, or the error of the
host's death. What one session may have open is bounded in number and bytes, since the host answers in its own time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rollout.errors import Busy, RolloutError, error_fields
from rollout.service.host_link import HostLink
from rollout.service.sessions import Channel, Session
from rollout.wire.codec import Arrays, Packet
from rollout.wire.fields import Message
from rollout.wire.operations import Op
from rollout.wire.security import new_token
from rollout.wire.session_messages import ErrorBody

MAX_OPEN_CALLS = 4096
MAX_OPEN_CALL_BYTES = 256 * 2**20


class Reply(Protocol):
    """Sends a reply to a session."""

    def __call__(
        self, session: Session, channel: Channel, op: Op, request_id: bytes, fields: Mapping[str, object], arrays: Arrays | None = None
    ) -> None: ...


# Sees a successful answer before it is passed on; returns the fields to send instead, or None to leave them.
OnResult = Callable[[Message], Mapping[str, object] | None]
# The same for an error.
OnError = Callable[[ErrorBody], Mapping[str, object] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    session: Session | None
    channel: Channel
    request_id: bytes
    on_result: OnResult | None
    on_error: OnError | None
    result_op: Op | None
    num_bytes: int = 0


class Calls:
    """Owns the open calls of one host link."""

    def __init__(self, link: HostLink, reply: Reply) -> None:
        self._link, self._reply = link, reply
        self._open: dict[bytes, _Call] = {}
        self._num_open: Counter[int] = Counter()
        self._open_bytes: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def is_open(self, session: Session, request_id: bytes) -> bool:
        """Tell whether this call of a session still waits for the host; a resumed client sends such calls again."""
        return any(call.session is session and call.request_id == request_id for call in self._open.values())

    def pass_on(
        self,
        session: Session,
        channel: Channel,
        request_id: bytes,
        op: Op,
        fields: Mapping[str, object],
        arrays: Arrays | None = None,
        *,
        on_result: OnResult | None = None,
        on_error: OnError | None = None,
        result_op: Op | None = None,
        refusable: bool = True,
    ) -> None:
        """Send a call to the host; its answer goes to the session under `request_id`, as `result_op` if that is given.

        Calls that something else bounds, a cancel by its request and a commit by its update, are not `refusable`: they must go however
        much else is open. Raises: Busy for a session that has too much open; then nothing was sent.
        """
        num_bytes = sum(array.nbytes for array in (arrays or {}).values())
        number = session.number
        full = self._num_open[number] >= MAX_OPEN_CALLS or self._open_bytes[number] + num_bytes > MAX_OPEN_CALL_BYTES
        if full and refusable:
            raise Busy(
                f"{self._num_open[number]} calls of this client with {self._open_bytes[number]} bytes wait for the engine",
                limit=f"at most {MAX_OPEN_CALLS} calls and {MAX_OPEN_CALL_BYTES} bytes",
                remedy="wait for answers before you send more",
            )
        self._num_open[number] += 1
        self._open_bytes[number] += num_bytes
        call_id = new_token()
        self._open[call_id] = _Call(
            session=session,
            channel=channel,
            request_id=request_id,
            on_result=on_result,
            on_error=on_error,
            result_op=result_op,
            num_bytes=num_bytes,
        )
        self._link.send(op, fields, arrays, call_id)

    def ask(self, op: Op, fields: Mapping[str, object], on_result: OnResult | None = None, on_error: OnError | None = None) -> None:
        """Call the host for the front itself; nobody is answered."""
        call_id = new_token()
        self._open[call_id] = _Call(
            session=None, channel=Channel.DATA, request_id=call_id, on_result=on_result, on_error=on_error, result_op=None
        )
        self._link.send(op, fields, None, call_id)

    def _take(self, call_id: bytes) -> _Call | None:
        """Take a call out, and what it counts for its session."""
        call = self._open.pop(call_id, None)
        if call is not None and call.session is not None:
            number = call.session.number
            self._num_open[number] -= 1
            self._open_bytes[number] -= call.num_bytes
            if not self._num_open[number]:
                del self._num_open[number], self._open_bytes[number]
        return call

    def answer(self, packet: Packet) -> None:
        """Pass a host's answer back."""
        call = self._take(packet.request_id)
        if call is None:
            return
        fields: Mapping[str, object] | None = None
        op = packet.op
        if isinstance(packet.body, ErrorBody):
            fields = call.on_error(packet.body) if call.on_error is not None else None
        else:
            fields = call.on_result(packet.body) if call.on_result is not None else None
            op = call.result_op or op
        if call.session is None:
            return
        self._reply(call.session, call.channel, op, call.request_id, packet.body.model_dump() if fields is None else fields, packet.arrays)

    def fail(self, call_id: bytes, error: RolloutError) -> None:
        """Answer one call with an error."""
        call = self._take(call_id)
        if call is not None:
            self._fail(call, error)

    def reply(self, session: Session, request_id: bytes, op: Op, fields: Mapping[str, object]) -> None:
        """Answer a control call that never went to the host."""
        self._reply(session, Channel.CONTROL, op, request_id, fields)

    def fail_all(self, error: RolloutError) -> None:
        """Answer every open call with an error."""
        for call_id in list(self._open):
            self.fail(call_id, error)

    def _fail(self, call: _Call, error: RolloutError) -> None:
        body = ErrorBody.model_validate(error_fields(error))
        fields = call.on_error(body) if call.on_error is not None else None
        if call.session is None:
            return
        self._reply(call.session, call.channel, Op.ERROR, call.request_id, body.model_dump() if fields is None else fields)
