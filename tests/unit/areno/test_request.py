"""Bad parameters are refused by name when they are made or at the engine's door, with limit and remedy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from areno import InvalidRequest, Request, RequestTooLong, SamplingParams
from areno.request import RequestLimits, check_request, resolve_stop_ids
from tests.hostile_values import HOSTILE_VALUES, check_refusal

LIMITS = RequestLimits(vocab_size=256, num_valid_ids=250, max_model_len=100, pool_tokens=80, eos_ids=(2, 7), sampling_slots=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", True),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", 2**31),
        ("max_new_tokens", "8"),
        ("max_new_tokens", None),
        ("min_new_tokens", -1),
        ("min_new_tokens", 500),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-40),
        ("temperature", 1e39),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("stop_ids", list(range(17))),
        ("stop_ids", [1.0]),
        ("stop_ids", [True]),
        ("stop_ids", "ab"),
        ("stop_ids", 7),
        ("ignore_eos", 1),
        ("logprobs", "yes"),
        ("forced_ids", [1] * 200),
        ("forced_ids", [[1, 2]]),
        ("forced_ids", np.array([1.0])),
    ],
)
def test_a_sampling_parameter_out_of_its_domain_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{field: value})
    error = refusal.value
    assert error.field == field and error.code == "invalid_request" and isinstance(error, ValueError)
    assert error.limit and error.remedy and error.remedy in str(error)


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [1, True],
        [1.5],
        ["a"],
        "abc",
        b"abc",
        5,
        None,
        [2**70],
        np.array([[1, 2]]),
        np.array([0.5]),
        np.array([], dtype=np.int32),
        [None],
    ],
)
def test_a_prompt_that_is_no_sequence_of_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Request(request_id=0, prompt_ids=prompt)
    assert refusal.value.field == "prompt_ids" and refusal.value.limit and refusal.value.remedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", -1),
        ("request_id", "a"),
        ("kv_policy", "drop"),
        ("lineage", ""),
        ("lineage", "x" * 300),
        ("cache_salt", 5),
        ("max_kv_lag", -1),
        ("sampling", {"temperature": 1}),
    ],
)
def test_a_request_field_out_of_its_domain_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Request(**{"request_id": 0, "prompt_ids": [1], field: value})
    assert refusal.value.field == field and refusal.value.remedy


@pytest.mark.parametrize("bad", [-1, 256, 2**31, 2**40])
@pytest.mark.parametrize("field", ["prompt_ids", "stop_ids", "forced_ids"])
def test_ids_outside_the_vocabulary_are_refused_at_the_door_with_their_place(field: str, bad: int) -> None:
    sampling = {} if field == "prompt_ids" else {field: [5, bad]}
    prompt = [5, bad] if field == "prompt_ids" else [5]
    with pytest.raises(InvalidRequest, match="allowed: 0 to 255") as refusal:
        check_request(Request(request_id=0, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=4, **sampling)), LIMITS)
    assert refusal.value.field == field and refusal.value.value == bad


def test_what_can_never_fit_is_refused_with_the_limit_it_breaks() -> None:
    with pytest.raises(RequestTooLong, match="context holds 100"):
        check_request(Request(request_id=0, prompt_ids=[1] * 60, sampling=SamplingParams(max_new_tokens=41)), LIMITS)
    with pytest.raises(RequestTooLong, match="KV pool holds 80") as refusal:
        check_request(Request(request_id=0, prompt_ids=[1] * 60, sampling=SamplingParams(max_new_tokens=40)), LIMITS)
    assert refusal.value.code == "request_too_long" and "num_pages" in str(refusal.value)
    check_request(Request(request_id=0, prompt_ids=[1] * 60, sampling=SamplingParams(max_new_tokens=20)), LIMITS)


def test_the_stop_set_is_the_union_with_the_models_and_bounded_together() -> None:
    own = SamplingParams(stop_ids=[9, 7])
    assert resolve_stop_ids(own, LIMITS).tolist() == [2, 7, 9]
    assert resolve_stop_ids(SamplingParams(stop_ids=[9], ignore_eos=True), LIMITS).tolist() == [9]
    with pytest.raises(InvalidRequest, match="at most 16 together"):
        check_request(Request(request_id=0, prompt_ids=[1], sampling=SamplingParams(stop_ids=range(20, 36))), LIMITS)


def test_numpy_integers_and_arrays_are_taken_as_they_are() -> None:
    made = Request(
        request_id=np.int64(3),
        prompt_ids=np.array([1, 2], dtype=np.uint16),
        sampling=SamplingParams(seed=np.uint64(2**64 - 1), temperature=np.float32(0.5)),
    )
    assert made.request_id == 3 and np.asarray(made.prompt_ids).tolist() == [1, 2] and made.sampling.seed == 2**64 - 1
    assert Request(request_id=0, prompt_ids=[np.int32(4), 5]).prompt_ids.tolist() == [4, 5]  # type: ignore[union-attr]


@pytest.mark.parametrize("field", SamplingParams.__dataclass_fields__)
def test_a_sampling_field_takes_or_refuses_whatever_it_is_given(field: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            SamplingParams(**{field: value})
        except InvalidRequest as error:
            check_refusal(error, (field, number))


@pytest.mark.parametrize("field", Request.__dataclass_fields__)
def test_a_request_field_takes_or_refuses_whatever_it_is_given(field: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            made = Request(**{"request_id": 0, "prompt_ids": [1], field: value})
            check_request(made, LIMITS)
        except InvalidRequest as error:
            check_refusal(error, (field, number))


@pytest.mark.parametrize("ids", [b"ab", bytearray(b"ab"), memoryview(b"ab")])
def test_bytes_are_no_token_ids_in_any_form(ids: Any) -> None:
    with pytest.raises(InvalidRequest, match="tokenize first"):
        Request(request_id=0, prompt_ids=ids)


@pytest.mark.parametrize("field", ["lineage", "cache_salt"])
def test_a_name_that_could_not_cross_the_wire_is_refused_in_process_too(field: str) -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        Request(**{"request_id": 0, "prompt_ids": [1], field: "a\ud800"})  # type: ignore[arg-type]


def test_a_number_beyond_every_float_is_out_of_range_on_its_own_side() -> None:
    for value, shown in ((10**400, math.inf), (-(10**400), -math.inf)):
        with pytest.raises(InvalidRequest, match=r"presence_penalty=.*is out of range; allowed: -100 to 100") as refusal:
            SamplingParams(presence_penalty=value)
        assert refusal.value.value == shown


@pytest.mark.parametrize("prior", [4, 5])
def test_a_resumed_output_that_has_used_its_whole_budget_is_refused(prior: int) -> None:
    with pytest.raises(InvalidRequest, match="the rollout is complete; do not resume it") as refusal:
        Request(request_id=0, prompt_ids=[1] * 6, prior_output_tokens=prior, sampling=SamplingParams(max_new_tokens=4))
    assert refusal.value.field == "prior_output_tokens"
    Request(request_id=0, prompt_ids=[1] * 6, prior_output_tokens=3, sampling=SamplingParams(max_new_tokens=4))
