"""Passes over many tensors at once on a CUDA device: copies to staged weights, what is learnt of them, their exchange with live ones.

A launch for each of a model's hundreds of tensors would cost the host more than the device; here a table of addresses goes up
and one launch follows it, each program a span of one tensor. Both read and write what they must and nothing else.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives a kernel's arguments their types at each launch.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from areno.kernels.digest import digest_terms, word_mask
from areno.uploads import upload
from areno.weights.digest import bits_of

Pair = tuple[torch.Tensor, torch.Tensor]
BLOCK = 2048
BLOCKS = 32
# Runs that one launch copies.
MAX_RUNS = 128
_WORDS = {1: (tl.uint8, torch.uint8), 2: (tl.int16, torch.int16), 4: (tl.int32, torch.int32), 8: (tl.int64, torch.int64)}
# The bits of an exponent that is all ones: NaN and infinity.
_EXPONENT = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}


@triton.jit
def _load(words, place, count, WHOLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a block of words; only one that is whole and aligned comes in wide loads."""
    at = words + place
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=place < count, other=0)


@triton.jit
def _store(words, place, count, values, WHOLE: tl.constexpr, ALIGNED: tl.constexpr):
    at = words + place
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    if WHOLE:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=place < count)


@triton.jit
def _learn_of(
    staged, live, place, count, start, run, stride,
    PARTS: tl.constexpr, MASK: tl.constexpr, EXPONENT: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return a block's terms of the digest, and its flags: bit 0 for not finite, bit 1 for not the live one's bits."""
    word = _load(staged, place, count, WHOLE, ALIGNED)
    against = _load(live, place, count, WHOLE, ALIGNED)
    bits = word.to(tl.int64)
    strange = ((bits & EXPONENT) == EXPONENT).to(tl.int32) | ((word != against).to(tl.int32) << 1)
    index = place
    if PARTS:
        index = start + place // run * stride + place % run
    return digest_terms(bits, index, MASK), strange


@triton.jit
def _inspect_kernel(
    staged, live, counts, piece_of, first_of, layouts, words,
    PARTS: tl.constexpr, WORD: tl.constexpr, MASK: tl.constexpr, EXPONENT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    piece = tl.load(piece_of + tl.program_id(0)).to(tl.int64)
    first = tl.load(first_of + tl.program_id(0))
    count = tl.load(counts + piece)
    staged_words = tl.load(staged + piece).to(tl.pointer_type(WORD))
    live_words = tl.load(live + piece).to(tl.pointer_type(WORD))
    total = tl.zeros([BLOCK], tl.uint64)
    strange = tl.zeros([BLOCK], tl.int32)
    start, run, stride = count, count, count
    if PARTS:
        start, run, stride = tl.load(layouts + piece * 3), tl.load(layouts + piece * 3 + 1), tl.load(layouts + piece * 3 + 2)
    whole = tl.minimum((count - first) // BLOCK, BLOCKS).to(tl.int32)
    for block in range(whole):
        place = first + block * BLOCK + tl.arange(0, BLOCK)
        terms, flags = _learn_of(staged_words, live_words, place, count, start, run, stride, PARTS, MASK, EXPONENT, True, ALIGNED)
        total += terms
        strange |= flags
    if whole < BLOCKS:
        place = first + whole * BLOCK + tl.arange(0, BLOCK)
        terms, flags = _learn_of(staged_words, live_words, place, count, start, run, stride, PARTS, MASK, EXPONENT, False, ALIGNED)
        total += tl.where(place < count, terms, 0)
        strange |= tl.where(place < count, flags, 0)
    tl.atomic_add(words + piece * 2, tl.sum(total, axis=0).to(tl.int64, bitcast=True))
    tl.atomic_or(words + piece * 2 + 1, tl.reduce_or(strange, axis=0).to(tl.int64))


@triton.jit
def _copy_block(target, source, place, count, width, stride, STRIDED: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr):
    if STRIDED:
        values = tl.load(source + place // width * stride + place % width, mask=place < count, other=0)
    else:
        values = _load(source, place, count, WHOLE, ALIGNED)
    _store(target, place, count, values, WHOLE, ALIGNED)


# The number of runs is another one for every bucket, and nothing to compile anew for.
@triton.jit(do_not_specialize=["num_runs"])
def _copy_kernel(
    table, num_runs,
    WORD: tl.constexpr, STRIDED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    # Rows of the table: targets, sources, counts, widths, strides, and the programs of all runs before.
    run, program = tl.arange(0, RUNS), tl.program_id(0).to(tl.int64)
    before = tl.load(table + 5 * num_runs + run, mask=run < num_runs, other=1 << 62)
    own = tl.sum((before <= program).to(tl.int32), axis=0) - 1
    first = (program - tl.load(table + 5 * num_runs + own)) * (BLOCK * BLOCKS)
    target = tl.load(table + own).to(tl.pointer_type(WORD))
    source = tl.load(table + num_runs + own).to(tl.pointer_type(WORD))
    count = tl.load(table + 2 * num_runs + own)
    width, stride = count, count
    if STRIDED:
        width, stride = tl.load(table + 3 * num_runs + own), tl.load(table + 4 * num_runs + own)
    whole = tl.minimum((count - first) // BLOCK, BLOCKS).to(tl.int32)
    for block in range(whole):
        place = first + block * BLOCK + tl.arange(0, BLOCK)
        _copy_block(target, source, place, count, width, stride, STRIDED, True, ALIGNED)
    if whole < BLOCKS:
        place = first + whole * BLOCK + tl.arange(0, BLOCK)
        _copy_block(target, source, place, count, width, stride, STRIDED, False, ALIGNED)


@triton.jit
def _swap_block(ones, others, place, count, WHOLE: tl.constexpr, ALIGNED: tl.constexpr):
    held = _load(ones, place, count, WHOLE, ALIGNED)
    _store(ones, place, count, _load(others, place, count, WHOLE, ALIGNED), WHOLE, ALIGNED)
    _store(others, place, count, held, WHOLE, ALIGNED)


@triton.jit
def _swap_kernel(
    first_side, second_side, counts, piece_of, first_of,
    WORD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    piece = tl.load(piece_of + tl.program_id(0)).to(tl.int64)
    first = tl.load(first_of + tl.program_id(0))
    count = tl.load(counts + piece)
    ones = tl.load(first_side + piece).to(tl.pointer_type(WORD))
    others = tl.load(second_side + piece).to(tl.pointer_type(WORD))
    whole = tl.minimum((count - first) // BLOCK, BLOCKS).to(tl.int32)
    for block in range(whole):
        _swap_block(ones, others, first + block * BLOCK + tl.arange(0, BLOCK), count, True, ALIGNED)
    if whole < BLOCKS:
        _swap_block(ones, others, first + whole * BLOCK + tl.arange(0, BLOCK), count, False, ALIGNED)


class Run(NamedTuple):
    """Rows of bytes that begin `stride` apart at address `source`, and lie one after the other at `target`."""

    target: int
    source: int
    row_bytes: int
    rows: int = 1
    stride: int = 0


def copy_runs(device: torch.device, runs: Sequence[tuple[int, int, int, int, int]]) -> None:
    """Copy runs (each as `Run`) of memory that `device` can address, on its current stream. No target overlaps another run.

    It is called while a trainer waits, so the host prepares as little as it can: each program finds its run by itself.
    """
    memory = np.array(runs, dtype=np.int64).reshape(-1, 5)
    memory = memory[memory[:, 2] * memory[:, 3] > 0]
    # One tensor of odd size does not make narrow words of all others, nor one that is cut narrow loads.
    sizes = np.gcd(memory[:, 0] | memory[:, 1] | memory[:, 2] | memory[:, 4], 8)
    kinds = sizes * 2 + (memory[:, 3] > 1)
    for kind in set(kinds.tolist()):
        alike = memory[kinds == kind]
        for first in range(0, len(alike), MAX_RUNS):
            _copy_alike(device, alike[first : first + MAX_RUNS], kind // 2, strided=kind % 2 == 1)


def _copy_alike(device: torch.device, runs: np.ndarray, size: int, *, strided: bool) -> None:
    table = np.empty((6, len(runs)), dtype=np.int64)
    table[:2] = runs[:, :2].T
    np.multiply(runs[:, 2], runs[:, 3], out=table[2])
    table[3], table[4] = runs[:, 2], runs[:, 4]
    table[2:5] //= size
    spans = -(-table[2] // (BLOCK * BLOCKS))
    ends = np.cumsum(spans)
    table[5] = ends - spans
    [sent] = upload(device, table)
    _copy_kernel[(int(ends[-1]),)](
        sent,
        len(runs),
        WORD=_WORDS[size][0],
        STRIDED=strided,
        ALIGNED=not (table[:2] % 16).any(),
        BLOCK=BLOCK,
        BLOCKS=BLOCKS,
        RUNS=MAX_RUNS,
        num_warps=8,
    )


def inspect_pairs(pairs: Sequence[Pair], layouts: Sequence[tuple[int, int, int]] | None = None) -> torch.Tensor:
    """Return the digest of each first tensor, whether it is finite and whether its bits differ from the second's, without waiting.

    Where tensors are parts of larger ones, `layouts` has of each the flat index of its first element in the whole one, the elements of
    a run, and how far in the whole one a run begins behind the one before it.

    Shapes: both of a pair alike and contiguous, all of one floating dtype; int64 [n, 3], the digest's bits modulo 2^64, 0 or 1, 0 or 1.
    """
    dtype, device = pairs[0][0].dtype, pairs[0][0].device
    assert all(one.dtype == other.dtype == dtype for one, other in pairs), "tensors of one dtype are looked at together"
    size = dtype.itemsize
    words = torch.zeros((len(pairs), 2), dtype=torch.int64, device=device)
    programs, tables, aligned = _tables(pairs, size)
    if programs:
        _inspect_kernel[(programs,)](
            *tables,
            None if layouts is None else upload(device, np.array(layouts, dtype=np.int64))[0],
            words,
            PARTS=layouts is not None,
            WORD=_WORDS[size][0],
            MASK=word_mask(size),
            EXPONENT=_EXPONENT[dtype],
            ALIGNED=aligned,
            BLOCK=BLOCK,
            BLOCKS=BLOCKS,
            num_warps=8,
        )
    strange = words[:, 1]
    return torch.stack([words[:, 0], 1 - (strange & 1), strange >> 1], dim=1)


class Exchange:
    """The exchange of each two tensors' contents, made ready. Shapes: both of a pair alike and contiguous."""

    __slots__ = ("_aligned", "_programs", "_size", "_tables", "_tensors")

    def __init__(self, pairs: Sequence[Pair]) -> None:
        size = math.gcd(8, *(tensor.data_ptr() for pair in pairs for tensor in pair), *(one.nbytes for one, _ in pairs))
        self._size, self._tensors = size, [(_as_words(one, size), _as_words(other, size)) for one, other in pairs]
        self._programs, self._tables, self._aligned = _tables(self._tensors, size)

    def run(self) -> None:
        """Exchange; a second time brings everything back. Mutates: all tensors."""
        if self._programs:
            launch = _swap_kernel[(self._programs,)]
            launch(*self._tables, WORD=_WORDS[self._size][0], ALIGNED=self._aligned, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=8)


def _as_words(tensor: torch.Tensor, size: int) -> torch.Tensor:
    flat = bits_of(tensor)
    return flat.view(torch.uint8).view(_WORDS[size][1])


def _tables(pairs: Sequence[Pair], size: int) -> tuple[int, list[torch.Tensor], bool]:
    """Return the number of programs, what they look up (addresses, counts, piece and first element), and whether 16-byte loads fit."""
    assert all(tensor.is_contiguous() for pair in pairs for tensor in pair), "tensors are passed over as flat memory"
    addresses = np.array([[tensor.data_ptr() for tensor in pair] for pair in pairs], dtype=np.int64).T.copy()
    counts = np.array([one.numel() for one, _ in pairs], dtype=np.int64)
    spans = -(-counts // (BLOCK * BLOCKS))
    piece_of = np.repeat(np.arange(len(pairs), dtype=np.int32), spans)
    before = np.repeat(np.cumsum(spans) - spans, spans)
    first_of = (np.arange(piece_of.size, dtype=np.int64) - before) * (BLOCK * BLOCKS)
    tables = upload(pairs[0][0].device, addresses[0], addresses[1], counts, piece_of, first_of)
    return int(piece_of.size), tables, not (addresses % 16).any()


def warm_up(dtype: torch.dtype, device: torch.device, *, cut: bool) -> None:
    """Compile what an update of weights of `dtype` launches, parts of them with `cut`, so that nobody's first one stands still for it."""
    one, other = (torch.zeros(2 * BLOCK, dtype=dtype, device=device) for _ in range(2))
    whole, row = Run(one.data_ptr(), other.data_ptr(), one.nbytes), BLOCK * dtype.itemsize
    copy_runs(device, [whole, Run(one.data_ptr(), other.data_ptr(), row // 2, 2, row)] if cut else [whole])
    inspect_pairs([(one, other)], [(0, one.numel(), 1)] if cut else None)
    Exchange([(one, other)]).run()
