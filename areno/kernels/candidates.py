"""The filters' thresholds where ranks hold shards of the vocabulary, and every filtered lane has a top-k of at most 64.

No more than 64 ids of a lane are kept then, ties at the last one aside, so each rank need tell only its 64 largest scores and how many
tie with the last of them:

    shard --[64 largest, ties]--> record of 65 words --gather--> all ranks' records --[threshold]--> the same on every rank

The threshold is exact, whatever ties there are: the k-th largest of all scores is among the records, and so is all mass above it. The
lane's ids are never gathered: each rank draws from what its own shard has at or above the threshold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno.kernels.filters import BLOCK, WARPS, FilterWorkspace, largest_reaching, pack_scores, tile_scores
from areno.kernels.reduce import Draw, finite
from areno.kernels.rows import row_pointers
from areno.kernels.shaping import LOG2E, lane_divisor, lane_filters, lane_row, lane_runs, lane_slot, lane_stops, slot_pointers
from areno.sampling.kept import MAX_KEPT

RECORD = MAX_KEPT + 1
_KEPT, _RECORD = tl.constexpr(MAX_KEPT), tl.constexpr(RECORD)


@triton.jit(do_not_specialize=["num_rows"])
def _candidates_kernel(
    logits,
    records,
    listed,
    rows,
    slots,
    running,
    lane_rows,
    logit_rows,
    num_rows,
    vocab,
    all_ids,
    num_valid,
    stride,
    listed_stride,
    FIRST_ID: tl.constexpr,
    TEMPERED: tl.constexpr,
    STOP_MASK: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0)
    row = lane_row(lane_rows, lane)
    source = lane_row(logit_rows, lane)
    runs = lane_runs(rows, running, lane, row)
    filtered = lane_filters(rows, num_rows, row)[3]
    base = logits + source.to(tl.int64) * stride
    listed += lane.to(tl.int64) * listed_stride
    records += lane * _RECORD
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
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    first = 0
    while first < stop:
        scores = tile_scores(
            base, first, vocab, rows, slots, row, stops, held, divisor, num_valid, all_ids, FIRST_ID,
            TEMPERED, STOP_MASK, SLOTS, MASKS_IDS, BLOCK,
        )  # fmt: skip
        largest = tl.maximum(largest, scores)
        first += BLOCK

    last, taken, ties = lowest, 0, tl.full([], 0.0, tl.float32)
    if stop > 0:
        # The columns' largest scores, as a list of one row, bound the 64th from below.
        tl.store(listed + column, largest)
        tl.debug_barrier()
        maximum = tl.max(largest, 0)
        needed = tl.full([], _KEPT, tl.float64)
        cutoff = largest_reaching(listed, 1, needed, lowest, maximum, False, BLOCK)
        tl.debug_barrier()
        count = pack_scores(
            listed, cutoff, stop, base, vocab, rows, slots, row, stops, held, divisor, num_valid, all_ids, FIRST_ID,
            TEMPERED, STOP_MASK, SLOTS, MASKS_IDS, BLOCK,
        )  # fmt: skip
        last = largest_reaching(listed, count, needed, cutoff, maximum, False, BLOCK)
        filled = 0
        while filled < count:
            scores = tl.load(listed + filled * BLOCK + column)
            above = scores > last
            # Fewer than 64 lie above the 64th; where there are not so many, all do.
            tl.store(records + taken + tl.cumsum(above.to(tl.int32), 0) - 1, scores, mask=above)
            taken += tl.sum(above.to(tl.int32), 0)
            ties += tl.sum(((scores == last) & (scores > float("-inf"))).to(tl.float32), 0)
            filled += 1
    number = tl.arange(0, _KEPT)
    tl.store(records + number, tl.zeros([_KEPT], tl.float32) + last, mask=number >= taken)
    # How many ids stand behind each of the record's copies of the last score.
    tl.store(records + _KEPT, ties / tl.maximum(_KEPT - taken, 1).to(tl.float32))


@triton.jit(do_not_specialize=["num_rows", "lanes"])
def _threshold_kernel(records, thresholds, rows, lane_rows, num_rows, lanes, RANKS: tl.constexpr, ALL: tl.constexpr):
    lane = tl.program_id(0)
    row = lane_row(lane_rows, lane)
    top_k, top_p, min_p, filtered = lane_filters(rows, num_rows, row)
    # One element for each rank's each score; `weights` is how many ids it stands for.
    number = tl.arange(0, ALL)
    rank = number // _KEPT
    inside = rank < RANKS
    place = records + (rank * lanes + lane) * _RECORD
    scores = tl.load(place + number % _KEPT, mask=inside, other=float("-inf"))
    last = tl.load(place + _KEPT - 1, mask=inside, other=float("-inf"))
    weights = tl.where(scores == last, tl.load(place + _KEPT, mask=inside, other=0.0), 1.0)
    maximum = tl.max(scores, 0)
    reference = finite(maximum)
    masses = tl.where(scores > float("-inf"), weights * tl.exp2((scores - reference) * LOG2E), 0.0)
    above = tl.zeros([ALL], tl.int32)
    reached = tl.zeros([ALL], tl.float64)
    part = tl.arange(0, _KEPT)
    for other in tl.static_range(RANKS):
        theirs = records + (other * lanes + lane) * _RECORD
        values = tl.load(theirs + part)
        their_last = tl.load(theirs + _KEPT - 1)
        counts = tl.where(values == their_last, tl.load(theirs + _KEPT), 1.0)
        mass = tl.where(values > float("-inf"), counts * tl.exp2((values - reference) * LOG2E), 0.0)
        above += tl.sum((values[None, :] > scores[:, None]).to(tl.int32), 1)
        reached += tl.sum(tl.where(values[None, :] >= scores[:, None], mass[None, :], 0.0).to(tl.float64), 1)
    threshold = tl.full([], float("-inf"), tl.float32)
    if filtered & (maximum > float("-inf")):
        if min_p > 0.0:
            threshold = maximum + tl.log(min_p)
        if top_k > 0:
            kth = tl.min(tl.where((above < top_k) & (scores > float("-inf")), scores, float("inf")), 0)
            threshold = tl.maximum(threshold, kth)
        if top_p < 1.0:
            whole = tl.sum(tl.where(scores >= threshold, masses, 0.0).to(tl.float64), 0)
            enough = (reached >= whole * top_p.to(tl.float64)) & (scores >= threshold) & (scores > float("-inf"))
            threshold = tl.maximum(threshold, tl.max(tl.where(enough, scores, float("-inf")), 0))
    tl.store(thresholds + lane, threshold)


def find_thresholds_by_candidates(draw: Draw, workspace: FilterWorkspace) -> None:
    """Find the threshold of each lane with a filter, all of which have a top-k of 1 to 64; -inf for others.

    Shapes: as `Draw`, of a shard, and `FilterWorkspace`. Mutates: the workspace. Blocks: for the other ranks.
    """
    assert draw.shard is not None, "one rank has all scores: see `find_thresholds`"
    group, lanes, block = draw.shard.group, draw.lanes, workspace.block
    assert workspace.scores.shape[1] >= triton.cdiv(draw.vocab, block) * block, f"the workspace holds {workspace.scores.shape[1]} ids"
    records = torch.empty((lanes, RECORD), device=draw.logits.device)
    _candidates_kernel[(lanes,)](
        draw.logits,
        records,
        workspace.scores,
        row_pointers(draw.state),
        slot_pointers(draw.slots) if draw.variant.slots else None,
        *draw.lanes_and_rows(),
        draw.vocab,
        draw.all_ids,
        draw.num_valid_ids,
        draw.logits.stride(0),
        workspace.scores.stride(0),
        FIRST_ID=draw.first_id,
        **draw.flags(),
        BLOCK=block,
        num_warps=WARPS if block == BLOCK else 4,
        enable_fp_fusion=False,
    )
    gathered = group.all_gather(records)
    _threshold_kernel[(lanes,)](
        gathered,
        workspace.thresholds,
        row_pointers(draw.state),
        draw.lane_rows,
        draw.state.ints.shape[1],
        lanes,
        RANKS=group.size,
        ALL=triton.next_power_of_2(group.size * MAX_KEPT),
        num_warps=8,
        enable_fp_fusion=False,
    )
