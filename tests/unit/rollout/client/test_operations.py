"""What calls refuse before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollout.client import operations
from rollout.client.operations import Operation, weights_begin
from rollout.client.results import CanarySpec
from rollout.errors import InvalidRequest
from rollout.wire.codec import NO_REQUEST, decode, encode
from rollout.wire.operations import CONTROL_REQUESTS, DATA_REQUESTS
from tests.hostile_values import HOSTILE_VALUES, check_refusal


@pytest.mark.parametrize("spec", [3, None, {"dtype": "float32"}, {"dtype": "float32", "shape": [1.5]}, {"dtype": "float32", "shape": 4}])
def test_a_manifest_entry_that_is_no_dtype_and_shape_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(InvalidRequest, match="manifest") as refusal:
        weights_begin({"a.weight": spec}, trainer_step=None, restore=None, partial=False)
    assert refusal.value.field == "manifest.a.weight" and refusal.value.remedy


def test_a_manifest_goes_as_names_with_dtype_and_shape() -> None:
    operation = weights_begin({"a": {"dtype": "float32", "shape": (2, 3)}}, trainer_step=None, restore=None, partial=False)
    assert operation.fields["manifest"] == {"a": {"dtype": "float32", "shape": [2, 3]}}


CANARY = CanarySpec(ids=[1, 2], expected_logprobs=[-1.0])
CALLS: dict[str, Callable[[Any], Operation[Any]]] = {
    "request_id": lambda value: operations.cancel(value, lambda one: one),
    "ids": lambda value: operations.score(value, 1.0),
    "temperature": lambda value: operations.score([1, 2], value),
    "evaluate_deadline_s": operations.evaluate_begin,
    "level": operations.sleep,
    "manifest": lambda value: weights_begin(value, trainer_step=None, restore=None, partial=False),
    "spec": lambda value: weights_begin({"a": value}, trainer_step=None, restore=None, partial=False),
    "trainer_step": lambda value: weights_begin(None, trainer_step=value, restore=None, partial=False),
    "restore": lambda value: weights_begin(None, trainer_step=None, restore=value, partial=False),
    "partial": lambda value: weights_begin(None, trainer_step=None, restore=None, partial=value),
    "path": lambda value: operations.weights_stage_file("u", value, size=1, xxh3=None),
    "size": lambda value: operations.weights_stage_file("u", "p", size=value, xxh3=None),
    "xxh3": lambda value: operations.weights_stage_file("u", "p", size=1, xxh3=value),
    "update_id": operations.weights_abort,
    "digests": lambda value: operations.weights_commit("u", digests=value, canaries=()),
    "digest": lambda value: operations.weights_commit("u", digests={"a": value}, canaries=()),
    "canaries": lambda value: operations.weights_commit("u", digests=None, canaries=value),
    "canary": lambda value: operations.weights_commit("u", digests=None, canaries=[value, CANARY]),
    "canary_ids": lambda value: operations.weights_commit("u", digests=None, canaries=[CanarySpec(ids=value, expected_logprobs=[1.0])]),
    "canary_logprobs": lambda value: operations.weights_commit(
        "u", digests=None, canaries=[CanarySpec(ids=[1, 2], expected_logprobs=value)]
    ),
    "canary_temperature": lambda value: operations.weights_commit(
        "u", digests=None, canaries=[CanarySpec(ids=[1, 2], expected_logprobs=[-1.0], temperature=value)]
    ),
    "mode": lambda value: operations.weights_commit("u", digests=None, canaries=(), mode=value),
    "drain_s": lambda value: operations.weights_commit("u", digests=None, canaries=(), drain_s=value),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_a_message_that_the_service_can_read_or_is_refused_by_name(name: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            call = CALLS[name](value)
            frames = [bytes(frame) for frame in encode(call.op, NO_REQUEST, call.fields, call.arrays)]
            decode(frames, CONTROL_REQUESTS if call.control else DATA_REQUESTS)
        except InvalidRequest as error:
            check_refusal(error, (name, number))


def test_a_commit_carries_digests_and_canaries_as_they_were_given() -> None:
    call = operations.weights_commit("u", digests={"a": np.uint64(2**64 - 1)}, canaries=[CANARY, CanarySpec(ids=[3], expected_logprobs=[])])
    assert call.fields["digests"] == {"a": 2**64 - 1} and call.fields["canary_temperatures"] == [1.0, 1.0]
    assert call.arrays["canary_ids"].tolist() == [1, 2, 3] and call.arrays["canary_counts"].tolist() == [2, 1]
    assert call.arrays["canary_logprobs"].tolist() == [-1.0]
