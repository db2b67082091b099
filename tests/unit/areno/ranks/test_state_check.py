"""States that differ are told by rank, field, row and both values; equal ones pass."""

from __future__ import annotations

import numpy as np
import pytest

from areno.errors import EngineFailure
from areno.ranks.state_check import FIELDS, compare_states

ROWS = 12


def test_equal_states_pass_whatever_they_hold() -> None:
    state = np.arange(len(FIELDS) * ROWS, dtype=np.int64).reshape(len(FIELDS), ROWS)
    compare_states(state, {1: state.ravel().copy(), 2: state.ravel().copy()})


@pytest.mark.parametrize("field", range(len(FIELDS)), ids=FIELDS)
def test_a_difference_names_rank_field_rows_and_values(field: int) -> None:
    state = np.zeros((len(FIELDS), ROWS), np.int64)
    other = state.copy()
    other[field, [3, 5, 6, 7, 8]] = 9
    with pytest.raises(
        EngineFailure, match=f"rank 2 has another {FIELDS[field]} in 5 rows .row 3: 0 on rank 0, 9 on rank 2, row 5"
    ) as told:
        compare_states(state, {1: state.ravel(), 2: other.ravel()})
    assert told.value.value == 2 and "row 8" not in str(told.value)


def test_another_number_of_rows_is_a_difference() -> None:
    state = np.zeros((len(FIELDS), ROWS), np.int64)
    with pytest.raises(EngineFailure, match=f"rank 1 has {ROWS - 1} rows, rank 0 has {ROWS}"):
        compare_states(state, {1: state[:, 1:].ravel()})
