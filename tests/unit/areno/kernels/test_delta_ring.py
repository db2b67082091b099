"""The delta ring: what it applies through mapped memory or copies equals the tables', and no slot in flight is written."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from areno.decode.delta_ring import DeltaRing
from areno.decode.deltas import DeltaPacker
from tests.unit.areno.decode.late_device import PromptDevice
from tests.unit.areno.kernels.row_cases import assert_same, empty_tables, poison, random_operations


@pytest.mark.parametrize("mapped", [True, False])
def test_slots_of_all_sizes_do_what_the_tables_do(mapped: bool) -> None:
    rng = np.random.default_rng(7)
    expected, found = empty_tables(), empty_tables()
    poison(expected.state, rng)
    for field in dataclasses.fields(expected.state):
        getattr(found.state, field.name).copy_(getattr(expected.state, field.name))
    generations = expected.field("generation").tolist()
    device = PromptDevice(mapped=mapped)
    ring = DeltaRing(device, slots=2, words=64)
    slots = 0
    for _ in range(10):
        packer = DeltaPacker()
        random_operations(packer, generations, rng)
        for slot in packer.take():
            expected.apply(slot)
            ring.apply(slot, found.state)
            slots += 1
            assert_same(found.state, expected.state)
    assert slots > 8 and len(device.copied) == (0 if mapped else slots)


def test_a_place_is_written_again_only_after_its_event() -> None:
    device = PromptDevice()
    ring = DeltaRing(device, slots=2, words=64)
    tables = empty_tables()
    packer = DeltaPacker(capacity=1)
    for row in range(5):
        packer.set_row({"row": row, "generation": row + 1}, np.array([5]))
    waits = []
    for slot in packer.take():
        ring.apply(slot, tables.state)
        waits.append([event.waits for event in device.events])
    assert waits == [[0, 0], [0, 0], [1, 0], [1, 1], [2, 1]]
