"""What the control socket is asked for: weight updates, evaluations and sleep.

The operations from 48 to 64, but for the announcement of buckets (`weight_handles`). The front answers them, the engine host carries
out those that it gets handed on.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollout.wire.fields import MAX_LIST, Count, Int64, Message, Name, Text, Unsigned64


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


class EvaluateBegin(Message):
    """Keep commits away until the evaluation ends, for `deadline_s` seconds at most."""

    deadline_s: Annotated[float, Field(gt=0, le=1e6)]


class EvaluationTicket(Message):
    """The open evaluation and the version that serves until its end."""

    evaluation_id: Name
    version: Int64


class EvaluateEnd(Message):
    """Names an evaluation that is over."""

    evaluation_id: Name


class Sleep(Message):
    """Let the engine give memory back: that of the KV, or that of KV and weights."""

    level: Literal["kv", "weights"] = "kv"
