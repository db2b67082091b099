"""The sampling noise on the device: the bits of `areno.sampling.noise`, made where the logits are.

Functions for other kernels, no launch of its own. `hashes` agrees with numpy bit for bit; `gumbel` is -log(-log1p(-u)) with
log1p made from log by the classic correction (Kahan): for w = 1 - u rounded, log1p(-u) = log(w) * u / (1 - w), which keeps
full relative accuracy down to u = 2^-33. It costs about 60 instructions, so `areno.kernels.sample` calls it only where an
id may win.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _splitmix64(value):
    z = value + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _fmix32(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def lane_key(seed, position):
    """Return the low and the high half of a lane's key. Shapes: int64 scalars to uint32 scalars."""
    key = _splitmix64(seed.to(tl.uint64, bitcast=True) ^ _splitmix64(position.to(tl.int64).to(tl.uint64, bitcast=True)))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def hashes(ids, low, high):
    """Return h of int32 ids under a lane's key, as uint32."""
    return _fmix32(_fmix32(ids.to(tl.uint32, bitcast=True) + low) ^ high)


@triton.jit
def gumbel(h):
    """Return the noise of each h in float32."""
    # Both parts are exact, so their sum is the correctly rounded (h + 1/2) * 2^-32.
    u = (h >> 8).to(tl.float32) * 5.9604644775390625e-08 + ((h & 0xFF).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10)
    u = tl.minimum(u, 0.999999940395355224609375)
    w = 1.0 - u
    lost = w == 1.0
    exponential = tl.where(lost, u, -tl.log(w) * (u / tl.where(lost, 1.0, 1.0 - w)))
    return -tl.log(exponential)
