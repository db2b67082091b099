"""Row state on the device: delta slots applied, and the prologue of a launch.

A slot is packed into one flat int32 buffer, which the kernel reads from pinned host memory: `num_rows` operations of 32
words (ROW_OP as it lies in memory), then `num_pages` page entries of 3 words (PAGE_OP). GROW has no row operation, its page
entries say all. A SET carries the number of its page entries in the word of `source`: its row clears the page table from
there on while other programs write the entries before, so that nothing is written twice and one launch does. The operations
of a slot commute (see `areno.decode.deltas`), so programs run in any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from areno.config import SINK_PAGE, ZERO_PAGE
from areno.decode.deltas import PAGE_OP, ROW_OP, DeltaKind, DeltaSlot
from areno.decode.row_state import FLOAT_FIELDS, INT_FIELDS, RowState
from areno.request import MAX_STOP_IDS

ROW_WORDS = ROW_OP.itemsize // 4
PAGE_WORDS = PAGE_OP.itemsize // 4
_ENTRIES = 256
_WARPS = 4


def _word(name: str) -> int:
    return ROW_OP.fields[name][1] // 4  # type: ignore[index]


LAST_TOKEN, LENGTH, REMAINING, STOP_WAIT, SAMPLING_SLOT, TOP_K, GENERATION = (
    tl.constexpr(INT_FIELDS.index(name))
    for name in ("last_token", "length", "remaining", "stop_wait", "sampling_slot", "top_k", "generation")
)
TEMPERATURE, TOP_P, MIN_P = (tl.constexpr(FLOAT_FIELDS.index(name)) for name in ("temperature", "top_p", "min_p"))
_KIND, _ROW, _SOURCE, _OP_GENERATION, _SEED, _STOP_IDS = (
    tl.constexpr(_word(name)) for name in ("kind", "row", "source", "generation", "seed", "stop_ids")
)
_SET, _KILL, _MOVE = (tl.constexpr(int(kind)) for kind in (DeltaKind.SET, DeltaKind.KILL, DeltaKind.MOVE))
_INT_WORDS, _FLOAT_WORDS = (tuple(_word(name) for name in fields) for fields in (INT_FIELDS, FLOAT_FIELDS))
_STOPS = tl.constexpr(MAX_STOP_IDS)
_ZERO_PAGE = tl.constexpr(ZERO_PAGE)


class RowPointers(NamedTuple):
    """`RowState` as a kernel takes it; the stride between int and float fields is the number of rows."""

    ints: Any
    floats: Any
    alive: Any
    seed: Any
    stop_ids: Any
    page_table: Any


def row_pointers(state: RowState) -> RowPointers:
    """Return the state's tensors in the order that kernels take."""
    assert state.ints.is_contiguous() and state.floats.is_contiguous(), "kernels take the state of all rows, not of a bucket"
    return RowPointers(state.ints, state.floats, state.alive, state.seed, state.stop_ids, state.page_table)


def slot_words(num_rows: int, num_pages: int) -> int:
    """Return how many int32 words a packed slot takes."""
    return num_rows * ROW_WORDS + num_pages * PAGE_WORDS


def fits(slot: DeltaSlot, words: int) -> bool:
    """Tell whether a buffer of this many int32 words holds the packed slot."""
    return slot_words(slot.rows.size, slot.pages.size) <= words


def pack_slot(slot: DeltaSlot, out: np.ndarray) -> tuple[int, int]:
    """Pack a slot's row operations and page entries; sampling slots are filled elsewhere. Returns the number of each.

    Shapes: `out` flat int32. Mutates: the front of `out`.
    """
    grown = slot.rows["kind"] == DeltaKind.GROW
    rows = slot.rows[~grown] if grown.any() else slot.rows
    num_rows, num_pages = rows.size, slot.pages.size
    words = slot_words(num_rows, num_pages)
    assert out.dtype == np.int32 and out.ndim == 1, f"a packed slot is flat int32, got {out.dtype} of {out.ndim} dimensions"
    assert words <= out.size, f"the slot takes {words} words, the buffer holds {out.size}: make delta slots larger"
    if num_rows:
        out[: num_rows * ROW_WORDS] = rows.view(np.int32)
    if num_pages:
        out[num_rows * ROW_WORDS : words] = slot.pages.view(np.int32)
    return num_rows, num_pages


@triton.jit
def _copy_state(rows, num_rows, source, target, INTS: tl.constexpr, FLOATS: tl.constexpr):
    number = tl.arange(0, 16)
    tl.store(
        rows.ints + number * num_rows + target,
        tl.load(rows.ints + number * num_rows + source, mask=number < INTS, other=0),
        mask=number < INTS,
    )
    tl.store(
        rows.floats + number * num_rows + target,
        tl.load(rows.floats + number * num_rows + source, mask=number < FLOATS, other=0.0),
        mask=number < FLOATS,
    )
    tl.store(rows.seed + target, tl.load(rows.seed + source))
    stop = tl.arange(0, _STOPS)
    tl.store(rows.stop_ids + target * _STOPS + stop, tl.load(rows.stop_ids + source * _STOPS + stop))


@triton.jit
def _apply_row(
    operation, rows, num_rows, width, INT_WORDS: tl.constexpr, FLOAT_WORDS: tl.constexpr, INTS: tl.constexpr, FLOATS: tl.constexpr, BLOCK
):
    kind = tl.load(operation + _KIND)
    row = tl.load(operation + _ROW)
    generation = tl.load(operation + _OP_GENERATION)
    entry = tl.arange(0, BLOCK)
    table = rows.page_table + row.to(tl.int64) * width
    if kind == _SET:
        for field in tl.static_range(INTS):
            tl.store(rows.ints + field * num_rows + row, tl.load(operation + INT_WORDS[field]))
        for field in tl.static_range(FLOATS):
            tl.store(rows.floats + field * num_rows + row, tl.load(operation + FLOAT_WORDS[field]).to(tl.float32, bitcast=True))
        low = tl.load(operation + _SEED).to(tl.uint32, bitcast=True).to(tl.int64)
        high = tl.load(operation + _SEED + 1).to(tl.int64)
        tl.store(rows.seed + row, (high << 32) | low)
        stop = tl.arange(0, _STOPS)
        tl.store(rows.stop_ids + row * _STOPS + stop, tl.load(operation + _STOP_IDS + stop))
        tl.store(rows.alive + row, True)
        first = tl.load(operation + _SOURCE)
        while first < width:
            tl.store(table + first + entry, tl.full([BLOCK], _ZERO_PAGE, tl.int32), mask=first + entry < width)
            first += BLOCK
    if kind == _KILL:
        if tl.load(rows.ints + GENERATION * num_rows + row) == generation:
            tl.store(rows.alive + row, False)
    if kind == _MOVE:
        source = tl.load(operation + _SOURCE)
        if tl.load(rows.ints + GENERATION * num_rows + source) == generation:
            _copy_state(rows, num_rows, source, row, INTS, FLOATS)
            alive = tl.load(rows.alive + source)
            tl.store(rows.alive + row, alive)
            tl.store(rows.alive + source, False)
            from_table = rows.page_table + source.to(tl.int64) * width
            first = 0
            while first < width:
                tl.store(table + first + entry, tl.load(from_table + first + entry, mask=first + entry < width), mask=first + entry < width)
                first += BLOCK


# A slot of one operation, or of sixteen, must not wait for a kernel of its own.
@triton.jit(do_not_specialize=["num_operations", "num_pages"])
def _apply_kernel(
    buffer,
    rows,
    num_operations,
    num_pages,
    num_rows,
    width,
    INT_WORDS: tl.constexpr,
    FLOAT_WORDS: tl.constexpr,
    INTS: tl.constexpr,
    FLOATS: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < num_operations:
        _apply_row(buffer + program * WORDS, rows, num_rows, width, INT_WORDS, FLOAT_WORDS, INTS, FLOATS, BLOCK)
    else:
        entry = (program - num_operations) * BLOCK + tl.arange(0, BLOCK)
        inside = entry < num_pages
        place = buffer + num_operations * WORDS + entry * PAGE_WORDS
        row = tl.load(place, mask=inside, other=0)
        index = tl.load(place + 1, mask=inside, other=0)
        page = tl.load(place + 2, mask=inside, other=0)
        tl.store(rows.page_table + row.to(tl.int64) * width + index, page, mask=inside)


def apply_deltas(buffer: torch.Tensor, num_rows: int, num_pages: int, state: RowState) -> None:
    """Apply a slot that `pack_slot` packed. Shapes: `buffer` flat int32, pinned or on the device. Mutates: the rows it names."""
    assert buffer.dtype == torch.int32 and buffer.ndim == 1, f"a packed slot is flat int32, got {buffer.dtype}"
    assert slot_words(num_rows, num_pages) <= buffer.numel(), f"{num_rows} operations and {num_pages} pages are more than the buffer holds"
    if num_rows + num_pages == 0:
        return
    _apply_kernel[(num_rows + triton.cdiv(num_pages, _ENTRIES),)](
        buffer,
        row_pointers(state),
        num_rows,
        num_pages,
        state.ints.shape[1],
        state.page_table.shape[1],
        INT_WORDS=_INT_WORDS,
        FLOAT_WORDS=_FLOAT_WORDS,
        INTS=len(INT_FIELDS),
        FLOATS=len(FLOAT_FIELDS),
        WORDS=ROW_WORDS,
        PAGE_WORDS=PAGE_WORDS,
        BLOCK=_ENTRIES,
        num_warps=_WARPS,
    )


class LaneBuffers(NamedTuple):
    """What a launch's lanes run, at fixed addresses. Shapes: [B]; flags uint8 or bool, the rest int32.

    `slots` are places in the KV store (page * page size + offset), `lengths` the tokens that attention sees.
    """

    running: torch.Tensor
    starved: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor

    @staticmethod
    def allocate(lanes: int, device: torch.device) -> LaneBuffers:
        """Return zeroed buffers of this many lanes."""
        flags = (torch.zeros(lanes, dtype=torch.bool, device=device) for _ in range(2))
        numbers = (torch.zeros(lanes, dtype=torch.int32, device=device) for _ in range(4))
        return LaneBuffers(*flags, *numbers)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _begin_step_kernel(
    rows,
    lanes,
    counter,
    embedding,
    x,
    num_rows,
    width,
    num_ids,
    FIRST_ID: tl.constexpr,
    SHARDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SINK_SLOT: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    lane = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.load(rows.ints + LAST_TOKEN * num_rows + lane)
    length = tl.load(rows.ints + LENGTH * num_rows + lane)
    alive = tl.load(rows.alive + lane) != 0
    # The row of the last token comes while its page is looked up; only a lane that does not run loads another.
    local = token - FIRST_ID
    here = inside
    if SHARDED:
        # A rank that does not hold the id adds zeros to the ranks' sum.
        here = inside & (local >= 0) & (local < num_ids)
    row = tl.load(embedding + local.to(tl.int64) * HIDDEN + column, mask=here, other=0.0)
    entry = length // PAGE_SIZE
    page = tl.load(rows.page_table + lane.to(tl.int64) * width + entry, mask=alive & (entry < width), other=_ZERO_PAGE).to(tl.int32)
    running = alive & (page != _ZERO_PAGE)
    none = tl.zeros_like(row)
    if FIRST_ID == 0:
        none = tl.load(embedding + column, mask=inside & (running == 0), other=0.0)
    tl.store(x + lane.to(tl.int64) * HIDDEN + column, tl.where(running, row, none), mask=inside)
    position = tl.where(running, length, 0)
    tl.store(lanes.running + lane, running)
    tl.store(lanes.starved + lane, alive & (page == _ZERO_PAGE))
    tl.store(lanes.ids + lane, tl.where(running, token, 0))
    tl.store(lanes.positions + lane, position)
    tl.store(lanes.slots + lane, tl.where(running, page * PAGE_SIZE + length % PAGE_SIZE, SINK_SLOT))
    tl.store(lanes.lengths + lane, position + 1)
    if lane == 0:
        tl.store(counter, tl.load(counter) + 1)


def begin_step(
    state: RowState,
    lanes: LaneBuffers,
    counter: torch.Tensor,
    embedding_VH: torch.Tensor,
    x_BH: torch.Tensor,
    *,
    page_size: int,
    pdl: bool = False,
    first_id: int | None = None,
) -> None:
    """The prologue of a decode step over rows 0..B - 1: what each lane runs, its embedding, and the launch counted.

    Shapes: `counter` int32 scalar, `x` [B, hidden], `lanes` at least [B]. With `first_id` the embedding has the ids from there on alone,
    and rows of others are zero. Mutates: `lanes`, `counter`, `x`.
    """
    count, hidden = x_BH.shape
    assert count <= state.ints.shape[1] and count <= lanes.ids.shape[0], f"{count} lanes of {state.ints.shape[1]} rows"
    assert embedding_VH.shape[1] == hidden and embedding_VH.dtype == x_BH.dtype, f"embedding {tuple(embedding_VH.shape)}, x {x_BH.dtype}"
    assert embedding_VH.is_contiguous() and x_BH.is_contiguous() and counter.dtype == torch.int32, "x, embedding and counter as documented"
    assert page_size & (page_size - 1) == 0, f"page_size={page_size} is no power of two"
    extra = {"launch_pdl": True} if pdl else {}
    _begin_step_kernel[(count,)](
        row_pointers(state),
        lanes,
        counter,
        embedding_VH,
        x_BH,
        state.ints.shape[1],
        state.page_table.shape[1],
        embedding_VH.shape[0],
        FIRST_ID=first_id or 0,
        SHARDED=first_id is not None,
        PAGE_SIZE=page_size,
        SINK_SLOT=SINK_PAGE * page_size,
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        PDL=pdl,
        num_warps=4 if hidden <= 4096 else 8,
        **extra,
    )


@triton.jit
def _begin_sample_kernel(counter):
    tl.store(counter, tl.load(counter) + 1)


def begin_sample(counter: torch.Tensor) -> None:
    """Count a launch that samples without a decode step (prefill). Shapes: int32 scalar. Mutates: `counter`."""
    assert counter.dtype == torch.int32 and counter.numel() == 1, "the counter is one int32"
    _begin_sample_kernel[(1,)](counter, num_warps=1)
