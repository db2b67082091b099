"""Sampling noise that depends on (seed, position, token id) and on nothing else.

A row's draw is the same alone or in company, in any row, on any number of shards. The hash is defined on unsigned integers
and made in numpy, since torch has none; kernels compute the same bits where the logits are.

    key = splitmix64(seed xor splitmix64(position))        position = number of tokens before the sampled one
    h   = fmix32(fmix32(id + lo32(key)) xor hi32(key))
    u   = (h + 1/2) * 2^-32, clamped to at most 1 - 2^-24
    noise = -log(-log1p(-u))                               large noise comes from u near 0, where floats are dense

Sources: splitmix64 (Steele, Lea, Flood 2014); the 32-bit finaliser of MurmurHash3; Gumbel-max (Gumbel 1954).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

_U64 = (1 << 64) - 1
LARGEST_U = 1.0 - 2.0**-24
_PART_ELEMENTS = 1 << 17
_GAMMA, _M1, _M2 = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_F1, _F2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def splitmix64(value: int) -> int:
    """Return splitmix64 of an unsigned 64-bit integer."""
    z = (value + 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def member_seed(seed: int, index: int, attempt: int = 0) -> int:
    """Return the seed of member `index` of a group (attempt counts refills of that member)."""
    return splitmix64(splitmix64(seed ^ splitmix64((1 << 63) + index)) ^ attempt)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    z = x + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


def _fmix32_(h: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Mix in place."""
    for shift, factor in ((16, _F1), (13, _F2), (16, None)):
        h ^= np.right_shift(h, np.uint32(shift), out=scratch)
        if factor is not None:
            h *= factor
    return h


def keys(seeds_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """Return the 64-bit key of each row. Shapes: uint64 [B] each."""
    return _splitmix64(seeds_B ^ _splitmix64(positions_B))


def hashes(keys_B: np.ndarray, ids_V: np.ndarray) -> np.ndarray:
    """Return h for each row and id. Shapes: uint64 [B] and uint32 [V] to uint32 [B, V]."""
    return hashes_of(keys_B[:, None], ids_V[None, :])


def hashes_of(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return h of pairs. Shapes: uint64 keys and uint32 ids that broadcast, to uint32."""
    h = ids + keys.astype(np.uint32)
    scratch = np.empty_like(h)
    _fmix32_(h, scratch)
    h ^= (keys >> np.uint64(32)).astype(np.uint32)
    return _fmix32_(h, scratch)


def parts(rows: int, width: int) -> Iterator[slice]:
    """Cut ids into parts that the caches hold for all rows: a large vocabulary goes through a dozen passes."""
    step = max(_PART_ELEMENTS // max(rows, 1), 1)
    return (slice(start, start + step) for start in range(0, width, step))


def of_hashes(hashed: np.ndarray) -> torch.Tensor:
    """Return the noise that hashes stand for. Shapes: uint32 to float32, kept."""
    # Exact in float64, so that the float32 is the correctly rounded (h + 1/2) * 2^-32.
    minus_u = hashed.astype(np.float64)
    minus_u += 0.5
    minus_u *= -(2.0**-32)
    return torch.from_numpy(minus_u.astype(np.float32)).clamp_(min=-LARGEST_U).log1p_().neg_().log_().neg_()


def gumbel(seeds_B: torch.Tensor, positions_B: torch.Tensor, ids_V: torch.Tensor) -> torch.Tensor:
    """Return the noise of each row and id. Shapes: int64 seeds (the bits of the unsigned ones), ids int32; float32 [B, V].

    Tensors of another device take the way over the host: that is for comparisons only.
    """
    keys_B = keys(seeds_B.cpu().numpy().view(np.uint64), positions_B.cpu().numpy().astype(np.uint64))
    ids = ids_V.cpu().numpy().view(np.uint32)
    noise = torch.empty((keys_B.size, ids.size))
    for part in parts(keys_B.size, ids.size):
        noise[:, part] = of_hashes(hashes(keys_B, ids[part]))
    return noise.to(seeds_B.device)


def numpy_hashes(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """Return h of one row. Shapes: ids [V] to uint32 [V]."""
    return hashes(np.array([splitmix64(seed ^ splitmix64(position))], dtype=np.uint64), ids.astype(np.uint32))[0]
