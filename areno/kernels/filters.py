"""Min-p, top-k and top-p as one threshold on the shaped scores of each lane, found by searching values, never by sorting.

One program a lane; a lane without a filter costs nothing. The first pass over the vocabulary keeps the largest score of each
column (ids a block apart). The k-th largest of these, or the value at which their mass alone reaches top-p, bounds the
threshold from below, so that the second pass can pack the few scores at or above it, by column, into a workspace. The exact
searches of `areno.sampling.filters` then run over that list: halve the interval of float bits until one value is left. A
flat distribution packs more and searches longer; nothing else changes. Sums run in a fixed order.

A third pass, in the variant that returns kept sets, lists the ids at or above the threshold, largest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areno.kernels.reduce import COLUMNS_PER_WARP, Draw, exp_sum, finite
from areno.kernels.rows import row_pointers
from areno.kernels.shaping import (
    LOG2E,
    lane_divisor,
    lane_filters,
    lane_row,
    lane_runs,
    lane_slot,
    lane_stops,
    shaped_scores,
    slot_pointers,
)
from areno.sampling.kept import MAX_KEPT

BLOCK, WARPS = 4096, 16
_KEPT = tl.constexpr(MAX_KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterWorkspace:
    """Scratch of the search. Shapes: `thresholds` float32 [B], `scores` float32 [B, V rounded up]; kept ones [B, 64]."""

    thresholds: torch.Tensor
    scores: torch.Tensor
    kept_scores: torch.Tensor
    kept_ids: torch.Tensor
    block: int

    @staticmethod
    def allocate(lanes: int, vocab: int, device: torch.device, *, block: int = BLOCK) -> FilterWorkspace:
        """Return a workspace for up to this many lanes."""
        return FilterWorkspace(
            thresholds=torch.zeros(lanes, device=device),
            scores=torch.zeros((lanes, triton.cdiv(vocab, block) * block), device=device),
            kept_scores=torch.zeros((lanes, MAX_KEPT), device=device),
            kept_ids=torch.zeros((lanes, MAX_KEPT), dtype=torch.int32, device=device),
            block=block,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRing:
    """Where kept sets go. Shapes: `ids` int32 [slots, lanes, 64], largest first, -1 pads; `counts` int32 [slots, lanes].

    A count above 64 says that the set does not fit; its ids then mean nothing.
    """

    ids: torch.Tensor
    counts: torch.Tensor


@triton.jit
def _ordered(values):
    """Map float32 to int32 so that integers compare as the floats do."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


@triton.jit
def _unordered(bits):
    return tl.where(bits >= 0, bits, (-bits) | (-2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(listed, count, floor, maximum, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number or the mass of the listed scores at or above a value."""
    column = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    row = 0
    while row < count:
        scores = tl.load(listed + row * BLOCK + column)
        if BY_MASS:
            found += tl.where(scores >= floor, tl.exp2((scores - maximum) * LOG2E), 0.0)
        else:
            found += (scores >= floor).to(tl.float32)
        row += 1
    return tl.sum(found.to(tl.float64), 0)


@triton.jit
def largest_reaching(listed, count, needed, floor, maximum, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest value at or above `floor` such that the listed scores from it on add up to `needed`; else `floor`."""
    low = _ordered(floor).to(tl.int64)
    high = tl.maximum(_ordered(maximum).to(tl.int64), low)
    while low < high:
        middle = (low + high + 1) >> 1
        if _mass(listed, count, _unordered(middle.to(tl.int32)), maximum, BY_MASS, BLOCK) >= needed:
            low = middle
        else:
            high = middle - 1
    return _unordered(low.to(tl.int32))


@triton.jit
def tile_scores(
    base, first, vocab, rows, slots, row, stops, held, divisor, num_valid, all_ids, FIRST_ID: tl.constexpr,
    TEMPERED: tl.constexpr, STOP_MASK: tl.constexpr, SLOTS: tl.constexpr, MASKS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return what a lane is drawn from of the tile at `first` of its logits, whose first one is that of id `FIRST_ID`; -inf behind them."""
    first = tl.multiple_of(first, BLOCK)
    place = first + tl.arange(0, BLOCK)
    tile = tl.load(base + place, mask=place < vocab, other=float("-inf"))
    return shaped_scores(
        tile, place + FIRST_ID, first + FIRST_ID, rows, slots, row, stops, held, divisor, num_valid, all_ids,
        TEMPERED, STOP_MASK, SLOTS, MASKS_IDS, BLOCK,
    )  # fmt: skip


@triton.jit
def pack_scores(
    listed, cutoff, stop, base, vocab, rows, slots, row, stops, held, divisor, num_valid, all_ids, FIRST_ID: tl.constexpr,
    TEMPERED: tl.constexpr, STOP_MASK: tl.constexpr, SLOTS: tl.constexpr, MASKS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List a lane's scores at or above `cutoff` by column, -inf where a column has fewer; return how many rows that takes."""
    column = tl.arange(0, BLOCK)
    packed = tl.zeros([BLOCK], tl.int32)
    first = 0
    while first < stop:
        scores = tile_scores(
            base, first, vocab, rows, slots, row, stops, held, divisor, num_valid, all_ids, FIRST_ID,
            TEMPERED, STOP_MASK, SLOTS, MASKS_IDS, BLOCK,
        )  # fmt: skip
        here = (scores >= cutoff) & (scores > float("-inf"))
        tl.store(listed + packed * BLOCK + column, scores, mask=here)
        packed += here.to(tl.int32)
        first += BLOCK
    count = tl.max(packed, 0)
    filled = 0
    while filled < count:
        tl.store(listed + filled * BLOCK + column, tl.full([BLOCK], float("-inf"), tl.float32), mask=packed <= filled)
        filled += 1
    tl.debug_barrier()
    return count


@triton.jit
def _list_kept(counts_ring, ids_ring, kept_scores, kept_ids, kept, BLOCK: tl.constexpr):
    """Store a lane's kept ids by rank: those with a larger score, or as large a one and a lower id, come first."""
    number = tl.arange(0, BLOCK)
    inside = number < kept
    scores = tl.load(kept_scores + number, mask=inside, other=float("-inf"))
    ids = tl.load(kept_ids + number, mask=inside, other=-1)
    before = (scores[None, :] > scores[:, None]) | ((scores[None, :] == scores[:, None]) & (number[None, :] < number[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    tl.store(ids_ring + rank, ids)
    tl.store(counts_ring, kept)


@triton.jit(do_not_specialize=["num_rows", "ring_slots"])
def _filter_kernel(
    logits,
    thresholds,
    listed,
    kept_scores,
    kept_ids,
    ids_ring,
    counts_ring,
    counter,
    rows,
    slots,
    running,
    lane_rows,
    logit_rows,
    num_rows,
    vocab,
    num_valid,
    stride,
    listed_stride,
    ring_slots,
    ring_lanes,
    TEMPERED: tl.constexpr,
    STOP_MASK: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKS_IDS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    lane = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = lane_row(lane_rows, lane)
    source = lane_row(logit_rows, lane)
    runs = lane_runs(rows, running, lane, row)
    top_k, top_p, min_p, filtered = lane_filters(rows, num_rows, row)
    base = logits + source.to(tl.int64) * stride
    listed += lane.to(tl.int64) * listed_stride
    divisor = lane_divisor(rows, num_rows, row)[0]
    stops = (0, False)
    held = (0, 0, 0, False, False)
    if STOP_MASK:
        stops = lane_stops(rows, num_rows, row)
    if SLOTS:
        held = lane_slot(rows, slots, num_rows, row)
    column = tl.arange(0, BLOCK)
    stop = tl.where(runs & filtered, vocab, 0)

    lowest = tl.full([], float("-inf"), tl.float32)
    largest, total, maximum = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([COLUMNS], tl.float32), lowest
    first = 0
    while first < stop:
        scores = tile_scores(
            base, first, vocab, rows, slots, row, stops, held, divisor, num_valid, vocab, 0, TEMPERED, STOP_MASK, SLOTS, MASKS_IDS, BLOCK
        )
        largest = tl.maximum(largest, scores)
        reached = tl.maximum(maximum, tl.max(scores, 0))
        _, total = exp_sum(scores, total, finite(reached), maximum, LOG2E)
        maximum = reached
        first += BLOCK

    threshold = lowest
    if stop > 0:
        # The columns' largest scores, as a list of one row, bound the thresholds from below.
        tl.store(listed + column, largest)
        tl.debug_barrier()
        whole = tl.sum(total.to(tl.float64), 0)
        limit = lowest
        if min_p > 0.0:
            limit = maximum + tl.log(min_p)
        cutoff = limit
        if top_k > 0:
            cutoff = tl.maximum(cutoff, largest_reaching(listed, 1, top_k.to(tl.float64), lowest, maximum, False, BLOCK))
        elif min_p <= 0.0:
            # The margin keeps the bound below the threshold whatever the sums' roundings.
            cutoff = largest_reaching(listed, 1, whole * top_p.to(tl.float64) * 1.00001, lowest, maximum, True, BLOCK)
        tl.debug_barrier()
        count = pack_scores(
            listed, cutoff, stop, base, vocab, rows, slots, row, stops, held, divisor, num_valid, vocab, 0,
            TEMPERED, STOP_MASK, SLOTS, MASKS_IDS, BLOCK,
        )  # fmt: skip
        threshold = limit
        if top_k > 0:
            threshold = tl.maximum(limit, largest_reaching(listed, count, top_k.to(tl.float64), cutoff, maximum, False, BLOCK))
        if top_p < 1.0:
            if (top_k > 0) | (min_p > 0.0):
                whole = _mass(listed, count, threshold, maximum, True, BLOCK)
            floor = tl.maximum(cutoff, threshold)
            threshold = tl.maximum(threshold, largest_reaching(listed, count, whole * top_p.to(tl.float64), floor, maximum, True, BLOCK))
    tl.store(thresholds + lane, threshold)

    if KEPT:
        kept = 0
        first = 0
        kept_scores += lane * _KEPT
        kept_ids += lane * _KEPT
        while first < stop:
            ids = first + column
            scores = tile_scores(
                base,
                first,
                vocab,
                rows,
                slots,
                row,
                stops,
                held,
                divisor,
                num_valid,
                vocab,
                0,
                TEMPERED,
                STOP_MASK,
                SLOTS,
                MASKS_IDS,
                BLOCK,
            )
            here = (scores >= threshold) & (scores > float("-inf"))
            more = tl.sum(here.to(tl.int32), 0)
            if more > 0:
                place = kept + tl.cumsum(here.to(tl.int32), 0) - 1
                tl.store(kept_scores + place, scores, mask=here & (place < _KEPT))
                tl.store(kept_ids + place, ids, mask=here & (place < _KEPT))
                kept += more
            first += BLOCK
        tl.debug_barrier()
        if runs:
            place = ((tl.load(counter) - 1) % ring_slots) * ring_lanes + lane
            # A lane without filters keeps more than fits.
            kept = tl.where(filtered, kept, tl.maximum(vocab, _KEPT + 1))
            _list_kept(counts_ring + place, ids_ring + place * _KEPT, kept_scores, kept_ids, kept, _KEPT)


def find_thresholds(
    draw: Draw, workspace: FilterWorkspace, counter: torch.Tensor, *, kept: KeptRing | None = None, warps: int = WARPS, pdl: bool = False
) -> None:
    """Find the threshold of each lane with a filter, -inf for others; with `kept` also store the ids at or above it.

    Shapes: as `Draw` and `FilterWorkspace`; `counter` int32 scalar. Mutates: the workspace, the counter's slot of `kept`.
    """
    vocab, block = draw.vocab, workspace.block
    assert draw.lanes <= workspace.thresholds.shape[0], f"{draw.lanes} lanes are more than the workspace's {workspace.thresholds.shape[0]}"
    assert workspace.scores.shape[1] >= triton.cdiv(vocab, block) * block, f"the workspace holds {workspace.scores.shape[1]} of {vocab} ids"
    extra = {"launch_pdl": True} if pdl else {}
    _filter_kernel[(draw.lanes,)](
        draw.logits,
        workspace.thresholds,
        workspace.scores,
        workspace.kept_scores,
        workspace.kept_ids,
        kept.ids if kept else None,
        kept.counts if kept else None,
        counter,
        row_pointers(draw.state),
        slot_pointers(draw.slots) if draw.variant.slots else None,
        *draw.lanes_and_rows(),
        vocab,
        draw.num_valid_ids,
        draw.logits.stride(0),
        workspace.scores.stride(0),
        kept.counts.shape[0] if kept else 1,
        kept.counts.shape[1] if kept else 1,
        KEPT=kept is not None,
        **draw.flags(),
        BLOCK=block,
        COLUMNS=min(block, COLUMNS_PER_WARP * warps),
        PDL=pdl,
        num_warps=warps,
        enable_fp_fusion=False,
        **extra,
    )
