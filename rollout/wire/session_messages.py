"""What a client and a service tell each other about session, service and errors.

The operations below 16 and from 32 to 37: HELLO and its answer, heartbeats, ERROR, INFO, STATS, tokenizer files. Invariant: no field
here names a request; request ids are in the header or in arrays.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rollout.wire.fields import MAX_LIST, Count, Int64, Message, Name, Scalar, Text, Token16


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
