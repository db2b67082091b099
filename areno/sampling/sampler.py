"""Draw one token per lane and say how likely it was.

A shard of the vocabulary is reduced to one small record per lane (`reduce_shard`); `combine` turns the records of all
shards, in fixed order, into tokens and log-probabilities. The vocabulary itself is never gathered. `logprob` and
`raw_logprob` are over the model's whole vocabulary and no mask touches them; only the draw sees masks, and
`behaviour_logprob` tells the draw's own distribution where a mask was active.

Variants skip work that no lane asked for; a plain lane's bits are the same in all of them, since dividing by a
temperature of one and adding no mask are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areno.sampling import noise
from areno.sampling.variant import Variant

_NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneParams:
    """Sampling state of B lanes. Shapes: all [B] but `stop_ids` [B, 16] (-1 pads); `forced` is -1 where free."""

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    stop_ids: torch.Tensor
    stop_wait: torch.Tensor
    forced: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One shard's reductions per lane. Shapes: all [B]; sums are of exp(x - max)."""

    maximum: torch.Tensor
    total: torch.Tensor
    tempered_maximum: torch.Tensor
    tempered_total: torch.Tensor
    masked_maximum: torch.Tensor | None
    masked_total: torch.Tensor | None
    best_score: torch.Tensor
    best_id: torch.Tensor
    best_logit: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Tokens and their log-probabilities. Shapes: [B]; `behaviour_logprob` is NaN where it equals `logprob`."""

    token: torch.Tensor
    logprob: torch.Tensor
    raw_logprob: torch.Tensor
    behaviour_logprob: torch.Tensor


def _sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    maximum = logits.amax(dim=1)
    return maximum, (logits - maximum[:, None]).exp_().sum(dim=1)


class Sampler:
    """The sampler of one shard, which holds ids `first_id`..`first_id + width - 1` of a vocabulary.

    Ids from `num_valid_ids` on are never drawn.
    """

    __slots__ = ("_first_id", "_ids", "_invalid_from", "_width")

    def __init__(self, *, first_id: int, width: int, num_valid_ids: int, device: torch.device) -> None:
        self._first_id, self._width = first_id, width
        self._ids = torch.arange(first_id, first_id + width, dtype=torch.int32, device=device)
        self._invalid_from = max(num_valid_ids - first_id, 0) if num_valid_ids < first_id + width else None

    @property
    def masks_ids(self) -> bool:
        """Whether ids beyond the tokenizer's are masked in every draw."""
        return self._invalid_from is not None

    def reduce_shard(self, logits_BW: torch.Tensor, lanes: LaneParams, variant: Variant) -> ShardRecord:
        """Reduce float32 logits of this shard to one record per lane. Shapes: [B, W]."""
        maximum, total = _sums(logits_BW)
        greedy = lanes.temperature == 0.0
        if variant.temperature:
            tempered = logits_BW / torch.where(greedy, 1.0, lanes.temperature)[:, None]
            tempered_maximum, tempered_total = _sums(tempered)
        else:
            tempered, tempered_maximum, tempered_total = logits_BW, maximum, total
        masked_maximum = masked_total = None
        scores = tempered
        if variant.stop_mask or self.masks_ids:
            scores = self._mask(tempered, lanes, variant)
            masked_maximum, masked_total = _sums(scores)
        if variant.noise:
            drawn = noise.gumbel(noise.keys(lanes.seeds, lanes.positions), self._ids)
            scores = drawn.masked_fill_(greedy[:, None], 0.0).add_(scores)
        best = scores.argmax(dim=1, keepdim=True)
        best_score = scores.gather(1, best)[:, 0]
        if variant.slots:
            local = lanes.forced.to(torch.int64) - self._first_id
            here = (local >= 0) & (local < self._width)
            best = torch.where(here, local, best[:, 0])[:, None]
            elsewhere = (lanes.forced >= 0) & ~here
            best_score = torch.where(here, float("inf"), torch.where(elsewhere, _NEG_INF, best_score))
        return ShardRecord(
            maximum=maximum,
            total=total,
            tempered_maximum=tempered_maximum,
            tempered_total=tempered_total,
            masked_maximum=masked_maximum,
            masked_total=masked_total,
            best_score=best_score,
            best_id=best[:, 0] + self._first_id,
            best_logit=logits_BW.gather(1, best)[:, 0],
        )

    def _mask(self, tempered_BW: torch.Tensor, lanes: LaneParams, variant: Variant) -> torch.Tensor:
        """Return a copy of the scores without the ids that may not be drawn."""
        masked = tempered_BW.clone()
        if self._invalid_from is not None:
            masked[:, self._invalid_from :] = _NEG_INF
        if variant.stop_mask:
            local = lanes.stop_ids.to(torch.int64) - self._first_id
            hidden = (local >= 0) & (local < self._width) & (lanes.stop_wait > 0)[:, None]
            rows, columns = hidden.nonzero(as_tuple=True)
            masked[rows, local[rows, columns]] = _NEG_INF
        return masked

    def draw(self, logits_BW: torch.Tensor, lanes: LaneParams, variant: Variant) -> Drawn:
        """Draw from an unsharded vocabulary."""
        return combine([self.reduce_shard(logits_BW, lanes, variant)], lanes, variant, masks_ids=self.masks_ids)


def _log_total(maxima: list[torch.Tensor], totals: list[torch.Tensor]) -> torch.Tensor:
    maximum = maxima[0]
    if len(maxima) == 1:
        return maximum + totals[0].log()
    for other in maxima[1:]:
        maximum = torch.maximum(maximum, other)
    total = torch.zeros_like(maximum)
    for shard_maximum, shard_total in zip(maxima, totals):
        total = total + shard_total * (shard_maximum - maximum).exp()
    return maximum + total.log()


def combine(records: list[ShardRecord], lanes: LaneParams, variant: Variant, *, masks_ids: bool) -> Drawn:
    """Combine the shards' records in their fixed order; every rank computes the same bits. Ties go to the lowest id."""
    best = records[0]
    score, token, logit = best.best_score, best.best_id, best.best_logit
    for record in records[1:]:
        better = record.best_score > score
        score = torch.where(better, record.best_score, score)
        token = torch.where(better, record.best_id, token)
        logit = torch.where(better, record.best_logit, logit)
    raw_logprob = logit - _log_total([r.maximum for r in records], [r.total for r in records])
    if variant.temperature:
        tempered = logit / torch.where(lanes.temperature == 0.0, 1.0, lanes.temperature)
        logprob = tempered - _log_total([r.tempered_maximum for r in records], [r.tempered_total for r in records])
    else:
        tempered, logprob = logit, raw_logprob
    behaviour = torch.full_like(logprob, float("nan"))
    if variant.stop_mask or masks_ids:
        masked = tempered - _log_total(
            [r.masked_maximum for r in records if r.masked_maximum is not None],
            [r.masked_total for r in records if r.masked_total is not None],
        )
        active = ((lanes.stop_wait > 0) & (lanes.stop_ids >= 0).any(dim=1)) | masks_ids
        behaviour = torch.where(active & (lanes.forced < 0), masked, behaviour)
    return Drawn(token=token, logprob=logprob, raw_logprob=raw_logprob, behaviour_logprob=behaviour)
