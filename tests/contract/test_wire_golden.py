"""The protocol's bytes, written down: a change here breaks every client that somebody else wrote."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.errors import Busy, InvalidRequest, RolloutError, error_class, error_fields, error_from_fields
from rollout.wire.arrays import ARRAYS
from rollout.wire.codec import PROTOCOL_VERSION, decode, encode
from rollout.wire.messages import MODELS
from rollout.wire.operations import CLIENT_REPLIES, CONTROL_REQUESTS, DATA_REQUESTS, HOST_REPLIES, HOST_REQUESTS, Op
from tests.contract.golden_frames import PIECES

REQUEST_ID = bytes(range(16))

OPERATIONS = {
    "HELLO": 1, "WELCOME": 2, "HEARTBEAT": 3, "ALIVE": 4, "GOODBYE": 5, "ERROR": 6, "DONE": 7,
    "GENERATE": 16, "ATTACH": 17, "CANCEL": 18, "CANCEL_RESULT": 19, "DELTAS": 20, "ACK": 21, "SCORE": 22, "SCORED": 23,
    "GENERATE_GROUP": 24, "TOOL_WAIT": 25,
    "INFO": 32, "INFO_RESULT": 33, "STATS": 34, "STATS_RESULT": 35, "TOKENIZER_FILES": 36, "TOKENIZER_FILES_RESULT": 37,
    "PAUSE": 48, "RESUME": 49, "WEIGHTS_BEGIN": 50, "WEIGHTS_TICKET": 51, "WEIGHTS_STAGE_FILE": 52, "WEIGHTS_COMMIT": 53,
    "WEIGHTS_REPORT": 54, "WEIGHTS_ABORT": 55, "SHUTDOWN": 56,
    "WEIGHTS_STAGE_BUCKET": 57, "WEIGHTS_JOIN_GROUP": 58,
    "EVALUATE_BEGIN": 60, "EVALUATION": 61, "EVALUATE_END": 62, "SLEEP": 63, "WAKE": 64,
    "HOST_READY": 80, "HOST_FAILED": 81, "SUBMIT": 82, "STEP": 83, "STEP_ACK": 84, "KILL": 85, "UPDATE_OPEN": 86,
    "EXPECT_RETURN": 87, "END_HINTS": 88, "HOST_LOADING": 89,
}  # fmt: skip

CODES = [
    "access_denied",
    "address_in_use", "asleep", "bucket_refused", "busy", "canary_mismatch", "checkpoint_invalid", "client_closed", "client_unusable",
    "conflict", "digest_mismatch", "drain_timeout", "duplicate_request", "engine_failure", "forked_client", "gone", "host_failed",
    "insecure_address", "internal_error", "invalid_config", "invalid_request", "malformed", "manifest_mismatch", "needs_weights",
    "no_evaluation", "no_service", "no_session", "no_update", "pause_held", "protocol_version", "request_error", "request_failed",
    "request_too_long", "rollout_error", "server_restarted", "server_unavailable", "service_stopping", "transport_unavailable",
    "unavailable", "unknown_operation", "unsupported_model", "update_busy", "version_changed", "weight_update_failed", "weights_changed",
    "weights_file_refused", "weights_unchanged",
]  # fmt: skip

BUSY_BYTES = [
    "01000600000102030405060708090a0b0c0d0e0f",
    "9284a4636f6465a462757379a477686174a466756c6ca56c696d6974d928746865207365727669636527732061646d697373696f6e206c696d69742069732072"
    "656163686564ad72657472795f61667465725f73cb3fe000000000000090",
]
GROUP_BYTES = [
    "01001800000102030405060708090a0b0c0d0e0f",
    (
        "9283a5746f705f6b05a473746f7091a2c3a9a473656564cf80000000000000009493aa70726f6d70745f696473a33c6934910193a8626961"
        "735f696473a33c6934910193ab626961735f76616c756573a33c6638910193aa6d656d6265725f696473a37c7531920210"
    ),
    "01000000",
    "07000000",
    "00000000000004c0",
    "000102030405060708090a0b0c0d0e0f00000000000000000000000000000000",
]
TOOL_WAIT_BYTES = [
    "0100190000000000000000000000000000000000",
    "9283a76c696e65616765a165aa63616368655f73616c74c0a86578706563745f73cb400400000000000090",
]
FLUSH_BODY = (
    "9282a373657101a866696e69736865649187a5696e64657800a46b696e64a473746f70ad6f75747075745f746f6b656e7302ab73746f705f73747269"
    "6e67a178ad6b765f72656275696c745f61749103ad70726f6d70745f73636f726564c3aa746578745f6279746573029c93ab726571756573745f6964"
    "73a37c753192011093a76f666673657473a33c6938910193a6636f756e7473a33c6934910193a9746f6b656e5f696473a33c6934910293ae76657273"
    "696f6e5f76616c756573a33c6938910193ae76657273696f6e5f636f756e7473a33c6938910193ab6b6570745f636f756e7473a33c6934910293a86b"
    "6570745f696473a33c6934910393ad70726f6d70745f73636f726573a33c693892010493af70726f6d70745f6c6f6770726f6273a33c6634910193b3"
    "70726f6d70745f7261775f6c6f6770726f6273a33c6634910193a57465787473a37c75319102"
)


def _hex(frames: list) -> list[str]:  # type: ignore[type-arg]
    return [bytes(frame).hex() for frame in frames]


def test_the_protocol_version_and_the_operations_are_these() -> None:
    assert PROTOCOL_VERSION == 1
    assert {op.name: op.value for op in Op} == OPERATIONS
    assert set(MODELS) == set(Op)
    assert set(ARRAYS) <= set(Op)
    sockets = DATA_REQUESTS | CONTROL_REQUESTS | CLIENT_REPLIES | HOST_REQUESTS | HOST_REPLIES
    assert sockets == set(Op), "every operation belongs to a socket"
    assert not (HOST_REQUESTS - {Op.SCORE, Op.STATS}) & DATA_REQUESTS, "clients cannot say what only the front may say"


def test_error_codes_are_stable_and_each_has_one_class() -> None:
    def classes(root: type[RolloutError]) -> list[type[RolloutError]]:
        return [root, *(one for child in root.__subclasses__() for one in classes(child))]

    own = [one for one in classes(RolloutError) if one.__module__ == "rollout.errors"]
    assert sorted(one.code for one in own) == CODES
    assert all(error_class(one.code) is one for one in own)


def test_a_hello_has_these_bytes() -> None:
    frames = encode(Op.HELLO, REQUEST_ID, {"name": "x", "session": None, "secret": None})
    assert _hex(frames) == [
        "01000100000102030405060708090a0b0c0d0e0f",
        "9283a46e616d65a178a773657373696f6ec0a6736563726574c090",
    ]


def test_what_an_engine_is_has_these_bytes() -> None:
    sizes = {"vocab_size": 9, "num_valid_ids": 8, "eos_ids": [2], "max_model_len": 7, "page_size": 6, "num_pages": 5, "pool_tokens": 31}
    ways = {"max_rows": 4, "sampling_slots": 3, "kept_ids": False, "run_ahead": 1, "decode_tables": "resident"}
    results = {"result_transport": "host", "result_transport_reason": "r", "num_parameters": 300, "tp": 2}
    facts = {"model_type": "m", "dtype": "float32", "device": "cpu", **sizes, **ways, **results}
    frames = encode(Op.HOST_READY, bytes(16), {"engine": facts, "version": 1})
    assert _hex(frames) == [
        "01005000" + "00" * 16,
        "9282a6656e67696e65de0013aa6d6f64656c5f74797065a16da56474797065a7666c6f61743332a6646576696365a3637075aa766f6361625f73697a6509"
        "ad6e756d5f76616c69645f69647308a7656f735f6964739102ad6d61785f6d6f64656c5f6c656e07a9706167655f73697a6506a96e756d5f706167657305"
        "ab706f6f6c5f746f6b656e731fa86d61785f726f777304ae73616d706c696e675f736c6f747303a86b6570745f696473c2a972756e5f616865616401"
        "ad6465636f64655f7461626c6573a87265736964656e74b0726573756c745f7472616e73706f7274a4686f7374b7726573756c745f7472616e73706f7274"
        "5f726561736f6ea172ae6e756d5f706172616d6574657273cd012ca2747002a776657273696f6e0190",
    ]


def test_a_busy_error_has_these_bytes() -> None:
    busy = Busy("full", limit="the service's admission limit is reached")
    busy.retry_after_s = 0.5
    frames = encode(Op.ERROR, REQUEST_ID, error_fields(busy))
    assert _hex(frames) == BUSY_BYTES
    again = error_from_fields(decode([bytes(frame) for frame in frames], CLIENT_REPLIES).body.model_dump())
    assert isinstance(again, Busy) and again.retry_after_s == 0.5


def test_what_an_update_did_has_these_bytes() -> None:
    counts = {"version": 3, "num_tensors": 2, "num_bytes": 192, "changed_tensors": 1, "changed_bytes": 128}
    times = {"staging_s": 0.5, "swap_ms": 1.5, "proof_ms": 2.5, "pause_ms": 4.5, "inspect_s": 0.25, "derive_s": 0.125}
    frames = encode(Op.WEIGHTS_REPORT, REQUEST_ID, counts | times)
    assert _hex(frames) == [
        "01003600000102030405060708090a0b0c0d0e0f",
        (
            "928ba776657273696f6e03ab6e756d5f74656e736f727302a96e756d5f6279746573ccc0af6368616e6765645f74656e736f727301ad6368616e6765"
            "645f6279746573cc80a973746167696e675f73cb3fe0000000000000a7737761705f6d73cb3ff8000000000000a870726f6f665f6d73cb4004000000"
            "000000a870617573655f6d73cb4012000000000000a9696e73706563745f73cb3fd0000000000000a86465726976655f73cb3fc000000000000090"
        ),
    ]


def test_a_generation_has_these_bytes() -> None:
    fields = {"max_new_tokens": 4, "temperature": 0.5}
    frames = encode(Op.GENERATE, REQUEST_ID, fields, {"prompt_ids": np.array([1, 258], np.int32)})
    assert _hex(frames) == [
        "01001000000102030405060708090a0b0c0d0e0f",
        "9282ae6d61785f6e65775f746f6b656e7304ab74656d7065726174757265cb3fe00000000000009193aa70726f6d70745f696473a33c69349102",
        "0100000002010000",
    ]


def test_a_group_with_biases_and_stop_strings_has_these_bytes() -> None:
    fields = {"top_k": 5, "stop": ["é"], "seed": 2**63}
    arrays = {
        "prompt_ids": np.array([1], np.int32),
        "bias_ids": np.array([7], np.int32),
        "bias_values": np.array([-2.5], np.float64),
        "member_ids": np.frombuffer(REQUEST_ID + bytes(16), np.uint8).reshape(2, 16),
    }
    frames = encode(Op.GENERATE_GROUP, REQUEST_ID, fields, arrays)
    assert _hex(frames) == GROUP_BYTES
    body = decode([bytes(frame) for frame in frames], DATA_REQUESTS).body
    assert (body.top_k, body.stop, body.seed, body.top_p) == (5, ["é"], 2**63, 1.0)  # type: ignore[attr-defined]


def test_the_defaults_of_a_generation_are_these() -> None:
    defaults = {name: field.default for name, field in MODELS[Op.GENERATE].model_fields.items()}
    assert defaults == {
        "max_new_tokens": 128, "min_new_tokens": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None, "ignore_eos": False, "stop": [],
        "logprobs": True, "return_kept_ids": False, "prompt_logprobs_from": None, "prior_output_tokens": 0, "lineage": None,
        "cache_salt": None, "kv_policy": "keep", "max_kv_lag": 4, "min_version": None, "deadline_s": None,
    }  # fmt: skip


def test_a_flush_with_kept_sets_a_scored_prompt_and_a_text_has_these_bytes() -> None:
    arrays = {
        "request_ids": np.frombuffer(REQUEST_ID, np.uint8).reshape(1, 16),
        "offsets": np.array([0], np.int64),
        "counts": np.array([2], np.int32),
        "token_ids": np.array([7, 9], np.int32),
        "version_values": np.array([5], np.int64),
        "version_counts": np.array([2], np.int64),
        "kept_counts": np.array([2, 1], np.int32),
        "kept_ids": np.array([7, 3, 9], np.int32),
        "prompt_scores": np.array([[0, 4, 1, 5]], np.int64),
        "prompt_logprobs": np.array([-0.5], np.float32),
        "prompt_raw_logprobs": np.array([-1.0], np.float32),
        "texts": np.frombuffer("é".encode(), np.uint8),
    }
    ending = {
        "index": 0,
        "kind": "stop",
        "output_tokens": 2,
        "stop_string": "x",
        "kv_rebuilt_at": [3],
        "prompt_scored": True,
        "text_bytes": 2,
    }
    frames = encode(Op.DELTAS, bytes(16), {"seq": 1, "finished": [ending]}, arrays)
    assert _hex(frames)[1] == FLUSH_BODY
    assert _hex(frames)[8:] == [
        "0200000001000000",
        "070000000300000009000000",
        "0000000000000000040000000000000001000000000000000500000000000000",
        "000000bf",
        "000080bf",
        "c3a9",
    ]
    assert decode([bytes(frame) for frame in frames], CLIENT_REPLIES).body.finished[0].stop_string == "x"  # type: ignore[attr-defined]


def test_a_flush_has_these_bytes() -> None:
    arrays = {
        "request_ids": np.frombuffer(REQUEST_ID, np.uint8).reshape(1, 16),
        "offsets": np.array([3], np.int64),
        "counts": np.array([2], np.int32),
        "token_ids": np.array([7, 9], np.int32),
        "logprobs": np.array([-0.5, -1.0], np.float32),
        "version_values": np.array([5], np.int64),
        "version_counts": np.array([2], np.int64),
    }
    ending = {"index": 0, "kind": "length", "output_tokens": 5}
    frames = encode(Op.DELTAS, bytes(16), {"seq": 1, "finished": [ending]}, arrays)
    assert _hex(frames)[0] == "01001400" + "00" * 16
    assert _hex(frames)[2:] == [
        REQUEST_ID.hex(),
        "0300000000000000",
        "02000000",
        "0700000009000000",
        "000000bf000080bf",
        "0500000000000000",
        "0200000000000000",
    ]
    packet = decode([bytes(frame) for frame in frames], CLIENT_REPLIES)
    assert packet.body.finished[0].output_tokens == 5  # type: ignore[attr-defined]
    assert packet.arrays["token_ids"].tolist() == [7, 9]


def test_arrays_travel_little_endian_whatever_the_caller_has() -> None:
    big = np.array([1, 2], ">i4")
    strided = np.arange(6, dtype=np.int32)[::2]
    assert bytes(encode(Op.SCORE, REQUEST_ID, {}, {"ids": big})[2]) == b"\1\0\0\0\2\0\0\0"
    assert bytes(encode(Op.SCORE, REQUEST_ID, {}, {"ids": strided})[2]) == np.array([0, 2, 4], "<i4").tobytes()


@pytest.mark.parametrize(
    ("handle", "arrays", "said"),
    [
        (
            {"kind": "shared", "segment": "areno-push-7-9-00112233-1", "nonce": REQUEST_ID},
            {},
            "83a46b696e64a6736861726564a77365676d656e74b96172656e6f2d707573682d372d392d30303131323233332d31a56e6f6e6365c410"
            "000102030405060708090a0b0c0d0e0f",
        ),
        (
            {"kind": "memfd", "process": 7, "descriptor": 9, "nonce": REQUEST_ID},
            {},
            "84a46b696e64a56d656d6664a770726f6365737307aa64657363726970746f7209a56e6f6e6365c410000102030405060708090a0b0c0d0e0f",
        ),
        ({"kind": "frames"}, {"content": np.arange(12, dtype=np.uint8)}, "81a46b696e64a66672616d6573"),
        ({"kind": "group"}, {}, "81a46b696e64a567726f7570"),
        ({"kind": "group", "group": REQUEST_ID}, {}, "82a46b696e64a567726f7570a567726f7570c410000102030405060708090a0b0c0d0e0f"),
        (
            {"kind": "cuda", "device": REQUEST_ID, "event": bytes(64), "allocations": [{"handle": b"\x01" * 64, "size": 4096}]},
            {},
            "84a46b696e64a463756461a6646576696365c410000102030405060708090a0b0c0d0e0fa56576656e74c440"
            + "00" * 64
            + "ab616c6c6f636174696f6e739182a668616e646c65c440"
            + "01" * 64
            + "a473697a65cd1000",
        ),
    ],
)
def test_a_bucket_of_weights_has_these_bytes(handle: dict[str, object], arrays: dict[str, np.ndarray], said: str) -> None:
    fields = {"update_id": "u", "bucket": 3, "size": 12, "pieces": PIECES, "handle": handle, "xxh3": None}
    frames = [bytes(frame) for frame in encode(Op.WEIGHTS_STAGE_BUCKET, REQUEST_ID, fields, arrays)]
    assert frames[0].hex() == "01003900000102030405060708090a0b0c0d0e0f"
    before = (
        "9286a97570646174655f6964a175a66275636b657403a473697a650ca670696563657387a56e616d657391a161a664747970657391a862666c6f61743136"
        "a673686170657391920203a67374617274739100a6636f756e74739106a76f6666736574739100a6706c616365739100a668616e646c65"
    )
    after = "a478786833c0" + ("91" + "93a7636f6e74656e74a37c7531910c" if arrays else "90")
    assert frames[1].hex() == before + said + after
    body = decode(frames, CONTROL_REQUESTS).body
    assert body.model_dump(exclude_unset=True) == fields
    assert decode(frames, HOST_REQUESTS).body == body


def test_joining_a_group_has_these_bytes() -> None:
    fields = {"update_id": "u", "host": "h", "port": 4000, "backend": "gloo", "device": None, "timeout_s": 2.0}
    frames = [bytes(frame) for frame in encode(Op.WEIGHTS_JOIN_GROUP, REQUEST_ID, fields)]
    assert [frame.hex() for frame in frames] == [
        "01003a00000102030405060708090a0b0c0d0e0f",
        (
            "9286a97570646174655f6964a175a4686f7374a168a4706f7274cd0fa0a76261636b656e64a4676c6f6fa6646576696365c0a974696d656f75745f73cb40"
            "0000000000000090"
        ),
    ]
    assert decode(frames, CONTROL_REQUESTS).body.model_dump(exclude_unset=True) == fields


def test_a_hint_of_return_has_these_bytes() -> None:
    fields = {"lineage": "e", "cache_salt": None, "expect_s": 2.5}
    frames = [bytes(frame) for frame in encode(Op.TOOL_WAIT, bytes(16), fields)]
    assert [frame.hex() for frame in frames] == TOOL_WAIT_BYTES
    assert decode(frames, DATA_REQUESTS).body.model_dump() == fields
    handed_on = [bytes(frame) for frame in encode(Op.EXPECT_RETURN, bytes(16), {**fields, "owner": "o"})]
    assert decode(handed_on, HOST_REQUESTS).body.model_dump() == {**fields, "owner": "o"}


@pytest.mark.parametrize("change", [{"expect_s": 0.0}, {"expect_s": float("inf")}, {"lineage": ""}, {"other": 1}])
def test_a_hint_outside_its_domain_is_refused_by_name(change: dict[str, object]) -> None:
    frames = [bytes(frame) for frame in encode(Op.TOOL_WAIT, bytes(16), {"lineage": "e", "expect_s": 2.5, **change})]
    with pytest.raises(InvalidRequest) as refused:
        decode(frames, DATA_REQUESTS)
    assert refused.value.field == next(iter(change))
