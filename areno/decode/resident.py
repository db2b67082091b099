"""The resident path: rows advance and end on the device, fed by deltas only. See `decode/tables.py` for the state."""

from __future__ import annotations

import torch

from areno.commands import DecodeLaunch, PrefillLaunch
from areno.decode.deltas import DeltaSlot
from areno.decode.results import LaneRecords
from areno.decode.tables import DecodeTables
from areno.forward import Forward, PrefillResult
from areno.sampling.variant import Variant


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
        rows = self.tables.bucket(launch.bucket)
        lanes = rows.lanes(launch.longest)
        logits = self._forward.decode(lanes, launch.longest)
        drawn = self._forward.draw(logits, rows.params(slots=launch.variant.slots), launch.variant)
        rows.advance(lanes.running, lanes.starved, drawn, records, slots=launch.variant.slots)

    def sample_prefill(self, launch: PrefillLaunch, computed: PrefillResult, records: LaneRecords) -> None:
        """Draw the next token of each row whose prompt is complete and write its record."""
        if computed.logits is None:
            return
        places = torch.tensor(launch.rows)
        rows = self.tables.gather(places)
        drawn = self._forward.draw(computed.logits[computed.places], rows.params(slots=launch.variant.slots), launch.variant)
        rows.advance(rows.state.alive.clone(), None, drawn, records, slots=launch.variant.slots)
        self.tables.put(places, rows)

    def warm_up(self, buckets: tuple[int, ...], variant: Variant) -> None:
        """Nothing to compile here."""

    @property
    def num_captures(self) -> int:
        """Nothing is captured here."""
        return 0

    def forget_captures(self) -> None:
        """Nothing is captured here."""

    def row_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that integrity checks compare."""
        return {name: self.tables.field(name).clone() for name in ("alive", "length", "generation", "last_token", "page_table")}
