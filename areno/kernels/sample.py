"""Draw a token for each lane, say how likely it was, advance the row: the sampler on the device.

`sample` makes two launches, three in variants with filters: `find_thresholds`, `reduce_logits`, and `finish` here, which
combines a lane's partial records in fixed order, writes the result record into the pinned ring and advances the row. The
semantics are those of `areno.sampling.sampler.combine` and of the epilogue in `areno.decode.tables`. A lane that does not run
changes nothing and reports IDLE or STARVED.

Where ranks hold shards of the vocabulary, `pack_records` first merges a lane's partial records into one of 36 bytes, one gather brings
those of all ranks, and `finish` combines them as if they were splits, on every rank with the same bits. Thresholds of filters are
found from each rank's largest scores (`candidates`), or searched for in gathered logits where a lane may keep more than 64 ids or
wants to know which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from areno.decode.launch import LaneStatus
from areno.kernels.candidates import find_thresholds_by_candidates
from areno.kernels.filters import FilterWorkspace, KeptRing, find_thresholds
from areno.kernels.reduce import (
    BEST,
    BEST_ID,
    BEST_LOGIT,
    BEST_SHAPED,
    FIELDS,
    MAXIMUM,
    NO_ID,
    SHAPED_MAXIMUM,
    SHAPED_TOTAL,
    TEMPERED_TOTAL,
    TOTAL,
    Draw,
    finite,
    partial_records,
    reduce_logits,
)
from areno.kernels.rows import GENERATION, LAST_TOKEN, LENGTH, REMAINING, STOP_WAIT, row_pointers
from areno.kernels.shaping import lane_divisor, lane_filters, lane_row, lane_runs, lane_slot, lane_stops, slot_pointers
from areno.sampling.shards import VocabularyShard, gather_scores

RECORD_WORDS = tl.constexpr(6)
_IDLE, _TOKEN, _STOPPED, _EXHAUSTED, _STARVED = (
    tl.constexpr(int(status))
    for status in (LaneStatus.IDLE, LaneStatus.TOKEN, LaneStatus.STOPPED, LaneStatus.EXHAUSTED, LaneStatus.STARVED)
)


@triton.jit
def _log_total(maxima, totals):
    """Return the largest maximum and the log of the sum relative to it. A split whose ids are all masked has no mass."""
    maximum = finite(tl.max(maxima, 0))
    total = tl.sum(_shares(maxima, totals, maximum), 0)
    # Nothing was summed for a lane that does not run.
    return maximum, tl.log(tl.where(total == 0.0, 1.0, total))


@triton.jit
def _shares(maxima, totals, maximum):
    """Return sums relative to a common maximum. A split whose ids are all masked has no mass."""
    return tl.where(maxima == float("-inf"), 0.0, totals * tl.exp(maxima - maximum))


@triton.jit
def _store_float(place, value, mask):
    tl.store(place, value.to(tl.int32, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "ring_slots"])
def _finish_kernel(
    logits,
    partials,
    ring,
    counter,
    rows,
    slots,
    starved,
    running,
    lane_rows,
    logit_rows,
    num_rows,
    vocab,
    stride,
    splits,
    ring_slots,
    ring_lanes,
    max_forced,
    lane_stride,
    field_stride,
    split_stride,
    SHARDED: tl.constexpr,
    TEMPERED: tl.constexpr,
    STOP_MASK: tl.constexpr,
    SLOTS: tl.constexpr,
    FILTERS: tl.constexpr,
    MASKS_IDS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    SHAPES: tl.constexpr = STOP_MASK or SLOTS or FILTERS or MASKS_IDS
    lane = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = lane_row(lane_rows, lane)
    runs = lane_runs(rows, running, lane, row)
    # Everything that no other load must precede comes first: this kernel is as long as its chain of loads.
    remaining = tl.load(rows.ints + REMAINING * num_rows + row)
    stop_wait = tl.load(rows.ints + STOP_WAIT * num_rows + row)
    length = tl.load(rows.ints + LENGTH * num_rows + row)
    generation = tl.load(rows.ints + GENERATION * num_rows + row)
    launch = tl.load(counter)
    split = tl.arange(0, BLOCK)
    inside = split < splits
    place = partials + lane * lane_stride + split * split_stride
    scores = tl.load(place + BEST * field_stride, mask=inside, other=float("-inf"))
    ids = tl.load(place + BEST_ID * field_stride, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    logit_of_splits = tl.load(place + BEST_LOGIT * field_stride, mask=inside, other=0.0)
    totals = tl.load(place + TOTAL * field_stride, mask=inside, other=0.0)
    if SUMS:
        maxima = tl.load(place + MAXIMUM * field_stride, mask=inside, other=float("-inf"))
        if TEMPERED:
            tempered_totals = tl.load(place + TEMPERED_TOTAL * field_stride, mask=inside, other=0.0)
        if SHAPES:
            shaped_maxima = tl.load(place + SHAPED_MAXIMUM * field_stride, mask=inside, other=float("-inf"))
            shaped_totals = tl.load(place + SHAPED_TOTAL * field_stride, mask=inside, other=0.0)
            shaped_of_splits = tl.load(place + BEST_SHAPED * field_stride, mask=inside, other=0.0)
    status = tl.where(runs, _TOKEN, _IDLE)
    if starved is not None:
        status = tl.where(tl.load(starved + lane) != 0, _STARVED, status)

    # Splits are in the order of their ids, so the lowest id among the best is the first one's.
    best = tl.max(scores, 0)
    token = tl.min(tl.where(inside & (scores == best), ids, NO_ID), 0)
    chosen = inside & (ids == token)
    logit = tl.max(tl.where(chosen, logit_of_splits, float("-inf")), 0)
    stop_ids, stops_held = lane_stops(rows, num_rows, row)
    active = (stops_held & (tl.max(stop_ids, 0) >= 0)) | MASKS_IDS
    forced = -1
    if SLOTS:
        held = lane_slot(rows, slots, num_rows, row)
        slot = tl.maximum(held[0], 0)
        emitted = tl.load(slots.emitted + slot)
        forced = tl.load(slots.forced_ids + slot * max_forced + tl.minimum(emitted, max_forced - 1)).to(tl.int32)
        forced = tl.where(held[0] >= 0, forced, -1)
        # Of shards the forced id's own said that it won, with its logit.
        if not SHARDED:
            if forced >= 0:
                source = lane
                if logit_rows is not None:
                    source = tl.load(logit_rows + lane)
                token = tl.minimum(forced, vocab - 1)
                logit = tl.load(logits + source.to(tl.int64) * stride + token)
        active = active | held[3] | held[4]
    if FILTERS:
        active = active | lane_filters(rows, num_rows, row)[3]
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)

    if SUMS:
        maximum, log_total = _log_total(maxima, totals)
        raw_logprob = logit - maximum - log_total
        logprob = raw_logprob
        if TEMPERED:
            divisor = lane_divisor(rows, num_rows, row)[0]
            maximum, log_total = _log_total(tl.div_rn(maxima, divisor), tempered_totals)
            logprob = tl.div_rn(logit, divisor) - maximum - log_total
        behaviour_logprob = tl.full([], float("nan"), tl.float32)
        if SHAPES:
            maximum, log_total = _log_total(shaped_maxima, shaped_totals)
            shaped = tl.max(tl.where(chosen, shaped_of_splits, float("-inf")), 0)
            behaviour_logprob = tl.where(active & (forced < 0), shaped - maximum - log_total, behaviour_logprob)
    else:
        # Zero, or NaN where the logits are not finite.
        raw_logprob = logit + tl.sum(totals, 0)
        logprob = tl.full([], float("nan"), tl.float32)
        behaviour_logprob = logprob

    stopped = runs & (stop_wait <= 0) & (tl.max((stop_ids == token).to(tl.int32), 0) > 0)
    exhausted = runs & (remaining <= 1) & (stopped == 0)
    status = tl.where(stopped, _STOPPED, tl.where(exhausted, _EXHAUSTED, status))
    tl.store(rows.ints + LAST_TOKEN * num_rows + row, token, mask=runs)
    tl.store(rows.ints + LENGTH * num_rows + row, length + 1, mask=runs)
    tl.store(rows.ints + REMAINING * num_rows + row, remaining - 1, mask=runs)
    tl.store(rows.ints + STOP_WAIT * num_rows + row, stop_wait - 1, mask=runs)
    tl.store(rows.alive + row, False, mask=stopped | exhausted)
    if SLOTS:
        mine = runs & (held[0] >= 0)
        tl.store(slots.emitted + slot, emitted + 1, mask=mine)
        count = slots.counts + slot.to(tl.int64) * vocab + token
        tl.store(count, tl.load(count, mask=mine, other=0) + 1, mask=mine)

    record = ring + ((launch - 1) % ring_slots) * RECORD_WORDS * ring_lanes + lane
    tl.store(record, status)
    tl.store(record + ring_lanes, generation)
    tl.store(record + 2 * ring_lanes, token, mask=runs)
    _store_float(record + 3 * ring_lanes, logprob, runs)
    _store_float(record + 4 * ring_lanes, raw_logprob, runs)
    _store_float(record + 5 * ring_lanes, behaviour_logprob, runs)


def finish(
    draw: Draw, partials: torch.Tensor, splits: int, ring: torch.Tensor, counter: torch.Tensor, *, num_warps: int = 1, pdl: bool = False
) -> None:
    """Combine the partial records, store each lane's result record, advance the rows that ran and end those that are done.

    Shapes: `ring` int32 [slots, 6, lanes], pinned or on the device; `counter` int32 scalar; `partials` float32 [lanes, 9, splits], of
    shards [splits, lanes, 9]. Mutates: the counter's ring slot, the rows' state, counts and places of their sampling slots.
    """
    fields = FIELDS.value
    strides = (fields * splits, splits, 1) if draw.shard is None else (fields, 1, draw.lanes * fields)
    assert ring.dtype == torch.int32 and ring.is_contiguous() and ring.shape[1] == RECORD_WORDS.value, (
        f"the ring has shape {tuple(ring.shape)}"
    )
    assert draw.lanes <= ring.shape[2] and counter.dtype == torch.int32, f"{draw.lanes} lanes are more than the ring's {ring.shape[2]}"
    extra = {"launch_pdl": True} if pdl else {}
    _finish_kernel[(draw.lanes,)](
        draw.logits,
        partials,
        ring,
        counter,
        row_pointers(draw.state),
        slot_pointers(draw.slots) if draw.variant.slots else None,
        draw.starved,
        *draw.lanes_and_rows(),
        draw.all_ids,
        draw.logits.stride(0),
        splits,
        ring.shape[0],
        ring.shape[2],
        draw.slots.forced_ids.shape[1],
        *strides,
        SHARDED=draw.shard is not None,
        FILTERS=draw.variant.filters,
        SUMS=draw.sums,
        **draw.flags(),
        BLOCK=triton.next_power_of_2(splits),
        PDL=pdl,
        num_warps=num_warps,
        enable_fp_fusion=False,
        **extra,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _pack_kernel(
    logits,
    partials,
    records,
    rows,
    slots,
    running,
    lane_rows,
    logit_rows,
    num_rows,
    vocab,
    stride,
    splits,
    max_forced,
    FIRST_ID: tl.constexpr,
    TEMPERED: tl.constexpr,
    STOP_MASK: tl.constexpr,
    SLOTS: tl.constexpr,
    FILTERS: tl.constexpr,
    MASKS_IDS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    SHAPES: tl.constexpr = STOP_MASK or SLOTS or FILTERS or MASKS_IDS
    lane = tl.program_id(0)
    row = lane_row(lane_rows, lane)
    split = tl.arange(0, BLOCK)
    inside = split < splits
    place = partials + lane * FIELDS * splits + split
    record = records + lane * FIELDS
    scores = tl.load(place + BEST * splits, mask=inside, other=float("-inf"))
    ids = tl.load(place + BEST_ID * splits, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    logit_of_splits = tl.load(place + BEST_LOGIT * splits, mask=inside, other=0.0)
    totals = tl.load(place + TOTAL * splits, mask=inside, other=0.0)
    best = tl.max(scores, 0)
    token = tl.min(tl.where(inside & (scores == best), ids, NO_ID), 0)
    chosen = inside & (ids == token)
    logit = tl.max(tl.where(chosen, logit_of_splits, float("-inf")), 0)
    if SHAPES and SUMS:
        shaped_of_splits = tl.load(place + BEST_SHAPED * splits, mask=inside, other=0.0)
        tl.store(record + BEST_SHAPED, tl.max(tl.where(chosen, shaped_of_splits, float("-inf")), 0))
    if SLOTS:
        held = lane_slot(rows, slots, num_rows, row)
        slot = tl.maximum(held[0], 0)
        forced = tl.load(slots.forced_ids + slot * max_forced + tl.minimum(tl.load(slots.emitted + slot), max_forced - 1)).to(tl.int32)
        forced = tl.where(held[0] >= 0, forced, -1)
        if forced >= 0:
            best = tl.full([], float("-inf"), tl.float32)
            if (forced >= FIRST_ID) & (forced < FIRST_ID + vocab):
                source = lane
                if logit_rows is not None:
                    source = tl.load(logit_rows + lane)
                best = tl.full([], float("inf"), tl.float32)
                token = forced
                logit = tl.load(logits + source.to(tl.int64) * stride + forced - FIRST_ID)
    tl.store(record + BEST, best)
    tl.store(record + BEST_ID, token.to(tl.float32, bitcast=True))
    tl.store(record + BEST_LOGIT, logit)
    if SUMS:
        maxima = tl.load(place + MAXIMUM * splits, mask=inside, other=float("-inf"))
        maximum = tl.max(maxima, 0)
        tl.store(record + MAXIMUM, maximum)
        tl.store(record + TOTAL, tl.sum(_shares(maxima, totals, finite(maximum)), 0))
        if TEMPERED:
            divisor = lane_divisor(rows, num_rows, row)[0]
            tempered_totals = tl.load(place + TEMPERED_TOTAL * splits, mask=inside, other=0.0)
            tempered = tl.div_rn(finite(maximum), divisor)
            tl.store(record + TEMPERED_TOTAL, tl.sum(_shares(tl.div_rn(maxima, divisor), tempered_totals, tempered), 0))
        if SHAPES:
            shaped_maxima = tl.load(place + SHAPED_MAXIMUM * splits, mask=inside, other=float("-inf"))
            shaped_totals = tl.load(place + SHAPED_TOTAL * splits, mask=inside, other=0.0)
            maximum = tl.max(shaped_maxima, 0)
            tl.store(record + SHAPED_MAXIMUM, maximum)
            tl.store(record + SHAPED_TOTAL, tl.sum(_shares(shaped_maxima, shaped_totals, finite(maximum)), 0))
    else:
        tl.store(record + TOTAL, tl.sum(totals, 0))


def pack_records(draw: Draw, partials: torch.Tensor, splits: int, records: torch.Tensor) -> None:
    """Merge each lane's partial records into one. Shapes: `records` float32 [lanes, 9]. Mutates: `records`."""
    assert records.shape == (draw.lanes, FIELDS.value) and records.is_contiguous(), f"records have shape {tuple(records.shape)}"
    _pack_kernel[(draw.lanes,)](
        draw.logits,
        partials,
        records,
        row_pointers(draw.state),
        slot_pointers(draw.slots) if draw.variant.slots else None,
        *draw.lanes_and_rows(),
        draw.vocab,
        draw.logits.stride(0),
        splits,
        draw.slots.forced_ids.shape[1],
        FIRST_ID=draw.first_id,
        FILTERS=draw.variant.filters,
        SUMS=draw.sums,
        **draw.flags(),
        BLOCK=triton.next_power_of_2(splits),
        num_warps=1,
        enable_fp_fusion=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWorkspace:
    """Scratch between the launches of up to a number of lanes; `filters` only where the engine allows them.

    Of a shard `records` [lanes * 9] are this rank's, `gathered` [ranks * lanes * 9] those of all.
    """

    partials: torch.Tensor
    filters: FilterWorkspace | None
    records: torch.Tensor
    gathered: torch.Tensor

    @staticmethod
    def allocate(
        max_lanes: int, vocab: int, device: torch.device, *, filters: bool, shard: VocabularyShard | None = None
    ) -> SampleWorkspace:
        """Return a workspace. One serves all launches of a stream. `vocab` is the number of ids that the logits cover."""
        words = 0 if shard is None else max_lanes * FIELDS.value
        whole = vocab if shard is None else shard.vocab_size
        return SampleWorkspace(
            partials=partial_records(max_lanes, vocab, device),
            filters=FilterWorkspace.allocate(max_lanes, whole, device) if filters else None,
            records=torch.zeros(words, device=device),
            gathered=torch.zeros(words * (1 if shard is None else shard.group.size), device=device),
        )


def sample(
    draw: Draw, workspace: SampleWorkspace, ring: torch.Tensor, counter: torch.Tensor, *, kept: KeptRing | None = None, pdl: bool = False
) -> None:
    """Draw, record and advance: all launches of the sampler. Shapes and Mutates: as `finish`; `kept` in its own variant."""
    thresholds = None
    if draw.variant.filters:
        assert workspace.filters is not None, "the variant with filters needs a workspace allocated with filters=True"
        if draw.shard is not None and not draw.variant.wide and not draw.variant.kept:
            find_thresholds_by_candidates(draw, workspace.filters)
        else:
            whole = draw if draw.shard is None else replace(draw, logits=gather_scores(draw.logits, draw.shard), shard=None)
            find_thresholds(whole, workspace.filters, counter, kept=kept if draw.variant.kept else None, pdl=pdl and draw.shard is None)
        thresholds = workspace.filters.thresholds
    splits = reduce_logits(draw, workspace.partials, thresholds, pdl=pdl).splits
    if draw.shard is None:
        finish(draw, workspace.partials, splits, ring, counter, pdl=pdl)
        return
    group, words = draw.shard.group, draw.lanes * FIELDS.value
    records = workspace.records[:words].view(draw.lanes, FIELDS.value)
    pack_records(draw, workspace.partials, splits, records)
    gathered = group.all_gather(records, workspace.gathered[: group.size * words].view(group.size, draw.lanes, FIELDS.value))
    finish(draw, gathered, group.size, ring, counter)
