"""What front and engine host tell each other: requests, steps, kills, hints and updates.

The operations from 80 up. Requests go by the front's own numbers here; lineages and owners carry their session.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollout.wire.control_messages import Manifest
from rollout.wire.fields import MAX_LIST, Count, Int64, Message, Name, Text, Unsigned64
from rollout.wire.generation_messages import MAX_MEMBERS, EndingKind, Generate
from rollout.wire.session_messages import EngineFacts, ErrorBody


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
