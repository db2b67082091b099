"""The fingerprint of a tensor's bits, equal in trainer and engine when their weights are.

    digest(x) = sum over flat index i of bits(x_i) * (mix64(i) | 1)   modulo 2^64

where bits are an element's raw bits zero-extended to 64 and mix64 is splitmix64. Every term has an odd factor, so any
change of one element changes the sum; factors differ by index, so swapped rows, a transposition or k in v's place show.
The sum is over a flat index of the whole tensor: digests of slices, each begun at its own index, add up to the whole
tensor's. That is how fused and sharded storage is compared with the trainer's tensor.

Imports torch and numpy and nothing else, and on a CUDA device one kernel; trainers use it without the engine. On the CPU it takes
chunks that stay in the caches, in numpy, whose 64-bit products are the faster ones; the factors of a tensor's first four million
elements are kept (32 MiB), since every tensor begins with them.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

MASK64 = (1 << 64) - 1
_CHUNK = 1 << 15
_KEPT_CHUNKS = 1 << 7
_BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# As unsigned integers, which widen to 64 bits by zeros.
_WORD_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned `value`."""
    return value - (1 << 64) if value >> 63 else value


def mix64(x: np.ndarray) -> np.ndarray:
    """Return splitmix64 of each uint64: golden-ratio step, then the finaliser. Source: Steele et al. 2014."""
    x = x + np.uint64(_GOLDEN)
    _finalise(x, np.empty_like(x))
    return x


def _finalise(x: np.ndarray, scratch: np.ndarray) -> None:
    """Make splitmix64's output of its state. Mutates: both."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        x ^= np.right_shift(x, shift, out=scratch)
        x *= factor
    x ^= np.right_shift(x, 31, out=scratch)


@functools.cache
def _places() -> np.ndarray:
    return np.arange(_CHUNK, dtype=np.uint64)


def _write_factors(chunk: int, factors: np.ndarray, scratch: np.ndarray) -> None:
    """Write the factors of a chunk's elements. Mutates: both arrays, of a chunk's size."""
    np.add(_places(), np.uint64((chunk * _CHUNK + _GOLDEN) & MASK64), out=factors)
    _finalise(factors, scratch)
    factors |= np.uint64(1)


@functools.lru_cache(maxsize=_KEPT_CHUNKS)
def _kept_factors(chunk: int) -> np.ndarray:
    factors = np.empty(_CHUNK, np.uint64)
    _write_factors(chunk, factors, np.empty_like(factors))
    return factors


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' raw bits as integers, flat in row-major order. Raises: TypeError (complex or quantized)."""
    if tensor.is_complex() or tensor.is_quantized or tensor.element_size() not in _BIT_DTYPES:
        raise TypeError(f"bits of a {tensor.dtype} tensor; elements of 1, 2, 4 or 8 bytes are needed; convert it first")
    return tensor.detach().reshape(-1).view(_BIT_DTYPES[tensor.element_size()])


def digest_slice(tensor: torch.Tensor, start_index: int) -> int:
    """Return the digest's part of a slice whose first element has flat index `start_index` in the whole tensor.

    Parts of one tensor add up modulo 2^64. Elements count in row-major order, whatever the strides.
    Raises: TypeError (complex or quantized), ValueError (negative start).
    """
    if start_index < 0:
        raise ValueError(f"start_index={start_index}; flat indices begin at 0; pass the index of the slice's first element")
    if tensor.is_cuda:
        return int(digest_part(tensor, start_index)) & MASK64
    words = bits_of(tensor).view(_WORD_DTYPES[tensor.element_size()])
    total, done, size = 0, 0, words.numel()
    # torch widens into memory of numpy's: a live tensor that numpy has seen could not give its memory back.
    widened = np.empty(min(size, _CHUNK), np.uint64)
    target = torch.from_numpy(widened.view(np.int64))
    made, scratch = (np.empty(_CHUNK if start_index + size > _KEPT_CHUNKS * _CHUNK else 0, np.uint64) for _ in range(2))
    while done < size:
        chunk, offset = divmod(start_index + done, _CHUNK)
        count = min(_CHUNK - offset, size - done)
        target[:count].copy_(words[done : done + count])
        if chunk < _KEPT_CHUNKS:
            factors = _kept_factors(chunk)
        else:
            _write_factors(chunk, made, scratch)
            factors = made
        total += int(np.einsum("i,i->", widened[:count], factors[offset : offset + count]))
        done += count
    return total & MASK64


def digest_rows(tensor: torch.Tensor, start_index: int, stride: int) -> int:
    """Return the digest's part of rows whose first elements have the flat indices `start_index`, `start_index` + `stride`, ...

    Shapes: [rows, width], in host memory. It is how columns of a tensor add up to the whole one. Raises: TypeError.
    """
    rows, width = tensor.shape
    if rows == 1 or width == stride:
        return digest_slice(tensor, start_index)
    step, total = max(_CHUNK // max(width, 1), 1), 0
    widened = np.empty(min(step, rows) * width, np.uint64)
    target = torch.from_numpy(widened.view(np.int64))
    columns = np.arange(width, dtype=np.uint64) + np.uint64(start_index)
    for first in range(0, rows, step):
        block = tensor[first : first + step]
        firsts = np.arange(first, first + block.shape[0], dtype=np.uint64) * np.uint64(stride)
        factors = mix64((firsts[:, None] + columns).reshape(-1)) | np.uint64(1)
        target[: block.numel()].copy_(bits_of(block).view(_WORD_DTYPES[tensor.element_size()]))
        total += int(np.einsum("i,i->", widened[: block.numel()], factors))
    return total & MASK64


def digest_part(tensor: torch.Tensor, start_index: int, *, run: int = 0, stride: int = 0) -> torch.Tensor:
    """Return `digest_slice` of a tensor on a CUDA device as an int64 scalar there, without waiting for it.

    With `run`, each run of so many elements begins `stride` behind the one before it. Raises: TypeError.
    """
    from areno.kernels.digest import digest_sum

    return digest_sum(bits_of(tensor), start_index, run=run, stride=stride)


def digest(tensor: torch.Tensor) -> int:
    """Return the digest of a whole tensor, an integer in [0, 2^64). Raises: TypeError."""
    return digest_slice(tensor, 0)
