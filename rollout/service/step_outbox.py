"""What the engine host owes the front: verdicts, tokens and endings, joined until the front takes them.

The host's loop adds to it after every step and never waits for a send. While messages are under way the news of later
steps join into one larger message; while what is gathered and what the front has not acknowledged take as many bytes as the
service allows (`host_credit_bytes`), the host does not step and answers no score. Nothing is dropped; the news of one step, or
the answer to one score, may come on top.

The front acknowledges steps only. An answer with arrays counts with the step behind it, which the link delivers after it; where
nothing is to tell, an empty one follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.errors import InternalError, InvalidRequest, error_fields, plain_text
from rollout.wire.codec import NO_REQUEST, Frame, encode
from rollout.wire.operations import Op
from rollout.wire.transport import Peer, Sent

if TYPE_CHECKING:
    from areno import Finished, PromptScore, StepOutput

MAX_UNDER_WAY = 8
COLUMNS = ("request_ids", "token_ids", "logprobs", "raw_logprobs", "behaviour_logprobs", "versions")
DTYPES = (np.int64, np.int32, np.float32, np.float32, np.float32, np.int64)
TOKEN_BYTES = sum(np.dtype(dtype).itemsize for dtype in DTYPES)
# About what a verdict with words, or an ending, takes.
ENTRY_BYTES = 256


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


def _encoded(op: Op, call_id: bytes, fields: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None) -> list[Frame]:
    """Return the frames of a message to the front. Raises: InternalError, since no caller can mend what the host itself made."""
    try:
        return encode(op, call_id, fields, arrays)
    except InvalidRequest as error:
        raise InternalError(
            f"the engine host's {op.name} cannot be sent: {error.what}", field=error.field, value=error.value, limit=error.limit
        ) from error


class StepOutbox:
    """Owns what was not sent or not acknowledged; see the module."""

    def __init__(self, peer: Peer, credit_bytes: int) -> None:
        self._peer, self._credit_bytes = peer, credit_bytes
        self._seq = 0
        # Bytes of each message that is not acknowledged, the oldest first, and of all of them.
        self._under_way: deque[int] = deque()
        self._under_way_bytes = 0
        self._accepted: list[int] = []
        self._refused: list[dict[str, object]] = []
        self._outputs: list[StepOutput] = []
        self._scores: list[PromptScore] = []
        self._finished: list[dict[str, object]] = []
        self._gathered_bytes = 0
        # Whether an answer is counted for which no step has gone out yet.
        self._answered = False
        self._unsent: deque[list[Frame]] = deque()

    @property
    def full(self) -> bool:
        """Whether the host must neither step nor answer scores."""
        return self.num_bytes >= self._credit_bytes

    @property
    def num_bytes(self) -> int:
        """What is gathered and what is sent without an acknowledgement."""
        return self._gathered_bytes + self._under_way_bytes

    @property
    def wants_room(self) -> bool:
        """Whether a message waits for room in the socket."""
        return bool(self._unsent)

    def accept(self, engine_id: int) -> None:
        """Add the engine's consent."""
        self._accepted.append(engine_id)
        self._gathered_bytes += 8

    def refuse(self, engine_id: int, error: Exception) -> None:
        """Add the engine's refusal."""
        self._refused.append({"engine_id": engine_id, "error": error_fields(error)})
        self._gathered_bytes += ENTRY_BYTES

    def add(self, output: StepOutput) -> None:
        """Add what a step learned."""
        if len(output.request_ids):
            self._outputs.append(output)
            self._gathered_bytes += TOKEN_BYTES * len(output.request_ids)
            if output.kept_counts is not None and output.kept_ids is not None:
                self._gathered_bytes += 4 * (output.kept_counts.size + output.kept_ids.size)
        self._scores.extend(output.prompt_scores)
        self._gathered_bytes += sum(8 * score.logprobs.size for score in output.prompt_scores)
        self._finished.extend(ending_fields(ending) for ending in output.finished)
        self._gathered_bytes += ENTRY_BYTES * len(output.finished)

    def acknowledge(self, seq: int) -> None:
        """Take the front's word that messages up to `seq` arrived."""
        while self._under_way and self._seq - len(self._under_way) < seq:
            self._under_way_bytes -= self._under_way.popleft()

    def reply(self, op: Op, call_id: bytes, fields: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Send anything that is no step; keeps the order among such messages. Raises: InternalError."""
        self._unsent.append(_encoded(op, call_id, fields, arrays))
        if arrays:
            self._gathered_bytes += sum(array.nbytes for array in arrays.values())
            self._answered = True
        self.send_queued()

    def send_queued(self) -> None:
        """Send what found no room before."""
        while self._unsent and self._peer.send(self._unsent[0]) is Sent.OK:
            self._unsent.popleft()

    def flush(self, version: int) -> None:
        """Send the gathered news as one message, if there are any and few enough messages are under way. Raises: InternalError."""
        self.send_queued()
        if not (self._accepted or self._refused or self._outputs or self._scores or self._finished or self._answered):
            return
        if self._unsent or len(self._under_way) >= MAX_UNDER_WAY:
            return
        self._seq += 1
        fields = {"seq": self._seq, "version": version, "refused": self._refused, "finished": self._finished}
        self._unsent.append(_encoded(Op.STEP, NO_REQUEST, fields, self._arrays()))
        self._accepted, self._refused, self._outputs, self._scores, self._finished = [], [], [], [], []
        self._under_way.append(self._gathered_bytes)
        self._under_way_bytes += self._gathered_bytes
        self._gathered_bytes, self._answered = 0, False
        self.send_queued()

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays: dict[str, Any] = {"accepted": np.array(self._accepted, np.int64)}
        for name, dtype in zip(COLUMNS, DTYPES):
            parts = [getattr(output, name) for output in self._outputs]
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, dtype)
            arrays[name] = joined.astype(dtype, copy=False)
        return arrays | kept_arrays(self._outputs) | score_arrays(self._scores)
