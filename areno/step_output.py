"""What several launches said, as the output of one step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from areno.request import Finished, PromptScore, StepOutput


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
