"""Which parts of the sampler a launch needs. Host only; the scheduler decides, the sampler and the graphs follow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What at least one lane of a launch needs; host-known, so that the common case costs nothing."""

    noise: bool
    temperature: bool
    stop_mask: bool
    slots: bool
