"""What the engine gives back: how requests ended, scored prompts, and the tokens of a step.

Results travel as packed arrays, one entry per sampled token, never as one object per token. No torch: the scheduler and the service's
bookkeeping read these types.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np


class FinishKind(enum.StrEnum):
    """How a request ended; all five are terminal."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """The one terminal reason of a request; `stop_id` is the sampled id that stopped it."""

    kind: FinishKind
    stop_id: int | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The terminal record of one request; counts in tokens.

    `kv_spans` says which weights built the KV: (first position, version) runs over prompt and output. `kv_rebuilt_at` lists
    the numbers of ids at which a preempted request had its KV rebuilt.
    """

    request_id: int
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    seed: int
    kv_spans: tuple[tuple[int, int], ...] = ()
    kv_rebuilt_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScore:
    """Log-probabilities of a prompt's ids from position `start` on. Shapes: float32 [prompt - start], tempered and raw."""

    request_id: int
    start: int
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one `Engine.step` learned: packed arrays, one entry per sampled token in the order sampled, then endings.

    Shapes: all arrays [n]. `logprobs` (of logits / temperature) and `raw_logprobs` (of the logits) are NaN where the
    request asked for none; `behaviour_logprobs` is NaN where it equals `logprobs`. `versions` is the version of
    the forward that produced the token. `kept_counts` [n] cut `kept_ids`, the ids that the filters kept, into tokens; both
    are None where no token returns any.
    """

    request_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray
    kept_counts: np.ndarray | None = None
    kept_ids: np.ndarray | None = None
    finished: tuple[Finished, ...] = ()
    prompt_scores: tuple[PromptScore, ...] = ()

    @staticmethod
    def empty(finished: tuple[Finished, ...] = ()) -> StepOutput:
        """Return an output without tokens."""
        f32 = np.empty(0, np.float32)
        return StepOutput(
            request_ids=np.empty(0, np.int64),
            token_ids=np.empty(0, np.int32),
            logprobs=f32,
            raw_logprobs=f32,
            behaviour_logprobs=f32,
            versions=np.empty(0, np.int64),
            finished=finished,
        )


def join_outputs(outputs: list[StepOutput], endings: tuple[Finished, ...], scores: tuple[PromptScore, ...]) -> StepOutput:
    """Return the outputs of launches, in their order, with the endings and prompt scores known by now."""
    if not outputs:
        return replace(StepOutput.empty(endings), prompt_scores=scores)
    if len(outputs) == 1:
        if not endings and not scores:
            return outputs[0]
        return replace(outputs[0], finished=endings, prompt_scores=scores)
    names = ("request_ids", "token_ids", "logprobs", "raw_logprobs", "behaviour_logprobs", "versions")
    joined = {name: np.concatenate([getattr(output, name) for output in outputs]) for name in names}
    counts, ids = _join_kept(outputs)
    return StepOutput(**joined, kept_counts=counts, kept_ids=ids, finished=endings, prompt_scores=scores)


def _join_kept(outputs: list[StepOutput]) -> tuple[np.ndarray | None, np.ndarray | None]:
    if all(output.kept_counts is None for output in outputs):
        return None, None
    nothing = np.zeros(0, dtype=np.int32)
    counts = [np.zeros(output.token_ids.size, np.int32) if output.kept_counts is None else output.kept_counts for output in outputs]
    return np.concatenate(counts), np.concatenate([nothing if output.kept_ids is None else output.kept_ids for output in outputs])
