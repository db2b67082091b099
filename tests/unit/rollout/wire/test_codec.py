"""Every byte from a socket is hostile: what is no message of this socket is refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import InvalidRequest, ProtocolMismatch, RolloutError, UnknownOperation, WireError
from rollout.wire.codec import HEADER, MAX_FRAMES, PROTOCOL_VERSION, decode, encode
from rollout.wire.messages import WeightsStageBucket, parse_fields
from rollout.wire.operations import CONTROL_REQUESTS, DATA_REQUESTS, Op

REQUEST_ID = bytes(range(1, 17))
PROMPT = {"prompt_ids": np.array([1, 2, 3], np.int32)}


def frames_of(fields: dict[str, Any], arrays: dict[str, np.ndarray] | None = None, op: Op = Op.GENERATE) -> list[bytes]:
    return [bytes(frame) for frame in encode(op, REQUEST_ID, fields, PROMPT if arrays is None else arrays)]


def with_body(body: object) -> list[bytes]:
    return [HEADER.pack(PROTOCOL_VERSION, Op.GENERATE, REQUEST_ID), body if isinstance(body, bytes) else msgpack.packb(body), b"\1\0\0\0"]


def test_what_was_encoded_comes_back() -> None:
    fields = {"max_new_tokens": 5, "temperature": 2, "seed": 2**64 - 1, "lineage": "a"}
    packet = decode(frames_of(fields, {**PROMPT, "stop_ids": np.array([], np.int64)}), DATA_REQUESTS)
    assert (packet.op, packet.request_id) == (Op.GENERATE, REQUEST_ID)
    assert packet.body.model_dump(exclude_unset=True) == {"max_new_tokens": 5, "temperature": 2.0, "seed": 2**64 - 1, "lineage": "a"}
    assert packet.arrays["prompt_ids"].tolist() == [1, 2, 3]
    assert packet.arrays["stop_ids"].size == 0
    assert not packet.arrays["prompt_ids"].flags.writeable


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"bogus": 1}, "bogus", "known: max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens", "valid integer"),
        ({"max_new_tokens": 1.5}, "max_new_tokens", "valid integer"),
        ({"max_new_tokens": 2**63}, "max_new_tokens", "less than"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"temperature": float("inf")}, "temperature", "finite"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"logprobs": 1}, "logprobs", "valid boolean"),
        ({"lineage": ""}, "lineage", "at least 1"),
        ({"lineage": "x" * 201}, "lineage", "at most 200"),
        ({"deadline_s": 0}, "deadline_s", "greater than 0"),
        ({"kv_policy": b"keep"}, "kv_policy", "valid string"),
        ({"top_p": float("nan")}, "top_p", "finite"),
        ({"presence_penalty": float("inf")}, "presence_penalty", "finite"),
        ({"top_k": 2.0}, "top_k", "valid integer"),
        ({"return_kept_ids": 1}, "return_kept_ids", "valid boolean"),
        ({"prompt_logprobs_from": 2**63}, "prompt_logprobs_from", "less than"),
        ({"stop": "x"}, "stop", "valid list"),
        ({"stop": [""]}, "stop.0", "at least 1"),
        ({"stop": ["x", "y" * 257]}, "stop.1", "at most 256"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": [b"x"]}, "stop.0", "valid string"),
    ],
)
def test_a_wrong_field_is_refused_with_its_name_and_limit(fields: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(frames_of(fields), DATA_REQUESTS)
    assert refused.value.field == field
    assert said in str(refused.value.limit)
    assert field in str(refused.value.remedy)


def test_a_map_that_is_none_is_refused_with_the_names_of_its_fields() -> None:
    bucket: dict[str, Any] = {"update_id": "u", "bucket": 0, "size": 4, "handle": {"kind": "frames"}}
    row = {"name": "w", "dtype": "float32", "shape": [1], "start": 0, "count": 1, "offset": 0}
    with pytest.raises(InvalidRequest, match="a map of names, dtypes, shapes, starts, counts, offsets, places; pass pieces"):
        parse_fields(WeightsStageBucket, {**bucket, "pieces": [row]})
    columns = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "starts": [0], "counts": [], "offsets": [0]}
    with pytest.raises(InvalidRequest, match="is refused; columns of one length, not of"):
        parse_fields(WeightsStageBucket, {**bucket, "pieces": columns})


@pytest.mark.parametrize(
    "value", [{1, 2}, 2**70, object(), "\ud800", {"a": {1}}, 1j], ids=["set", "large int", "object", "surrogate", "nested set", "complex"]
)
def test_a_value_without_a_binary_form_is_refused_before_it_is_sent(value: object) -> None:
    with pytest.raises(InvalidRequest, match="cannot be sent") as refused:
        encode(Op.GENERATE, REQUEST_ID, {"max_new_tokens": 1, "lineage": value})
    assert refused.value.field == "lineage"
    assert "convert lineage" in str(refused.value.remedy)


def test_another_protocol_version_is_refused_with_both_numbers() -> None:
    frames = frames_of({})
    frames[0] = HEADER.pack(9, Op.GENERATE, REQUEST_ID)
    with pytest.raises(ProtocolMismatch, match="version 9; this side speaks version 1; install the same"):
        decode(frames, DATA_REQUESTS)


def test_an_operation_of_another_socket_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(UnknownOperation, match="PAUSE=48"):
        decode(frames_of({}), CONTROL_REQUESTS)
    frames = frames_of({})
    frames[0] = HEADER.pack(PROTOCOL_VERSION, 999, REQUEST_ID)
    with pytest.raises(UnknownOperation, match="operation 999"):
        decode(frames, DATA_REQUESTS)


@pytest.mark.parametrize(("name", "dtype"), [("bias_ids", np.int32), ("bias_values", np.float64)])
def test_an_array_with_more_entries_than_any_engine_takes_is_refused_before_it_is_read(name: str, dtype: type) -> None:
    assert decode(frames_of({}, {**PROMPT, name: np.zeros(4096, dtype)}), DATA_REQUESTS).arrays[name].size == 4096
    with pytest.raises(WireError, match="at most 4096; shorten bias") as refused:
        decode(frames_of({}, {**PROMPT, name: np.zeros(4097, dtype)}), DATA_REQUESTS)
    assert refused.value.field == name


def test_a_group_names_its_members() -> None:
    with pytest.raises(WireError, match="lacks array member_ids"):
        decode(frames_of({}, op=Op.GENERATE_GROUP), DATA_REQUESTS)
    with pytest.raises(WireError, match="no array 'member_ids'"):
        decode(frames_of({}, {**PROMPT, "member_ids": np.zeros((2, 16), np.uint8)}), DATA_REQUESTS)


def spoil_bytes(frames: list[bytes]) -> None:
    frames[2] = frames[2][:-1]


def spoil_shape(frames: list[bytes]) -> None:
    frames[1] = msgpack.packb([{}, [["prompt_ids", "<i4", [2**39]]]])


def negative_shape(frames: list[bytes]) -> None:
    frames[1] = msgpack.packb([{}, [["prompt_ids", "<i4", [-3]]]])


def two_dimensions(frames: list[bytes]) -> None:
    frames[1] = msgpack.packb([{}, [["prompt_ids", "<i4", [3, 1]]]])


def object_dtype(frames: list[bytes]) -> None:
    frames[1] = msgpack.packb([{}, [["prompt_ids", "|O", [3]]]])


def big_endian(frames: list[bytes]) -> None:
    frames[1] = msgpack.packb([{}, [["prompt_ids", ">i4", [3]]]])


def unknown_array(frames: list[bytes]) -> None:
    frames[1] = msgpack.packb([{}, [["blob", "<i4", [3]]]])


def array_twice(frames: list[bytes]) -> None:
    frames[1] = msgpack.packb([{}, [["prompt_ids", "<i4", [3]], ["prompt_ids", "<i4", [3]]]])
    frames.append(frames[2])


def no_arrays(frames: list[bytes]) -> None:
    frames[1] = msgpack.packb([{}, []])
    del frames[2]


def frame_missing(frames: list[bytes]) -> None:
    del frames[2]


def frame_extra(frames: list[bytes]) -> None:
    frames.append(b"")


def short_header(frames: list[bytes]) -> None:
    frames[0] = frames[0][:-1]


def only_header(frames: list[bytes]) -> None:
    del frames[1:]


def many_frames(frames: list[bytes]) -> None:
    frames.extend([b""] * MAX_FRAMES)


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_bytes, spoil_shape, negative_shape, two_dimensions, object_dtype, big_endian, unknown_array, array_twice, no_arrays,
        frame_missing, frame_extra, short_header, only_header, many_frames,
    ],
)  # fmt: skip
def test_frames_that_do_not_fit_together_are_refused(spoil: Callable[[list[bytes]], None]) -> None:
    frames = frames_of({})
    spoil(frames)
    with pytest.raises(WireError):
        decode(frames, DATA_REQUESTS)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xc1", b"\x92\x80", msgpack.packb({}), msgpack.packb([{}]), msgpack.packb([[], []]), msgpack.packb([{}, {}]),
        msgpack.packb([{1: 2}, []]), b"\x91" * 3000, b"\x92\x81\xa1a" + b"\x91" * 20 + b"\xc0\x90",
        msgpack.packb([{"lineage": msgpack.ExtType(4, b"x")}, []]), msgpack.packb([{"lineage": msgpack.Timestamp(1)}, []]),
        b"\x92\xdf\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\x92\x80\x90trailing", b"cos\nsystem\n(S'true'\ntR.",
    ],
)  # fmt: skip
def test_a_body_that_is_not_the_closed_form_of_msgpack_is_refused(body: bytes) -> None:
    frames = with_body(body)
    with pytest.raises((WireError, InvalidRequest)):
        decode(frames[:2] if b"prompt" not in body else frames, DATA_REQUESTS)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_messages_are_read_or_refused_by_a_typed_error(data: st.DataObject) -> None:
    frames = frames_of({"max_new_tokens": 5, "lineage": "abc", "deadline_s": 1.0}, {**PROMPT, "stop_ids": np.array([4], np.int64)})
    for _ in range(data.draw(st.integers(1, 4))):
        which = data.draw(st.integers(0, len(frames) - 1))
        frame = bytearray(frames[which])
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        frames[which] = bytes(frame)[: data.draw(st.integers(0, len(frame)))] if data.draw(st.booleans()) else bytes(frame)
    with contextlib.suppress(RolloutError):
        decode(frames, DATA_REQUESTS)


def test_a_small_operations_body_is_small_and_the_limit_is_named() -> None:
    with pytest.raises(WireError, match="at most 65536") as refused:
        decode(with_body(b"\x91" * 65_537), DATA_REQUESTS)
    assert (refused.value.field, refused.value.value) == ("body", 65_537)


def test_a_body_of_nothing_but_empty_lists_is_given_up_before_it_fills_the_memory() -> None:
    rows = [[[] for _ in range(150_000)] for _ in range(4)]
    body = msgpack.packb([{"digests": rows}, []])
    frames = [HEADER.pack(PROTOCOL_VERSION, Op.WEIGHTS_COMMIT, REQUEST_ID), body]
    with pytest.raises(WireError, match="within limits"):
        decode(frames, CONTROL_REQUESTS)


def test_nesting_as_deep_as_the_bytes_allow_is_refused() -> None:
    for opening in (b"\x91", b"\x81\xa1x"):
        with pytest.raises(WireError):
            decode(with_body(opening * 20_000 + b"\xc0"), DATA_REQUESTS)


def test_a_client_names_a_bounded_number_of_ids_in_one_message() -> None:
    ids = np.zeros((16_385, 16), np.uint8)
    with pytest.raises(WireError, match="at most 16384"):
        decode(frames_of({}, {"request_ids": ids, "offsets": np.zeros(16_385, np.int64)}, Op.ATTACH), DATA_REQUESTS)
    with pytest.raises(WireError, match="at most 16384"):
        decode(frames_of({"seq": 1}, {"request_ids": ids}, Op.ACK), DATA_REQUESTS)


def test_an_array_over_bytes_is_sent_as_those_bytes() -> None:
    content = bytes(100_000)
    assert encode(Op.TOKENIZER_FILES_RESULT, REQUEST_ID, {"files": []}, {"content": np.frombuffer(content, np.uint8)})[2] is content
    assert encode(Op.SCORE, REQUEST_ID, {}, {"ids": np.frombuffer(content, np.int32)[1:]})[2] is not content
