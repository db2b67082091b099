"""One message of every operation at least, as fields and arrays; `golden_frames.json` has their bytes.

The contract test compares both, a client in another language can be tested with them, and fuzzing starts from them. After a
wanted change of the protocol: `python -m tests.contract.golden_frames` writes the file anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollout.wire.codec import NO_REQUEST, encode
from rollout.wire.operations import Op

FILE = Path(__file__).with_suffix(".json")
REQUEST_ID = bytes(range(16))
OTHER_ID = bytes(range(16, 32))
TOKEN = bytes(range(32, 48))
SECRET = bytes(range(48, 64))


class Golden(NamedTuple):
    """A message; `name` is unique."""

    name: str
    op: Op
    fields: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    request_id: bytes = REQUEST_ID


def _ids(*request_ids: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(request_ids), np.uint8).reshape(-1, 16)


def _i4(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _i8(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _f4(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


ERROR = {"code": "invalid_request", "what": "w", "field": "top_p", "value": 1.5, "limit": "l", "remedy": "r"}
FACTS = {
    "model_type": "llama", "dtype": "float32", "device": "cpu", "vocab_size": 256, "num_valid_ids": 256, "eos_ids": [2],
    "max_model_len": 512, "page_size": 16, "num_pages": 64, "pool_tokens": 1024, "max_rows": 8, "sampling_slots": 4, "kept_ids": True,
    "run_ahead": 0, "decode_tables": "resident", "result_transport": "host", "result_transport_reason": "", "num_parameters": 1, "tp": 1,
}  # fmt: skip
PIECES = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "starts": [0], "counts": [6], "offsets": [0], "places": [0]}
BUCKET = {"update_id": "u", "bucket": 3, "size": 12, "pieces": PIECES, "xxh3": None}
EVERY_OPTION = {
    "max_new_tokens": 8, "min_new_tokens": 1, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 2**63, "ignore_eos": True, "stop": ["\u00e9"], "logprobs": True,
    "return_kept_ids": True, "prompt_logprobs_from": 1, "prior_output_tokens": 1, "lineage": "l", "cache_salt": "s",
    "kv_policy": "recompute", "max_kv_lag": 2, "min_version": 0, "deadline_s": 1.5,
}  # fmt: skip
INPUT = {
    "prompt_ids": _i8(1, 2), "stop_ids": _i4(9), "forced_ids": _i4(4), "bias_ids": _i4(7), "bias_values": np.array([-2.5]),
}  # fmt: skip
ENDING = {"index": 0, "kind": "length", "output_tokens": 5}
FULL_ENDING = {
    "index": 0, "kind": "stop", "output_tokens": 2, "prompt_tokens": 3, "cached_tokens": 1, "seed": 2**64 - 1, "stop_id": 9,
    "stop_string": "x", "detail": None, "error": None, "kv_spans": [[0, 5]], "kv_rebuilt_at": [3], "prompt_scored": True, "text_bytes": 2,
}  # fmt: skip
FLUSH = {
    "request_ids": _ids(REQUEST_ID), "offsets": _i8(3), "counts": _i4(2), "token_ids": _i4(7, 9), "logprobs": _f4(-0.5, -1.0),
    "raw_logprobs": _f4(-0.5, -1.0), "behaviour_logprobs": _f4(-0.25, -0.75), "version_values": _i8(5), "version_counts": _i8(2),
}  # fmt: skip
FULL_FLUSH = {
    **FLUSH, "offsets": _i8(0), "kept_counts": _i4(2, 1), "kept_ids": _i4(7, 3, 9), "prompt_scores": np.array([[0, 4, 1, 5]], np.int64),
    "prompt_logprobs": _f4(-0.5), "prompt_raw_logprobs": _f4(-1.0), "texts": np.frombuffer("\u00e9".encode(), np.uint8),
}  # fmt: skip
REPORT = {
    "version": 5, "num_tensors": 2, "num_bytes": 24, "changed_tensors": 1, "changed_bytes": 12, "staging_s": 0.5, "swap_ms": 1.0,
    "proof_ms": 2.0, "pause_ms": 3.0, "canary_gap": 0.0, "canary_mean_gap": 0.0, "decode_canary_gap": None, "inspect_s": 0.0,
    "derive_s": 0.25,
    "warning": None,
}  # fmt: skip
INFO = {
    "protocol_version": 1, "incarnation": TOKEN, "address": "ipc:///s", "model": "m", "health": "ready", "version": 5,
    "needs_weights": None,
    "paused_by": [], "asleep": None, "weights_dir": "w", "tokenizer_digest": None, "chat_template_digest": None, "lease_s": 30.0,
    "max_message_bytes": 67108864, "engine": FACTS,
}  # fmt: skip
WELCOME = {
    "incarnation": TOKEN, "session": OTHER_ID, "secret": SECRET, "lease_s": 30.0, "control_address": "ipc:///s.control",
    "max_message_bytes": 67108864,
}  # fmt: skip
STEP = {
    "accepted": _i8(1), "request_ids": _i8(1), "token_ids": _i4(7), "logprobs": _f4(-0.5), "raw_logprobs": _f4(-0.5),
    "behaviour_logprobs": _f4(float("nan")), "versions": _i8(5), "kept_counts": _i4(1), "kept_ids": _i4(7),
    "prompt_scores": np.array([[1, 4, 1, 5]], np.int64), "prompt_logprobs": _f4(-0.5), "prompt_raw_logprobs": _f4(-1.0),
}  # fmt: skip
HOST_ENDING = {
    "engine_id": 1, "kind": "length", "output_tokens": 1, "prompt_tokens": 3, "cached_tokens": 0, "seed": 1, "stop_id": None,
    "detail": None, "kv_spans": [[0, 5]], "kv_rebuilt_at": [],
}  # fmt: skip
CANARIES = {"canary_ids": _i4(1, 2, 3), "canary_counts": _i8(3), "canary_logprobs": _f4(-1.0, -2.0)}
MANIFEST = {"a": {"dtype": "bfloat16", "shape": [2, 3]}}

GOLDEN = [
    Golden("hello", Op.HELLO, {"name": "x", "session": None, "secret": None}, {}),
    Golden("hello again", Op.HELLO, {"name": "x", "session": OTHER_ID, "secret": SECRET}, {}),
    Golden("welcome", Op.WELCOME, WELCOME, {}),
    Golden("heartbeat", Op.HEARTBEAT, {}, {}),
    Golden("alive", Op.ALIVE, {"health": "ready", "version": 5}, {"request_ids": _ids(OTHER_ID)}),
    Golden("goodbye", Op.GOODBYE, {}, {}, NO_REQUEST),
    Golden("error", Op.ERROR, ERROR, {}),
    Golden("busy", Op.ERROR, {"code": "busy", "what": "w", "retry_after_s": 1.5}, {}),
    Golden("done", Op.DONE, {}, {}),
    Golden("generate", Op.GENERATE, {"max_new_tokens": 4, "temperature": 0.5}, {"prompt_ids": _i4(1, 258)}),
    Golden("generate, every option", Op.GENERATE, EVERY_OPTION, INPUT),
    Golden("attach", Op.ATTACH, {}, {"request_ids": _ids(OTHER_ID), "offsets": _i8(3)}),
    Golden("cancel", Op.CANCEL, {"target": OTHER_ID}, {}),
    Golden("cancel result", Op.CANCEL_RESULT, {"cancelled": True, "state": "live"}, {}),
    Golden("flush", Op.DELTAS, {"seq": 1, "finished": [ENDING]}, FLUSH, NO_REQUEST),
    Golden("flush, everything", Op.DELTAS, {"seq": 2, "finished": [FULL_ENDING]}, FULL_FLUSH, NO_REQUEST),
    Golden("ack", Op.ACK, {"seq": 2}, {"request_ids": _ids(REQUEST_ID)}, NO_REQUEST),
    Golden("score", Op.SCORE, {"temperature": 0.5}, {"ids": _i4(1, 2, 3)}),
    Golden("scored", Op.SCORED, {"version": 5}, {"token_logprobs": _f4(-0.5, -1.0), "raw_logprobs": _f4(-0.5, -1.0)}),
    Golden("group", Op.GENERATE_GROUP, EVERY_OPTION, {**INPUT, "member_ids": _ids(REQUEST_ID, OTHER_ID)}),
    Golden("tool wait", Op.TOOL_WAIT, {"lineage": "l", "cache_salt": "s", "expect_s": 1.5}, {}),
    Golden("info", Op.INFO, {}, {}),
    Golden("info result", Op.INFO_RESULT, INFO, {}),
    Golden("stats", Op.STATS, {}, {}),
    Golden(
        "stats result", Op.STATS_RESULT, {"values": {"live": 1, "health": "ready", "paused": False, "x": None}, "engine": {"y": 0.5}}, {}
    ),
    Golden("tokenizer files", Op.TOKENIZER_FILES, {}, {}),
    Golden(
        "tokenizer files result",
        Op.TOKENIZER_FILES_RESULT,
        {"files": [{"name": "tokenizer.json", "size": 2}]},
        {"content": np.frombuffer(b"{}", np.uint8)},
    ),
    Golden("pause", Op.PAUSE, {}, {}),
    Golden("resume", Op.RESUME, {}, {}),
    Golden("weights begin", Op.WEIGHTS_BEGIN, {"manifest": MANIFEST, "trainer_step": 7, "restore": None, "partial": False}, {}),
    Golden("weights ticket", Op.WEIGHTS_TICKET, {"update_id": "u", "version": 5}, {}),
    Golden("weights file", Op.WEIGHTS_STAGE_FILE, {"update_id": "u", "path": "a.safetensors", "size": 12, "xxh3": "00" * 8}, {}),
    Golden(
        "bucket by frames", Op.WEIGHTS_STAGE_BUCKET, {**BUCKET, "handle": {"kind": "frames"}}, {"content": np.arange(12, dtype=np.uint8)}
    ),
    Golden(
        "bucket by shared memory",
        Op.WEIGHTS_STAGE_BUCKET,
        {**BUCKET, "handle": {"kind": "shared", "segment": "areno-push-7-9-00112233-1", "nonce": REQUEST_ID}},
        {},
    ),
    Golden(
        "bucket by sealed memory",
        Op.WEIGHTS_STAGE_BUCKET,
        {**BUCKET, "handle": {"kind": "memfd", "process": 7, "descriptor": 9, "nonce": REQUEST_ID}},
        {},
    ),
    Golden("bucket by group", Op.WEIGHTS_STAGE_BUCKET, {**BUCKET, "handle": {"kind": "group"}}, {}),
    Golden("bucket by kept group", Op.WEIGHTS_STAGE_BUCKET, {**BUCKET, "handle": {"kind": "group", "group": REQUEST_ID}}, {}),
    Golden(
        "bucket on the card",
        Op.WEIGHTS_STAGE_BUCKET,
        {
            **BUCKET,
            "handle": {"kind": "cuda", "device": REQUEST_ID, "event": bytes(64), "allocations": [{"handle": b"\1" * 64, "size": 4096}]},
        },
        {},
    ),
    Golden(
        "join group",
        Op.WEIGHTS_JOIN_GROUP,
        {"update_id": "u", "host": "h", "port": 4000, "backend": "gloo", "device": None, "timeout_s": 2.0},
        {},
    ),
    Golden(
        "join kept group",
        Op.WEIGHTS_JOIN_GROUP,
        {"update_id": "u", "host": "h", "port": 4000, "backend": "nccl", "device": REQUEST_ID, "timeout_s": 2.0, "group": OTHER_ID},
        {},
    ),
    Golden(
        "commit",
        Op.WEIGHTS_COMMIT,
        {"update_id": "u", "digests": {"a": 2**64 - 1}, "canary_temperatures": [1.0], "mode": "drain", "drain_s": 5.0},
        CANARIES,
    ),
    Golden("report", Op.WEIGHTS_REPORT, REPORT, {}),
    Golden("abort", Op.WEIGHTS_ABORT, {"update_id": "u"}, {}),
    Golden("shutdown", Op.SHUTDOWN, {}, {}),
    Golden("evaluate begin", Op.EVALUATE_BEGIN, {"deadline_s": 5.0}, {}),
    Golden("evaluation", Op.EVALUATION, {"evaluation_id": "e", "version": 5}, {}),
    Golden("evaluate end", Op.EVALUATE_END, {"evaluation_id": "e"}, {}),
    Golden("sleep", Op.SLEEP, {"level": "weights"}, {}),
    Golden("wake", Op.WAKE, {}, {}),
    Golden("host ready", Op.HOST_READY, {"engine": FACTS, "version": 5}, {}, NO_REQUEST),
    Golden("host failed", Op.HOST_FAILED, {"error": ERROR}, {}, NO_REQUEST),
    Golden(
        "submit",
        Op.SUBMIT,
        {"engine_ids": [1], "seeds": [5], "grouped": False, "params": {**EVERY_OPTION, "stop": []}},
        INPUT,
        NO_REQUEST,
    ),
    Golden(
        "step",
        Op.STEP,
        {"seq": 1, "version": 5, "refused": [{"engine_id": 2, "error": ERROR}], "finished": [HOST_ENDING]},
        STEP,
        NO_REQUEST,
    ),
    Golden("step ack", Op.STEP_ACK, {"seq": 1}, {}, NO_REQUEST),
    Golden("kill", Op.KILL, {"engine_id": 1, "kind": "cancelled", "detail": None}, {}),
    Golden("expect return", Op.EXPECT_RETURN, {"lineage": "a:l", "cache_salt": None, "expect_s": 1.5, "owner": "a"}, {}, NO_REQUEST),
    Golden("end hints", Op.END_HINTS, {"owner": "a"}, {}, NO_REQUEST),
    Golden("host loading", Op.HOST_LOADING, {}, {}, NO_REQUEST),
    Golden("update open", Op.UPDATE_OPEN, {"update_id": "u", "version": 5, "manifest": MANIFEST, "partial": False}, {}),
]


def frames_of(golden: Golden) -> list[bytes]:
    """Return a message's frames as the codec makes them."""
    return [bytes(frame) for frame in encode(golden.op, golden.request_id, golden.fields, golden.arrays)]


def written() -> dict[str, list[str]]:
    """Return the committed frames in hex, by name."""
    return dict(json.loads(FILE.read_text()))


if __name__ == "__main__":
    FILE.write_text(json.dumps({golden.name: [frame.hex() for frame in frames_of(golden)] for golden in GOLDEN}, indent=1) + "\n")
