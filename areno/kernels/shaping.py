"""The scores that a lane is drawn from, tile by tile: biases, masks, penalties, temperature.

Functions for the sampler's and the filters' kernels, no launch of its own; the order and the roundings are those of
`areno.sampling.sampler`. A lane's biases and stop ids are few: their places are held in registers and each tile looks only at
those that lie in it. Kernels that use these are compiled without contraction of products into sums, so that torch's
roundings are kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from areno.kernels.rows import MIN_P, SAMPLING_SLOT, STOP_WAIT, TEMPERATURE, TOP_K, TOP_P
from areno.request import MAX_STOP_IDS
from areno.request_values import MAX_BIASES
from areno.sampling.penalties import SlotTables

LOG2E = tl.constexpr(1.4426950408889634)
_STOPS = tl.constexpr(MAX_STOP_IDS)
_BIASES = tl.constexpr(MAX_BIASES)


class SlotPointers(NamedTuple):
    """`SlotTables` as a kernel takes it."""

    forced_ids: Any
    emitted: Any
    bias_ids: Any
    bias_values: Any
    repetition: Any
    presence: Any
    frequency: Any
    counts: Any
    prompt_seen: Any


def slot_pointers(tables: SlotTables) -> SlotPointers:
    """Return the tables' tensors in the order that kernels take."""
    return SlotPointers(*(getattr(tables, name) for name in SlotPointers._fields))


@triton.jit
def lane_row(rows_of_lanes, lane):
    """Return the row of a lane, of the tables or of the logits: lanes of a decode step are rows, those of prefills are told."""
    row = lane
    if rows_of_lanes is not None:
        row = tl.load(rows_of_lanes + lane)
    return row


@triton.jit
def lane_runs(rows, running, lane, row):
    """Return whether a lane draws: what the step found where there was one, else whether its row is alive."""
    if running is not None:
        runs = tl.load(running + lane) != 0
    else:
        runs = tl.load(rows.alive + row) != 0
    return runs


@triton.jit
def lane_divisor(rows, num_rows, row):
    """Return a lane's temperature, 1 where it is greedy, and whether it is greedy."""
    temperature = tl.load(rows.floats + TEMPERATURE * num_rows + row)
    greedy = temperature == 0.0
    return tl.where(greedy, 1.0, temperature), greedy


@triton.jit
def lane_filters(rows, num_rows, row):
    """Return top-k, top-p, min-p of a lane and whether one of them is on."""
    top_k = tl.load(rows.ints + TOP_K * num_rows + row)
    top_p = tl.load(rows.floats + TOP_P * num_rows + row)
    min_p = tl.load(rows.floats + MIN_P * num_rows + row)
    return top_k, top_p, min_p, (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def lane_stops(rows, num_rows, row):
    """Return a lane's stop ids [16] and whether they may not be drawn yet."""
    stop_ids = tl.load(rows.stop_ids + row * _STOPS + tl.arange(0, _STOPS))
    return stop_ids, tl.load(rows.ints + STOP_WAIT * num_rows + row) > 0


@triton.jit
def lane_slot(rows, slots, num_rows, row):
    """Return a lane's sampling slot, its bias ids and values [256], and whether it has biases and penalties."""
    slot = tl.load(rows.ints + SAMPLING_SLOT * num_rows + row)
    held = slot >= 0
    place = tl.maximum(slot, 0)
    number = tl.arange(0, _BIASES)
    ids = tl.load(slots.bias_ids + place * _BIASES + number).to(tl.int32)
    values = tl.load(slots.bias_values + place * _BIASES + number, mask=held & (number >= 0), other=0.0)
    biased = tl.max((values != 0.0).to(tl.int32), 0) > 0
    repetition = tl.load(slots.repetition + place)
    presence = tl.load(slots.presence + place)
    frequency = tl.load(slots.frequency + place)
    penalised = held & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0))
    return slot, ids, values, biased, penalised


@triton.jit
def _add_biases(scores, ids, first, slots, slot, bias_ids, bias_values, BLOCK: tl.constexpr):
    number = tl.arange(0, _BIASES)
    inside = (bias_values != 0.0) & (bias_ids >= first) & (bias_ids < first + BLOCK)
    left = tl.sum(inside.to(tl.int32), 0)
    last = -1
    while left > 0:
        last = tl.min(tl.where(inside & (number > last), number, _BIASES), 0)
        place = tl.maximum(slot, 0) * _BIASES + last
        biased = tl.load(slots.bias_ids + place).to(tl.int32)
        scores = tl.where(ids == biased, scores + tl.load(slots.bias_values + place), scores)
        left -= 1
    return scores


@triton.jit
def _mask_stops(scores, ids, first, rows, row, stop_ids, BLOCK: tl.constexpr):
    left = tl.max(((stop_ids >= first) & (stop_ids < first + BLOCK)).to(tl.int32), 0) * _STOPS
    while left > 0:
        left -= 1
        scores = tl.where(ids == tl.load(rows.stop_ids + row * _STOPS + left), float("-inf"), scores)
    return scores


@triton.jit
def _penalise(scores, ids, first, slots, slot, vocab, BLOCK: tl.constexpr):
    place = tl.maximum(slot, 0)
    inside = ids < vocab
    start = place.to(tl.int64) * vocab
    counts = tl.load(slots.counts + start + ids, mask=inside, other=0)
    # Read byte by byte: wide loads of bytes would give a thread 16 ids and change the order of the plain sums.
    scattered = tl.max_contiguous(first + tl.arange(0, BLOCK), 1)
    seen = tl.load(slots.prompt_seen + start + scattered, mask=inside, other=0) != 0
    repetition = tl.load(slots.repetition + place)
    repeated = tl.where(scores > 0.0, tl.div_rn(scores, repetition), scores * repetition)
    scores = tl.where((counts > 0) | seen, repeated, scores)
    scores = scores - tl.load(slots.frequency + place) * counts.to(tl.float32)
    return scores - tl.load(slots.presence + place) * (counts > 0).to(tl.float32)


@triton.jit
def shaped_scores(
    logits,
    ids,
    first,
    rows,
    slots,
    row,
    stops,
    held,
    divisor,
    num_valid,
    vocab,
    TEMPERED: tl.constexpr,
    STOP_MASK: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the scores of one tile before filters and noise.

    `stops` is what `lane_stops` gave, `held` what `lane_slot` gave. Shapes: logits and int32 ids [BLOCK]; the ids start at `first`.
    """
    scores = logits
    if SLOTS:
        if held[3]:
            scores = _add_biases(scores, ids, first, slots, held[0], held[1], held[2], BLOCK)
    if MASKS_IDS:
        scores = tl.where(ids < num_valid, scores, float("-inf"))
    if STOP_MASK:
        if stops[1]:
            scores = _mask_stops(scores, ids, first, rows, row, stops[0], BLOCK)
    if SLOTS:
        if held[4]:
            scores = _penalise(scores, ids, first, slots, held[0], vocab, BLOCK)
    if TEMPERED:
        scores = tl.div_rn(scores, divisor)
    return scores
