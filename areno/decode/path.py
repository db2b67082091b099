"""The seam behind which the row state lives: resident on the device, or rebuilt by the host for every step."""

from __future__ import annotations

from typing import Protocol

import torch

from areno.commands import DecodeLaunch, PrefillLaunch
from areno.decode.deltas import DeltaSlot
from areno.decode.results import LaneRecords
from areno.forward import PrefillResult
from areno.sampling.variant import Variant


class DecodePath(Protocol):
    """Keeps the rows' state and runs launches over it; both implementations give the same bits for the same commands."""

    def apply(self, slot: DeltaSlot) -> None:
        """Apply row operations."""

    def decode(self, launch: DecodeLaunch, records: LaneRecords) -> None:
        """Run one token of rows 0..bucket - 1 and write their records."""

    def sample_prefill(self, launch: PrefillLaunch, computed: PrefillResult, records: LaneRecords) -> None:
        """Draw the next token of each row whose prompt is complete and write its record; called for every launch that reports."""

    def warm_up(self, buckets: tuple[int, ...], variant: Variant) -> None:
        """Get ready for steps of these sizes while no row is alive."""

    @property
    def num_captures(self) -> int:
        """Number of kinds of steps that are captured."""

    def forget_captures(self) -> None:
        """Drop what was captured over memory that has moved; it is made again as steps come, or by `warm_up`."""

    def row_state(self) -> dict[str, torch.Tensor]:
        """Return copies of `alive`, `length`, `generation`, `last_token` and `page_table` for integrity checks."""
