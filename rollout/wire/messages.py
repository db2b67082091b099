"""Every operation's body: which fields it has, how large it may be, and the check of what came.

The codec reads the table here and `arrays` beside it; the bodies are grouped in `session_messages`, `generation_messages`,
`control_messages`, `weight_handles` and `host_messages`. Request ids are in the header, bulk numbers in array frames.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollout.errors import InvalidRequest, plain_value
from rollout.wire.control_messages import (
    EvaluateBegin,
    EvaluateEnd,
    EvaluationTicket,
    Sleep,
    WeightsBegin,
    WeightsCommit,
    WeightsReport,
    WeightsStageFile,
    WeightsTicket,
    WeightsUpdateRef,
)
from rollout.wire.fields import Message
from rollout.wire.generation_messages import Ack, Cancel, CancelResult, Deltas, Generate, GenerateGroup, Score, Scored, ToolWait
from rollout.wire.host_messages import EndHints, ExpectReturn, HostFailed, HostReady, Kill, Step, StepAck, Submit, UpdateOpen
from rollout.wire.operations import Op
from rollout.wire.session_messages import Alive, ErrorBody, Hello, InfoResult, Nothing, StatsResult, TokenizerFilesResult, Welcome
from rollout.wire.weight_handles import WeightsJoinGroup, WeightsStageBucket

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


def _limit(model: type[Message], first: ErrorDetails) -> str:
    """Say what a value may be in words of the wire, where those of the library name its own classes."""
    if first["type"] == "model_type":
        inner: object = model.model_fields[str(first["loc"][0])].annotation if len(first["loc"]) == 1 else None
        if isinstance(inner, type) and issubclass(inner, Message):
            return f"a map of {', '.join(inner.model_fields)}"
        return "a map"
    return str(first["msg"]).removeprefix("Value error, ")


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
        limit=_limit(model, first),
        remedy=f"pass {path} as the limit says",
    )


def parse_fields(model: type[Message], fields: Mapping[str, object]) -> Message:
    """Return the body of these fields. Raises: InvalidRequest naming field, value, limit and remedy."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _refusal(model, error) from None
