"""What the engine host owes the front: verdicts, tokens and endings, joined until the front takes them.

The host's loop adds to it after every step and never waits for a send. While messages are under way the news of later
steps join into one larger message; when too much has gathered the host stops stepping until the front has caught up.
Nothing is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.errors import error_fields, plain_text
from rollout.wire.codec import NO_REQUEST, Frame, encode
from rollout.wire.operations import Op
from rollout.wire.transport import Peer, Sent

if TYPE_CHECKING:
    from areno import Finished, PromptScore, StepOutput

MAX_UNDER_WAY = 8
MAX_GATHERED_TOKENS = 2**16
COLUMNS = ("request_ids", "token_ids", "logprobs", "raw_logprobs", "behaviour_logprobs", "versions")
DTYPES = (np.int64, np.int32, np.float32, np.float32, np.float32, np.int64)


def ending_fields(ending: Finished) -> dict[str, object]:
    """Return the wire form of the engine's terminal record."""
    return {
        "engine_id": ending.request_id,
        "kind": str(ending.reason.kind),
        "output_tokens": ending.output_tokens,
        "prompt_tokens": ending.prompt_tokens,
        "cached_tokens": ending.cached_tokens,
        "seed": ending.seed,
        "stop_id": ending.reason.stop_id,
        "detail": None if ending.reason.detail is None else plain_text(ending.reason.detail),
        "kv_spans": [[int(start), int(version)] for start, version in ending.kv_spans],
        "kv_rebuilt_at": [int(place) for place in ending.kv_rebuilt_at],
    }


def kept_arrays(outputs: Sequence[StepOutput]) -> dict[str, np.ndarray]:
    """Return the kept sets of some steps' tokens; none if no token has any."""
    if all(output.kept_counts is None for output in outputs):
        return {}
    counts, ids = [], []
    for output in outputs:
        counts.append(np.zeros(len(output.request_ids), np.int32) if output.kept_counts is None else output.kept_counts)
        ids.append(np.zeros(0, np.int32) if output.kept_ids is None else output.kept_ids)
    return {"kept_counts": np.concatenate(counts).astype(np.int32), "kept_ids": np.concatenate(ids).astype(np.int32)}


def score_arrays(scores: Sequence[PromptScore]) -> dict[str, np.ndarray]:
    """Return the scored prompts of some steps; none without any."""
    if not scores:
        return {}
    table = [(score.request_id, score.start, score.logprobs.size, score.version) for score in scores]
    return {
        "prompt_scores": np.array(table, np.int64),
        "prompt_logprobs": np.concatenate([score.logprobs for score in scores]).astype(np.float32),
        "prompt_raw_logprobs": np.concatenate([score.raw_logprobs for score in scores]).astype(np.float32),
    }


class StepOutbox:
    """Owns what was not sent or not acknowledged; see the module."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._seq = 0
        self._acknowledged = 0
        self._accepted: list[int] = []
        self._refused: list[dict[str, object]] = []
        self._outputs: list[StepOutput] = []
        self._scores: list[PromptScore] = []
        self._finished: list[dict[str, object]] = []
        self._tokens = 0
        self._unsent: deque[list[Frame]] = deque()

    @property
    def full(self) -> bool:
        """Whether the host must not step."""
        return self._tokens >= MAX_GATHERED_TOKENS

    @property
    def wants_room(self) -> bool:
        """Whether a message waits for room in the socket."""
        return bool(self._unsent)

    def accept(self, engine_id: int) -> None:
        """Add the engine's consent."""
        self._accepted.append(engine_id)

    def refuse(self, engine_id: int, error: Exception) -> None:
        """Add the engine's refusal."""
        self._refused.append({"engine_id": engine_id, "error": error_fields(error)})

    def add(self, output: StepOutput) -> None:
        """Add what a step learned."""
        if len(output.request_ids):
            self._outputs.append(output)
            self._tokens += len(output.request_ids)
        self._scores.extend(output.prompt_scores)
        self._tokens += sum(score.logprobs.size for score in output.prompt_scores)
        self._finished.extend(ending_fields(ending) for ending in output.finished)

    def acknowledge(self, seq: int) -> None:
        """Take the front's word that messages up to `seq` arrived."""
        self._acknowledged = max(self._acknowledged, seq)

    def reply(self, op: Op, call_id: bytes, fields: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Send anything that is no step; keeps the order among such messages."""
        self._unsent.append(encode(op, call_id, fields, arrays))
        self.send_queued()

    def send_queued(self) -> None:
        """Send what found no room before."""
        while self._unsent and self._peer.send(self._unsent[0]) is Sent.OK:
            self._unsent.popleft()

    def flush(self, version: int) -> None:
        """Send the gathered news as one message, if there are any and few enough messages are under way."""
        self.send_queued()
        if not (self._accepted or self._refused or self._outputs or self._scores or self._finished):
            return
        if self._unsent or self._seq - self._acknowledged >= MAX_UNDER_WAY:
            return
        self._seq += 1
        fields = {"seq": self._seq, "version": version, "refused": self._refused, "finished": self._finished}
        self._unsent.append(encode(Op.STEP, NO_REQUEST, fields, self._arrays()))
        self._accepted, self._refused, self._outputs, self._scores, self._finished, self._tokens = [], [], [], [], [], 0
        self.send_queued()

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays: dict[str, Any] = {"accepted": np.array(self._accepted, np.int64)}
        for name, dtype in zip(COLUMNS, DTYPES):
            parts = [getattr(output, name) for output in self._outputs]
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, dtype)
            arrays[name] = joined.astype(dtype, copy=False)
        return arrays | kept_arrays(self._outputs) | score_arrays(self._scores)
