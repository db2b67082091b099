"""Which parts of the sampler a launch needs. Host only; the scheduler decides, the sampler and the graphs follow."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What at least one lane of a launch needs; host-known, so that the common case costs nothing.

    `noise`: a lane is not greedy; `temperature`: one divides its logits; `stop_mask`: one may hold stop ids back; `slots`: one
    has a sampling slot; `filters`: one has top-k, top-p or min-p; `wide`: one of these may keep more than 64 ids; `kept`: one returns
    the ids its filters kept; `sums`: one wants log-probabilities.
    """

    noise: bool = False
    temperature: bool = False
    stop_mask: bool = False
    slots: bool = False
    filters: bool = False
    wide: bool = False
    kept: bool = False
    sums: bool = False

    def counts(self) -> np.ndarray:
        """Return the needs as numbers that add up over lanes. Shapes: int64 [needs]."""
        return np.array([getattr(self, name) for name in _NEEDS], dtype=np.int64)

    @staticmethod
    def of_counts(counts: np.ndarray) -> Variant:
        """Return what lanes with these summed needs have in common."""
        key = tuple(count > 0 for count in counts.tolist())
        known = _KNOWN.get(key)
        if known is None:
            known = _KNOWN[key] = Variant(**dict(zip(_NEEDS, key)))
        return known


_NEEDS = tuple(field.name for field in fields(Variant))
_KNOWN: dict[tuple[bool, ...], Variant] = {}
