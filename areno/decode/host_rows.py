"""Row state that the host keeps in numpy: what the rebuilt paths make each step's inputs from.

Deltas and advances are applied to all their rows at once, without a loop over rows. The torch forms of the same rules are in
`decode/tables.py`; the two are written apart, so that each is a check of the other.
"""

from __future__ import annotations

import numpy as np
import torch

from areno.config import ZERO_PAGE
from areno.decode.deltas import DeltaKind, DeltaSlot
from areno.decode.launch import LaneStatus
from areno.decode.row_state import COUNTERS, FLOAT_FIELDS, INT_FIELDS, RowState
from areno.request import MAX_STOP_IDS

_STEPS = np.array([[1], [-1], [-1]], dtype=np.int32)
_GENERATION = INT_FIELDS.index("generation")


def advance(rows: RowState[np.ndarray], status: np.ndarray, token: np.ndarray) -> None:
    """Advance rows by what a launch said of them: a positive status brought a token, one beyond TOKEN ended its row.

    Shapes: int32 [n] each, for the n rows given. Mutates: `rows`.
    """
    ran = status > LaneStatus.IDLE
    np.copyto(rows.ints[0], token, where=ran)
    rows.ints[COUNTERS] += _STEPS * ran
    rows.alive[status > LaneStatus.TOKEN] = False


class HostRows:
    """State of R rows; `state` is read by the paths, changed by `apply`, `put` and `advance` on views of it."""

    __slots__ = ("state",)

    def __init__(self, *, num_rows: int, pages_per_row: int, page_dtype: type[np.integer]) -> None:
        self.state: RowState[np.ndarray] = RowState(
            ints=np.zeros((len(INT_FIELDS), num_rows), dtype=np.int32),
            floats=np.zeros((len(FLOAT_FIELDS), num_rows), dtype=np.float32),
            alive=np.zeros(num_rows, dtype=bool),
            seed=np.zeros(num_rows, dtype=np.int64),
            stop_ids=np.full((num_rows, MAX_STOP_IDS), -1, dtype=np.int32),
            page_table=np.zeros((num_rows, pages_per_row), dtype=page_dtype),
        )

    def apply(self, slot: DeltaSlot) -> None:
        """Apply the row operations and page entries of one slot; sampling slots are filled elsewhere. Mutates: the rows named."""
        kinds = slot.rows["kind"]
        state = self.state
        fresh = slot.rows[kinds == DeltaKind.SET]
        if fresh.size:
            rows = fresh["row"]
            state.ints[:, rows] = [fresh[name] for name in INT_FIELDS]
            state.floats[:, rows] = [fresh[name] for name in FLOAT_FIELDS]
            state.seed[rows], state.stop_ids[rows] = fresh["seed"], fresh["stop_ids"]
            state.page_table[rows] = ZERO_PAGE
            state.alive[rows] = True
        state.page_table[slot.pages["row"], slot.pages["index"]] = slot.pages["page"]
        killed = slot.rows[kinds == DeltaKind.KILL]
        state.alive[killed["row"][state.ints[_GENERATION, killed["row"]] == killed["generation"]]] = False
        moved = slot.rows[kinds == DeltaKind.MOVE]
        moved = moved[state.ints[_GENERATION, moved["source"]] == moved["generation"]]
        if moved.size:
            rows, sources = moved["row"], moved["source"]
            for columns in (state.ints, state.floats):
                columns[:, rows] = columns[:, sources]
            for field in (state.seed, state.stop_ids, state.page_table, state.alive):
                field[rows] = field[sources]
            state.alive[sources] = False

    def gather(self, places: np.ndarray) -> RowState[np.ndarray]:
        """Return copies of some rows without their page tables; `put` writes them back. Shapes: [n], each row once."""
        state = self.state
        return RowState(
            ints=state.ints[:, places],
            floats=state.floats[:, places],
            alive=state.alive[places],
            seed=state.seed[places],
            stop_ids=state.stop_ids[places],
            page_table=state.page_table[:0],
        )

    def put(self, places: np.ndarray, advanced: RowState[np.ndarray]) -> None:
        """Write gathered rows back after their launch. Mutates: what a launch advances of these rows."""
        self.state.ints[:, places], self.state.alive[places] = advanced.ints, advanced.alive

    def row_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that integrity checks compare."""
        names = ("alive", "length", "generation", "last_token", "page_table")
        return {name: torch.from_numpy(self.state.named(name).copy()) for name in names}
