"""Records go through their states once, and the counters reconcile after every call."""

from __future__ import annotations

import secrets
from dataclasses import replace

import numpy as np
import pytest

from rollout.service.ledger import Ledger
from rollout.service.records import KINDS, Record, RecordState, Reservation, Terminal
from rollout.service.token_store import BYTES_PER_TOKEN, TokenColumns


def opened(ledger: Ledger, session: int = 1, request_id: bytes | None = None, budget: int = 10) -> Record:
    needs = Reservation(max_tokens=budget)
    return ledger.open(session, request_id or secrets.token_bytes(16), b"body", prompt_tokens=3, needs=needs, seed=1, now=0.0)


def room(ledger: Ledger, num_tokens: int) -> bool:
    return ledger.has_room(Reservation(max_tokens=num_tokens))


def tokens(count: int) -> TokenColumns:
    return TokenColumns.room_for(count)


def test_an_accepted_request_ends_once_and_is_gone_after_its_acknowledgement() -> None:
    ledger = Ledger(10, 2**20)
    record = opened(ledger)
    ledger.accept(record)
    assert ledger.take_step(np.array([record.engine_id] * 3), tokens(3)).tolist() == [record.row]
    assert ledger.end(record, Terminal(kind="stop", stop_id=2))
    assert not ledger.end(record, Terminal(kind="cancelled")), "a second ending is no ending"
    ledger.check_integrity()
    assert ledger.get(1, record.request_id) is record
    assert not ledger.is_gone(1, record.request_id)
    assert ledger.acknowledge(1, record.request_id)
    assert not ledger.acknowledge(1, record.request_id)
    assert ledger.is_gone(1, record.request_id)
    assert not ledger.is_gone(2, record.request_id), "ids are scoped to their client"
    ledger.check_integrity()
    assert (ledger.counters.received, ledger.counters.stop, ledger.counters.tokens) == (1, 1, 3)
    assert (ledger.reserved_bytes, ledger.tokens.used_pages) == (0, 0)


def test_a_refused_request_leaves_its_id_free() -> None:
    ledger = Ledger(10, 2**20)
    record = opened(ledger)
    ledger.refuse(record)
    ledger.check_integrity()
    assert ledger.get(1, record.request_id) is None
    assert not ledger.is_gone(1, record.request_id)
    assert (ledger.counters.received, ledger.counters.refused, ledger.counters.accepted) == (1, 1, 0)


def test_tokens_of_an_ended_or_former_request_are_dropped_and_counted() -> None:
    ledger = Ledger(10, 2**20)
    former = opened(ledger)
    ledger.end(former, Terminal(kind="cancelled"))
    assert ledger.take_step(np.array([former.engine_id]), tokens(1)).size == 0
    ledger.acknowledge(1, former.request_id)
    later = opened(ledger)
    assert later.row == former.row
    ledger.accept(later)
    grown = ledger.take_step(np.array([former.engine_id, later.engine_id, 2**40 + 77, later.engine_id]), tokens(4))
    assert grown.tolist() == [later.row]
    assert int(ledger.tokens.lengths[later.row]) == 2
    assert ledger.counters.late_tokens == 3
    assert ledger.by_engine_id(former.engine_id) is None
    assert ledger.by_engine_id(later.engine_id) is later


@pytest.mark.parametrize("seed", range(3))
def test_the_same_requests_step_after_step_and_those_that_come_and_end_between_get_their_own_tokens(seed: int) -> None:
    draw, ledger = np.random.default_rng(seed), Ledger(1000, 2**30)
    records = [opened(ledger, budget=10_000) for _ in range(5)]
    expected = {record.engine_id: [] for record in records}  # type: ignore[var-annotated]
    ids, late = np.array([record.engine_id for record in records]), 0
    for number in range(400):
        if draw.random() < 0.1:
            # The step names a request that has ended, in whose row another may be by then.
            place = int(draw.integers(0, 5))
            ledger.end(records[place], Terminal(kind="stop"))
            if draw.random() < 0.5:
                ledger.acknowledge(1, records[place].request_id)
            fresh = opened(ledger, budget=10_000)
            late += 1
            expected[fresh.engine_id] = []
            step = ids.copy()
            records[place], ids[place] = fresh, fresh.engine_id
        else:
            step = ids.copy()
        values = np.arange(5, dtype=np.int32) + 10 * number
        grown = ledger.take_step(step, replace(tokens(5), token_ids=values))
        assert sorted(grown.tolist()) == sorted({record.row for record in records if record.engine_id in step})
        for engine_id, value in zip(step.tolist(), values.tolist()):
            if any(record.engine_id == engine_id for record in records):
                expected[engine_id].append(value)
    for record in records:
        length = len(expected[record.engine_id])
        stored = ledger.tokens.gather(np.array([record.row]), np.array([0]), np.array([length])).token_ids
        assert stored.tolist() == expected[record.engine_id] and ledger.tokens.lengths[record.row] == length
    assert late and ledger.counters.late_tokens == late
    ledger.check_integrity()


def test_admission_is_bounded_in_requests_and_in_bytes() -> None:
    ledger = Ledger(2, 10 * BYTES_PER_TOKEN)
    assert room(ledger, 10)
    assert not room(ledger, 11)
    first = opened(ledger, budget=8)
    assert room(ledger, 2)
    assert not room(ledger, 3)
    ledger.end(first, Terminal(kind="cancelled"))
    assert room(ledger, 10), "an end gives back what was not used"
    opened(ledger, budget=0)
    opened(ledger, budget=0)
    assert not room(ledger, 0)


def test_a_session_that_ends_forgets_its_ended_records_and_names_the_others() -> None:
    ledger = Ledger(10, 2**20)
    ended, live, other = opened(ledger), opened(ledger), opened(ledger, session=2)
    for record in (ended, live, other):
        ledger.accept(record)
    ledger.end(ended, Terminal(kind="stop"))
    assert ledger.end_session(1) == [live]
    ledger.check_integrity()
    ledger.end(live, Terminal(kind="cancelled"))
    ledger.check_integrity()
    assert ledger.records() == [other]


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_keep_the_counters_reconciled(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ledger = Ledger(400, 2**30)
    for _ in range(2000):
        records = ledger.records()
        action = int(draw.integers(0, 7))
        record = records[int(draw.integers(0, len(records)))] if records else None
        if action <= 1 and room(ledger, 0):
            opened(ledger, session=int(draw.integers(1, 4)))
        elif action == 2 and record is not None and record.state is RecordState.DECIDING:
            ledger.accept(record) if draw.random() < 0.7 else ledger.refuse(record)
        elif action == 3 and records:
            chosen = [records[int(i)].engine_id for i in draw.integers(0, len(records), 5)]
            ledger.take_step(np.array(chosen), tokens(5))
        elif action == 4 and record is not None:
            ledger.end(record, Terminal(kind=KINDS[int(draw.integers(0, 5))]))
        elif action == 5 and record is not None:
            ledger.acknowledge(record.session, record.request_id)
        elif action == 6 and draw.random() < 0.02:
            for unfinished in ledger.end_session(int(draw.integers(1, 4))):
                ledger.end(unfinished, Terminal(kind="cancelled"))
        ledger.check_integrity()
