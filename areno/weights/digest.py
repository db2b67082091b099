"""The fingerprint of a tensor's bits, equal in trainer and engine when their weights are.

    digest(x) = sum over flat index i of bits(x_i) * (mix64(i) | 1)   modulo 2^64

where bits are an element's raw bits zero-extended to 64 and mix64 is splitmix64. Every term has an odd factor, so any
change of one element changes the sum; factors differ by index, so swapped rows, a transposition or k in v's place show.
The sum is over a flat index of the whole tensor: digests of slices, each begun at its own index, add up to the whole
tensor's. That is how fused and sharded storage is compared with the trainer's tensor.

Imports torch and nothing else, and on a CUDA device one kernel; trainers use it without the engine.
"""

from __future__ import annotations

import functools

import torch

MASK64 = (1 << 64) - 1
_CHUNK = 1 << 17
_KEPT_CHUNKS = 16  # one MiB each: the factors of a tensor's first two million elements are made once
_BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned `value`."""
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_xor(x: torch.Tensor, shift: int) -> torch.Tensor:
    """Return x ^ (x >> shift) with a logical shift; int64 shifts drag the sign along, so it is masked off."""
    return x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))


def mix64(x: torch.Tensor) -> torch.Tensor:
    """Return splitmix64 of each int64, read as unsigned: golden-ratio step, then the finaliser. Source: Steele et al. 2014."""
    x = _shift_xor(x + _GOLDEN, 30) * _MIX_1
    x = _shift_xor(x, 27) * _MIX_2
    return _shift_xor(x, 31)


def _make_factors(chunk: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK, dtype=torch.int64, device=device)
    return mix64(index) | 1


_kept_factors = functools.lru_cache(maxsize=2 * _KEPT_CHUNKS)(_make_factors)


def _factors(chunk: int, device: torch.device) -> torch.Tensor:
    return _kept_factors(chunk, device) if chunk < _KEPT_CHUNKS else _make_factors(chunk, device)


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
    size, bits = tensor.element_size(), bits_of(tensor)
    zero_extend = (1 << (8 * size)) - 1 if size < 8 else -1
    total, done = 0, 0
    while done < bits.numel():
        chunk, offset = divmod(start_index + done, _CHUNK)
        count = min(_CHUNK - offset, bits.numel() - done)
        words = bits[done : done + count].to(torch.int64)
        if size in (2, 4):
            words &= zero_extend
        total += int((words * _factors(chunk, tensor.device)[offset : offset + count]).sum())
        done += count
    return total & MASK64


def digest_part(tensor: torch.Tensor, start_index: int) -> torch.Tensor:
    """Return `digest_slice` of a tensor on a CUDA device as an int64 scalar there, without waiting for it. Raises: TypeError."""
    from areno.kernels.digest import digest_sum

    return digest_sum(bits_of(tensor), start_index)


def digest(tensor: torch.Tensor) -> int:
    """Return the digest of a whole tensor, an integer in [0, 2^64). Raises: TypeError."""
    return digest_slice(tensor, 0)
