"""What the ranks of a cut vocabulary tell each other of it: a few numbers a row, in one gather, whatever its size.

    plain    records of 20 to 40 bytes a row and rank          the sampler's reductions, then `combine` on every rank
    top-k    64 candidates a row and rank beside them           where every filtered row has a top-k of at most 64
    filters  the scores themselves                              top-p or min-p alone, a larger top-k, ties beyond the candidates

Which of the ways a launch goes follows from the rows' parameters and from what was gathered, so that all ranks go the same one.
Called by the sampler and for scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areno.parallel import TPGroup
from areno.sampling import filters
from areno.sampling.kept import MAX_KEPT

_NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """Ids `first_id` to `first_id + count` - 1 of `vocab_size`, of which every rank's cut has room for `width`."""

    first_id: int
    count: int
    width: int
    vocab_size: int
    group: TPGroup

    def place_of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where ids lie in this shard, and whether they do."""
        local = ids.to(torch.int64) - self.first_id
        return local, (local >= 0) & (local < self.count)


@dataclass(frozen=True, slots=True)
class FilteredScores:
    """Scores of a shard, -inf where a filter dropped them. Shapes: `scores` [B, W], `kept_ids` [B, 64], `kept_count` [B]."""

    scores: torch.Tensor
    kept_ids: torch.Tensor
    kept_count: torch.Tensor


def log_total(maxima: list[torch.Tensor], totals: list[torch.Tensor]) -> torch.Tensor:
    """Return the log of sums of exponentials that shards took relative to their own maxima, added up in the shards' order."""
    maximum = maxima[0]
    if len(maxima) == 1:
        return maximum + totals[0].log()
    for other in maxima[1:]:
        maximum = torch.maximum(maximum, other)
    total = torch.zeros_like(maximum)
    for shard_maximum, shard_total in zip(maxima, totals):
        # A shard whose ids are all masked has a maximum of -inf and no mass.
        share = shard_total * (shard_maximum - maximum).exp()
        total = total + torch.where(shard_maximum == _NEG_INF, 0.0, share)
    return maximum + total.log()


def logprobs_of(
    logits_SW: torch.Tensor, ids_S: torch.Tensor, temperature: float, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of one id for each row of this shard's logits: tempered and raw. Shapes: [S] each."""
    local, here = shard.place_of(ids_S)
    logit = logits_SW.gather(1, local.clamp(0, shard.count - 1)[:, None])[:, 0].masked_fill(~here, _NEG_INF)
    fields = [logit, *_sums(logits_SW)]
    plain = temperature in (0.0, 1.0)
    if not plain:
        fields += _sums(logits_SW / temperature)
    ranks = shard.group.all_gather(torch.stack(fields))
    logit = ranks[:, 0].amax(dim=0)
    raw = logit - log_total(list(ranks[:, 1]), list(ranks[:, 2]))
    return raw if plain else logit / temperature - log_total(list(ranks[:, 3]), list(ranks[:, 4])), raw


def _sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    maximum = logits.amax(dim=1)
    return maximum, (logits - maximum[:, None]).exp_().sum(dim=1)


def gather_scores(scores_BW: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """Return every shard's scores side by side. Shapes: [B, W] to [B, V]."""
    rows, width = scores_BW.shape
    if width < shard.width:
        scores_BW = torch.nn.functional.pad(scores_BW, (0, shard.width - width), value=_NEG_INF)
    ranks = shard.group.all_gather(scores_BW.contiguous())
    return ranks.transpose(0, 1).reshape(rows, -1)[:, : shard.vocab_size]


def filter_scores(
    scores_BW: torch.Tensor, shard: VocabularyShard, *, min_p_B: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor
) -> FilteredScores:
    """Apply min-p, top-k and top-p to the whole vocabulary's scores, of which this shard has some. Shapes: as `filters.apply`."""
    given = {"min_p_B": min_p_B, "top_k_B": top_k_B, "top_p_B": top_p_B}
    free_B = (top_k_B <= 0) & (top_p_B >= 1.0) & (min_p_B <= 0.0)
    few = bool((free_B | ((top_k_B > 0) & (top_k_B <= MAX_KEPT))).all()) and shard.width > MAX_KEPT
    found = _by_candidates(scores_BW, shard, free_B, given) if few else None
    if found is not None:
        return found
    filtered = filters.apply(gather_scores(scores_BW, shard), **given)
    ids, count = largest(filtered)
    return FilteredScores(filtered[:, shard.first_id : shard.first_id + shard.count], ids, count)


def largest(scores_BV: torch.Tensor, first_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the 64 largest scores, -1 where there are no more, and how many scores there are. Shapes: [B, 64], [B]."""
    values, ids = scores_BV.topk(min(MAX_KEPT, scores_BV.shape[1]), dim=1)
    ids = torch.where(values > _NEG_INF, ids + first_id, -1).to(torch.int32)
    return ids, (scores_BV > _NEG_INF).sum(dim=1).to(torch.int32)


def _by_candidates(
    scores_BW: torch.Tensor, shard: VocabularyShard, free_B: torch.Tensor, given: dict[str, torch.Tensor]
) -> FilteredScores | None:
    """Filter by each shard's 64 largest scores; None where more of them may tie at a threshold."""
    values, places = scores_BW.topk(min(MAX_KEPT, shard.count), dim=1)
    missing = MAX_KEPT - values.shape[1]
    if missing:
        values, places = (torch.nn.functional.pad(one, (0, missing), value=fill) for one, fill in ((values, _NEG_INF), (places, 0)))
    ids = (places + shard.first_id).to(torch.int32)
    # [N, 2, B, 64]: one gather brings the scores and, as bits, their ids.
    ranks = shard.group.all_gather(torch.stack((values, ids.view(torch.float32))))
    rows = values.shape[0]
    candidates, ids = (ranks[:, part].transpose(0, 1).reshape(rows, -1) for part in range(2))
    filtered = filters.apply(candidates, **given)
    threshold_B = filtered.masked_fill(filtered == _NEG_INF, float("inf")).amin(dim=1)
    last_BN = ranks[:, 0, :, -1].t()
    if bool(((last_BN >= threshold_B[:, None]) & ~free_B[:, None]).any()):
        return None
    threshold_B = threshold_B.masked_fill(free_B, _NEG_INF)
    order = filtered.sort(dim=1, descending=True, stable=True)
    kept = ids.contiguous().view(torch.int32).gather(1, order.indices[:, :MAX_KEPT])
    kept = torch.where(order.values[:, :MAX_KEPT] > _NEG_INF, kept, -1)
    # Of a row without a filter more are kept than fit.
    count = (filtered > _NEG_INF).sum(dim=1).to(torch.int32).masked_fill(free_B, MAX_KEPT + 1)
    return FilteredScores(scores_BW.masked_fill(scores_BW < threshold_B[:, None], _NEG_INF), kept, count)
