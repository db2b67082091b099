"""The state of rows, field by field, in one shape for whoever keeps it: tensors of the resident tables, arrays of the host.

Both decode paths, the kernels and the staging memory between host and device name the fields and their order from here. Owns
no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

INT_FIELDS = ("last_token", "length", "remaining", "stop_wait", "sampling_slot", "recurrent_slot", "top_k", "generation")
FLOAT_FIELDS = ("temperature", "top_p", "min_p")
COUNTERS = slice(1, 4)
"""`length`, `remaining` and `stop_wait` lie together, so that one addition advances them."""

Array = TypeVar("Array", np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState(Generic[Array]):
    """The state of R rows. Shapes: `ints` [8, R], `floats` [3, R], `alive` and `seed` [R], `stop_ids` [R, 16], `page_table` [R, P]."""

    ints: Array
    floats: Array
    alive: Array
    seed: Array
    stop_ids: Array
    page_table: Array

    def select(self, rows: Any) -> RowState[Array]:
        """Return the state of some rows: views for a slice, copies for indices."""
        return RowState(
            ints=self.ints[:, rows],
            floats=self.floats[:, rows],
            alive=self.alive[rows],
            seed=self.seed[rows],
            stop_ids=self.stop_ids[rows],
            page_table=self.page_table[rows],
        )

    def named(self, name: str) -> Array:
        """Return one field of all rows, by its name in ROW_OP. Shapes: [R]."""
        if name in INT_FIELDS:
            return self.ints[INT_FIELDS.index(name)]
        found: Array = self.floats[FLOAT_FIELDS.index(name)] if name in FLOAT_FIELDS else getattr(self, name)
        return found
