"""Random row operations and tables to apply them to, for tests of the row kernels here and on a card."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from areno.decode.deltas import DeltaPacker, DeltaSlot
from areno.decode.row_state import RowState
from areno.decode.tables import DecodeTables
from areno.request import MAX_STOP_IDS
from areno.sampling.penalties import SlotTables

ROWS, PAGES, PAGE_SIZE, VOCAB = 8, 300, 4, 40
CPU = torch.device("cpu")


def empty_tables(pages: int = PAGES, device: torch.device = CPU) -> DecodeTables:
    """Return tables of rows that were never set."""
    slots = SlotTables(num_slots=1, vocab_size=VOCAB, max_forced=4, device=device)
    return DecodeTables(num_rows=ROWS, pages_per_row=pages, page_size=PAGE_SIZE, slots=slots, device=device)


def poison(state: RowState, rng: np.random.Generator) -> None:
    """Fill the state with small random numbers. Mutates: all of it."""
    for field in dataclasses.fields(state):
        tensor = getattr(state, field.name)
        values = rng.integers(0, 2 if tensor.dtype == torch.bool else 90, tuple(tensor.shape))
        tensor.copy_(torch.from_numpy(values).to(tensor.dtype))


def assert_same(found: RowState, expected: RowState) -> None:
    """Compare two states field by field."""
    for field in dataclasses.fields(expected):
        mine, theirs = getattr(found, field.name).cpu(), getattr(expected, field.name)
        assert torch.equal(mine.to(theirs.dtype), theirs), f"{field.name}: {mine}, expected {theirs}"


def shuffled(slot: DeltaSlot, rng: np.random.Generator) -> DeltaSlot:
    """Return the slot with its operations and its pages in another order."""
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


def random_operations(packer: DeltaPacker, generations: list[int], rng: np.random.Generator, pages: int = PAGES) -> None:
    """Append operations of all kinds. Mutates: the packer and the rows' generations."""
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
