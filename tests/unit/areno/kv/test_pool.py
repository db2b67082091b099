"""Pages, rows and slots are conserved."""

from __future__ import annotations

import pytest

from areno.kv.pool import PagePool, RowPool
from areno.kv.slots import SlotPool


def test_a_page_is_free_again_after_its_last_reference() -> None:
    pool = PagePool(4, first=2)
    pages = pool.allocate(3)
    assert set(pages) <= {2, 3, 4, 5} and pool.num_free == 1
    pool.hold(pages[0])
    assert not pool.release(pages[0]) and pool.release(pages[0])
    pool.check_integrity({pages[1]: 1, pages[2]: 1})
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages[0])
    with pytest.raises(AssertionError, match="is free and can't be shared"):
        pool.hold(pages[0])
    with pytest.raises(AssertionError, match="references differ"):
        pool.check_integrity({pages[1]: 2, pages[2]: 1})


def test_what_is_handed_out_is_listed_once_and_only_where_it_is_asked_for() -> None:
    pool, silent = PagePool(4, first=2), PagePool(4, first=2, lists_fresh=False)
    for one in (pool, silent):
        [page] = one.allocate(1)
        one.release(page)
        assert one.allocate(2)[0] == page and set(one.free_pages) == {4, 5}
    assert pool.take_fresh() == [2, 3] and pool.take_fresh() == []
    assert silent.take_fresh() == []


def test_rows_are_given_lowest_first_with_generations_that_never_repeat() -> None:
    rows = RowPool(3)
    first = [rows.allocate() for _ in range(3)]
    assert [row for row, _ in first] == [0, 1, 2]
    rows.release(1)
    rows.release(0)
    assert rows.highest_used == 2
    assert rows.move_down(2) == 0 and rows.highest_used == 0
    row, generation = rows.allocate()
    assert row == 1 and generation not in {old for _, old in first}
    rows.check_integrity()


def test_a_slot_can_be_given_back_once() -> None:
    slots = SlotPool(2)
    taken = slots.allocate()
    slots.check_integrity({taken})
    slots.release(taken)
    with pytest.raises(AssertionError, match="not in use"):
        slots.release(taken)
