"""The life of generations in the front: receipt, verdict, tokens, deadline, cancel, end.

The front calls it with decoded messages of clients and of the engine host; it drives the ledger and the streams.

    client GENERATE -> open records -> SUBMIT to the host (or wait, while no host is ready or `min_version` is not there)
    host STEP       -> verdicts (accept / refuse) -> prompt scores, tokens into the ledger -> endings; then STEP_ACK to the host
    deadline, cancel, ended lease -> KILL to the host; the host's STEP brings the ending
    host death      -> every submitted record ends as failed; held ones wait for the next host

A paused engine host still brings endings: it launches nothing, but tells what is over. A stop string is found here: the
record takes no token after the one that completes it, the engine is told, and the terminal event waits for the engine's
word on the KV.
"""

from __future__ import annotations

import heapq
import logging
import random
import secrets
from collections.abc import Mapping

import numpy as np

from rollout.errors import Gone, InvalidRequest, RolloutError, error_fields
from rollout.seeds import derive_seed
from rollout.service.admission import Admission, form_refusal, id_refusal, room_refusal
from rollout.service.calls import Calls, Reply
from rollout.service.endings import terminal_of
from rollout.service.host_link import HostLink
from rollout.service.ledger import Ledger
from rollout.service.records import PromptScore, Record, RecordState, Reservation
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.service.step_check import check_step
from rollout.service.stop_desk import StopDesk
from rollout.service.stop_text import StopText
from rollout.service.streams import Streams
from rollout.service.submissions import Submission, Submissions
from rollout.service.token_store import KeptSets, TokenColumns
from rollout.wire.codec import Arrays, Packet
from rollout.wire.fields import Message
from rollout.wire.generation_messages import Cancel, CancelResult, Generate, GenerateGroup
from rollout.wire.host_messages import HostEnding, Step
from rollout.wire.operations import Op

log = logging.getLogger("rollout.front")
MAX_NAMED_ENDINGS = 1024
SPARE_DEADLINES = 1024


class RequestDesk:
    """Drives requests; see the module. Owns the deadlines, what waits for the engine, and the stop strings."""

    def __init__(
        self,
        ledger: Ledger,
        streams: Streams,
        sessions: SessionBook,
        link: HostLink,
        calls: Calls,
        admission: Admission,
        reply: Reply,
        stop_text: StopText,
        *,
        seed: int | None,
    ) -> None:
        # A service that was given a seed draws the same seeds for requests that bring none, in the order they come.
        draw = secrets.SystemRandom() if seed is None else random.Random(seed)
        self._draw_seed = lambda: draw.getrandbits(64)
        self._ledger, self._streams, self._sessions = ledger, streams, sessions
        self._link, self._calls, self._admission, self._reply = link, calls, admission, reply
        self._stop_text, self._stops = stop_text, StopDesk(stop_text, ledger.counters)
        self._submissions = Submissions(link, admission)
        self._deadlines: list[tuple[float, int]] = []

    @property
    def num_held(self) -> int:
        """Requests that wait for a host or a version."""
        return len(self._submissions)

    @property
    def num_watched(self) -> int:
        """Live requests with stop strings."""
        return len(self._stops)

    @property
    def num_in_engine(self) -> int:
        """Requests that the engine has, its verdict outstanding or not."""
        return sum(record.submitted and record.state is not RecordState.ENDED for record in self._ledger.records())

    @property
    def engine_owes(self) -> bool:
        """Whether the engine has a request whose end it has not told."""
        return self._ledger.live + self._ledger.deciding > len(self._submissions)

    def stage_of(self, record: Record) -> str:
        """Say where a request stands, and what it waits for."""
        if record.state is RecordState.ENDED:
            return "ended; its client has not acknowledged the end"
        if not record.submitted:
            return self._admission.waits_for(record)
        tokens = int(self._ledger.tokens.lengths[record.row])
        stage = "the engine's verdict is out" if record.state is RecordState.DECIDING else f"{tokens} tokens sampled"
        if record.killing:
            return f"in the engine, {stage}, its end was asked for"
        return f"in the engine, {stage}{', the engine is paused' if self._admission.paused else ''}"

    def abort_in_engine(self, detail: str) -> None:
        """Cancel every request that the engine has; each keeps what was sampled and ends in its turn."""
        for record in self._ledger.records():
            if record.submitted and record.state is not RecordState.ENDED:
                self._kill(record, "cancelled", detail)

    def _refuse(self, session: Session, request_id: bytes, error: RolloutError, count: int = 1) -> None:
        for _ in range(count):
            self._ledger.refuse_at_door()
        self._reply(session, Channel.DATA, Op.ERROR, request_id, error_fields(error))

    def generate(self, session: Session, packet: Packet, fingerprint: bytes, now: float) -> None:
        """Take a generation or a group; a refusal is its only reply. A group is taken whole or not at all.

        Ids that are here already with the same body attach.
        """
        body, arrays = packet.body, packet.arrays
        assert isinstance(body, Generate)
        grouped = isinstance(body, GenerateGroup)
        members = [row.tobytes() for row in arrays["member_ids"]] if grouped else [packet.request_id]
        refusal = form_refusal(arrays)
        fresh: list[int] = []
        for index, request_id in enumerate(members):
            known = self._ledger.get(session.number, request_id)
            if known is not None and known.fingerprint == fingerprint:
                self._ledger.attach()
                self._streams.attach(known)
                continue
            own = id_refusal(self._ledger, session.number, request_id, known)
            if isinstance(own, Gone):
                self._refuse(session, request_id, own)
                continue
            fresh.append(index)
            refusal = refusal or own
        if members and not fresh:
            return
        needs = self._admission.needs_of(body, arrays, len(fresh))
        refusal = refusal or self._admission.refusal() or self._admission.prompt_refusal(body, arrays)
        refusal = refusal or (self._stop_text.refusal(body.stop) if body.stop else None)
        refusal = refusal or room_refusal(self._ledger, session.number, needs, len(fresh), now)
        if refusal is not None:
            self._refuse(session, packet.request_id, refusal, max(1, len(fresh)))
            return
        base = self._draw_seed() if body.seed is None else body.seed
        seeds = {members[index]: derive_seed(base, index) if grouped else base for index in fresh}
        self._open(session, body, arrays, fingerprint, seeds, needs, now)

    def _open(
        self,
        session: Session,
        body: Generate,
        arrays: Arrays,
        fingerprint: bytes,
        seeds: Mapping[bytes, int],
        needs: Reservation,
        now: float,
    ) -> None:
        """Make the records of a message's requests and hand them over when that may be. `seeds`: request id -> seed."""
        prompt = arrays["prompt_ids"]
        prior = body.prior_output_tokens if 0 < body.prior_output_tokens < prompt.size else 0
        lineage = None if body.lineage is None else f"{session.session_id.hex()}:{body.lineage}"
        submission = Submission(
            params={**body.model_dump(), "lineage": lineage, "stop": []},
            arrays={name: array for name, array in arrays.items() if name != "member_ids"},
            grouped=isinstance(body, GenerateGroup),
        )
        # Everything that may fail comes before the first record.
        matcher = None
        if body.stop:
            earlier = prompt[prompt.size - prior :].tolist()
            matcher = self._stops.matcher(body.stop, min_new_tokens=body.min_new_tokens, earlier=earlier)
        for request_id, seed in seeds.items():
            record = self._ledger.open(
                session.number, request_id, fingerprint, prompt_tokens=int(prompt.size), needs=needs, seed=seed, now=now
            )
            record.min_version = body.min_version
            if body.deadline_s is not None:
                record.deadline = now + body.deadline_s
                heapq.heappush(self._deadlines, (record.deadline, record.engine_id))
            if matcher is not None:
                self._stops.watch(record.engine_id, matcher.fork())
            self._streams.attach(record)
            submission.members[record.engine_id] = record
        self._submissions.add(submission)

    def submit_held(self) -> None:
        """Hand over what may go now; called when a host became ready, a version was published or a refusal ended."""
        self._submissions.send_open()

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
                    f"request {request_id.hex()} {'ended and was acknowledged' if gone else 'is not known'}", remedy="draw a new request id"
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
            # One that is sent again after a lost connection gets the answer of the first.
            if not self._calls.is_open(session, call_id):
                self._answer_cancel(session, call_id, False, "ending")
        elif self._end_here(record, "cancelled", None):
            self._answer_cancel(session, call_id, True, "waiting")
        else:
            record.killing = True
            fields = {"engine_id": record.engine_id, "kind": "cancelled", "detail": None}
            # One for each request at most, and none may be lost: nobody would end the request any more.
            self._calls.pass_on(
                session,
                Channel.DATA,
                call_id,
                Op.KILL,
                fields,
                on_result=lambda body: self._verdict(record, body),
                refusable=False,
            )

    def _verdict(self, record: Record, body: Message) -> Mapping[str, object]:
        assert isinstance(body, CancelResult)
        state = record.terminal.kind if record.terminal is not None else record.state.value
        return {"cancelled": body.cancelled and not record.stopped, "state": state}

    def _answer_cancel(self, session: Session, call_id: bytes, cancelled: bool, state: str) -> None:
        self._reply(session, Channel.DATA, Op.CANCEL_RESULT, call_id, {"cancelled": cancelled, "state": state})

    def _end_here(self, record: Record, kind: str, detail: str | None) -> bool:
        """End a request that the engine does not have."""
        if record.submitted:
            return False
        heir = self._submissions.take_back(record)
        if heir is not None:
            self._ledger.inherit(heir, record)
        self._end(record, kind, detail=detail)
        return True

    def _end(
        self,
        record: Record,
        kind: str,
        *,
        detail: str | None = None,
        error: dict[str, object] | None = None,
        ending: HostEnding | None = None,
    ) -> None:
        """Give a record its terminal event, once. A stop string that was complete before is its end whatever came after."""
        if record.state is RecordState.ENDED:
            return
        engine_id = record.engine_id
        terminal = terminal_of(
            record,
            int(self._ledger.tokens.lengths[record.row]),
            kind,
            detail=detail,
            error=error,
            text=self._stops.text(engine_id),
            match=self._stops.match(engine_id),
            ending=ending,
        )
        self._stops.forget(engine_id)
        orphan = self._sessions.get(record.session) is None
        if orphan:
            self._streams.drop(record)
        if self._ledger.end(record, terminal) and not orphan:
            self._streams.ended(record)

    def _kill(self, record: Record, kind: str, detail: str) -> None:
        if record.killing:
            return
        if not self._end_here(record, kind, detail):
            record.killing = True
            self._link.send(Op.KILL, {"engine_id": record.engine_id, "kind": kind, "detail": detail})

    def take_step(self, packet: Packet) -> None:
        """Take what the engine learned in some steps. Raises: WireError for arrays that do not fit together."""
        body, arrays = packet.body, packet.arrays
        check_step(arrays)
        assert isinstance(body, Step)
        for engine_id in arrays["accepted"].tolist():
            record = self._ledger.by_engine_id(engine_id)
            if record is not None and record.state is RecordState.DECIDING:
                self._ledger.accept(record)
        for refusal in body.refused:
            self._refused(refusal.engine_id, refusal.error.model_dump(exclude_none=True))
        self._take_scores(arrays)
        stopped = self._take_tokens(arrays)
        for ending in body.finished:
            self._finished(ending)
        for record in stopped:
            if record.state is not RecordState.ENDED and not record.killing:
                record.killing = True
                self._link.send(Op.KILL, {"engine_id": record.engine_id, "kind": "stop", "detail": None})
        self._link.send(Op.STEP_ACK, {"seq": body.seq})

    def _take_scores(self, arrays: Arrays) -> None:
        """Give prompts their log-probabilities; those of ended requests are dropped."""
        at = 0
        for engine_id, start, count, version in arrays.get("prompt_scores", np.empty((0, 4), np.int64)).tolist():
            record = self._ledger.by_engine_id(engine_id)
            if record is not None and record.state is not RecordState.ENDED:
                part = slice(at, at + count)
                record.prompt_score = PromptScore(
                    start=start,
                    version=version,
                    # Copies: a slice would keep the whole message.
                    logprobs=arrays["prompt_logprobs"][part].copy(),
                    raw_logprobs=arrays["prompt_raw_logprobs"][part].copy(),
                )
                self._streams.scored(record)
            at += count

    def _take_tokens(self, arrays: Arrays) -> list[Record]:
        """Append the tokens of a step; return the records that a stop string has ended."""
        engine_ids, counts = arrays["request_ids"], arrays.get("kept_counts")
        tokens = TokenColumns(
            arrays["token_ids"],
            arrays["logprobs"],
            arrays["raw_logprobs"],
            arrays["behaviour_logprobs"],
            arrays["versions"],
            None if counts is None else KeptSets(counts, arrays["kept_ids"]),
        )
        places, completed = self._stops.scan(engine_ids, tokens.token_ids)
        if places is not None:
            engine_ids, tokens = engine_ids[places], tokens.take(places)
        self._streams.grew(self._ledger.take_step(engine_ids, tokens))
        stopped = [record for engine_id in completed if (record := self._ledger.by_engine_id(engine_id)) is not None]
        for record in stopped:
            record.stopped = True
        return stopped

    def _refused(self, engine_id: int, error: Mapping[str, object]) -> None:
        record = self._ledger.by_engine_id(engine_id)
        if record is None or record.state is not RecordState.DECIDING:
            return
        session = self._sessions.get(record.session)
        self._streams.drop(record)
        self._stops.forget(engine_id)
        self._ledger.refuse(record)
        if session is not None:
            self._reply(session, Channel.DATA, Op.ERROR, record.request_id, error)

    def _finished(self, ending: HostEnding) -> None:
        record = self._ledger.by_engine_id(ending.engine_id)
        if record is None or record.state is RecordState.ENDED:
            return
        have = int(self._ledger.tokens.lengths[record.row])
        kind, detail = str(ending.kind), ending.detail
        if have != ending.output_tokens and not (record.stopped and have < ending.output_tokens):
            log.error("request %s has %d tokens, the engine counts %d", record.request_id.hex(), have, ending.output_tokens)
            kind, detail = "failed", f"{have} tokens arrived, the engine counts {ending.output_tokens}"
        error: dict[str, object] = {"code": "engine_failure", "what": detail or "the engine failed this request"}
        self._end(record, kind, detail=detail, error=error if kind == "failed" else None, ending=ending)

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
                self._end(record, "failed", detail=str(fields["what"]), error=fields)

    def refuse_held(self, error: RolloutError) -> None:
        """End every held request with an error that will not pass."""
        for engine_id in self._submissions.take_all():
            self._refused(engine_id, error_fields(error))

    def cancel_all(self, detail: str) -> None:
        """End every request now; used when the service stops."""
        self._submissions.take_all()
        for record in self._ledger.records():
            self._end(record, "cancelled", detail=detail)

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
