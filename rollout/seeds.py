"""Seeds of parts: one 64-bit seed gives every member of a group, and every turn of an episode, its own.

    derive_seed(seed, i, attempt) = mix(mix(seed xor mix(2^63 + i)) xor attempt)        mix = splitmix64

The front derives the seeds of a group's members with it, and episodes those of their turns, so a group run member by member
draws the same tokens.
Source: splitmix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

_U64 = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """Return splitmix64 of an unsigned 64-bit integer."""
    z = (value + 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def derive_seed(seed: int, index: int, attempt: int = 0) -> int:
    """Return the seed of part `index` (a group member, a turn) of what `seed` belongs to; `attempt` counts repeats."""
    return splitmix64(splitmix64(seed ^ splitmix64((1 << 63) + index)) ^ attempt)
