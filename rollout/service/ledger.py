"""The record of every request, from receipt to acknowledged end, and the counters that must reconcile.

The front calls it; nothing else writes it. States: DECIDING (the engine's verdict is outstanding) -> LIVE -> ENDED, or
DECIDING -> forgotten when refused. Invariants, at any moment between two calls:
    received = refused + attached + accepted      (a request counts as received with its verdict)
    accepted = live + stop + length + cancelled + expired + failed
An ended record stays until its end is acknowledged or its session ends; after that its id is `gone`, never run again.
Engine numbers are generation << 24 | row, so late news of a row's former request is recognised and dropped.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from rollout.service.records import KINDS, Record, RecordState, Reservation, Terminal
from rollout.service.token_store import BYTES_PER_TOKEN, KEPT_BYTES_PER_TOKEN, TokenColumns, TokenStore

ROW_BITS = 24
ROW_MASK = (1 << ROW_BITS) - 1
REMEMBERED_IDS = 200_000
# Over how many endings, and how many seconds at most, the rate is taken that tells when there may be room again.
RATE_ENDINGS = 64
LEAST_RETRY_S, MOST_RETRY_S = 0.05, 30.0


@dataclass(slots=True)
class Counters:
    """Totals since the start; see the module for the identities.

    `late_tokens` came for requests that had ended; `tokens_after_stop` were sampled after the end of a stop string.
    """

    received: int = 0
    refused: int = 0
    attached: int = 0
    accepted: int = 0
    stop: int = 0
    length: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    tokens: int = 0
    late_tokens: int = 0
    tokens_after_stop: int = 0


@dataclass(slots=True)
class _Owned:
    """What one session has: records by request id, and the ids that are gone."""

    records: dict[bytes, Record] = field(default_factory=dict)
    open: int = 0
    reserved_bytes: int = 0
    gone: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


_NOTHING = _Owned()


class Ledger:
    """Owns records, tokens and counters; see the module."""

    def __init__(
        self,
        max_requests: int,
        max_record_bytes: int,
        *,
        max_client_requests: int | None = None,
        max_client_record_bytes: int | None = None,
    ) -> None:
        self.tokens = TokenStore()
        self.counters = Counters()
        self.reserved_bytes = 0
        self._max_requests, self._max_bytes = max_requests, max_record_bytes
        self._max_client_requests = max_client_requests or max_requests
        self._max_client_bytes = max_client_record_bytes or max_record_bytes
        # Failures by the code of their cause, and when the last requests ended.
        self.failures: Counter[str] = Counter()
        self._ends: deque[float] = deque(maxlen=RATE_ENDINGS)
        self._progress_at = np.full(self.tokens.num_rows, np.inf)
        # When a token or an end came last, whosever.
        self.last_progress = float("-inf")
        self._rows: list[Record | None] = [None] * self.tokens.num_rows
        self._free_rows = list(range(self.tokens.num_rows - 1, -1, -1))
        self._generation = np.zeros(self.tokens.num_rows, np.int64)
        self._taking = np.zeros(self.tokens.num_rows, bool)
        self._keeps = np.zeros(self.tokens.num_rows, bool)
        self._owned: dict[int, _Owned] = {}
        self._live = 0
        self._deciding = 0
        self._held = 0
        # The engine ids of the last step, all of which took their tokens, and their rows; None once any of them may have ended.
        self._last_ids: np.ndarray | None = None
        self._last_rows = np.empty(0, np.int64)

    @property
    def live(self) -> int:
        """Accepted requests without an end."""
        return self._live

    @property
    def deciding(self) -> int:
        """Requests whose verdict is outstanding."""
        return self._deciding

    @property
    def held(self) -> int:
        """Ended records that were not acknowledged yet."""
        return self._held

    def has_room(self, needs: Reservation, count: int = 1) -> bool:
        """Tell whether this many more requests with these needs fit the admission limits."""
        fits = self.reserved_bytes + count * needs.num_bytes <= self._max_bytes
        return self._live + self._deciding + count <= self._max_requests and fits

    def client_has_room(self, session: int, needs: Reservation, count: int = 1) -> bool:
        """Tell whether this many more requests with these needs fit what one client may have."""
        owned = self._owned.get(session, _NOTHING)
        fits = owned.reserved_bytes + count * needs.num_bytes <= self._max_client_bytes
        return owned.open + count <= self._max_client_requests and fits

    def client_load(self, session: int) -> tuple[int, int]:
        """Return how many requests of a client are open, and how many bytes its records reserve."""
        owned = self._owned.get(session, _NOTHING)
        return owned.open, owned.reserved_bytes

    def retry_after_s(self, count: int, now: float) -> float:
        """Return in how many seconds so many requests will have ended, as the last ones did."""
        if len(self._ends) < 2:
            return 1.0
        per_end_s = max(now - self._ends[0], 1e-6) / len(self._ends)
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, count * per_end_s))

    def least_recent(self, *, begun: bool = False) -> tuple[Record | None, float]:
        """Return the open or unacknowledged record whose last progress is the longest ago, and when that was; None without any.

        `begun` leaves out open requests without a token: they may only be waiting for their turn.
        """
        at = np.where(self._taking & (self.tokens.lengths == 0), np.inf, self._progress_at) if begun else self._progress_at
        row = int(np.argmin(at))
        return (self._rows[row], float(at[row])) if np.isfinite(at[row]) else (None, float("inf"))

    def get(self, session: int, request_id: bytes) -> Record | None:
        """Return a session's record, or None."""
        owned = self._owned.get(session)
        return owned.records.get(request_id) if owned else None

    def is_gone(self, session: int, request_id: bytes) -> bool:
        """Tell whether this id ended and was acknowledged."""
        owned = self._owned.get(session)
        return owned is not None and request_id in owned.gone

    def by_engine_id(self, engine_id: int) -> Record | None:
        """Return the record that the engine knows under this number, or None for a former one."""
        row = engine_id & ROW_MASK
        record = self._rows[row] if row < len(self._rows) else None
        return record if record is not None and record.engine_id == engine_id else None

    def token_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Return the most bytes that one token of each row takes."""
        return BYTES_PER_TOKEN + self._keeps[rows] * KEPT_BYTES_PER_TOKEN

    def have_ended(self, rows: np.ndarray) -> np.ndarray:
        """Tell of each row in use whether it takes no tokens any more."""
        return ~self._taking[rows]

    def row_record(self, row: int) -> Record:
        """Return the record of a row in use."""
        record = self._rows[row]
        assert record is not None, f"row {row} has no record"
        return record

    def records(self) -> list[Record]:
        """Return all records."""
        return [record for record in self._rows if record is not None]

    def of_session(self, session: int) -> list[Record]:
        """Return a session's records."""
        owned = self._owned.get(session)
        return list(owned.records.values()) if owned else []

    def open(
        self, session: int, request_id: bytes, fingerprint: bytes, *, prompt_tokens: int, needs: Reservation, seed: int, now: float
    ) -> Record:
        """Make the record of a request whose verdict is outstanding; the caller has checked `has_room`."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._generation[row] += 1
        record = Record(
            row=row,
            engine_id=int(self._generation[row]) << ROW_BITS | row,
            request_id=request_id,
            session=session,
            fingerprint=fingerprint,
            prompt_tokens=prompt_tokens,
            reserved_bytes=needs.num_bytes,
            input_bytes=needs.input_bytes,
            seed=seed,
            received_at=now,
        )
        self._rows[row] = record
        self._taking[row], self._keeps[row] = True, needs.keeps
        self.reserved_bytes += record.reserved_bytes
        self._deciding += 1
        self._progress_at[row] = now
        owned = self._owned.setdefault(session, _Owned())
        owned.records[request_id] = record
        owned.open += 1
        owned.reserved_bytes += record.reserved_bytes
        return record

    def _grow(self) -> None:
        rows = self.tokens.num_rows
        self.tokens.grow_rows(2 * rows)
        self._rows.extend([None] * rows)
        self._free_rows.extend(range(2 * rows - 1, rows - 1, -1))
        self._generation = np.concatenate([self._generation, np.zeros(rows, np.int64)])
        self._progress_at = np.concatenate([self._progress_at, np.full(rows, np.inf)])
        self._taking = np.concatenate([self._taking, np.zeros(rows, bool)])
        self._keeps = np.concatenate([self._keeps, np.zeros(rows, bool)])

    def inherit(self, heir: Record, ended: Record) -> None:
        """Let a member of a group answer for the input that it shares with one that ended before."""
        heir.reserved_bytes += ended.input_bytes
        heir.input_bytes += ended.input_bytes
        self.reserved_bytes += ended.input_bytes
        owned = self._owned.get(heir.session)
        if owned is not None:
            owned.reserved_bytes += ended.input_bytes

    def accept(self, record: Record) -> None:
        """Take the engine's consent."""
        assert record.state is RecordState.DECIDING, f"accept of a record that is {record.state.value}"
        record.state = RecordState.LIVE
        self._deciding -= 1
        self._live += 1
        self.counters.received += 1
        self.counters.accepted += 1

    def refuse_at_door(self) -> None:
        """Count a request that never got a record."""
        self.counters.received += 1
        self.counters.refused += 1

    def attach(self) -> None:
        """Count a request that found its own record."""
        self.counters.received += 1
        self.counters.attached += 1

    def refuse(self, record: Record) -> None:
        """Take the engine's refusal; the record is forgotten and its id stays free."""
        assert record.state is RecordState.DECIDING, f"refusal of a record that is {record.state.value}"
        self._deciding -= 1
        self.refuse_at_door()
        self._drop(record)

    def take_step(self, engine_ids: np.ndarray, tokens: TokenColumns) -> np.ndarray:
        """Append the tokens of a step and return the rows that grew; tokens of former or ended requests are dropped."""
        if not engine_ids.size:
            return np.empty(0, np.int64)
        rows, tokens = self._rows_of(engine_ids, tokens)
        if not rows.size:
            return rows
        self.counters.tokens += int(rows.size)
        self.last_progress = time.monotonic()
        self._progress_at[rows] = self.last_progress
        return self.tokens.append(rows, tokens, self._keeps[rows])

    def _rows_of(self, engine_ids: np.ndarray, tokens: TokenColumns) -> tuple[np.ndarray, TokenColumns]:
        """Return the rows of tokens of requests that take some, and those tokens. Found anew when any request came or ended since."""
        last = self._last_ids
        if last is not None and last.size == engine_ids.size and bool((last == engine_ids).all()):
            return self._last_rows, tokens
        rows = engine_ids & ROW_MASK
        known = rows < len(self._rows)
        if not known.all():
            rows = np.where(known, rows, 0)
        wanted = known & self._taking[rows] & (self._generation[rows] == engine_ids >> ROW_BITS)
        if not wanted.all():
            self.counters.late_tokens += int(wanted.size - wanted.sum())
            return rows[wanted], tokens.take(np.flatnonzero(wanted))
        self._last_ids, self._last_rows = engine_ids, rows
        return rows, tokens

    def end(self, record: Record, terminal: Terminal) -> bool:
        """Give a request its terminal event; False if it has one already. A deciding request counts as accepted first."""
        if record.state is RecordState.ENDED:
            return False
        if record.state is RecordState.DECIDING:
            self.accept(record)
        record.state, record.terminal = RecordState.ENDED, terminal
        self._taking[record.row] = False
        self._last_ids = None
        self._live -= 1
        self._held += 1
        now = time.monotonic()
        self._ends.append(now)
        self._progress_at[record.row] = self.last_progress = now
        if terminal.kind == "failed":
            self.failures[str((terminal.error or {}).get("code", "unknown"))] += 1
        setattr(self.counters, terminal.kind, getattr(self.counters, terminal.kind) + 1)
        held_bytes = self.tokens.num_bytes(record.row) + record.extra_bytes
        released = record.reserved_bytes - held_bytes
        self.reserved_bytes -= released
        record.reserved_bytes = held_bytes
        owned = self._owned.get(record.session)
        if owned is None:
            self._forget(record)
        else:
            owned.open -= 1
            owned.reserved_bytes -= released
        return True

    def acknowledge(self, session: int, request_id: bytes) -> bool:
        """Forget an ended record whose end arrived; its id is gone from now on."""
        record = self.get(session, request_id)
        if record is None or record.state is not RecordState.ENDED:
            return False
        gone = self._owned[session].gone
        gone[request_id] = None
        if len(gone) > REMEMBERED_IDS:
            gone.popitem(last=False)
        self._forget(record)
        return True

    def end_session(self, session: int) -> list[Record]:
        """Forget a session and its ended records; return the records that are still to be ended."""
        owned = self._owned.pop(session, None)
        unfinished = []
        for record in owned.records.values() if owned else ():
            if record.state is RecordState.ENDED:
                self._forget(record)
            else:
                unfinished.append(record)
        return unfinished

    def _forget(self, record: Record) -> None:
        self._held -= 1
        self._drop(record)

    def _drop(self, record: Record) -> None:
        owned = self._owned.get(record.session)
        if owned is not None and owned.records.get(record.request_id) is record:
            del owned.records[record.request_id]
            owned.open -= record.state is RecordState.DECIDING
            owned.reserved_bytes -= record.reserved_bytes
        self.tokens.clear(record.row)
        self.reserved_bytes -= record.reserved_bytes
        self._rows[record.row] = None
        self._taking[record.row] = False
        self._last_ids = None
        self._progress_at[record.row] = np.inf
        self._free_rows.append(record.row)

    def check_counters(self) -> None:
        """Assert that the counters reconcile; costs nothing."""
        count = self.counters
        assert count.received == count.refused + count.attached + count.accepted, f"received does not reconcile: {count}"
        ended = sum(getattr(count, kind) for kind in KINDS)
        assert count.accepted == self._live + ended, f"accepted does not reconcile: {count}, live {self._live}"
        assert count.failed == sum(self.failures.values()), f"failures have other causes: {count}, {self.failures}"
        assert self.reserved_bytes >= 0 and self._deciding >= 0, f"{self.reserved_bytes} bytes, {self._deciding} verdicts"

    def check_integrity(self) -> None:
        """Assert that counters reconcile and that every row is free or has one record."""
        self.check_counters()
        states = [record.state for record in self.records()]
        assert states.count(RecordState.LIVE) == self._live, "live records miscounted"
        assert states.count(RecordState.DECIDING) == self._deciding, "deciding records miscounted"
        assert states.count(RecordState.ENDED) == self._held, "held records miscounted"
        assert len(states) + len(self._free_rows) == len(self._rows), "a row is lost"
        assert self.reserved_bytes == sum(record.reserved_bytes for record in self.records()), "reserved bytes do not add up"
        for owned in self._owned.values():
            records = owned.records.values()
            assert owned.open == sum(record.state is not RecordState.ENDED for record in records), "a client's open requests miscounted"
            assert owned.reserved_bytes == sum(record.reserved_bytes for record in records), "a client's bytes do not add up"
        assert int(np.isfinite(self._progress_at).sum()) == len(states), "progress of rows without a record"
        self.tokens.check_integrity()
