"""The life of generations in the front: receipt, verdict, tokens, deadline, cancel, end.

The front calls it with decoded messages of clients and of the engine host; it drives the ledger and the streams.

    client GENERATE -> open record -> SUBMIT to the host (or hold, while no host is ready or `min_version` is not there)
    host STEP       -> verdicts (accept / refuse) -> tokens into the ledger -> endings; then STEP_ACK to the host
    deadline, cancel, ended lease -> KILL to the host; the host's STEP brings the ending
    host death      -> every submitted record ends as failed; held ones wait for the next host

A paused engine host still brings endings: it launches nothing, but tells what is over.
"""

from __future__ import annotations

import heapq
import logging
import random
import secrets
from collections.abc import Callable, Mapping

import numpy as np

from rollout.errors import Busy, Conflict, Gone, InvalidRequest, RolloutError, error_fields
from rollout.service.calls import Calls, Reply
from rollout.service.host_link import HostLink
from rollout.service.ledger import Ledger, Record, RecordState, Terminal
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.service.streams import Streams
from rollout.service.token_store import BYTES_PER_TOKEN, TokenColumns
from rollout.wire.codec import NO_REQUEST, Arrays, Packet
from rollout.wire.messages import Cancel, CancelResult, Generate, HostEnding, Message, Op, Step

log = logging.getLogger("rollout.front")
MAX_NAMED_ENDINGS = 1024
SPARE_DEADLINES = 1024


class Admission:
    """What decides whether and when requests go to the engine: written by the front's parts, read by the request desk.

    `refusal` gives the reason why nothing is taken at all, or None.
    """

    def __init__(self, refusal: Callable[[], RolloutError | None]) -> None:
        self.refusal = refusal
        self.ready = False
        self.paused = False
        self.version = 0
        self.max_model_len: int | None = None

    def open_for(self, record: Record) -> bool:
        """Tell whether the engine may have this record now."""
        return self.ready and self.refusal() is None and (record.min_version is None or record.min_version <= self.version)


class RequestDesk:
    """Drives requests; see the module. Owns the held requests and the deadlines."""

    def __init__(
        self,
        ledger: Ledger,
        streams: Streams,
        sessions: SessionBook,
        link: HostLink,
        calls: Calls,
        admission: Admission,
        reply: Reply,
        *,
        seed: int | None,
    ) -> None:
        # A service that was given a seed draws the same seeds for requests that bring none, in the order they come.
        draw = secrets.SystemRandom() if seed is None else random.Random(seed)
        self._draw_seed = lambda: draw.getrandbits(64)
        self._ledger, self._streams, self._sessions = ledger, streams, sessions
        self._link, self._calls, self._admission, self._reply = link, calls, admission, reply
        self._held: dict[int, tuple[Mapping[str, object], Arrays]] = {}
        self._deadlines: list[tuple[float, int]] = []

    @property
    def num_held(self) -> int:
        """Requests that wait for a host or a version."""
        return len(self._held)

    def _refuse(self, session: Session, request_id: bytes, error: RolloutError) -> None:
        self._ledger.refuse_at_door()
        self._reply(session, Channel.DATA, Op.ERROR, request_id, error_fields(error))

    def generate(self, session: Session, packet: Packet, fingerprint: bytes, now: float) -> None:
        """Take a generation, or refuse it with a typed error as its only reply."""
        body = packet.body
        assert isinstance(body, Generate)
        known = self._ledger.get(session.number, packet.request_id)
        if known is not None and known.fingerprint == fingerprint:
            self._ledger.attach()
            self._streams.attach(known)
            return
        budget = min(body.max_new_tokens, self._admission.max_model_len or body.max_new_tokens)
        refusal = self._door(session, packet.request_id, known, budget)
        if refusal is not None:
            self._refuse(session, packet.request_id, refusal)
            return
        seed = self._draw_seed() if body.seed is None else body.seed
        prompt_tokens = int(packet.arrays["prompt_ids"].size)
        record = self._ledger.open(
            session.number, packet.request_id, fingerprint, prompt_tokens=prompt_tokens, max_new_tokens=budget, seed=seed, now=now
        )
        record.min_version = body.min_version
        if body.deadline_s is not None:
            record.deadline = now + body.deadline_s
            heapq.heappush(self._deadlines, (record.deadline, record.engine_id))
        self._streams.attach(record)
        lineage = None if body.lineage is None else f"{session.session_id.hex()}:{body.lineage}"
        params = {**body.model_dump(), "seed": seed, "lineage": lineage}
        self._held[record.engine_id] = (params, packet.arrays)
        if self._admission.open_for(record):
            self._submit(record)

    def _door(self, session: Session, request_id: bytes, known: Record | None, budget: int) -> RolloutError | None:
        if request_id == NO_REQUEST:
            return InvalidRequest(
                "a request id of zeros", field="request_id", limit="16 bytes that are not all zero", remedy="draw 16 random bytes"
            )
        if known is not None:
            return Conflict(
                f"request {request_id.hex()} exists with another body",
                field="request_id",
                value=request_id.hex(),
                remedy="draw a new request id",
            )
        if self._ledger.is_gone(session.number, request_id):
            return Gone(
                f"request {request_id.hex()} ended and was acknowledged",
                field="request_id",
                value=request_id.hex(),
                remedy="draw a new request id",
            )
        refusal = self._admission.refusal()
        if refusal is None and not self._ledger.has_room(budget * BYTES_PER_TOKEN):
            refusal = Busy(
                f"{self._ledger.live + self._ledger.deciding} requests reserve {self._ledger.reserved_bytes} bytes",
                limit="the service's admission limit is reached",
                remedy="ask again when some have ended, or start the service with larger max_requests and max_record_bytes",
            )
        return refusal

    def _submit(self, record: Record) -> None:
        params, arrays = self._held.pop(record.engine_id)
        record.submitted = True
        self._link.send(Op.SUBMIT, {"engine_id": record.engine_id, "params": params}, arrays)

    def submit_held(self) -> None:
        """Hand over what may go now; called when a host became ready, a version was published or a refusal ended."""
        for engine_id in list(self._held):
            record = self._ledger.by_engine_id(engine_id)
            assert record is not None, "a held request has a record"
            if self._admission.open_for(record):
                self._submit(record)

    def attach(self, session: Session, packet: Packet) -> None:
        """Continue streams from the client's own positions."""
        ids, offsets = packet.arrays["request_ids"], packet.arrays["offsets"]
        if ids.shape[0] != offsets.size:
            raise InvalidRequest(
                f"{ids.shape[0]} request ids and {offsets.size} offsets", field="offsets", remedy="send one offset for each id"
            )
        for index in range(ids.shape[0]):
            request_id, offset = ids[index].tobytes(), int(offsets[index])
            record = self._ledger.get(session.number, request_id)
            error: RolloutError | None = None
            if record is None:
                gone = self._ledger.is_gone(session.number, request_id)
                error = Gone(
                    f"request {request_id.hex()} {'ended and was acknowledged' if gone else 'is not known'}", remedy="submit a new one"
                )
            elif not 0 <= offset <= int(self._ledger.tokens.lengths[record.row]):
                error = InvalidRequest(
                    f"offset {offset} of request {request_id.hex()}",
                    field="offsets",
                    value=offset,
                    limit=f"0 to {int(self._ledger.tokens.lengths[record.row])}",
                    remedy="attach from your own position",
                )
            else:
                self._streams.attach(record, offset)
            if error is not None:
                self._reply(session, Channel.DATA, Op.ERROR, request_id, error_fields(error))

    def acknowledge(self, session: Session, packet: Packet, seq: int) -> None:
        """Take acknowledgements of flushes and of endings."""
        session.acknowledge(seq)
        for row in packet.arrays.get("request_ids", np.empty((0, 16), np.uint8)):
            request_id = row.tobytes()
            record = self._ledger.get(session.number, request_id)
            if record is not None and record.state is RecordState.ENDED:
                self._streams.drop(record)
                self._ledger.acknowledge(session.number, request_id)

    def unacknowledged(self, session: Session) -> np.ndarray:
        """Return ids [n, 16] of the client's ended requests whose ending it has not acknowledged."""
        ended = [record.request_id for record in self._ledger.of_session(session.number) if record.state is RecordState.ENDED]
        return np.frombuffer(b"".join(ended[:MAX_NAMED_ENDINGS]), np.uint8).reshape(-1, 16)

    def cancel(self, session: Session, packet: Packet) -> None:
        """Answer a cancel: exact id, idempotent; it ends the request only if nothing ended it before."""
        body = packet.body
        assert isinstance(body, Cancel)
        record = self._ledger.get(session.number, body.target)
        call_id = packet.request_id
        if record is None:
            state = "gone" if self._ledger.is_gone(session.number, body.target) else "unknown"
            self._answer_cancel(session, call_id, False, state)
        elif record.terminal is not None:
            self._answer_cancel(session, call_id, False, record.terminal.kind)
        elif record.killing:
            self._answer_cancel(session, call_id, False, "ending")
        elif self._end_here(record, "cancelled", None):
            self._answer_cancel(session, call_id, True, "waiting")
        else:
            record.killing = True
            fields = {"engine_id": record.engine_id, "kind": "cancelled", "detail": None}
            self._calls.pass_on(session, Channel.DATA, call_id, Op.KILL, fields, on_result=lambda body: self._verdict(record, body))

    def _verdict(self, record: Record, body: Message) -> Mapping[str, object]:
        assert isinstance(body, CancelResult)
        state = record.terminal.kind if record.terminal is not None else record.state.value
        return {"cancelled": body.cancelled, "state": state}

    def _answer_cancel(self, session: Session, call_id: bytes, cancelled: bool, state: str) -> None:
        self._reply(session, Channel.DATA, Op.CANCEL_RESULT, call_id, {"cancelled": cancelled, "state": state})

    def _end_here(self, record: Record, kind: str, detail: str | None) -> bool:
        """End a request that the engine does not have."""
        if record.submitted:
            return False
        self._held.pop(record.engine_id, None)
        self._end(record, Terminal(kind=kind, detail=detail, prompt_tokens=record.prompt_tokens, seed=record.seed))
        return True

    def _end(self, record: Record, terminal: Terminal) -> None:
        orphan = self._sessions.get(record.session) is None
        if orphan:
            self._streams.drop(record)
        if self._ledger.end(record, terminal) and not orphan:
            self._streams.ended(record)

    def _kill(self, record: Record, kind: str, detail: str) -> None:
        if not record.killing and not self._end_here(record, kind, detail):
            record.killing = True
            self._link.send(Op.KILL, {"engine_id": record.engine_id, "kind": kind, "detail": detail})

    def take_step(self, packet: Packet) -> None:
        """Take what the engine learned in some steps."""
        body, arrays = packet.body, packet.arrays
        assert isinstance(body, Step)
        for engine_id in arrays["accepted"].tolist():
            record = self._ledger.by_engine_id(engine_id)
            if record is not None and record.state is RecordState.DECIDING:
                self._ledger.accept(record)
        for refusal in body.refused:
            self._refused(refusal.engine_id, refusal.error.model_dump(exclude_none=True))
        tokens = TokenColumns(
            arrays["token_ids"], arrays["logprobs"], arrays["raw_logprobs"], arrays["behaviour_logprobs"], arrays["versions"]
        )
        self._streams.grew(self._ledger.take_step(arrays["request_ids"], tokens))
        for ending in body.finished:
            self._finished(ending)
        self._link.send(Op.STEP_ACK, {"seq": body.seq})

    def _refused(self, engine_id: int, error: Mapping[str, object]) -> None:
        record = self._ledger.by_engine_id(engine_id)
        if record is None or record.state is not RecordState.DECIDING:
            return
        session = self._sessions.get(record.session)
        self._streams.drop(record)
        self._ledger.refuse(record)
        if session is not None:
            self._reply(session, Channel.DATA, Op.ERROR, record.request_id, error)

    def _finished(self, ending: HostEnding) -> None:
        record = self._ledger.by_engine_id(ending.engine_id)
        if record is None or record.state is RecordState.ENDED:
            return
        have = int(self._ledger.tokens.lengths[record.row])
        kind, detail = str(ending.kind), ending.detail
        if have != ending.output_tokens:
            log.error("request %s has %d tokens, the engine counts %d", record.request_id.hex(), have, ending.output_tokens)
            kind, detail = "failed", f"{have} tokens arrived, the engine counts {ending.output_tokens}"
        terminal = Terminal(
            kind=kind,
            stop_id=ending.stop_id,
            detail=detail,
            error={"code": "engine_failure", "what": detail or "the engine failed this request"} if kind == "failed" else None,
            prompt_tokens=ending.prompt_tokens,
            cached_tokens=ending.cached_tokens,
            seed=ending.seed,
            kv_spans=tuple((span[0], span[1]) for span in ending.kv_spans if len(span) == 2),
        )
        self._end(record, terminal)

    def end_session(self, session: Session, reason: str) -> None:
        """Cancel a session's requests; its ended ones are forgotten."""
        for record in self._ledger.of_session(session.number):
            self._streams.drop(record)
        self._streams.close(session)
        for record in self._ledger.end_session(session.number):
            self._kill(record, "cancelled", reason)

    def fail_submitted(self, error: RolloutError) -> None:
        """End every request that a dead host had."""
        for record in self._ledger.records():
            if record.submitted and record.state is not RecordState.ENDED:
                fields = error_fields(error)
                self._end(
                    record,
                    Terminal(kind="failed", detail=str(fields["what"]), error=fields, prompt_tokens=record.prompt_tokens, seed=record.seed),
                )

    def refuse_held(self, error: RolloutError) -> None:
        """End every held request with an error that will not pass."""
        for engine_id in list(self._held):
            del self._held[engine_id]
            self._refused(engine_id, error_fields(error))

    def cancel_all(self, detail: str) -> None:
        """End every request now; used when the service stops."""
        self._held.clear()
        for record in self._ledger.records():
            if record.state is not RecordState.ENDED:
                self._end(record, Terminal(kind="cancelled", detail=detail, prompt_tokens=record.prompt_tokens, seed=record.seed))

    def expire(self, now: float) -> float | None:
        """End what is past its deadline; return the next deadline."""
        if len(self._deadlines) > 2 * (self._ledger.live + self._ledger.deciding) + SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if self._ledger.by_engine_id(entry[1]) is not None]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, engine_id = heapq.heappop(self._deadlines)
            record = self._ledger.by_engine_id(engine_id)
            if record is not None and record.state is not RecordState.ENDED:
                self._kill(record, "expired", "deadline_s passed")
        return self._deadlines[0][0] if self._deadlines else None
