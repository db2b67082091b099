"""Every operation of the protocol: its fields (pydantic, unknown ones refused) and its arrays.

A closed list, read by the codec, and long for that reason. Request ids are in the header, bulk numbers in array frames;
the fields here are the small rest. Semantic limits that depend on the model (vocabulary, context) are the engine's to
check; here a field has a type, a finite value and a size. Sockets take only the operations listed for them at the end.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from rollout.errors import InvalidRequest, plain_value
from rollout.wire.fields import Count, Int64, Message, Name, Scalar, Text, Token16, Unsigned64
from rollout.wire.weight_handles import WeightsJoinGroup, WeightsStageBucket


class Op(enum.IntEnum):
    """Operation numbers; a number is never reused for another meaning."""

    HELLO = 1
    WELCOME = 2
    HEARTBEAT = 3
    ALIVE = 4
    GOODBYE = 5
    ERROR = 6
    DONE = 7

    GENERATE = 16
    ATTACH = 17
    CANCEL = 18
    CANCEL_RESULT = 19
    DELTAS = 20
    ACK = 21
    SCORE = 22
    SCORED = 23
    GENERATE_GROUP = 24
    TOOL_WAIT = 25

    INFO = 32
    INFO_RESULT = 33
    STATS = 34
    STATS_RESULT = 35
    TOKENIZER_FILES = 36
    TOKENIZER_FILES_RESULT = 37

    PAUSE = 48
    RESUME = 49
    WEIGHTS_BEGIN = 50
    WEIGHTS_TICKET = 51
    WEIGHTS_STAGE_FILE = 52
    WEIGHTS_COMMIT = 53
    WEIGHTS_REPORT = 54
    WEIGHTS_ABORT = 55
    SHUTDOWN = 56
    WEIGHTS_STAGE_BUCKET = 57
    WEIGHTS_JOIN_GROUP = 58
    EVALUATE_BEGIN = 60
    EVALUATION = 61
    EVALUATE_END = 62
    SLEEP = 63
    WAKE = 64

    HOST_READY = 80
    HOST_FAILED = 81
    SUBMIT = 82
    STEP = 83
    STEP_ACK = 84
    KILL = 85
    UPDATE_OPEN = 86
    EXPECT_RETURN = 87
    END_HINTS = 88
    HOST_LOADING = 89


EndingKind = Literal["stop", "length", "cancelled", "expired", "failed"]
MAX_LIST = 100_000
MAX_NAMED_IDS = 16_384
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_MEMBERS = 4096
# More biases than any engine takes: the engine names its own limit, this one only bounds the work of getting there.
MAX_BIAS_ENTRIES = 4096
MAX_KEPT = 64
# Detail of the ending that mode abort_requests gives: the client goes on with what it has as a new request.
CANCELLED_BY_UPDATE = "update"


class Nothing(Message):
    """A body without fields."""


class ErrorBody(Message):
    """A refusal or failure: what, limit, remedy, and a stable code."""

    code: Name
    what: Text
    field: Text | None = None
    value: Scalar = None
    limit: Text | None = None
    remedy: Text | None = None
    retry_after_s: float | None = None


class Hello(Message):
    """Open a session, or continue one by showing its secret."""

    name: Name = ""
    session: Token16 | None = None
    secret: Token16 | None = None


class Welcome(Message):
    """The session and the terms of its lease."""

    incarnation: Token16
    session: Token16
    secret: Token16
    lease_s: float
    control_address: Text
    max_message_bytes: Count


class Alive(Message):
    """Answer to a heartbeat; the array names ended requests whose end was not acknowledged."""

    health: Name
    version: Int64


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class Generate(Message):
    """One generation; ids and biases are arrays. `stop` is the front's to match, all else the engine's to judge."""

    max_new_tokens: Int64 = 128
    min_new_tokens: Int64 = 0
    temperature: float = 1.0
    top_k: Int64 = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Unsigned64 | None = None
    ignore_eos: bool = False
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] = []
    logprobs: bool = True
    return_kept_ids: bool = False
    prompt_logprobs_from: Int64 | None = None
    prior_output_tokens: Int64 = 0
    lineage: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    kv_policy: Annotated[str, Field(max_length=32)] = "keep"
    max_kv_lag: Int64 = 4
    min_version: Int64 | None = None
    deadline_s: Annotated[float, Field(gt=0, le=1e9)] | None = None


class GenerateGroup(Generate):
    """Several generations of one prompt; the array names the members, and `seed` is what their seeds are derived from."""


class ToolWait(Message):
    """A lineage's next request, of the same salt, is expected in about `expect_s` seconds, because its tool runs. A hint."""

    lineage: Annotated[str, Field(min_length=1, max_length=200)]
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    expect_s: Annotated[float, Field(gt=0, le=1e6)]


class Cancel(Message):
    """End the generation `target`; the header's request id names this call."""

    target: Token16


class CancelResult(Message):
    """Whether this cancel ends the request, and the state it was found in."""

    cancelled: bool
    state: Name


class Ending(Message):
    """The terminal event of one stream of a flush; `index` is its place in the flush.

    `prompt_scored` says that prompt log-probabilities belong to the record; `text_bytes` how much of the flush's `texts` is
    this one's, None for a request without stop strings.
    """

    index: Count
    kind: EndingKind
    output_tokens: Count
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    seed: Unsigned64 = 0
    stop_id: Int64 | None = None
    stop_string: StopString | None = None
    detail: Text | None = None
    error: ErrorBody | None = None
    kv_spans: Annotated[list[list[Int64]], Field(max_length=MAX_LIST)] = []
    kv_rebuilt_at: Annotated[list[Count], Field(max_length=MAX_LIST)] = []
    prompt_scored: bool = False
    text_bytes: Count | None = None


class Deltas(Message):
    """All news of one client: packed arrays over its streams, and endings."""

    seq: Count
    finished: Annotated[list[Ending], Field(max_length=MAX_LIST)] = []


class Ack(Message):
    """Flushes up to `seq` arrived; the array names requests whose ending arrived."""

    seq: Count


class Score(Message):
    """Score given ids."""

    temperature: float = 1.0


class Scored(Message):
    """The version that scored."""

    version: Int64


class EngineFacts(Message):
    """What the running engine is and allows."""

    model_type: Name
    dtype: Name
    device: Name
    vocab_size: Count
    num_valid_ids: Count
    eos_ids: Annotated[list[Int64], Field(max_length=1024)]
    max_model_len: Count
    page_size: Count
    num_pages: Count
    pool_tokens: Count
    max_rows: Count
    sampling_slots: Count
    kept_ids: bool
    run_ahead: Count
    decode_tables: Name
    result_transport: Name
    result_transport_reason: Text
    num_parameters: Count
    tp: Count


class InfoResult(Message):
    """What this service is."""

    protocol_version: Count
    incarnation: Token16
    address: Text
    model: Text
    health: Name
    version: Int64
    needs_weights: Int64 | None = None
    paused_by: Annotated[list[Text], Field(max_length=MAX_LIST)] = []
    asleep: Name | None = None
    weights_dir: Text
    tokenizer_digest: Name | None = None
    chat_template_digest: Name | None = None
    lease_s: float
    max_message_bytes: Count
    engine: EngineFacts | None = None


class StatsResult(Message):
    """Counters and gauges; `engine` is absent while no engine answers."""

    values: dict[str, Scalar]
    engine: dict[str, Scalar] | None = None


class FileEntry(Message):
    """One file of a packed array of bytes."""

    name: Name
    size: Count


class TokenizerFilesResult(Message):
    """The tokenizer's files, in the order of their bytes."""

    files: Annotated[list[FileEntry], Field(max_length=64)]


class TensorSpecBody(Message):
    """One tensor of a manifest."""

    dtype: Name
    shape: Annotated[list[Count], Field(max_length=8)]


Manifest = Annotated[dict[str, TensorSpecBody], Field(max_length=MAX_LIST)]


class WeightsBegin(Message):
    """Open an update."""

    manifest: Manifest | None = None
    trainer_step: Int64 | None = None
    restore: Int64 | None = None
    partial: bool = False


class WeightsTicket(Message):
    """The open update and the version it will publish."""

    update_id: Name
    version: Int64


class WeightsUpdateRef(Message):
    """Names an open update."""

    update_id: Name


class WeightsStageFile(Message):
    """A safetensors file below the weights folder; `xxh3` is the file's XXH3-64 in hex."""

    update_id: Name
    path: Text
    size: Count
    xxh3: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None


class WeightsCommit(Message):
    """Publish an update; canary sequences are packed in arrays, one temperature for each.

    `mode` says what happens to running requests: they go on (inflight), end by themselves within `drain_s` seconds (drain), or
    are cancelled (abort_requests). The front sees to it; the engine only commits.
    """

    update_id: Name
    digests: Annotated[dict[str, Unsigned64], Field(max_length=MAX_LIST)] | None = None
    canary_temperatures: Annotated[list[float], Field(max_length=64)] = []
    mode: Literal["inflight", "drain", "abort_requests"] = "inflight"
    drain_s: Annotated[float, Field(ge=0, le=1e6)] = 60.0


class EvaluateBegin(Message):
    """Keep commits away until the evaluation ends, for `deadline_s` seconds at most."""

    deadline_s: Annotated[float, Field(gt=0, le=1e6)]


class EvaluationTicket(Message):
    """The open evaluation and the version that serves until its end."""

    evaluation_id: Name
    version: Int64


class Sleep(Message):
    """Let the engine give memory back: that of the KV, or that of KV and weights."""

    level: Literal["kv", "weights"] = "kv"


class EvaluateEnd(Message):
    """Names an evaluation that is over."""

    evaluation_id: Name


class WeightsReport(Message):
    """What an update moved, changed and cost."""

    version: Int64
    num_tensors: Count
    num_bytes: Count
    changed_tensors: Count
    changed_bytes: Count
    staging_s: float
    swap_ms: float
    proof_ms: float
    pause_ms: float
    canary_gap: float | None = None
    canary_mean_gap: float | None = None
    decode_canary_gap: float | None = None
    inspect_s: float = 0.0
    derive_s: float = 0.0
    warning: Text | None = None


class HostReady(Message):
    """The engine host has loaded its model."""

    engine: EngineFacts
    version: Int64


class HostFailed(Message):
    """The engine host ends with this cause."""

    error: ErrorBody


class SubmitParams(Generate):
    """A generation as the front hands it on: the lineage carries its session."""

    lineage: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class Submit(Message):
    """Requests for the engine that differ in the front's own number and in the seed only; `grouped`: members of one group."""

    engine_ids: Annotated[list[Count], Field(min_length=1, max_length=MAX_MEMBERS)]
    seeds: Annotated[list[Unsigned64], Field(min_length=1, max_length=MAX_MEMBERS)]
    grouped: bool = False
    params: SubmitParams


class HostEnding(Message):
    """The engine's terminal record of one request."""

    engine_id: Count
    kind: EndingKind
    output_tokens: Count
    prompt_tokens: Count
    cached_tokens: Count
    seed: Unsigned64
    stop_id: Int64 | None = None
    detail: Text | None = None
    kv_spans: Annotated[list[list[Int64]], Field(max_length=MAX_LIST)] = []
    kv_rebuilt_at: Annotated[list[Count], Field(max_length=MAX_LIST)] = []


class Refusal(Message):
    """The engine refused a submitted request."""

    engine_id: Count
    error: ErrorBody


class Step(Message):
    """What some engine steps learned; verdicts, then packed tokens, then endings."""

    seq: Count
    version: Int64
    refused: Annotated[list[Refusal], Field(max_length=MAX_LIST)] = []
    finished: Annotated[list[HostEnding], Field(max_length=MAX_LIST)] = []


class StepAck(Message):
    """The front has taken the steps up to `seq`."""

    seq: Count


class Kill(Message):
    """End a request in the engine."""

    engine_id: Count
    kind: Literal["stop", "cancelled", "expired"]
    detail: Text | None = None


class ExpectReturn(Message):
    """A client's hint as the front hands it on: lineage and owner carry its session."""

    lineage: Annotated[str, Field(min_length=1, max_length=256)]
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    expect_s: Annotated[float, Field(gt=0, le=1e6)]
    owner: Name


class EndHints(Message):
    """A session ended, and its hints with it."""

    owner: Name


class UpdateOpen(Message):
    """Open an update in the engine under a version that the front handed out."""

    update_id: Name
    version: Int64
    manifest: Manifest | None = None
    partial: bool = False


MODELS: Mapping[Op, type[Message]] = {
    Op.HELLO: Hello,
    Op.WELCOME: Welcome,
    Op.HEARTBEAT: Nothing,
    Op.ALIVE: Alive,
    Op.GOODBYE: Nothing,
    Op.ERROR: ErrorBody,
    Op.DONE: Nothing,
    Op.GENERATE: Generate,
    Op.GENERATE_GROUP: GenerateGroup,
    Op.ATTACH: Nothing,
    Op.TOOL_WAIT: ToolWait,
    Op.CANCEL: Cancel,
    Op.CANCEL_RESULT: CancelResult,
    Op.DELTAS: Deltas,
    Op.ACK: Ack,
    Op.SCORE: Score,
    Op.SCORED: Scored,
    Op.INFO: Nothing,
    Op.INFO_RESULT: InfoResult,
    Op.STATS: Nothing,
    Op.STATS_RESULT: StatsResult,
    Op.TOKENIZER_FILES: Nothing,
    Op.TOKENIZER_FILES_RESULT: TokenizerFilesResult,
    Op.PAUSE: Nothing,
    Op.RESUME: Nothing,
    Op.WEIGHTS_BEGIN: WeightsBegin,
    Op.WEIGHTS_TICKET: WeightsTicket,
    Op.WEIGHTS_STAGE_FILE: WeightsStageFile,
    Op.WEIGHTS_STAGE_BUCKET: WeightsStageBucket,
    Op.WEIGHTS_JOIN_GROUP: WeightsJoinGroup,
    Op.WEIGHTS_COMMIT: WeightsCommit,
    Op.WEIGHTS_REPORT: WeightsReport,
    Op.WEIGHTS_ABORT: WeightsUpdateRef,
    Op.SHUTDOWN: Nothing,
    Op.EVALUATE_BEGIN: EvaluateBegin,
    Op.EVALUATION: EvaluationTicket,
    Op.EVALUATE_END: EvaluateEnd,
    Op.SLEEP: Sleep,
    Op.WAKE: Nothing,
    Op.HOST_LOADING: Nothing,
    Op.HOST_READY: HostReady,
    Op.HOST_FAILED: HostFailed,
    Op.SUBMIT: Submit,
    Op.STEP: Step,
    Op.STEP_ACK: StepAck,
    Op.KILL: Kill,
    Op.UPDATE_OPEN: UpdateOpen,
    Op.EXPECT_RETURN: ExpectReturn,
    Op.END_HINTS: EndHints,
}


SMALL_BODY_BYTES = 64 * 2**10
LARGE_BODY_BYTES = 16 * 2**20
# Bodies that list tensors, endings or requests, or carry reports; all others are small.
_LARGE = {
    Op.DELTAS,
    Op.WEIGHTS_BEGIN,
    Op.WEIGHTS_STAGE_BUCKET,
    Op.WEIGHTS_COMMIT,
    Op.INFO_RESULT,
    Op.STATS_RESULT,
    Op.SUBMIT,
    Op.STEP,
    Op.UPDATE_OPEN,
}
MAX_BODY_BYTES: Mapping[Op, int] = {op: LARGE_BODY_BYTES if op in _LARGE else SMALL_BODY_BYTES for op in Op}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Which arrays a name may carry: shape [n, *row], n at most `most`."""

    dtypes: tuple[str, ...]
    row: tuple[int, ...] = ()
    required: bool = True
    most: int = 2**40


_IDS = ArraySpec(("<i4", "<i8"))
_MAYBE_IDS = ArraySpec(("<i4", "<i8"), required=False)
_FLOATS = ArraySpec(("<f4",))
_MAYBE_FLOATS = ArraySpec(("<f4",), required=False)
_LONGS = ArraySpec(("<i8",))
_INTS = ArraySpec(("<i4",))
_MAYBE_INTS = ArraySpec(("<i4",), required=False)
_REQUEST_IDS = ArraySpec(("|u1",), row=(16,))
_MAYBE_REQUEST_IDS = ArraySpec(("|u1",), row=(16,), required=False)
# What a client names in one message, each of which may be answered: as many as a flush or a heartbeat can make it name, and more.
_NAMED_IDS = ArraySpec(("|u1",), row=(16,), most=MAX_NAMED_IDS)
_PROMPT = {
    "prompt_ids": _IDS,
    "stop_ids": _MAYBE_IDS,
    "forced_ids": _MAYBE_IDS,
    "bias_ids": ArraySpec(("<i4", "<i8"), required=False, most=MAX_BIAS_ENTRIES),
    "bias_values": ArraySpec(("<f8",), required=False, most=MAX_BIAS_ENTRIES),
}
# A token's kept set: how many ids, then the ids of all tokens one after the other. Both absent where no token has any.
_KEPT = {"kept_counts": _MAYBE_INTS, "kept_ids": _MAYBE_INTS}
# Prompts that were scored: whose (a stream's index, or the engine's number), first position, how many, version; then the
# log-probabilities of all of them, one prompt after the other.
_SCORES = {
    "prompt_scores": ArraySpec(("<i8",), row=(4,), required=False),
    "prompt_logprobs": _MAYBE_FLOATS,
    "prompt_raw_logprobs": _MAYBE_FLOATS,
}

ARRAYS: Mapping[Op, Mapping[str, ArraySpec]] = {
    Op.GENERATE: _PROMPT,
    Op.GENERATE_GROUP: {**_PROMPT, "member_ids": ArraySpec(("|u1",), row=(16,), most=MAX_MEMBERS)},
    Op.SUBMIT: _PROMPT,
    Op.ALIVE: {"request_ids": _MAYBE_REQUEST_IDS},
    Op.ATTACH: {"request_ids": _NAMED_IDS, "offsets": _LONGS},
    Op.ACK: {"request_ids": ArraySpec(("|u1",), row=(16,), required=False, most=MAX_NAMED_IDS)},
    # Streams of a flush: ids, first offset, number of tokens. Then the tokens of all of them, one after the other; the
    # versions of those as runs. A missing log-probability array is all NaN. `texts` is UTF-8, in the order of the endings.
    Op.DELTAS: {
        "request_ids": _REQUEST_IDS,
        "offsets": _LONGS,
        "counts": _INTS,
        "token_ids": _INTS,
        "logprobs": _MAYBE_FLOATS,
        "raw_logprobs": _MAYBE_FLOATS,
        "behaviour_logprobs": _MAYBE_FLOATS,
        "version_values": _LONGS,
        "version_counts": _LONGS,
        **_KEPT,
        **_SCORES,
        "texts": ArraySpec(("|u1",), required=False),
    },
    Op.SCORE: {"ids": _IDS},
    Op.SCORED: {"token_logprobs": _FLOATS, "raw_logprobs": _FLOATS},
    Op.TOKENIZER_FILES_RESULT: {"content": ArraySpec(("|u1",))},
    Op.WEIGHTS_STAGE_BUCKET: {"content": ArraySpec(("|u1",), required=False)},
    Op.WEIGHTS_COMMIT: {"canary_ids": _MAYBE_IDS, "canary_counts": ArraySpec(("<i8",), required=False), "canary_logprobs": _MAYBE_FLOATS},
    Op.STEP: {
        "accepted": _LONGS,
        "request_ids": _LONGS,
        "token_ids": _INTS,
        "logprobs": _FLOATS,
        "raw_logprobs": _FLOATS,
        "behaviour_logprobs": _FLOATS,
        "versions": _LONGS,
        **_KEPT,
        **_SCORES,
    },
}

DATA_REQUESTS = frozenset(
    {
        Op.HELLO,
        Op.HEARTBEAT,
        Op.GOODBYE,
        Op.GENERATE,
        Op.GENERATE_GROUP,
        Op.TOOL_WAIT,
        Op.ATTACH,
        Op.CANCEL,
        Op.ACK,
        Op.SCORE,
        Op.INFO,
        Op.STATS,
        Op.TOKENIZER_FILES,
    }
)
CONTROL_REQUESTS = frozenset(
    {
        Op.HELLO,
        Op.PAUSE,
        Op.RESUME,
        Op.WEIGHTS_BEGIN,
        Op.WEIGHTS_STAGE_FILE,
        Op.WEIGHTS_STAGE_BUCKET,
        Op.WEIGHTS_JOIN_GROUP,
        Op.WEIGHTS_COMMIT,
        Op.WEIGHTS_ABORT,
        Op.SHUTDOWN,
        Op.EVALUATE_BEGIN,
        Op.EVALUATE_END,
        Op.SLEEP,
        Op.WAKE,
    }
)
CLIENT_REPLIES = frozenset(
    {
        Op.WELCOME,
        Op.ALIVE,
        Op.ERROR,
        Op.DONE,
        Op.CANCEL_RESULT,
        Op.DELTAS,
        Op.SCORED,
        Op.INFO_RESULT,
        Op.STATS_RESULT,
        Op.TOKENIZER_FILES_RESULT,
        Op.WEIGHTS_TICKET,
        Op.WEIGHTS_REPORT,
        Op.EVALUATION,
    }
)
HOST_REQUESTS = frozenset(
    {
        Op.SUBMIT,
        Op.STEP_ACK,
        Op.KILL,
        Op.EXPECT_RETURN,
        Op.END_HINTS,
        Op.SCORE,
        Op.STATS,
        Op.PAUSE,
        Op.RESUME,
        Op.UPDATE_OPEN,
        Op.WEIGHTS_STAGE_FILE,
        Op.WEIGHTS_STAGE_BUCKET,
        Op.WEIGHTS_JOIN_GROUP,
        Op.WEIGHTS_COMMIT,
        Op.WEIGHTS_ABORT,
        Op.SLEEP,
        Op.WAKE,
        Op.SHUTDOWN,
    }
)
HOST_REPLIES = frozenset(
    {
        Op.HOST_LOADING,
        Op.HOST_READY,
        Op.HOST_FAILED,
        Op.STEP,
        Op.ERROR,
        Op.DONE,
        Op.CANCEL_RESULT,
        Op.SCORED,
        Op.STATS_RESULT,
        Op.WEIGHTS_REPORT,
    }
)


def _refusal(model: type[Message], error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"])[:200]
    if first["type"] == "extra_forbidden":
        return InvalidRequest(
            f"unknown field {path!r}",
            field=path,
            value=plain_value(path),
            limit=f"known: {', '.join(model.model_fields) or 'none'}",
            remedy=f"leave {path!r} out",
        )
    value = plain_value(first["input"]) if first["type"] != "missing" else None
    return InvalidRequest(
        f"{path} is missing" if first["type"] == "missing" else f"{path}={value!r} is refused",
        field=path,
        value=value,
        limit=str(first["msg"]),
        remedy=f"pass {path} as the limit says",
    )


def parse_fields(model: type[Message], fields: Mapping[str, object]) -> Message:
    """Return the body of these fields. Raises: InvalidRequest naming field, value, limit and remedy."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _refusal(model, error) from None
