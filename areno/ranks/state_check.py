"""The rows' state as a few numbers, by which ranks that went different ways find each other out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from areno.errors import EngineFailure

if TYPE_CHECKING:
    from areno.decode.path import DecodePath

FIELDS = ("alive", "length", "generation", "last_token", "page table", "number of captured steps")
CHECK_LAUNCHES = 256
_SHOWN_ROWS = 4


def state_of(path: DecodePath) -> np.ndarray:
    """Return what must be equal on all ranks. Shapes: int64 [fields, R]. Blocks: until the device has done what was launched."""
    state = path.row_state()
    table_RP = state["page_table"].cpu().numpy().astype(np.int64)
    weights_P = np.arange(1, 2 * table_RP.shape[1], 2, dtype=np.int64) * np.int64(0x9E3779B97F4A7C15 - (1 << 64))
    columns = [state[name].cpu().numpy().astype(np.int64) for name in FIELDS[:4]]
    captures = np.full(table_RP.shape[0], path.num_captures, np.int64)
    return np.stack([*columns, (table_RP * weights_P).sum(axis=1), captures])


def compare_states(mine: np.ndarray, others: Mapping[int, np.ndarray]) -> None:
    """Compare the states of one check. Shapes: [fields, R]; the others' flat. Raises: EngineFailure naming rank, rows and values."""
    for rank, flat in others.items():
        if flat.size != mine.size:
            raise _diverged(f"rank {rank} has {flat.size // len(FIELDS)} rows, rank 0 has {mine.shape[1]}", rank)
        theirs = flat.reshape(mine.shape)
        for name, one, other in zip(FIELDS, mine, theirs):
            rows = np.flatnonzero(one != other)
            if rows.size:
                shown = ", ".join(f"row {row}: {one[row]} on rank 0, {other[row]} on rank {rank}" for row in rows[:_SHOWN_ROWS].tolist())
                raise _diverged(f"rank {rank} has another {name} in {rows.size} rows ({shown})", rank)


def _diverged(what: str, rank: int) -> EngineFailure:
    return EngineFailure(
        f"the ranks have gone different ways: {what}",
        field="tp",
        value=rank,
        limit="every rank executes the same log, so that their rows are equal",
        remedy="start the engine again; if it comes again, check the devices' memory and that all ranks use the same libraries",
    )
