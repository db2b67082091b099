"""Draw one token per lane and say how likely it was.

A shard of the vocabulary is reduced to one small record per lane (`reduce_shard`); `combine` turns the records of all
shards, in fixed order, into tokens and log-probabilities. The vocabulary itself is never gathered. `logprob` and
`raw_logprob` are over the model's whole vocabulary and nothing below touches them; only the draw sees

    biases and masks -> penalties -> temperature -> min-p -> top-k -> top-p

and `behaviour_logprob` tells the draw's own distribution where one of these was active. Variants skip work that no lane
asked for; a plain lane's bits are the same in all of them, since a factor of one and an absent mask are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from areno.sampling import filters, race
from areno.sampling.penalties import SlotTables
from areno.sampling.shards import VocabularyShard, filter_scores, largest, log_total
from areno.sampling.variant import Variant

_NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneParams:
    """Sampling state of B lanes. Shapes: all [B] but `stop_ids` [B, 16] (-1 pads).

    `slots` is each lane's sampling slot in `tables`, -1 without one; `forced` the id it must emit, -1 where it is free.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    stop_ids: torch.Tensor
    stop_wait: torch.Tensor
    slots: torch.Tensor
    forced: torch.Tensor
    tables: SlotTables


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One shard's reductions per lane. Shapes: all [B]; sums are of exp(x - max). `best_shaped` is the score without noise."""

    maximum: torch.Tensor
    total: torch.Tensor
    tempered_maximum: torch.Tensor
    tempered_total: torch.Tensor
    shaped_maximum: torch.Tensor
    shaped_total: torch.Tensor
    best_score: torch.Tensor
    best_id: torch.Tensor
    best_logit: torch.Tensor
    best_shaped: torch.Tensor
    kept_ids: torch.Tensor | None
    kept_count: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Tokens and their log-probabilities. Shapes: [B]; `behaviour_logprob` is NaN where it equals `logprob`.

    `kept_ids` [B, 64] and `kept_count` [B] are the ids the filters kept, largest first, in the variant that returns them.
    """

    token: torch.Tensor
    logprob: torch.Tensor
    raw_logprob: torch.Tensor
    behaviour_logprob: torch.Tensor
    kept_ids: torch.Tensor | None = None
    kept_count: torch.Tensor | None = None


def _sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    maximum = logits.amax(dim=1)
    weights = (logits - maximum[:, None]).exp_()
    return maximum, weights.sum(dim=1), weights


class Sampler:
    """The sampler of a vocabulary, or of one rank's shard of it. Ids from `num_valid_ids` on are never drawn."""

    __slots__ = ("_first_id", "_invalid_from", "_masks_ids", "_shard", "_width")

    def __init__(self, *, first_id: int, width: int, num_valid_ids: int, shard: VocabularyShard | None = None) -> None:
        self._first_id, self._width, self._shard = first_id, width, shard
        self._invalid_from = max(num_valid_ids - first_id, 0) if num_valid_ids < first_id + width else None
        self._masks_ids = num_valid_ids < (first_id + width if shard is None else shard.vocab_size)

    @staticmethod
    def of_shard(shard: VocabularyShard, num_valid_ids: int) -> Sampler:
        """Return the sampler of a rank."""
        return Sampler(first_id=shard.first_id, width=shard.count, num_valid_ids=num_valid_ids, shard=shard)

    @property
    def masks_ids(self) -> bool:
        """Whether ids beyond the tokenizer's are masked in every draw, here or in another shard."""
        return self._masks_ids

    def reduce_shard(self, logits_BW: torch.Tensor, lanes: LaneParams, variant: Variant) -> ShardRecord:
        """Reduce float32 logits of this shard to one record per lane. Shapes: [B, W]."""
        maximum, total, weights = _sums(logits_BW)
        greedy = lanes.temperature == 0.0
        divisor = torch.where(greedy, 1.0, lanes.temperature)[:, None] if variant.temperature else None
        tempered, tempered_maximum, tempered_total = logits_BW, maximum, total
        if divisor is not None:
            tempered = logits_BW / divisor
            tempered_maximum, tempered_total, weights = _sums(tempered)
        shaped, shaped_maximum, shaped_total = tempered, tempered_maximum, tempered_total
        kept_ids = kept_count = None
        if variant.stop_mask or variant.slots or variant.filters or self.masks_ids:
            shaped = self._shape(logits_BW, divisor, lanes, variant)
            if variant.filters:
                shaped, kept_ids, kept_count = self._filter(shaped, lanes, kept=variant.kept)
            shaped_maximum, shaped_total, weights = _sums(shaped)
        if variant.noise:
            best, best_score = race.draw(shaped, weights, greedy, lanes.seeds, lanes.positions, self._first_id)
        else:
            best = shaped.argmax(dim=1, keepdim=True)
            best_score = shaped.gather(1, best)[:, 0]
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
            shaped_maximum=shaped_maximum,
            shaped_total=shaped_total,
            best_score=best_score,
            best_id=best[:, 0] + self._first_id,
            best_logit=logits_BW.gather(1, best)[:, 0],
            best_shaped=shaped.gather(1, best)[:, 0],
            kept_ids=kept_ids,
            kept_count=kept_count,
        )

    def _shape(self, logits_BW: torch.Tensor, divisor: torch.Tensor | None, lanes: LaneParams, variant: Variant) -> torch.Tensor:
        """Return the scores that are drawn from, before filters and noise."""
        shaped = logits_BW.clone()
        if variant.slots:
            lanes.tables.add_biases(shaped, lanes.slots, self._first_id)
        if self._invalid_from is not None:
            shaped[:, self._invalid_from :] = _NEG_INF
        if variant.stop_mask:
            local = lanes.stop_ids.to(torch.int64) - self._first_id
            hidden = (local >= 0) & (local < self._width) & (lanes.stop_wait > 0)[:, None]
            rows, columns = hidden.nonzero(as_tuple=True)
            shaped[rows, local[rows, columns]] = _NEG_INF
        if variant.slots:
            lanes.tables.penalise(shaped, lanes.slots, self._first_id)
        if divisor is not None:
            shaped /= divisor
        return shaped

    def _filter(
        self, shaped_BW: torch.Tensor, lanes: LaneParams, *, kept: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the scores that the filters leave and, asked for, the ids of the largest and their number in the whole vocabulary."""
        if self._shard is not None:
            found = filter_scores(shaped_BW, self._shard, min_p_B=lanes.min_p, top_k_B=lanes.top_k, top_p_B=lanes.top_p)
            return found.scores, found.kept_ids if kept else None, found.kept_count if kept else None
        shaped_BW = filters.apply(shaped_BW, min_p_B=lanes.min_p, top_k_B=lanes.top_k, top_p_B=lanes.top_p)
        return (shaped_BW, *(largest(shaped_BW) if kept else (None, None)))

    def draw(self, logits_BW: torch.Tensor, lanes: LaneParams, variant: Variant) -> Drawn:
        """Draw from the vocabulary; a rank of several together with the others, in one gather beside those of filters."""
        record = self.reduce_shard(logits_BW, lanes, variant)
        records = [record] if self._shard is None else self._gather(record, self._shard, variant)
        return combine(records, lanes, variant, masks_ids=self.masks_ids)

    def _gather(self, record: ShardRecord, shard: VocabularyShard, variant: Variant) -> list[ShardRecord]:
        """Return the records of all shards. Of each only the fields that the variant looks at travel: 20 to 40 bytes a lane."""
        names = ["maximum", "total", "best_score", "best_logit"]
        if variant.temperature:
            names += ["tempered_maximum", "tempered_total"]
        if variant.stop_mask or variant.slots or variant.filters or self.masks_ids:
            names += ["shaped_maximum", "shaped_total", "best_shaped"]
        words = torch.stack([record.best_id.to(torch.int32).view(torch.float32), *(getattr(record, name) for name in names)])
        gathered = []
        for fields in shard.group.all_gather(words):
            mine = dict(zip(names, fields[1:]))
            gathered.append(replace(record, best_id=fields[0].view(torch.int32).to(torch.int64), **mine))
        return gathered


def combine(records: list[ShardRecord], lanes: LaneParams, variant: Variant, *, masks_ids: bool) -> Drawn:
    """Combine the shards' records in their fixed order; every rank computes the same bits. Ties go to the lowest id."""
    best = records[0]
    score, token, logit, shaped = best.best_score, best.best_id, best.best_logit, best.best_shaped
    for record in records[1:]:
        better = record.best_score > score
        score, token = torch.where(better, record.best_score, score), torch.where(better, record.best_id, token)
        logit, shaped = torch.where(better, record.best_logit, logit), torch.where(better, record.best_shaped, shaped)
    raw_logprob = logit - log_total([r.maximum for r in records], [r.total for r in records])
    logprob = raw_logprob
    if variant.temperature:
        tempered = logit / torch.where(lanes.temperature == 0.0, 1.0, lanes.temperature)
        logprob = tempered - log_total([r.tempered_maximum for r in records], [r.tempered_total for r in records])
    behaviour = torch.full_like(logprob, float("nan"))
    if variant.stop_mask or variant.slots or variant.filters or masks_ids:
        drawn_from = shaped - log_total([r.shaped_maximum for r in records], [r.shaped_total for r in records])
        active = ((lanes.stop_wait > 0) & (lanes.stop_ids >= 0).any(dim=1)) | masks_ids
        if variant.slots:
            active = active | lanes.tables.shapes_draw(lanes.slots)
        if variant.filters:
            active = active | (lanes.top_k > 0) | (lanes.top_p < 1.0) | (lanes.min_p > 0.0)
        behaviour = torch.where(active & (lanes.forced < 0), drawn_from, behaviour)
    kept_ids = kept_count = None
    if variant.kept:
        assert records[0].kept_ids is not None, "the variant that returns kept sets has filters"
        kept_ids, kept_count = records[0].kept_ids, records[0].kept_count
    return Drawn(
        token=token, logprob=logprob, raw_logprob=raw_logprob, behaviour_logprob=behaviour, kept_ids=kept_ids, kept_count=kept_count
    )
