"""The ordered log: everything that touches tables, KV or weights is a command, executed in the order appended.

The scheduler plans and appends, the executor executes; no other part decides. Host only, no torch: commands hold
numbers and numpy arrays, so that the same log can be carried to other ranks. A launch that samples names the seat and
generation of each lane (-1 without one), by which its results are read back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.decode.deltas import DeltaSlot
from areno.sampling.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyDelta:
    """Apply one slot of row operations to the decode tables."""

    slot: DeltaSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens `start`..`start + len(ids) - 1` of one prompt.

    `pages` hold positions 0..end; `row` is the row whose first token this chunk samples, -1 for an inner chunk.
    """

    ids: np.ndarray
    start: int
    pages: np.ndarray
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLaunch:
    """Run prompt chunks packed together and sample the rows that are complete, one lane each in the chunks' order."""

    chunks: tuple[PrefillChunk, ...]
    seats: np.ndarray
    generations: np.ndarray
    variant: Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunch:
    """Run one token of rows 0..bucket - 1; no row is longer than `longest` afterwards."""

    bucket: int
    longest: int
    seats: np.ndarray
    generations: np.ndarray
    variant: Variant


Command = ApplyDelta | PrefillLaunch | DecodeLaunch
