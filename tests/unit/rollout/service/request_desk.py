"""A request desk with everything around it that is not a process: real ledger, streams, calls; a link that keeps what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from rollout.service.admission import Admission
from rollout.service.calls import Calls
from rollout.service.host_link import HostLink
from rollout.service.ledger import Ledger
from rollout.service.records import Record
from rollout.service.requests import RequestDesk
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.service.stop_text import StopText
from rollout.service.streams import Streams
from rollout.wire.codec import NO_REQUEST, Packet, decode, encode
from rollout.wire.operations import DATA_REQUESTS, HOST_REPLIES, HOST_REQUESTS, Op
from rollout.wire.security import new_token
from rollout.wire.transport import Sent
from tests.fakes import StreamReader
from tests.unit.rollout.agent.byte_tokenizer import files


class KeepingLink:
    """The link to an engine host that only keeps what was sent, as the host would read it."""

    def __init__(self) -> None:
        self.sent: list[Packet] = []

    def send(self, op: Op, fields: Mapping[str, object], arrays: Any = None, call_id: bytes = NO_REQUEST) -> None:
        self.sent.append(decode([bytes(frame) for frame in encode(op, call_id, fields, arrays)], HOST_REQUESTS))

    def of(self, op: Op) -> list[Any]:
        """Return the bodies of an operation."""
        return [packet.body for packet in self.sent if packet.op is op]


class Desk:
    """See the module; `reader` has what the client got, `replies` what it was answered."""

    def __init__(
        self,
        *,
        max_requests: int = 100,
        max_record_bytes: int = 2**30,
        served: Mapping[str, bytes] | None = None,
        seed: int | None = None,
        link: KeepingLink | None = None,
    ) -> None:
        self.link, self.reader = link or KeepingLink(), StreamReader()
        self.replies: list[tuple[Op, bytes, dict[str, Any]]] = []
        self.ledger, self.sessions = Ledger(max_requests, max_record_bytes), SessionBook(30.0)
        self.session = self.sessions.open("test", Channel.DATA, b"\0abcd", 0.0)
        self.streams = Streams(self.ledger, self.sessions, self._flushed, interval_s=0.0, credit_bytes=2**30)
        self.calls = Calls(cast(HostLink, self.link), self._reply)
        self.admission = Admission(lambda: None)
        self.admission.ready, self.admission.max_model_len = True, 1000
        self.desk = RequestDesk(
            self.ledger,
            self.streams,
            self.sessions,
            cast(HostLink, self.link),
            self.calls,
            self.admission,
            self._reply,
            StopText(files() if served is None else served),
            seed=seed,
        )
        self._seq = 0

    def _flushed(self, session: Session, frames: list[Any]) -> Sent:
        from rollout.wire.operations import CLIENT_REPLIES

        packet = decode([bytes(frame) for frame in frames], CLIENT_REPLIES)
        self.reader.take(packet)
        return Sent.OK

    def _reply(self, session: Session, channel: Channel, op: Op, request_id: bytes, fields: Mapping[str, Any], arrays: Any = None) -> None:
        self.replies.append((op, request_id, dict(fields)))

    def errors(self) -> list[tuple[bytes, str, Any]]:
        """Return request id, code and field of every error reply."""
        return [(request_id, fields["code"], fields.get("field")) for op, request_id, fields in self.replies if op is Op.ERROR]

    def _send(self, op: Op, request_id: bytes, fields: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
        frames = [bytes(frame) for frame in encode(op, request_id, fields, arrays)]
        packet = decode(frames, DATA_REQUESTS)
        if op is Op.CANCEL:
            self.desk.cancel(self.session, packet)
        else:
            self.desk.generate(self.session, packet, b"".join(frames[1:]), 0.0)

    def generate(
        self, request_id: bytes | None = None, *, prompt: Sequence[int] = (1, 2, 3), biases: Any = None, **fields: object
    ) -> bytes:
        """Send a generation; returns its request id."""
        request_id = request_id or new_token()
        arrays = {"prompt_ids": np.array(prompt, np.int32), **(biases or {})}
        self._send(Op.GENERATE, request_id, fields, arrays)
        return request_id

    def group(self, members: Sequence[bytes], **fields: object) -> bytes:
        """Send a group with these request ids; returns the message's id."""
        message_id = new_token()
        ids = np.frombuffer(b"".join(members), np.uint8).reshape(-1, 16)
        self._send(Op.GENERATE_GROUP, message_id, fields, {"prompt_ids": np.array([1, 2, 3], np.int32), "member_ids": ids})
        return message_id

    def cancel(self, request_id: bytes, call_id: bytes | None = None) -> None:
        """Send a cancel."""
        self._send(Op.CANCEL, call_id or new_token(), {"target": request_id}, {})

    def record(self, request_id: bytes) -> Record:
        """Return a request's record."""
        record = self.ledger.get(self.session.number, request_id)
        assert record is not None
        return record

    def step(self, tokens: Sequence[tuple[int, int]] = (), finished: Sequence[Mapping[str, object]] = (), **lists: Any) -> None:
        """Bring the engine's news: tokens are (engine number, id); then flush and check."""
        self._seq += 1
        floats = np.full(len(tokens), -1.0, np.float32)
        arrays = {
            "accepted": np.array(lists.get("accepted", ()), np.int64),
            "request_ids": np.array([engine_id for engine_id, _ in tokens], np.int64),
            "token_ids": np.array([token for _, token in tokens], np.int32),
            "logprobs": floats,
            "raw_logprobs": floats,
            "behaviour_logprobs": np.full(len(tokens), np.nan, np.float32),
            "versions": np.zeros(len(tokens), np.int64),
        }
        fields = {"seq": self._seq, "version": 0, "finished": list(finished), "refused": list(lists.get("refused", ()))}
        self.desk.take_step(decode([bytes(frame) for frame in encode(Op.STEP, NO_REQUEST, fields, arrays)], HOST_REPLIES))
        self.flush()

    def flush(self) -> None:
        """Send what is due and check the books."""
        while self.streams.flush(float("inf")) is not None:
            pass
        self.ledger.check_integrity()


def ending(engine_id: int, output_tokens: int, kind: str = "length", **fields: object) -> dict[str, object]:
    """Return the engine's terminal record."""
    counts = {"prompt_tokens": 3, "cached_tokens": 2, "seed": 5}
    return {"engine_id": engine_id, "kind": kind, "output_tokens": output_tokens, **counts, **fields}
