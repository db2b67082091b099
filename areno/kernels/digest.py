"""The digest of a tensor's bits on a CUDA device; `areno.weights.digest` has the definition and the form for the CPU.

One program sums one block of elements into a word of its own and torch adds the words up: sums modulo 2^64 have no order, so
the result is exact however they are cut. Nothing is asked of the device; the caller reads the sum when it needs it.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives a kernel's arguments their types at each launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areno.kernels.noise import _splitmix64

BLOCK = 4096


@triton.jit
def digest_terms(bits, index, MASK: tl.constexpr):
    """Return the digest's terms of words, given sign-extended as int64, at these flat indices; both [n]."""
    if MASK != 0:
        # A narrow word was sign-extended; its upper bits are no part of it.
        bits = bits & MASK
    return bits.to(tl.uint64, bitcast=True) * (_splitmix64(index.to(tl.uint64, bitcast=True)) | 1)


def word_mask(size: int) -> int:
    """Return the bits that a word of `size` bytes has of an int64; 0 where it has all of them."""
    return 0 if size == 8 else (1 << (8 * size)) - 1


@triton.jit
def _digest_kernel(bits, sums, count, start_index, run, stride, MASK: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = place < count
    word = tl.load(bits + place, mask=inside, other=0).to(tl.int64)
    if RUNS:
        place = place // run * stride + place % run
    term = digest_terms(word, start_index + place, MASK)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(inside, term, 0), axis=0).to(tl.int64, bitcast=True))


def digest_sum(bits_n: torch.Tensor, start_index: int, *, run: int = 0, stride: int = 0) -> torch.Tensor:
    """Return the digest's part of a slice as an int64 scalar on its device, bits of the sum modulo 2^64.

    Shapes: `bits_n` [n], raw bits as integers of the elements' size; the first has flat index `start_index` in its tensor. With
    `run`, each run of so many elements begins `stride` behind the one before it there.
    """
    assert bits_n.ndim == 1 and bits_n.is_contiguous(), "a slice of raw bits is flat and contiguous"
    count = bits_n.numel()
    blocks = triton.cdiv(count, BLOCK)
    sums = torch.zeros(max(blocks, 1), dtype=torch.int64, device=bits_n.device)
    if blocks:
        mask = word_mask(bits_n.element_size())
        _digest_kernel[(blocks,)](bits_n, sums, count, start_index, max(run, 1), stride, MASK=mask, RUNS=run > 0, BLOCK=BLOCK)
    return sums.sum()
