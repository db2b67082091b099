"""Delta slots commute: at most one operation per target row, and none that reads a row which another one writes."""

from __future__ import annotations

import numpy as np

from areno.decode.deltas import DeltaKind, DeltaPacker

PAGES = np.array([5, 6], dtype=np.int64)


def _rows(packer: DeltaPacker) -> list[list[tuple[int, int]]]:
    return [[(int(op["kind"]), int(op["row"])) for op in slot.rows] for slot in packer.take()]


def test_independent_operations_share_a_slot() -> None:
    packer = DeltaPacker()
    packer.set_row({"row": 0, "generation": 1}, PAGES)
    packer.kill(1, 2)
    packer.grow(2, 3, 4, PAGES)
    packer.move(4, 3, 5)
    assert len(_rows(packer)) == 1


def test_a_second_operation_on_a_row_starts_a_new_slot() -> None:
    packer = DeltaPacker()
    packer.kill(0, 1)
    packer.set_row({"row": 0, "generation": 2}, PAGES)
    assert _rows(packer) == [[(DeltaKind.KILL, 0)], [(DeltaKind.SET, 0)]]


def test_a_move_never_shares_a_slot_with_a_write_to_its_source_or_target() -> None:
    for other in (2, 7):
        for first in ("move", "kill"):
            packer = DeltaPacker()
            steps = {"move": lambda p=packer: p.move(7, 2, 1), "kill": lambda p=packer, row=other: p.kill(row, 1)}
            steps.pop(first)()
            next(iter(steps.values()))()
            assert len(packer.take()) == 2


def test_slots_are_bounded_and_taken_once() -> None:
    packer = DeltaPacker(capacity=4)
    for row in range(10):
        packer.kill(row, 1)
    assert [len(rows) for rows in _rows(packer)] == [4, 4, 2]
    assert packer.take() == []
