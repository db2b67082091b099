"""The probe of the host, the watchdog of the accounts and the life of a service, each on its own clock."""

from __future__ import annotations

import logging
import time
from typing import Any, cast

import numpy as np
import pytest

from rollout.service.calls import Calls
from rollout.service.host_probe import HostProbe
from rollout.service.ledger import Ledger
from rollout.service.lifecycle import Lifecycle, Phase
from rollout.service.records import Reservation, Terminal
from rollout.service.watchdog import Watchdog
from rollout.wire.operations import Op
from tests.unit.rollout.service.test_ledger import tokens


class Asked:
    """Calls that only note what was asked."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def ask(self, op: Op, fields: Any) -> None:
        self.ops.append(op)


def probe() -> tuple[HostProbe, Asked]:
    asked = Asked()
    return HostProbe(cast(Calls, asked), timeout_s=8.0, start_timeout_s=100.0), asked


def test_an_idle_host_is_asked_nothing_and_never_looked_at() -> None:
    watch, asked = probe()
    for now in (0.0, 50.0, 1000.0):
        assert watch.judge(now, loading=False, expected=False) == (None, None)
    assert asked.ops == []


def test_a_silent_host_is_asked_once_and_given_up_after_its_time() -> None:
    watch, asked = probe()
    assert watch.judge(10.0, loading=False, expected=True) == (None, 12.0)
    assert watch.judge(12.0, loading=False, expected=True) == (None, 18.0)
    assert watch.judge(15.0, loading=False, expected=True) == (None, 18.0)
    assert asked.ops == [Op.STATS]
    cause, again = watch.judge(18.0, loading=False, expected=True)
    assert cause is not None and again is None
    assert "gave no sign of life for 8.0 s" in str(cause) and "host_timeout_s" in str(cause)


def test_a_word_begins_the_time_anew_and_a_standstill_of_our_own_counts_for_nothing() -> None:
    watch, asked = probe()
    watch.judge(0.0, loading=False, expected=True)
    watch.judge(2.0, loading=False, expected=True)
    watch.heard(7.0)
    assert watch.judge(9.0, loading=False, expected=True) == (None, 15.0)
    assert asked.ops == [Op.STATS, Op.STATS]
    watch.stood_still(100.0)
    assert watch.judge(110.0, loading=False, expected=True)[0] is None


def test_a_host_that_loads_has_its_own_time_and_is_asked_nothing() -> None:
    watch, asked = probe()
    assert watch.judge(0.0, loading=True, expected=False) == (None, 100.0)
    cause, _ = watch.judge(100.0, loading=True, expected=False)
    assert cause is not None and "host_start_timeout_s" in str(cause)
    assert asked.ops == []


def opened(ledger: Ledger, now: float, number: int = 1) -> Any:
    return ledger.open(1, bytes([number]) * 16, b"f", prompt_tokens=1, needs=Reservation(max_tokens=5), seed=0, now=now)


def test_the_watchdog_names_the_longest_wait_and_its_stage(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(10, 2**20)
    watch = Watchdog(ledger, lambda record: f"stage of {record.request_id[0]}", stall_s=5.0)
    assert watch.advance(0.0) is None and watch.oldest(0.0) == (0.0, "")
    first, second = opened(ledger, 1.0, 1), opened(ledger, 2.0, 2)
    ledger.accept(first)
    ledger.accept(second)
    with caplog.at_level(logging.WARNING):
        assert watch.advance(3.0) == 4.0
        assert watch.oldest(3.0) == (2.0, f"request {first.request_id.hex()} of client #1: stage of 1")
        assert not caplog.records
        watch.advance(6.5)
        watch.advance(7.5)
    assert [record.message for record in caplog.records] == [
        f"no progress for 5.5 s: request {first.request_id.hex()} of client #1: stage of 1"
    ]
    ledger.take_step(np.array([first.engine_id]), tokens(1))
    assert "stage of 2" in watch.oldest(8.0)[1], "a token is progress"
    for record in (first, second):
        ledger.end(record, Terminal(kind="length"))
        ledger.acknowledge(1, record.request_id)
    assert watch.advance(9.0) is None and watch.accounting_errors == 0


def test_a_long_queue_is_no_stall_while_others_get_tokens(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(10, 2**20)
    watch = Watchdog(ledger, lambda record: f"stage of {record.request_id[0]}", stall_s=5.0)
    now = time.monotonic()
    queued, running, stuck = (opened(ledger, now - 100.0, number) for number in (1, 2, 3))
    for record in (queued, running, stuck):
        ledger.accept(record)
    ledger.take_step(np.array([running.engine_id]), tokens(1))
    with caplog.at_level(logging.WARNING):
        watch.advance(now + 1.0)
        assert not caplog.records and "stage of" in watch.oldest(now)[1]
        ledger.take_step(np.array([stuck.engine_id]), tokens(1))
        ledger._progress_at[stuck.row] = now - 50.0
        watch.advance(now + 3.0)
        assert "stage of 3" in caplog.records[-1].message
        watch.advance(now + 30.0)
        assert len(caplog.records) == 2 and "stage of 1" in caplog.records[-1].message, "nobody gets anything any more"


def test_accounts_that_do_not_reconcile_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(10, 2**20)
    watch = Watchdog(ledger, lambda record: "", stall_s=5.0)
    record = opened(ledger, 1.0)
    ledger.accept(record)
    watch.advance(2.0)
    ledger.counters.accepted += 1
    watch.advance(3.5)
    assert watch.accounting_errors == 1
    ledger.counters.accepted -= 1
    ledger.end(record, Terminal(kind="failed", error={"code": "host_failed"}))
    ledger.acknowledge(1, record.request_id)
    ledger.reserved_bytes += 7
    watch.advance(4.6)
    assert watch.accounting_errors == 2, "what only a thorough look finds is found when the service becomes idle"
    assert all("do not reconcile" in line.message for line in caplog.records) and len(caplog.records) == 2
    assert ledger.failures == {"host_failed": 1}


def test_a_drain_waits_for_the_last_request_and_no_longer_than_its_deadline() -> None:
    life = Lifecycle(drain_s=5.0)
    assert life.advance(0.0, idle=True) is None and not life.refuses
    life.drain()
    assert life.refuses and not life.is_over
    deadline = life.advance(0.0, idle=False)
    assert deadline is not None
    assert life.advance(deadline - 0.1, idle=False) == deadline and not life.is_over
    life.advance(deadline, idle=False)
    assert life.is_over
    life.close()


def test_a_second_wish_and_a_drain_of_no_length_end_at_once() -> None:
    twice, none = Lifecycle(drain_s=5.0), Lifecycle(drain_s=0.0)
    twice.drain()
    twice.drain()
    none.drain()
    assert twice.phase is none.phase is Phase.STOPPING
    twice.drain()
    assert twice.phase is Phase.STOPPING, "a phase only moves forward"
    for life in (twice, none):
        life.close()
