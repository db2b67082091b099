"""Prompts piece by piece: the chunk that is computed next, and the scores of prompt ids as chunks bring them.

The scheduler decides how much goes into a launch. Invariant: the pages that a chunk fills are published when it is cut, so that prompts
cut after it in the same launch find them. No torch.
"""

from __future__ import annotations

import numpy as np

from areno.commands import PrefillChunk
from areno.decode.launch import ChunkScores
from areno.kv.residency import Residency
from areno.live import LiveRequest
from areno.step_output import PromptScore


def cut_chunk(live: LiveRequest, take: int, *, version: int, residency: Residency) -> PrefillChunk:
    """Return the next `take` ids of a prompt as a chunk without rows, computed under `version`. Mutates: how far `live` is computed."""
    start, end = live.computed, live.computed + take
    if not live.base_spans or live.base_spans[-1][1] != version:
        live.base_spans = (*live.base_spans, (start, version))
    live.computed = end
    residency.publish_prompt(live)
    first = live.request.sampling.prompt_logprobs_from
    targets = np.zeros(0, dtype=np.int64)
    score_from = start
    if first is not None and live.prompt_logprobs is not None:
        # Position p's logits score the id at p + 1; ids sampled by this request are not part of its prompt.
        score_from = max(start, first - 1)
        targets = live.ids[score_from + 1 : min(end + 1, live.prompt_tokens)].astype(np.int64)
    return PrefillChunk(
        ids=live.ids[start:end].astype(np.int64),
        start=start,
        pages=np.array(live.pages[: residency.pages_for(end)], dtype=np.int64),
        rows=(),
        score_from=score_from,
        score_targets=targets,
        temperature=live.request.sampling.temperature,
        seat=live.seat,
        generation=live.generation,
    )


def add_score(live: LiveRequest, score: ChunkScores, *, version: int) -> PromptScore | None:
    """Add what a chunk scored to its request; return the prompt's score once it is whole. Mutates: `live.prompt_logprobs`."""
    assert live.prompt_logprobs is not None, "only a prompt that is to be scored has scores"
    end = score.position + score.logprobs.size
    live.prompt_logprobs[:, score.position : end] = score.logprobs, score.raw_logprobs
    if end != live.prompt_tokens:
        return None
    first = live.request.sampling.prompt_logprobs_from or 0
    tempered, raw = live.prompt_logprobs[:, first:]
    assert not np.isnan(raw).any(), "a prompt position was never scored"
    live.prompt_logprobs = None
    return PromptScore(request_id=live.request.request_id, start=first, logprobs=tempered, raw_logprobs=raw, version=version)
