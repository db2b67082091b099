"""Sampling noise that depends on (seed, position, token id) and on nothing else.

A row's draw is the same alone or in company, in any row, on any number of shards. The hash is defined on integers and
agrees bit for bit with the numpy form below; torch has no unsigned arithmetic, so int64 and int32 wrap around.

    key = splitmix64(seed xor splitmix64(position))        position = number of tokens before the sampled one
    h   = fmix32(fmix32(id + lo32(key)) xor hi32(key))
    u   = (h + 1/2) * 2^-32, clamped to at most 1 - 2^-24
    noise = -log(-log1p(-u))                               large noise comes from u near 0, where floats are dense

Sources: splitmix64 (Steele, Lea, Flood 2014); the 32-bit finaliser of MurmurHash3; Gumbel-max (Gumbel 1954).
"""

from __future__ import annotations

import numpy as np
import torch

_U64 = (1 << 64) - 1
_LARGEST_U = 1.0 - 2.0**-24


def splitmix64(value: int) -> int:
    """Return splitmix64 of an unsigned 64-bit integer."""
    z = (value + 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def member_seed(seed: int, index: int, attempt: int = 0) -> int:
    """Return the seed of member `index` of a group (attempt counts refills of that member)."""
    return splitmix64(splitmix64(seed ^ splitmix64((1 << 63) + index)) ^ attempt)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_GAMMA, _M1, _M2 = (_signed(value, 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_F1, _F2 = (_signed(value, 32) for value in (0x85EBCA6B, 0xC2B2AE35))


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """`splitmix64` on int64 bit patterns; right shifts are made logical by masks."""
    z = x + _GAMMA
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _M1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _M2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _fmix32_(h: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Mix int32 bit patterns in place."""
    for shift, factor in ((16, _F1), (13, _F2), (16, None)):
        torch.bitwise_right_shift(h, shift, out=scratch)
        h ^= scratch.bitwise_and_((1 << (32 - shift)) - 1)
        if factor is not None:
            h *= factor
    return h


def keys(seeds_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Return the 64-bit key of each row. Shapes: int64 [B]."""
    return _splitmix64(seeds_B ^ _splitmix64(positions_B.to(torch.int64)))


def hashes(keys_B: torch.Tensor, ids_V: torch.Tensor) -> torch.Tensor:
    """Return h for each row and id as int32 bit patterns. Shapes: int64 [B] and int32 [V] to int32 [B, V]."""
    low = keys_B.to(torch.int32)
    high = (keys_B >> 32).to(torch.int32)
    h = ids_V[None, :] + low[:, None]
    scratch = torch.empty_like(h)
    _fmix32_(h, scratch)
    h ^= high[:, None]
    return _fmix32_(h, scratch)


def gumbel(keys_B: torch.Tensor, ids_V: torch.Tensor) -> torch.Tensor:
    """Return the noise of each row and id. Shapes: float32 [B, V]."""
    h = hashes(keys_B, ids_V)
    # The top 24 and the low 8 bits are exact in float32, so their sum is the correctly rounded (h + 1/2) * 2^-32.
    minus_u = (h >> 8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(-(2.0**-24))
    minus_u.add_(h.bitwise_and_(0xFF).to(torch.float32).mul_(-(2.0**-32)).sub_(2.0**-33)).clamp_(min=-_LARGEST_U)
    return minus_u.log1p_().neg_().log_().neg_()


def numpy_hashes(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """The definition of `h` in numpy, as uint32; the oracle of the tests."""
    key = splitmix64(seed ^ splitmix64(position))
    with np.errstate(over="ignore"):
        h = _numpy_fmix32(ids.astype(np.uint32) + np.uint32(key & 0xFFFFFFFF))
        return _numpy_fmix32(h ^ np.uint32(key >> 32))


def _numpy_fmix32(h: np.ndarray) -> np.ndarray:
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> np.uint32(13))
    h = h * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))
