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
class ClearPages:
    """Zero pages that were just handed out, so that nothing an earlier owner left (NaN of diverged weights) is ever read.

    In the log only where attention reads whole pages (`ResolvedConfig.clears_pages`).
    """

    pages: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPages:
    """Copy pages in every layer; all sources are read before a target is written. Shapes: [n] each.

    Only the first `tokens` of a page count; where attention reads whole pages the rest of the target becomes zero.
    """

    sources: np.ndarray
    targets: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens `start`..`start + len(ids) - 1` of one sequence.

    `pages` hold positions 0..end. `rows` are the rows whose next token is drawn from the last position's logits: none for an
    inner chunk, several for a group. `score_targets` are the ids at `score_from + 1` and on whose log-probabilities are
    asked for; `seat` and `generation` name the request they belong to.
    """

    ids: np.ndarray
    start: int
    pages: np.ndarray
    rows: tuple[int, ...]
    score_from: int
    score_targets: np.ndarray
    temperature: float
    seat: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLaunch:
    """Run chunks packed together, copy the last pages of forked prompts, and sample, one lane per row in the chunks' order."""

    chunks: tuple[PrefillChunk, ...]
    fork_sources: np.ndarray
    fork_targets: np.ndarray
    seats: np.ndarray
    generations: np.ndarray
    variant: Variant

    @property
    def rows(self) -> list[int]:
        """The sampled rows, one lane each."""
        return [row for chunk in self.chunks for row in chunk.rows]

    @property
    def reports(self) -> bool:
        """Whether the launch takes a slot of the result ring."""
        return bool(self.seats.size) or any(chunk.score_targets.size for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunch:
    """Run one token of rows 0..bucket - 1; no row is longer than `longest` afterwards."""

    bucket: int
    longest: int
    seats: np.ndarray
    generations: np.ndarray
    variant: Variant


Command = ApplyDelta | ClearPages | CopyPages | PrefillLaunch | DecodeLaunch
