"""The resident path on a CUDA device: row state and steps stay there, records go into the result ring.

A step (`decode/steps.py`) depends on nothing of the host, so the host only replays it. Row operations come through a delta ring.
The rank makes two paths, one for requests, one for canaries.
"""

from __future__ import annotations

import numpy as np
import torch

from areno.commands import DecodeLaunch, PrefillLaunch
from areno.decode.delta_ring import DeltaRing
from areno.decode.deltas import DeltaSlot
from areno.decode.results import LaneRecords, ResultRing
from areno.decode.steps import DecodeSteps, StepKind, StepMemory
from areno.decode.tables import DecodeTables
from areno.decode.transport import Transport
from areno.forward import PrefillResult
from areno.kernels import rows as row_kernels
from areno.kernels.filters import KeptRing
from areno.sampling.variant import Variant
from areno.uploads import upload


class GraphPath:
    """Launches over resident tables on a CUDA device. Shapes: `ring` as in `ResultRing`."""

    def __init__(self, steps: DecodeSteps, tables: DecodeTables, ring: ResultRing, transport: Transport) -> None:
        self.steps, self.tables = steps, tables
        self._device = tables.state.ints.device
        kept = None
        if ring.launch_kept_ids is not None and ring.launch_kept_count is not None:
            kept = KeptRing(ids=ring.launch_kept_ids, counts=ring.launch_kept_count)
        self._memory = StepMemory(state=tables.state, ring=ring.launch_words, kept=kept)
        self._deltas = DeltaRing(transport)

    def apply(self, slot: DeltaSlot) -> None:
        """Apply row operations."""
        self.tables.slots.fill(slot.contents)
        self._deltas.apply(slot, self.tables.state)

    def decode(self, launch: DecodeLaunch, records: LaneRecords) -> None:
        """Run one token of rows 0..bucket - 1; the device picks the ring's slot by its own count."""
        self.steps.run(self.steps.kind_of(launch), self._memory)

    def memory_of(self, kind: StepKind) -> StepMemory:
        """Return what a kind of step runs over: the tables and the ring."""
        return self._memory

    def warm_up(self, buckets: tuple[int, ...], variant: Variant) -> None:
        """Compile and capture steps of short rows, while no row is alive."""
        self.steps.warm_up(buckets, variant, self.memory_of)

    @property
    def num_captures(self) -> int:
        """Number of captured kinds of steps."""
        return self.steps.num_graphs

    def forget_captures(self) -> None:
        """Drop the graphs, whose launches name addresses."""
        self.steps.forget_captures()

    def sample_prefill(self, launch: PrefillLaunch, computed: PrefillResult, records: LaneRecords) -> None:
        """Draw the next token of each row whose prompt is complete and write its record; called for every launch that reports."""
        row_kernels.begin_sample(self.steps.counter)
        if computed.logits is None:
            return
        places = np.array(computed.places, dtype=np.int32)
        lane_rows, logit_rows = upload(self._device, np.array(launch.rows, dtype=np.int32), places)
        self.steps.sample_prefill(launch.variant, computed.logits, (lane_rows, logit_rows), self._memory)

    def row_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that integrity checks compare."""
        return {name: self.tables.field(name).clone() for name in ("alive", "length", "generation", "last_token", "page_table")}
