"""The result ring: slots are read before they are taken again, run-ahead withholds results, late devices are waited for."""

from __future__ import annotations

import time

import numpy as np
import pytest

from areno.decode.results import ResultRing
from areno.sampling.kept import MAX_KEPT
from tests.unit.areno.decode.late_device import POISON, LateDevice


def _take(ring: ResultRing, version: int = 0) -> None:
    lanes = np.zeros(4, dtype=np.int64)
    launch, records = ring.take(seats=lanes, generations=lanes.astype(np.int32), version=version)
    records.words[2, :4] = launch.number


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
def test_results_are_withheld_until_run_ahead_further_launches(run_ahead: int) -> None:
    ring = ResultRing(slots=8, lanes=4, run_ahead=run_ahead)
    seen = []
    for number in range(1, 20):
        _take(ring)
        results = ring.ready(drain=False)
        seen.extend(result.launch.number for result in results)
        assert all(result.token.tolist() == [result.launch.number] * 4 for result in results)
        assert seen == list(range(1, max(number - run_ahead, 0) + 1))
    seen.extend(result.launch.number for result in ring.ready(drain=True))
    assert seen == list(range(1, 20)) and ring.last_read == ring.last_launch == 19


def test_a_slot_is_never_taken_before_it_was_read() -> None:
    ring = ResultRing(slots=2, lanes=4, run_ahead=1)
    _take(ring)
    _take(ring)
    with pytest.raises(AssertionError, match="before it was read"):
        _take(ring)


def test_a_read_result_survives_the_reuse_of_its_slot() -> None:
    ring = ResultRing(slots=2, lanes=4, run_ahead=0)
    _take(ring)
    first = ring.ready(drain=False)[0]
    for _ in range(4):
        _take(ring)
        ring.ready(drain=False)
    assert first.token.tolist() == [1] * 4


def _launch(ring: ResultRing, device: LateDevice, lanes: int) -> int:
    """Take a slot and queue a launch that fills its first lanes with the launch's number."""
    seats = np.zeros(lanes, dtype=np.int64)
    launch, _ = ring.take(seats=seats, generations=seats.astype(np.int32), version=0)

    def write() -> None:
        ring.launch_words[launch.slot, :, :lanes] = launch.number
        if ring.launch_kept_ids is not None and ring.launch_kept_count is not None:
            ring.launch_kept_ids[launch.slot, :lanes] = launch.number
            ring.launch_kept_count[launch.slot, :lanes] = launch.number

    device.queue.append(write)
    ring.launched()
    return launch.slot


@pytest.mark.parametrize("mapped", [True, False])
def test_a_late_device_is_read_only_once_its_event_has_passed(mapped: bool) -> None:
    device = LateDevice(mapped=mapped)
    ring = ResultRing(slots=4, lanes=8, run_ahead=3, kept=True, transport=device)
    read = []
    rng = np.random.default_rng(1)
    for number in range(1, 60):
        _launch(ring, device, lanes=int(rng.integers(1, 9)))
        device.run(int(rng.integers(0, len(device.queue) + 1)))
        for result in ring.ready(drain=False):
            lanes = result.launch.seats.size
            assert result.kept_ids is not None and result.kept_count is not None
            assert result.token.tolist() == [result.launch.number] * lanes
            assert result.kept_ids.tolist() == [[result.launch.number] * MAX_KEPT] * lanes
            assert result.kept_count.tolist() == [result.launch.number] * lanes
            read.append(result.launch.number)
        assert number - ring.last_read <= 3, "more launches are unread than run_ahead allows"
    read += [result.launch.number for result in ring.ready(drain=True)]
    assert read == list(range(1, 60)) and not device.queue


def test_nothing_is_ready_before_its_launch_has_passed() -> None:
    device = LateDevice()
    ring = ResultRing(slots=4, lanes=4, run_ahead=3, transport=device)
    _launch(ring, device, lanes=4)
    assert ring.ready(drain=False) == []
    device.run(2)
    assert ring.ready(drain=False) == [], "the launch and its copy have passed, the event has not"
    device.run(1)
    assert [result.launch.number for result in ring.ready(drain=False)] == [1]
    assert device.events[0].waits == 0, "nobody waited"


def test_the_newest_launch_is_given_time_and_no_more_than_that() -> None:
    device = LateDevice()
    ring = ResultRing(slots=4, lanes=4, run_ahead=3, transport=device)
    ring.await_newest(60.0)
    for _ in range(2):
        _launch(ring, device, lanes=4)
    started = time.monotonic()
    ring.await_newest(0.02)
    assert time.monotonic() - started >= 0.02 and ring.waited_s >= 0.02
    assert ring.ready(drain=False) == []
    ring.lock_step = True
    ring.await_newest(60.0)
    ring.lock_step = False
    device.run(len(device.queue))
    ring.await_newest(60.0)
    assert [result.launch.number for result in ring.ready(drain=False)] == [1, 2]
    assert time.monotonic() - started < 30.0


def test_a_copy_takes_the_used_words_of_one_slot_and_leaves_the_others_alone() -> None:
    device = LateDevice()
    ring = ResultRing(slots=3, lanes=8, run_ahead=1, transport=device)
    ring.words.fill_(5)
    for lanes in (3, 8):
        slot = _launch(ring, device, lanes)
        before = ring.words.clone()
        ring.ready(drain=True)
        assert device.copied.pop() == 5 * 8 + lanes and not device.copied
        others = [place for place in range(3) if place != slot]
        assert ring.words[others].equal(before[others])
        assert ring.words[slot, 5, lanes:].tolist() == [5] * (8 - lanes), "words behind the last lane do not travel"
        assert ring.words[slot, 0, lanes:].tolist() == [POISON] * (8 - lanes)


def test_a_launch_without_lanes_copies_nothing() -> None:
    device = LateDevice()
    ring = ResultRing(slots=2, lanes=4, run_ahead=0, transport=device)
    _launch(ring, device, lanes=0)
    assert [result.status.size for result in ring.ready(drain=True)] == [0] and not device.copied


def test_mapped_memory_is_never_copied() -> None:
    device = LateDevice(mapped=True)
    ring = ResultRing(slots=2, lanes=4, run_ahead=0, kept=True, transport=device)
    _launch(ring, device, lanes=4)
    ring.ready(drain=True)
    assert ring.launch_words is ring.words and not device.copied
