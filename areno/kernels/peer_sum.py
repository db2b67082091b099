"""A residual addition and norm whose addend is a sum over the ranks, read from their memory: collective and kernel in one launch.

One program holds one token. It tells the other ranks that this rank's part of the row is there, waits for theirs, adds all parts in
the order of the ranks in fp32 and rounds once, so that every rank has the same bits; then it goes on as `areno.kernels.norm` does.

Where the bytes count more than a second signal, a row is added by one rank, number row % ranks: the others tell that one alone, and
it writes the sum over their parts of the row, which nobody else reads. Half the bytes cross the links of four ranks.

Two buffers take turns. Nobody waits at the end: a rank writes a buffer again two sums later, and by then has heard in the sum between
from every rank that it has left this one. Signals have a place of their own for each buffer, for the same reason.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives a kernel's arguments their types at each launch.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from areno.kernels.norm import WARPS

_TRIES = 256
"""Looks at a signal between two looks at the word that ends all waiting, which lies in host memory."""


@triton.jit
def _tell(signals, signal, peer, asked, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Set a signal in the memory of every peer that is asked for, all behind one wait for what was written before."""
    places = tl.zeros([LANES], tl.int64)
    for rank in tl.static_range(RANKS):
        places = tl.where(peer == rank, signals[rank].to(tl.int64), places)
    tl.atomic_xchg(places.to(tl.pointer_type(tl.int32)) + signal, 1, mask=asked, sem="release", scope="sys")


@triton.jit
def _wait_for(own, peer, asked, stop, RANK: tl.constexpr, LANES: tl.constexpr, TRIES: tl.constexpr):
    """Take the signals of all peers that are asked for back once they have come, or leave when all waiting is to end."""
    # A rank's own signal is never set, so that lanes which wait for none may look there.
    place = own + tl.where(asked, peer, RANK)
    one, none = tl.full([LANES], 1, tl.int32), tl.zeros([LANES], tl.int32)
    come = tl.atomic_cas(place, one, none, sem="acquire", scope="sys")
    waiting = tl.sum((asked & (come == 0)).to(tl.int32), 0)
    tries = 0
    while waiting > 0:
        come = come | tl.atomic_cas(place, one, none, sem="acquire", scope="sys")
        waiting = tl.sum((asked & (come == 0)).to(tl.int32), 0)
        tries += 1
        if tries == TRIES:
            tries = 0
            if tl.load(stop, volatile=True) != 0:
                waiting = 0


@triton.jit(do_not_specialize=["start", "first_signal"])
def _peer_sum_kernel(
    x,
    parts,
    signals,
    weight,
    out,
    stop,
    start,
    first_signal,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    SHARED: tl.constexpr,
    TRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = row.to(tl.int64) * SIZE + column
    signal = first_signal + row * RANKS
    # One lane for each of the others.
    lane = tl.arange(0, LANES)
    peer, there = lane + (lane >= RANK).to(tl.int32), lane < RANKS - 1
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    adds = True
    if SHARED:
        adder = row % RANKS
        adds = adder == RANK
        _tell(signals, signal + RANK, peer, there & (peer == adder), RANKS, LANES)
    else:
        _tell(signals, signal + RANK, peer, there, RANKS, LANES)
    residual = tl.load(x + place, mask=inside, other=0.0)
    dtype = residual.dtype
    if adds:
        _wait_for(signals[RANK] + signal, peer, there, stop, RANK, LANES, TRIES)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(RANKS):
            total += tl.load(parts[rank] + start + place, mask=inside, other=0.0).to(tl.float32)
        delta = total.to(dtype)
        if SHARED:
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    tl.store(parts[rank] + start + place, delta, mask=inside)
            # One thread tells; what the others have written is behind this.
            tl.debug_barrier()
            _tell(signals, signal + RANK, peer, there, RANKS, LANES)
    else:
        _wait_for(signals[RANK] + signal, peer, there & (peer == row % RANKS), stop, RANK, LANES, TRIES)
        delta = tl.load(parts[RANK] + start + place, mask=inside, other=0.0)
    residual = (residual.to(tl.float32) + delta.to(tl.float32)).to(dtype)
    tl.store(x + place, residual, mask=inside)
    wide = residual.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * inverse).to(dtype)
    tl.store(out + place, (normed.to(tl.float32) * scale).to(dtype), mask=inside)


def peer_add_rms_norm(
    x_T: torch.Tensor,
    parts: Sequence[Any],
    signals: Sequence[Any],
    turn: int,
    weight: torch.Tensor,
    eps: float,
    out_T: torch.Tensor,
    *,
    rank: int,
    stop: torch.Tensor,
    shared: bool = False,
    pdl: bool = False,
) -> None:
    """Add every rank's part of buffer `turn` to `x_T`, then norm the sum into `out_T`.

    Every rank must launch the same sums in the same order, with 0 and 1 as turns in turn. `shared`: each row is added by one rank only,
    and the others' parts of it are written.
    Shapes: x and out [T, hidden], weight [hidden]; by rank, each in that rank's own memory, contiguous tensors or what stands for one
    (`data_ptr`, `shape` and `dtype`): parts [2, rows, hidden], signals int32 [2, rows, ranks], zero between sums; stop int32 [1],
    pinned: nonzero ends all waiting, and what is computed then is of no use.
    Mutates: `x_T`, `out_T`, `signals`; with `shared` `parts`.
    """
    tokens, size = x_T.shape
    ranks, rows = len(parts), parts[0].shape[1]
    assert len(signals) == ranks and 0 <= rank < ranks and turn in (0, 1), f"rank {rank} of {ranks}, turn {turn}"
    assert tokens <= rows and all(part.shape == (2, rows, size) for part in parts), f"{tokens} tokens of {rows}"
    assert all(place.shape == (2, rows, ranks) for place in signals), "one signal for each row and rank"
    assert out_T.shape == x_T.shape and weight.shape == (size,), f"out {tuple(out_T.shape)}, weight {tuple(weight.shape)}"
    assert not shared or tokens >= ranks, f"{tokens} tokens are not shared by {ranks} ranks: each must hear from each"
    assert x_T.is_contiguous() and out_T.is_contiguous() and weight.is_contiguous(), "x, out and weight must be contiguous"
    assert x_T.dtype == out_T.dtype == weight.dtype == parts[0].dtype, f"dtypes {x_T.dtype}, {out_T.dtype}, {weight.dtype} differ"
    assert size <= WARPS[-1][0], f"hidden={size} is above {WARPS[-1][0]}, the longest row that a program holds"
    extra = {"launch_pdl": True} if pdl else {}
    _peer_sum_kernel[(tokens,)](
        x_T,
        tuple(parts),
        tuple(signals),
        weight,
        out_T,
        stop,
        turn * rows * size,
        turn * rows * ranks,
        eps,
        RANK=rank,
        RANKS=ranks,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        LANES=triton.next_power_of_2(ranks - 1),
        SHARED=shared,
        TRIES=_TRIES,
        PDL=pdl,
        num_warps=next(warps for limit, warps in WARPS if size <= limit),
        **extra,
    )
