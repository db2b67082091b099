"""What an update moved, changed and cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What a committed update did. Units: names say them; gaps are in nats, None without canaries.

    `staging_s` runs from begin to verification; `inspect_s` is how much of it went into proving staged tensors on the host (digest,
    finiteness, what changed), `derive_s` into copies of them in the layout that is multiplied; `pause_ms` is all the time in which
    no row could decode.
    """

    version: int
    num_tensors: int
    num_bytes: int
    changed_tensors: int
    changed_bytes: int
    staging_s: float
    swap_ms: float
    proof_ms: float
    pause_ms: float
    canary_gap: float | None = None
    canary_mean_gap: float | None = None
    decode_canary_gap: float | None = None
    inspect_s: float = 0.0
    derive_s: float = 0.0
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """How much was staged, in serving dtype, and how much of it differs from the live weights bit for bit."""

    num_tensors: int
    num_bytes: int
    changed_tensors: int
    changed_bytes: int
