"""What a caller passes becomes fields and arrays; only what has no binary form is refused here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.client.parameters import id_array, prepare
from rollout.errors import InvalidRequest


@pytest.mark.parametrize(
    "ids", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3], np.int64), np.array([1, 2, 3], np.uint8), [np.int64(1), 2, 3]]
)
def test_any_sequence_of_integers_is_taken(ids: Any) -> None:
    array = id_array("prompt_ids", ids)
    assert array.dtype == np.int32
    assert array.tolist() == [1, 2, 3]


def test_ids_that_no_vocabulary_has_are_sent_for_the_engine_to_name_them() -> None:
    assert id_array("prompt_ids", [2**31, -1]).tolist() == [2**31, -1]
    assert id_array("prompt_ids", []).size == 0


@pytest.mark.parametrize(
    "ids", ["text", b"bytes", [True], [1.5], [None], [[1]], np.array([1.0]), np.array([[1]]), np.array([True]), [2**70], 5, {1: 2},
            np.array([2**63], np.uint64)],
)  # fmt: skip
def test_what_is_no_list_of_integers_is_refused_with_its_name(ids: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        id_array("stop_ids", ids)
    assert refused.value.field == "stop_ids"
    assert "stop_ids" in str(refused.value.remedy)


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"known: max_new_tokens, .*request_id"):
        prepare([1], {"max_tokens": 3})


def test_numpy_scalars_become_plain_numbers_and_a_request_id_is_drawn() -> None:
    first, second = (prepare([1], {"max_new_tokens": np.int64(3), "temperature": np.float32(0.5)}) for _ in range(2))
    assert dict(first.fields) == {"max_new_tokens": 3, "temperature": 0.5}
    assert type(first.fields["max_new_tokens"]) is int
    assert len(first.request_id) == 16
    assert first.request_id != second.request_id


@pytest.mark.parametrize("request_id", [b"short", "x" * 16, 5])
def test_a_request_id_is_sixteen_bytes(request_id: Any) -> None:
    with pytest.raises(InvalidRequest, match="16 bytes"):
        prepare([1], {"request_id": request_id})


def test_no_forced_ids_and_empty_ones_are_not_the_same_message() -> None:
    assert "forced_ids" not in prepare([1], {"forced_ids": None}).arrays
    assert prepare([1], {"forced_ids": []}).arrays["forced_ids"].size == 0
    assert "stop_ids" not in prepare([1], {"stop_ids": ()}).arrays
