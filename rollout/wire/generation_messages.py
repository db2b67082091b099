"""What is said of generations: the request, its cancel, the flushes that bring its tokens, and scores.

The operations from 16 to 25. Token ids, log-probabilities and versions are arrays (`arrays`); the fields here are the small rest. The
engine judges what depends on the model (vocabulary, context); here a field has a type, a finite value and a size.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollout.wire.fields import MAX_LIST, Count, Int64, Message, Name, Text, Token16, Unsigned64
from rollout.wire.session_messages import ErrorBody

EndingKind = Literal["stop", "length", "cancelled", "expired", "failed"]
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_MEMBERS = 4096
MAX_KEPT = 64
# Detail of the ending that mode abort_requests gives: the client goes on with what it has as a new request.
CANCELLED_BY_UPDATE = "update"
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
