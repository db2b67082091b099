"""The vocabulary reduced to one small record for each lane and split: sums of exponentials and the best noisy score.

The first of the sampler's two launches; `areno.kernels.sample` is the second. It reads the logits once. Gumbel noise is at
most -log(u), so an id can beat the best score so far only if u < exp(score - best): the exponential is there for the sum
anyway, and the noise itself (two logarithms) is computed only for tiles with such an id. A lane that nothing shapes runs the
plain loop in every variant, so its sums have the same bits in each; ids beyond the tokenizer's are left to a second loop over
the last tiles, and the other masks to the lanes that have one. The semantics are those of `areno.sampling.sampler`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from areno.decode.row_state import RowState
from areno.kernels.noise import gumbel, hashes, lane_key
from areno.kernels.rows import LENGTH, row_pointers
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
from areno.sampling.penalties import SlotTables
from areno.sampling.shards import VocabularyShard
from areno.sampling.variant import Variant

CONFIGS = (
    (4, 1024, 4, 264, 96, 128),
    (32, 1024, 8, 600, 48, 64),
    (128, 512, 2, 1056, 64, 64),
    (1 << 30, 512, 2, 2112, 64, 96),
)
"""Measured on an H200: (most lanes, ids of a tile, warps, programs aimed at, registers of a thread, those with a temperature or slots)."""
COLUMNS_PER_WARP = 128
"""Ids that a warp loads at once, four by each thread."""

MAXIMUM, TOTAL, TEMPERED_TOTAL, BEST, BEST_ID, BEST_LOGIT, SHAPED_MAXIMUM, SHAPED_TOTAL, BEST_SHAPED, FIELDS = (
    tl.constexpr(number) for number in range(10)
)
NO_ID = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """How a launch cuts the vocabulary: `splits` programs a lane, each over `tiles` tiles of `block` ids.

    `registers` bounds those of a thread, `more_registers` in the variants with a temperature or sampling slots.
    """

    splits: int
    tiles: int
    block: int
    warps: int
    registers: int
    more_registers: int

    @staticmethod
    def of(lanes: int, vocab: int) -> Splits:
        """Return the cut for this many lanes."""
        _, block, warps, programs, registers, more = next(config for config in CONFIGS if lanes <= config[0])
        return Splits.cut(lanes, vocab, block=block, warps=warps, programs=programs, registers=registers, more_registers=more)

    @staticmethod
    def cut(lanes: int, vocab: int, *, block: int, warps: int, programs: int, registers: int = 128, more_registers: int = 128) -> Splits:
        """Return the cut that comes nearest to a number of programs."""
        tiles_in_all = triton.cdiv(vocab, block)
        tiles = triton.cdiv(tiles_in_all, max(1, min(programs // lanes, tiles_in_all)))
        return Splits(
            splits=triton.cdiv(tiles_in_all, tiles),
            tiles=tiles,
            block=block,
            warps=warps,
            registers=registers,
            more_registers=more_registers,
        )


def partial_records(max_lanes: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Return the workspace between the two launches, enough for 1 to `max_lanes` lanes. Shapes: float32, flat."""
    words = max(lanes * Splits.of(lanes, vocab).splits for lanes in range(1, max_lanes + 1)) * FIELDS.value
    return torch.zeros(words, dtype=torch.float32, device=device)


@triton.jit
def exp_sum(values, total, reference, maximum, scale):
    """Add exp of a tile to the running sums by column, which were relative to `maximum`. Returns weights and sums.

    Columns are the ids that one load of the whole program spans, so that a thread adds what it holds.
    """
    weights = tl.exp2((values - reference) * scale)
    rows: tl.constexpr = values.shape[0] // total.shape[0]
    fresh = tl.sum(tl.reshape(weights, (rows, total.shape[0])), 0)
    return weights, tl.fma(total, tl.exp2((maximum - reference) * scale), fresh)


@triton.jit
def finite(maximum):
    """A reference for exponentials: zero where everything so far is masked."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _may_win(weights, reference, top, ids, low, high, greedy, best, NOISE: tl.constexpr):
    """Tell whether an id of the tile may beat `best`; `weights` are exp(score - reference), `top` is the tile's largest score."""
    hot = top > best
    if NOISE:
        if greedy == 0:
            # A margin for the roundings of weights and scores; 2^126 keeps the limit finite before the first best.
            slack = 1e-3 + (tl.abs(best) + tl.abs(reference)) * 1e-6
            limit = tl.exp2(tl.minimum((reference - best + slack) * LOG2E, 126.0))
            # 1 + u, rounded down to a float by its bits: conversions of integers are slow. 1 + limit cannot round below it.
            one_and_u = ((hashes(ids, low, high) >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
            hot = tl.max(tl.fma(weights, limit, 1.0) - one_and_u, 0) >= 0.0
    return hot


@triton.jit
def _improve(scores, logits, ids, low, high, greedy, best, best_id, best_logit, best_shaped, NOISE: tl.constexpr, SHAPES: tl.constexpr):
    """Return the best of what was and a tile: its noisy score, id, logit and score. Ties keep the lowest id."""
    noisy = scores
    if NOISE:
        if greedy == 0:
            noisy = scores + gumbel(hashes(ids, low, high))
    top = tl.max(noisy, 0)
    if top > best:
        best = top
        best_id = tl.min(tl.where(noisy == top, ids, NO_ID), 0)
        best_logit = tl.max(tl.where(ids == best_id, logits, float("-inf")), 0)
        if SHAPES:
            best_shaped = tl.max(tl.where(ids == best_id, scores, float("-inf")), 0)
    return best, best_id, best_logit, best_shaped


@triton.jit(do_not_specialize=["num_rows"])
def _reduce_kernel(
    logits,
    partials,
    thresholds,
    rows,
    slots,
    running,
    lane_rows,
    logit_rows,
    num_rows,
    vocab,
    num_valid,
    stride,
    tiles,
    all_ids,
    FIRST_ID: tl.constexpr,
    NOISE: tl.constexpr,
    TEMPERED: tl.constexpr,
    STOP_MASK: tl.constexpr,
    SLOTS: tl.constexpr,
    FILTERS: tl.constexpr,
    MASKS_IDS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    SHAPES: tl.constexpr = STOP_MASK or SLOTS or FILTERS or MASKS_IDS
    lane, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = lane_row(lane_rows, lane)
    source = lane_row(logit_rows, lane)
    runs = lane_runs(rows, running, lane, row)
    base = logits + source.to(tl.int64) * stride
    divisor, greedy = lane_divisor(rows, num_rows, row)
    low, high = lane_key(tl.load(rows.seed + row), tl.load(rows.ints + LENGTH * num_rows + row) + 1)
    shaped = False
    stops = (0, False)
    held = (0, 0, 0, False, False)
    if STOP_MASK:
        stops = lane_stops(rows, num_rows, row)
        shaped = shaped | stops[1]
    if SLOTS:
        held = lane_slot(rows, slots, num_rows, row)
        shaped = shaped | held[3] | held[4]
    threshold = tl.full([], float("-inf"), tl.float32)
    if FILTERS:
        filtered = lane_filters(rows, num_rows, row)[3]
        threshold = tl.where(filtered, tl.load(thresholds + lane), threshold)
        shaped = shaped | filtered

    offset = tl.arange(0, BLOCK)
    first = split * tiles * BLOCK
    end = tl.minimum(first + tiles * BLOCK, vocab)
    stop = tl.where(runs, end, first)
    plain_stop = stop
    if MASKS_IDS:
        plain_stop = tl.minimum(stop, first + tl.maximum(num_valid - FIRST_ID - first, 0) // BLOCK * BLOCK)
    if SHAPES:
        plain_stop = tl.where(shaped, first, plain_stop)
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), divisor)
    scale = inverse * LOG2E
    maximum, total, tempered_total = float("-inf"), tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    # Infinite until an id is drawn, for a lane of which every logit is NaN.
    best, best_id, best_logit, best_shaped = float("-inf"), tl.minimum(first, vocab - 1) + FIRST_ID, float("inf"), float("-inf")
    worst = tl.full([BLOCK], float("-inf"), tl.float32)
    # Each tile is loaded while the one before it is worked on; the first before it is known whether the lane runs.
    tile = tl.load(base + tl.multiple_of(first, BLOCK) + offset, mask=first + offset < end, other=float("-inf"))

    while first < plain_stop:
        first = tl.multiple_of(first, BLOCK)
        place = first + offset
        ids = place + FIRST_ID
        following = tl.load(base + place + BLOCK, mask=place + BLOCK < end, other=float("-inf"))
        top = tl.max(tile, 0)
        reached = tl.maximum(maximum, top)
        reference = finite(reached)
        weights = tile
        if SUMS or (NOISE and not TEMPERED):
            weights, total = exp_sum(tile, total, reference, maximum, LOG2E)
        if TEMPERED:
            weights, tempered_total = exp_sum(tile, tempered_total, reference, maximum, scale)
        if not SUMS:
            worst = tl.maximum(worst, tile, propagate_nan=tl.PropagateNan.ALL)
        maximum = reached
        if _may_win(weights, reference * inverse, top * inverse, ids, low, high, greedy, best, NOISE):
            scores = tile
            if TEMPERED:
                scores = tl.div_rn(tile, divisor)
            best, best_id, best_logit, best_shaped = _improve(
                scores, tile, ids, low, high, greedy, best, best_id, best_logit, best_shaped, NOISE, SHAPES
            )
        tile = following
        first += BLOCK

    if SHAPES:
        shaped_maximum = tl.div_rn(maximum, divisor)
        shaped_total = total
        if TEMPERED:
            shaped_total = tempered_total
        while first < stop:
            first = tl.multiple_of(first, BLOCK)
            place = first + offset
            ids = place + FIRST_ID
            following = tl.load(base + place + BLOCK, mask=place + BLOCK < end, other=float("-inf"))
            if SUMS:
                reached = tl.maximum(maximum, tl.max(tile, 0))
                reference = finite(reached)
                weights, total = exp_sum(tile, total, reference, maximum, LOG2E)
                if TEMPERED:
                    weights, tempered_total = exp_sum(tile, tempered_total, reference, maximum, scale)
                maximum = reached
            else:
                worst = tl.maximum(worst, tile, propagate_nan=tl.PropagateNan.ALL)
            scores = shaped_scores(
                tile, ids, first + FIRST_ID, rows, slots, row, stops, held, divisor, num_valid, all_ids,
                TEMPERED, STOP_MASK, SLOTS, MASKS_IDS, BLOCK,
            )  # fmt: skip
            if FILTERS:
                scores = tl.where(scores >= threshold, scores, float("-inf"))
            top = tl.max(scores, 0)
            reached = tl.maximum(shaped_maximum, top)
            reference = finite(reached)
            weights, shaped_total = exp_sum(scores, shaped_total, reference, shaped_maximum, LOG2E)
            shaped_maximum = reached
            if _may_win(weights, reference, top, ids, low, high, greedy, best, NOISE):
                best, best_id, best_logit, best_shaped = _improve(
                    scores, tile, ids, low, high, greedy, best, best_id, best_logit, best_shaped, NOISE, SHAPES
                )
            tile = following
            first += BLOCK

    splits = tl.num_programs(1)
    record = partials + (lane * FIELDS * splits + split)
    tl.store(record + BEST * splits, best)
    tl.store(record + BEST_ID * splits, best_id.to(tl.float32, bitcast=True))
    tl.store(record + BEST_LOGIT * splits, best_logit)
    if SUMS:
        tl.store(record + MAXIMUM * splits, maximum)
        tl.store(record + TOTAL * splits, tl.sum(total, 0))
        if TEMPERED:
            tl.store(record + TEMPERED_TOTAL * splits, tl.sum(tempered_total, 0))
        if SHAPES:
            tl.store(record + SHAPED_MAXIMUM * splits, shaped_maximum)
            tl.store(record + SHAPED_TOTAL * splits, tl.sum(shaped_total, 0))
            tl.store(record + BEST_SHAPED * splits, best_shaped)
    else:
        # Not a sum: NaN where the split holds a NaN or +inf, for which nothing else looks here.
        broken = tl.sum((worst < float("inf")).to(tl.int32), 0) < BLOCK
        tl.store(record + TOTAL * splits, tl.where(broken, float("nan"), 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a launch draws from and for whom, shared by the two (with filters three) launches.

    Shapes: `logits` fp32 [S, V]; `running` [B] of a decode step, whose lanes are rows 0..B - 1, or `lane_rows` int32 [B] of a
    prefill, whose lanes run where their row is alive; `logit_rows` int32 [B] where lanes share logits rows. `sums` says
    whether somebody wants log-probabilities: without, they are NaN and the raw one is the chosen logit, or NaN where the
    lane's logits hold NaN or +inf. Ids from `num_valid_ids` on are never drawn. With `shard` the logits are of a rank's ids only.
    """

    lanes: int
    logits: torch.Tensor
    state: RowState
    slots: SlotTables
    variant: Variant
    num_valid_ids: int
    sums: bool = True
    running: torch.Tensor | None = None
    starved: torch.Tensor | None = None
    lane_rows: torch.Tensor | None = None
    logit_rows: torch.Tensor | None = None
    shard: VocabularyShard | None = None

    def __post_init__(self) -> None:
        assert self.logits.dtype == torch.float32 and self.logits.stride(1) == 1, f"logits are {self.logits.dtype}, rows contiguous"
        assert (self.running is None) != (self.lane_rows is None), "a decode step has `running`, a prefill `lane_rows`"
        assert self.lane_rows is not None or self.lanes <= self.state.ints.shape[1], f"{self.lanes} lanes are more than the rows"
        assert self.logit_rows is not None or self.lanes <= self.logits.shape[0], f"{self.lanes} lanes are more than the logits' rows"
        for name in ("running", "starved", "lane_rows", "logit_rows"):
            given = getattr(self, name)
            assert given is None or given.shape[0] >= self.lanes, f"{name} has {given.shape[0]} of {self.lanes} lanes"

    @property
    def vocab(self) -> int:
        """Number of ids that the logits cover."""
        return self.logits.shape[1]

    @property
    def first_id(self) -> int:
        """The id of the logits' first column."""
        return 0 if self.shard is None else self.shard.first_id

    @property
    def all_ids(self) -> int:
        """Number of ids of the whole vocabulary."""
        return self.vocab if self.shard is None else self.shard.vocab_size

    @property
    def masks_ids(self) -> bool:
        """Whether ids beyond the tokenizer's are masked in every draw."""
        return self.num_valid_ids < self.all_ids

    def flags(self) -> dict[str, bool]:
        """Return the constants by which a variant's kernels differ, but for NOISE, FILTERS and SUMS."""
        return {
            "TEMPERED": self.variant.temperature,
            "STOP_MASK": self.variant.stop_mask,
            "SLOTS": self.variant.slots,
            "MASKS_IDS": self.masks_ids,
        }

    def lanes_and_rows(self) -> tuple[Any, ...]:
        """Return what kernels take to find a lane's row and logits: running, lane rows, logits rows, number of rows."""
        return self.running, self.lane_rows, self.logit_rows, self.state.ints.shape[1]


def reduce_logits(
    draw: Draw, partials: torch.Tensor, thresholds: torch.Tensor | None = None, *, splits: Splits | None = None, pdl: bool = False
) -> Splits:
    """Reduce the logits of each lane and split to a partial record; returns the cut, which `finish` needs.

    Shapes: `partials` as `partial_records` made it, `thresholds` float32 [B] in the variant with filters. Mutates: `partials`.
    """
    splits = splits or Splits.of(draw.lanes, draw.vocab)
    assert partials.numel() >= draw.lanes * splits.splits * FIELDS.value, f"partials hold {partials.numel()} words for {draw.lanes} lanes"
    assert thresholds is not None or not draw.variant.filters, "the variant with filters needs thresholds"
    extra = {"launch_pdl": True} if pdl else {}
    _reduce_kernel[(draw.lanes, splits.splits)](
        draw.logits,
        partials,
        thresholds if draw.variant.filters else None,
        row_pointers(draw.state),
        slot_pointers(draw.slots) if draw.variant.slots else None,
        *draw.lanes_and_rows(),
        draw.vocab,
        draw.num_valid_ids,
        draw.logits.stride(0),
        splits.tiles,
        draw.all_ids,
        FIRST_ID=draw.first_id,
        NOISE=draw.variant.noise,
        FILTERS=draw.variant.filters,
        SUMS=draw.sums,
        **draw.flags(),
        BLOCK=splits.block,
        COLUMNS=min(splits.block, COLUMNS_PER_WARP * splits.warps),
        PDL=pdl,
        num_warps=splits.warps,
        maxnreg=splits.more_registers if draw.variant.temperature or draw.variant.slots else splits.registers,
        enable_fp_fusion=False,
        **extra,
    )
    return splits
