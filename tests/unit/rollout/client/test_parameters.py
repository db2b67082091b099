"""What a caller passes becomes fields and arrays; only what has no binary form is refused here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import areno
from areno.request import RequestLimits, check_request
from rollout.client.parameters import OPTIONS, id_array, prepare, prepare_evaluation, prepare_group, tool_wait_fields
from rollout.errors import InvalidRequest
from rollout.service.engine_host import requests_of
from rollout.wire.codec import decode, encode
from rollout.wire.generation_messages import MAX_MEMBERS
from rollout.wire.host_messages import Submit
from rollout.wire.operations import DATA_REQUESTS, Op
from tests.hostile_values import HOSTILE_VALUES, check_refusal


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


def test_biases_become_two_arrays_and_none_of_them_none() -> None:
    arrays = prepare([1], {"logit_bias": {5: 1, np.int64(7): np.float32(-0.5), 2**31: 1e39}}).arrays
    assert arrays["bias_ids"].tolist() == [5, 7, 2**31]
    assert arrays["bias_values"].dtype == np.float64 and arrays["bias_values"].tolist() == [1.0, -0.5, 1e39]
    assert not {"bias_ids", "bias_values"} & set(prepare([1], {"logit_bias": {}}).arrays)
    assert np.isnan(prepare([1], {"logit_bias": {5: float("nan")}}).arrays["bias_values"]).all(), "the engine names what is wrong"


@pytest.mark.parametrize("bias", [[(3, 1.0)], {True: 1.0}, {"a": 1.0}, {3: "1"}, {3: True}, {3: None}, {3: 10**400}, {1.5: 1.0}])
def test_biases_that_are_no_mapping_of_ids_to_numbers_are_refused_by_name(bias: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prepare([1], {"logit_bias": bias})
    assert str(refused.value.field).startswith("logit_bias") and refused.value.remedy


def test_stop_strings_are_a_list_and_one_may_be_given_alone() -> None:
    assert prepare([1], {"stop": "x"}).fields["stop"] == ["x"]
    assert prepare([1], {"stop": ("x", "y")}).fields["stop"] == ["x", "y"]
    assert all("stop" not in prepare([1], {"stop": nothing}).fields for nothing in (None, ()))


def test_a_group_names_its_members_and_is_the_same_message_when_it_is_sent_again() -> None:
    ids = [bytes([member] * 16) for member in range(1, 4)]
    first, again = (prepare_group([1, 2], 3, {"request_ids": ids, "top_k": 4, "return_kept_ids": True}) for _ in range(2))
    assert first.op is Op.GENERATE_GROUP and first.members == tuple(ids)
    assert first.request_id == again.request_id and first.request_id not in ids
    assert first.arrays["member_ids"].tobytes() == b"".join(ids)
    assert dict(first.fields) == {"top_k": 4, "return_kept_ids": True} and first.wants.kept_ids
    drawn = prepare_group([1], 2, {})
    assert len(set(drawn.members)) == 2


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2", None, MAX_MEMBERS + 1])
def test_a_group_has_at_least_one_member(n: Any) -> None:
    with pytest.raises(InvalidRequest, match="at least one member") as refused:
        prepare_group([1], n, {})
    assert refused.value.field == "n"


@pytest.mark.parametrize("ids", [[bytes(16)], [bytes(16)] * 2, [b"x", bytes(16)]])
def test_request_ids_of_a_group_are_one_for_each_member(ids: Any) -> None:
    with pytest.raises(InvalidRequest):
        prepare_group([1], 2, {"request_ids": ids})
    with pytest.raises(InvalidRequest, match=r"known: max_new_tokens, .*request_ids"):
        prepare_group([1], 2, {"request_id": bytes(16)})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_tokens", "did you mean max_new_tokens"),
        ("temprature", "did you mean temperature"),
        ("n", "generate_group"),
        ("zzzz", "leave zzzz out"),
    ],
)
def test_an_unknown_option_is_told_what_it_may_mean(name: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        prepare([1], {name: 1})


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True])
def test_a_seed_out_of_its_range_is_told_the_range(seed: object) -> None:
    with pytest.raises(InvalidRequest, match=r"from 0 to 2\*\*64 - 1"):
        prepare([1], {"seed": seed})


def test_text_and_a_tokenizers_encoding_are_told_how_they_become_ids() -> None:
    class Encoding:
        ids, tokens = (1,), ("a",)

    with pytest.raises(InvalidRequest, match=r"client\.tokenizer\(\)\.encode\(text\)\.ids"):
        prepare("hello", {})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"encoding\.ids"):
        prepare(Encoding(), {})  # type: ignore[arg-type]


LIMITS = RequestLimits(
    vocab_size=256, num_valid_ids=250, max_model_len=200, pool_tokens=300, eos_ids=(2, 7), sampling_slots=4, kept_ids=True
)
SAMPLING = tuple(name for name in areno.SamplingParams.__dataclass_fields__)
SHARED = tuple(name for name in OPTIONS if name in SAMPLING or (name in areno.Request.__dataclass_fields__ and name != "request_id"))


def _verdict_in_process(name: str, value: Any) -> str | None:
    """Return the field that the engine refuses when it is called directly."""
    of_sampling = {name: value} if name in SAMPLING else {}
    of_request = {"prompt_ids": [3, 4, 5], "request_id": 0} | ({} if name in SAMPLING else {name: value})
    try:
        sampling = areno.SamplingParams(**{"max_new_tokens": 8, **of_sampling})
        check_request(areno.Request(sampling=sampling, **of_request), LIMITS)
    except areno.InvalidRequest as error:
        return str(error.field)
    return None


def _verdict_over_the_wire(name: str, value: Any) -> str | None:
    """Return the field that client, codec or engine host refuses: all that a request passes on its way but the sockets."""
    prompt, options = (value, {}) if name == "prompt_ids" else ([3, 4, 5], {name: value})
    try:
        prepared = prepare(prompt, {"max_new_tokens": 8, **options})
        frames = [bytes(frame) for frame in encode(prepared.op, prepared.request_id, prepared.fields, prepared.arrays)]
        packet = decode(frames, DATA_REQUESTS)
        params = packet.body.model_dump()
        seed = params["seed"]
        body = Submit.model_validate({"engine_ids": [0], "seeds": [0 if seed is None else seed], "params": {**params, "stop": []}})
        for request in requests_of(body, packet.arrays):
            check_request(request, LIMITS)
    except (InvalidRequest, areno.InvalidRequest) as error:
        check_refusal(error, (name, repr(type(value))))
        return str(error.field)
    return None


# What Python has and a message leaves out.
OTHERWISE = {"stop_ids": {"None"}, "logit_bias": {"None"}}


@pytest.mark.parametrize("name", ["prompt_ids", *SHARED])
def test_a_field_is_taken_or_refused_alike_in_process_and_over_the_wire(name: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        if (isinstance(value, np.ndarray) and not value.ndim) or (value is None and name in OTHERWISE):
            continue
        inside, outside = _verdict_in_process(name, value), _verdict_over_the_wire(name, value)
        assert (inside is None) == (outside is None), (name, number, inside, outside)
        assert inside is None or inside == outside or (inside.startswith(name) and str(outside).startswith(name)), (
            name,
            number,
            inside,
            outside,
        )


@pytest.mark.parametrize("name", [*OPTIONS, "prompt_ids"])
def test_a_generation_is_a_message_or_is_refused_by_name(name: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            made = prepare(value, {}) if name == "prompt_ids" else prepare([1], {name: value})
            decode([bytes(frame) for frame in encode(made.op, made.request_id, made.fields, made.arrays)], DATA_REQUESTS)
        except InvalidRequest as error:
            check_refusal(error, (name, number))


@pytest.mark.parametrize("name", ["n", "request_ids", "seed"])
def test_a_group_is_a_message_or_is_refused_by_name(name: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            made = prepare_group([1], value, {}) if name == "n" else prepare_group([1], 2, {name: value})
            decode([bytes(frame) for frame in encode(made.op, made.request_id, made.fields, made.arrays)], DATA_REQUESTS)
        except InvalidRequest as error:
            check_refusal(error, (name, number))


@pytest.mark.parametrize("name", ["prompts", "deadline_s", "seed"])
def test_an_evaluation_is_messages_or_is_refused_by_name(name: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            given = {"prompts": [[1]], "deadline_s": 1.0, name: value}
            options = {"seed": given.pop("seed")} if "seed" in given else {}
            for made in prepare_evaluation(given["prompts"], given["deadline_s"], options):
                decode([bytes(frame) for frame in encode(made.op, made.request_id, made.fields, made.arrays)], DATA_REQUESTS)
        except InvalidRequest as error:
            check_refusal(error, (name, number))


@pytest.mark.parametrize("name", ["lineage", "expect_s", "cache_salt"])
def test_a_hint_is_a_message_or_is_refused_by_name(name: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            encode(Op.TOOL_WAIT, bytes(16), tool_wait_fields(**{"lineage": "a", "expect_s": 1.0, "cache_salt": None, name: value}))
        except InvalidRequest as error:
            check_refusal(error, (name, number))


@pytest.mark.parametrize("prompts", [[1, 2, 3], (1,), range(3), np.arange(3), [np.int64(4)]])
def test_one_prompt_alone_is_no_list_of_prompts_to_evaluate(prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"pass \[prompt_ids\] for a single prompt") as refusal:
        prepare_evaluation(prompts, 1.0, {})
    check_refusal(refusal.value, prompts)
    assert refusal.value.field == "prompts"
    assert len(prepare_evaluation([prompts], 1.0, {})) == 1
