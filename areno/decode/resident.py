"""The resident path: rows advance and end on the device, fed by deltas only. See `decode/tables.py` for the state."""

from __future__ import annotations

import torch

from areno.commands import DecodeLaunch, PrefillLaunch
from areno.decode.deltas import DeltaSlot
from areno.decode.results import LaneRecords
from areno.decode.tables import DecodeTables
from areno.forward import Forward


class ResidentPath:
    """Launches over resident tables: prologue, model, sampler, epilogue."""

    __slots__ = ("_forward", "tables")

    def __init__(self, forward: Forward, tables: DecodeTables) -> None:
        self._forward, self.tables = forward, tables

    def apply(self, slot: DeltaSlot) -> None:
        """Apply row operations."""
        self.tables.apply(slot)

    def decode(self, launch: DecodeLaunch, records: LaneRecords) -> None:
        """Run one token of rows 0..bucket - 1 and write their records."""
        rows = slice(0, launch.bucket)
        lanes = self.tables.lanes(rows, launch.longest)
        logits = self._forward.decode(lanes, launch.longest)
        drawn = self._forward.draw(logits, self.tables.params(rows, slots=launch.variant.slots), launch.variant)
        self.tables.advance(rows, lanes.running, lanes.starved, drawn, records, slots=launch.variant.slots)

    def sample_prefill(self, launch: PrefillLaunch, logits_BV: torch.Tensor, records: LaneRecords) -> None:
        """Draw the next token of each row whose prompt is complete and write its record."""
        rows = torch.tensor(launch.rows)
        drawn = self._forward.draw(logits_BV, self.tables.params(rows, slots=launch.variant.slots), launch.variant)
        self.tables.advance(rows, self.tables.alive[rows], None, drawn, records, slots=launch.variant.slots)

    def row_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that integrity checks compare."""
        tables = self.tables
        names = ("alive", "length", "generation", "last_token", "page_table")
        return {name: getattr(tables, name).clone() for name in names}
