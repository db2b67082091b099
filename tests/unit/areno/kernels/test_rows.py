"""Row kernels against the torch form: random delta slots in random order, prologues between, fields compared."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from areno.config import SINK_PAGE, ZERO_PAGE
from areno.decode.deltas import PAGE_OP, DeltaPacker, DeltaSlot
from areno.decode.tables import DecodeTables, RowState
from areno.kernels.rows import LaneBuffers, apply_deltas, begin_sample, begin_step, fits, pack_slot, slot_words
from areno.request import MAX_STOP_IDS
from areno.sampling.penalties import SlotTables

ROWS, PAGES, PAGE_SIZE, VOCAB = 8, 300, 4, 40


def _tables(pages: int = PAGES) -> DecodeTables:
    cpu = torch.device("cpu")
    slots = SlotTables(num_slots=1, vocab_size=VOCAB, max_forced=4, device=cpu)
    return DecodeTables(num_rows=ROWS, pages_per_row=pages, page_size=PAGE_SIZE, slots=slots, device=cpu)


def _poison(state: RowState, rng: np.random.Generator) -> None:
    for field in dataclasses.fields(state):
        tensor = getattr(state, field.name)
        values = rng.integers(0, 2 if tensor.dtype == torch.bool else 90, tuple(tensor.shape))
        tensor.copy_(torch.from_numpy(values).to(tensor.dtype))


def _same(found: RowState, expected: RowState) -> None:
    for field in dataclasses.fields(expected):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name)), field.name


def _shuffled(slot: DeltaSlot, rng: np.random.Generator) -> DeltaSlot:
    return DeltaSlot(rows=slot.rows[rng.permutation(slot.rows.size)], pages=slot.pages[rng.permutation(slot.pages.size)])


def _fields(row: int, generation: int, rng: np.random.Generator) -> dict[str, object]:
    return {
        "row": row,
        "generation": generation,
        "last_token": int(rng.integers(0, VOCAB)),
        "length": int(rng.integers(0, 12)),
        "remaining": int(rng.integers(1, 9)),
        "stop_wait": int(rng.integers(0, 3)),
        "sampling_slot": int(rng.integers(-1, 1)),
        "recurrent_slot": int(rng.integers(-1, 9)),
        "top_k": int(rng.integers(0, 9)),
        "temperature": rng.random(),
        "top_p": rng.random(),
        "min_p": rng.random(),
        "seed": int(rng.integers(-(2**63), 2**63)),
        "stop_ids": rng.integers(-1, VOCAB, MAX_STOP_IDS).astype(np.int32),
    }


def _random_operations(packer: DeltaPacker, generations: list[int], rng: np.random.Generator, pages: int) -> None:
    for _ in range(int(rng.integers(1, 7))):
        row, other = (int(number) for number in rng.permutation(ROWS)[:2])
        # A KILL or a MOVE may come too late: its row has another generation by then.
        late = int(rng.random() < 0.3)
        kind = rng.integers(0, 4)
        if kind == 0:
            generations[row] = max(generations) + 1
            count = int(rng.choice([0, 1, 3, pages]))
            packer.set_row(_fields(row, generations[row], rng), rng.integers(2, 90, count).astype(np.int64))
        elif kind == 1:
            index = int(rng.integers(0, pages - 2))
            packer.grow(row, generations[row], index, rng.integers(2, 90, int(rng.integers(1, 3))).astype(np.int64))
        elif kind == 2:
            packer.kill(row, generations[row] - late)
        else:
            packer.move(other, row, generations[other] - late)
            if not late:
                generations[row] = generations[other]


@pytest.mark.parametrize("seed", range(4))
def test_a_packed_slot_does_what_the_tables_do_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    expected, found = _tables(), _tables()
    _poison(expected.state, rng)
    for field in dataclasses.fields(expected.state):
        getattr(found.state, field.name).copy_(getattr(expected.state, field.name))
    generations = expected.field("generation").tolist()
    buffer = torch.full((4096,), -(2**31), dtype=torch.int32)
    for _ in range(12):
        packer = DeltaPacker()
        _random_operations(packer, generations, rng, PAGES)
        for slot in packer.take():
            expected.apply(slot)
            buffer.fill_(int(rng.integers(-99, 99)))
            counts = pack_slot(_shuffled(slot, rng), buffer.numpy())
            apply_deltas(buffer, *counts, found.state)
            _same(found.state, expected.state)


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


def test_a_set_whose_pages_leave_a_hole_is_refused() -> None:
    packer = DeltaPacker()
    packer.set_row({"row": 1}, np.array([5, 6]))
    slot = packer.take()[0]
    holed = DeltaSlot(rows=slot.rows, pages=np.array([(1, 0, 5), (1, 2, 6)], dtype=PAGE_OP))
    with pytest.raises(AssertionError, match="0 to n - 1"):
        pack_slot(holed, np.zeros(99, dtype=np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_prologue_equals_the_tables_prologue(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    tables = _tables(pages=6)
    _poison(tables.state, rng)
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
    tables = _tables(pages=2)
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
