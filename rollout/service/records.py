"""What the front knows of one request: its record, what it may come to hold, and its end.

The ledger makes and forgets records and counts them; the request desk says what happened to them. Values only: whoever
changes a record's state is the ledger.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from rollout.service.token_store import BYTES_PER_TOKEN, KEPT_BYTES_PER_TOKEN

KINDS = ("stop", "length", "cancelled", "expired", "failed")
SCORE_BYTES_PER_TOKEN = 2 * 4
# Text is kept for requests with stop strings only; few tokens are longer than this in the mean.
TEXT_BYTES_PER_TOKEN = 16


class RecordState(enum.Enum):
    """Where a request stands; ENDED is terminal."""

    DECIDING = "deciding"
    LIVE = "live"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a request may come to hold, in tokens: sampled ones (with kept sets if it `keeps`), prompt ids to be scored, and
    those whose text is kept; and `input_bytes`, its share of the arrays that its message brought, which somebody holds to its end.
    """

    max_tokens: int
    scored_tokens: int = 0
    text_tokens: int = 0
    keeps: bool = False
    input_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """The most bytes that its record takes."""
        tokens = max(0, self.max_tokens) * (BYTES_PER_TOKEN + self.keeps * KEPT_BYTES_PER_TOKEN)
        texts = max(0, self.text_tokens) * TEXT_BYTES_PER_TOKEN
        return self.input_bytes + tokens + max(0, self.scored_tokens) * SCORE_BYTES_PER_TOKEN + texts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScore:
    """Log-probabilities of a prompt's ids from position `start` on, and the version that computed them."""

    start: int
    version: int
    logprobs: np.ndarray
    raw_logprobs: np.ndarray

    @property
    def num_bytes(self) -> int:
        """What it takes in a record and in a flush."""
        return int(self.logprobs.size) * SCORE_BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The one end of a request; counts in tokens. `error` is the wire form of a failure's cause.

    `text` is the output's text, cut before `stop_string`; None for a request without stop strings.
    """

    kind: str
    stop_id: int | None = None
    stop_string: str | None = None
    text: str | None = None
    detail: str | None = None
    error: dict[str, object] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seed: int = 0
    kv_spans: tuple[tuple[int, int], ...] = ()
    kv_rebuilt_at: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Record:
    """One request. `host` names the engine host that runs it; `submitted`: handed over; `killing`: its end was asked for;
    `stopped`: a stop string is complete, so that its own end is certain and only the engine's word about it is outstanding.
    """

    row: int
    engine_id: int
    request_id: bytes
    session: int
    fingerprint: bytes
    prompt_tokens: int
    reserved_bytes: int
    input_bytes: int
    seed: int
    received_at: float
    deadline: float | None = None
    min_version: int | None = None
    host: int = 0
    submitted: bool = False
    killing: bool = False
    stopped: bool = False
    prompt_score: PromptScore | None = None
    state: RecordState = RecordState.DECIDING
    terminal: Terminal | None = None

    @property
    def text_bytes(self) -> int:
        """Length of its end's text in UTF-8."""
        text = self.terminal.text if self.terminal is not None else None
        return len(text.encode()) if text else 0

    @property
    def extra_bytes(self) -> int:
        """What it holds beside its tokens."""
        return self.text_bytes + (self.prompt_score.num_bytes if self.prompt_score is not None else 0)
