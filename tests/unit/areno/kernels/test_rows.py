"""Row kernels against the torch form: random delta slots in random order, prologues between, fields compared."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from areno.config import SINK_PAGE, ZERO_PAGE
from areno.decode.deltas import ROW_OP, DeltaPacker
from areno.kernels.rows import ROW_WORDS, LaneBuffers, apply_deltas, begin_sample, begin_step, fits, pack_slot, slot_words
from tests.unit.areno.kernels.row_cases import PAGE_SIZE, ROWS, VOCAB, assert_same, empty_tables, poison, random_operations, shuffled


@pytest.mark.parametrize("seed", range(4))
def test_a_packed_slot_does_what_the_tables_do_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    expected, found = empty_tables(), empty_tables()
    poison(expected.state, rng)
    for field in dataclasses.fields(expected.state):
        getattr(found.state, field.name).copy_(getattr(expected.state, field.name))
    generations = expected.field("generation").tolist()
    buffer = torch.full((4096,), -(2**31), dtype=torch.int32)
    for _ in range(12):
        packer = DeltaPacker()
        random_operations(packer, generations, rng)
        for slot in packer.take():
            expected.apply(slot)
            buffer.fill_(int(rng.integers(-99, 99)))
            counts = pack_slot(shuffled(slot, rng), buffer.numpy())
            apply_deltas(buffer, *counts, found.state)
            assert_same(found.state, expected.state)


def test_pages_of_a_growth_travel_without_a_row_operation_and_capacity_is_checked() -> None:
    packer = DeltaPacker()
    packer.grow(3, 1, 2, np.array([7, 8]))
    slot = packer.take()[0]
    assert slot_words(1, 2) == 38 and fits(slot, 38) and not fits(slot, 37)
    out = np.full(6, -1, dtype=np.int32)
    assert pack_slot(slot, out) == (0, 2)
    assert out.tolist() == [3, 2, 7, 3, 3, 8]
    with pytest.raises(AssertionError, match="make delta slots larger"):
        pack_slot(slot, np.zeros(5, dtype=np.int32))


def test_a_set_says_how_many_pages_it_brings_and_a_growth_stands_beside_it() -> None:
    """The kernel clears what lies behind them in the row's table by that number."""
    packer = DeltaPacker()
    packer.set_row({"row": 1, "sampling_slot": -1}, np.array([5, 6]))
    packer.grow(2, 1, 4, np.array([9]))
    packer.kill(3, 1)
    out = np.zeros(256, dtype=np.int32)
    assert pack_slot(packer.take()[0], out) == (2, 3)
    operations = out[: 2 * ROW_WORDS].view(ROW_OP)
    assert operations["row"].tolist() == [1, 3] and operations["source"].tolist() == [2, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_prologue_equals_the_tables_prologue(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    tables = empty_tables(pages=6)
    poison(tables.state, rng)
    tables.state.page_table[rng.random((ROWS, 6)) < 0.4] = ZERO_PAGE
    tables.field("length").copy_(torch.from_numpy(rng.integers(0, 24, ROWS)))
    tables.field("last_token").copy_(torch.from_numpy(rng.integers(0, VOCAB, ROWS)))
    tables.state.alive[4] = True
    tables.state.page_table[4] = ZERO_PAGE
    embedding = torch.randn(VOCAB, 24).to(dtype)
    for count in (1, 3, ROWS):
        lanes, x = LaneBuffers.allocate(ROWS, torch.device("cpu")), torch.full((count, 24), float("nan"), dtype=dtype)
        for buffer in lanes:
            buffer.fill_(1)
        counter = torch.tensor(41, dtype=torch.int32)
        begin_step(tables.state, lanes, counter, embedding, x, page_size=PAGE_SIZE)
        expected = tables.bucket(count).lanes(24)
        for name in LaneBuffers._fields:
            assert getattr(lanes, name)[:count].tolist() == getattr(expected, name).tolist(), name
            assert getattr(lanes, name)[count:].tolist() == [1] * (ROWS - count)
        assert torch.equal(x, embedding[expected.ids.long()])
        assert counter.item() == 42
    assert expected.running.any() and expected.starved.any() and not tables.state.alive.all()
    assert lanes.slots[~expected.running].unique().tolist() == [SINK_PAGE * PAGE_SIZE]


def test_a_row_at_the_end_of_its_table_starves() -> None:
    tables = empty_tables(pages=2)
    tables.state.alive[0] = True
    tables.state.page_table.fill_(9)
    tables.field("length").fill_(2 * PAGE_SIZE)
    lanes, x = LaneBuffers.allocate(1, torch.device("cpu")), torch.zeros(1, 8)
    begin_step(tables.state, lanes, torch.zeros((), dtype=torch.int32), torch.zeros(VOCAB, 8), x, page_size=PAGE_SIZE)
    assert lanes.starved.item() and not lanes.running.item()


def test_a_prefill_counts_its_launch() -> None:
    counter = torch.tensor([6], dtype=torch.int32)
    begin_sample(counter)
    assert counter.item() == 7
