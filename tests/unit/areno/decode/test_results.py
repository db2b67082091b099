"""The result ring: slots are read before they are taken again, and run-ahead withholds results."""

from __future__ import annotations

import numpy as np
import pytest

from areno.decode.results import ResultRing


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
