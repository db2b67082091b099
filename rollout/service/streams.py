"""Streams to clients: cursors over the ledger's records, flushed as one packed message per client.

The front marks rows with news; a flush gathers what lies between each row's cursor and its length into one message.
A cursor moves only when the socket took the message, so a full or slow connection just gets larger deltas later. How
much may be under way is bounded in bytes for each client. Work per flush is proportional to rows with news.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rollout.service.endings import ending_fields
from rollout.service.ledger import Ledger
from rollout.service.records import PromptScore, Record, RecordState
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.service.token_store import BYTES_PER_TOKEN, TokenColumns
from rollout.wire.codec import NO_REQUEST, Frame, encode
from rollout.wire.operations import Op
from rollout.wire.transport import Sent

MAX_FLUSH_BYTES = 2**18 * BYTES_PER_TOKEN
MAX_FLUSH_ENDINGS = 2**14

SendData = Callable[[Session, list[Frame]], Sent]


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return values and lengths of the runs of equal neighbours."""
    if values.size and values[0] == values[-1] and bool((values == values[0]).all()):
        return values[:1], np.array([values.size], np.int64)
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if values.size else np.empty(0, np.int64)
    return values[starts], np.diff(np.append(starts, values.size))


def token_arrays(tokens: TokenColumns) -> dict[str, np.ndarray]:
    """Return the arrays of a flush; a log-probability column that is all NaN stays away."""
    values, counts = _runs(tokens.versions)
    arrays = {"token_ids": tokens.token_ids, "version_values": values, "version_counts": counts}
    for name in ("logprobs", "raw_logprobs", "behaviour_logprobs"):
        column = getattr(tokens, name)
        # The first entry nearly always says it.
        if column.size and (column[0] == column[0] or not np.isnan(column).all()):
            arrays[name] = column
    if tokens.kept is not None:
        arrays |= {"kept_counts": tokens.kept.counts, "kept_ids": tokens.kept.ids}
    return arrays


def score_arrays(scores: Mapping[int, PromptScore]) -> dict[str, np.ndarray]:
    """Return the arrays of scored prompts, by the index of their stream in the flush; none without scores."""
    if not scores:
        return {}
    table = [(index, score.start, score.logprobs.size, score.version) for index, score in scores.items()]
    return {
        "prompt_scores": np.array(table, np.int64),
        "prompt_logprobs": np.concatenate([score.logprobs for score in scores.values()]),
        "prompt_raw_logprobs": np.concatenate([score.raw_logprobs for score in scores.values()]),
    }


class Streams:
    """Owns cursors and what is due; see the module."""

    def __init__(self, ledger: Ledger, sessions: SessionBook, send: SendData, *, interval_s: float, credit_bytes: int) -> None:
        self._ledger, self._sessions, self._send = ledger, sessions, send
        self._interval_s, self._credit_bytes = interval_s, credit_bytes
        rows = ledger.tokens.num_rows
        self._cursor = np.zeros(rows, np.int64)
        self._session_of = np.zeros(rows, np.int64)
        self._request_ids = np.zeros((rows, 16), np.uint8)
        # Rows whose prompt was scored and whose client has not been sent that yet; and what each row has to send beside tokens.
        self._unsent_scores: set[int] = set()
        self._extra_bytes = np.zeros(rows, np.int64)
        # Due rows by session number; a row is due while it has tokens or an ending that no message carried.
        self._due: dict[int, set[int]] = {}
        self.flushes = 0
        self.flushed_bytes = 0

    def _grow(self) -> None:
        more = self._ledger.tokens.num_rows - self._cursor.size
        self._cursor = np.concatenate([self._cursor, np.zeros(more, np.int64)])
        self._session_of = np.concatenate([self._session_of, np.zeros(more, np.int64)])
        self._request_ids = np.concatenate([self._request_ids, np.zeros((more, 16), np.uint8)])
        self._extra_bytes = np.concatenate([self._extra_bytes, np.zeros(more, np.int64)])

    def attach(self, record: Record, offset: int = 0) -> None:
        """Point a record's stream at its session from token `offset` on."""
        if self._cursor.size < self._ledger.tokens.num_rows:
            self._grow()
        self._cursor[record.row] = offset
        self._session_of[record.row] = record.session
        self._request_ids[record.row] = np.frombuffer(record.request_id, np.uint8)
        self._extra_bytes[record.row] = record.extra_bytes
        if record.prompt_score is not None:
            self._unsent_scores.add(record.row)
            self._is_due(record)
        if record.state is RecordState.ENDED or self._ledger.tokens.lengths[record.row] > offset:
            self._due.setdefault(record.session, set()).add(record.row)

    def detach(self, session: Session) -> None:
        """Stop the streams of a session until they attach again; used when its connection changed."""
        for record in self._ledger.of_session(session.number):
            self._session_of[record.row] = 0
        self._due.pop(session.number, None)
        session.reset_flow()

    def drop(self, record: Record) -> None:
        """Forget a record's stream; called before the ledger forgets the record."""
        self._session_of[record.row] = 0
        self._unsent_scores.discard(record.row)
        due = self._due.get(record.session)
        if due is not None:
            due.discard(record.row)

    def close(self, session: Session) -> None:
        """Forget what is due to a session."""
        self._due.pop(session.number, None)

    def grew(self, rows: np.ndarray) -> None:
        """Mark rows with new tokens as due."""
        if not rows.size:
            return
        owners = self._session_of[rows]
        first = int(owners[0])
        if (owners == first).all():
            parts = [(first, rows)]
        else:
            parts = [(int(owner), rows[owners == owner]) for owner in np.unique(owners)]
        for owner, own in parts:
            if owner:
                self._due.setdefault(owner, set()).update(own.tolist())

    def scored(self, record: Record) -> None:
        """Mark a record's prompt score as due."""
        self._unsent_scores.add(record.row)
        self._extra_bytes[record.row] = record.extra_bytes
        self._is_due(record)

    def ended(self, record: Record) -> None:
        """Mark a record's ending as due."""
        unsent = record.row in self._unsent_scores or record.prompt_score is None
        self._extra_bytes[record.row] = record.extra_bytes if unsent else record.text_bytes
        self._is_due(record)

    def _is_due(self, record: Record) -> None:
        if self._session_of[record.row] == record.session:
            self._due.setdefault(record.session, set()).add(record.row)

    def flush(self, now: float) -> float | None:
        """Send what is due and may go; return when to look again, None if only an acknowledgement or news can help."""
        again: list[float] = []
        for number in [number for number, due in self._due.items() if due]:
            session = self._sessions.get(number)
            if session is None:
                del self._due[number]
                continue
            if Channel.DATA not in session.routes or session.unacked_bytes >= self._credit_bytes:
                continue
            wait = session.last_flush + self._interval_s - now
            if wait > 0:
                again.append(session.last_flush + self._interval_s)
            elif not self._flush_session(session, now):
                again.append(now + max(self._interval_s, 0.01))
            elif self._due.get(number):
                again.append(now + self._interval_s)
        return min(again, default=None)

    def _flush_session(self, session: Session, now: float) -> bool:
        """Send one message to a client; False if the socket had no room."""
        due = self._due[session.number]
        rows, starts, counts = self._portion(due)
        ends = starts + counts
        finished, texts, complete = self._endings(rows, ends)
        scored = [index for index, row in enumerate(rows.tolist()) if row in self._unsent_scores] if self._unsent_scores else []
        scores = {index: score for index in scored if (score := self._ledger.row_record(int(rows[index])).prompt_score) is not None}
        arrays: dict[str, np.ndarray] = {
            "request_ids": self._request_ids[rows],
            "offsets": starts,
            "counts": counts.astype(np.int32),
            **token_arrays(self._ledger.tokens.gather(rows, starts, counts)),
            **score_arrays(scores),
            **({"texts": np.frombuffer(texts, np.uint8)} if texts else {}),
        }
        frames = encode(Op.DELTAS, NO_REQUEST, {"seq": session.flush_seq + 1, "finished": finished}, arrays)
        sent = self._send(session, frames)
        session.stalled = sent is Sent.FULL
        if sent is not Sent.OK:
            return sent is Sent.GONE
        session.flush_seq += 1
        session.last_flush = now
        size = sum(map(len, frames))
        session.unacked.append((session.flush_seq, size))
        session.unacked_bytes += size
        self.flushes += 1
        self.flushed_bytes += size
        self._cursor[rows] = ends
        for index, score in scores.items():
            self._unsent_scores.discard(int(rows[index]))
            self._extra_bytes[rows[index]] -= score.num_bytes
        if len(due) == rows.size and complete.all():
            due.clear()
        else:
            due.difference_update(rows[complete].tolist())
        return True

    def _portion(self, due: set[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which rows a message speaks of, and which tokens of them: starts and counts. Bounded in bytes, never nothing."""
        rows = np.fromiter(due, np.int64, len(due))[:MAX_FLUSH_ENDINGS]
        extra = self._extra_bytes[rows]
        if extra.any():
            rows = rows[np.cumsum(extra) - extra <= MAX_FLUSH_BYTES]
        starts = self._cursor[rows]
        counts = self._ledger.tokens.lengths[rows] - starts
        each = self._ledger.token_bytes(rows)
        wanted = counts * each
        if wanted.sum() > MAX_FLUSH_BYTES:
            room = np.maximum(0, MAX_FLUSH_BYTES - (np.cumsum(wanted) - wanted))
            counts = np.minimum(counts, -(-room // each))
        return rows, starts, counts

    def _endings(self, rows: np.ndarray, ends: np.ndarray) -> tuple[list[dict[str, object]], bytes, np.ndarray]:
        """Return the endings that go with these ends, their texts, and which rows have nothing more to send."""
        complete = ends == self._ledger.tokens.lengths[rows]
        finished, texts = [], []
        for index in np.flatnonzero(complete & self._ledger.have_ended(rows)):
            record = self._ledger.row_record(int(rows[index]))
            if record.terminal is not None:
                finished.append(ending_fields(int(index), record, int(ends[index])))
                texts.append((record.terminal.text or "").encode())
        return finished, b"".join(texts), complete

    def due_bytes(self) -> int:
        """Return about how many bytes are due but not under way."""
        total = 0
        for due in self._due.values():
            rows = np.fromiter(due, np.int64, len(due))
            tokens = self._ledger.tokens.lengths[rows] - self._cursor[rows]
            total += int((tokens * self._ledger.token_bytes(rows) + self._extra_bytes[rows]).sum())
        return total
