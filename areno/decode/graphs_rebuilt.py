"""The rebuilt path on a CUDA device: the host keeps the rows and sends all of a step's inputs anew, the steps are the resident path's.

    rows in numpy --fill--> pinned buffer --one copy--> device buffer --the step--> records --one copy--> pinned, one wait
          ^                                                                                                     |
          +------------------------------- advance by status and token -----------------------------------------+

It is what the resident tables are measured against, so it does nothing that it need not: all rows at once in numpy, page tables
as narrow as the step's bound on lengths allows, views made once, the same captured step with its records in device memory. What a
step advances on the device is lost with the next copy. Sampling slots hold vocabulary-sized tables, which no engine rebuilds per
step: they stay on the device. Results are known when a launch returns; the result ring is that of the CPU, which withholds
them for `run_ahead` further launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from areno.commands import DecodeLaunch, PrefillLaunch
from areno.decode.deltas import DeltaSlot
from areno.decode.host_rows import HostRows, advance
from areno.decode.results import LaneRecords
from areno.decode.row_state import RowState
from areno.decode.staging import Layout, Staging
from areno.decode.steps import DecodeSteps, StepKind, StepMemory
from areno.forward import PrefillResult
from areno.sampling.penalties import SlotTables
from areno.sampling.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """One size of step: its staging layout, the rows it sends, and the arrays to copy for it as (target, source)."""

    layout: Layout
    rows: RowState[np.ndarray]
    copies: tuple[tuple[np.ndarray, np.ndarray], ...]


class RebuiltGraphPath:
    """Row state in numpy, steps on the device. `slots` are the sampling slots that `steps` read."""

    def __init__(
        self,
        steps: DecodeSteps,
        slots: SlotTables,
        *,
        num_rows: int,
        pages_per_row: int,
        page_size: int,
        kept: bool,
        device: torch.device,
    ) -> None:
        self.steps = steps
        self._slots, self._page_size, self._pages_per_row = slots, page_size, pages_per_row
        self._rows = HostRows(num_rows=num_rows, pages_per_row=pages_per_row, page_dtype=np.int32)
        self._staging = Staging(num_rows=num_rows, pages_per_row=pages_per_row, kept=kept, device=device)
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    @property
    def waited_s(self) -> float:
        """Seconds in which launches waited for the device."""
        return self._staging.waited_s

    def apply(self, slot: DeltaSlot) -> None:
        """Apply row operations."""
        self._slots.fill(slot.contents)
        self._rows.apply(slot)

    def decode(self, launch: DecodeLaunch, records: LaneRecords) -> None:
        """Send the inputs of rows 0..bucket - 1, run them, read the results back and advance the rows. Blocks: for the step."""
        kind = self.steps.kind_of(launch)
        bucket = self._bucket(kind)
        for target, source in bucket.copies:
            target[...] = source
        bucket.layout.send.run()
        self.steps.run(kind, bucket.layout.memory)
        self._finish(bucket.layout, bucket.rows, records, kept=launch.variant.kept)

    def sample_prefill(self, launch: PrefillLaunch, computed: PrefillResult, records: LaneRecords) -> None:
        """Draw the next token of each row whose prompt is complete and write its record; called for every launch that reports.

        Blocks: for the launch, whose scores are read as soon as its slot of the ring may be.
        """
        if computed.logits is None:
            self._staging.receive(None)
            return
        places = np.array(launch.rows, dtype=np.int64)
        count = places.size
        rows, layout = self._rows.gather(places), self._staging.layout(count, 0)
        for target, source in _pairs(layout.rows, rows, count):
            target[...] = source
        layout.logit_rows[:count] = computed.places
        layout.send_plain.run()
        lanes = self._staging.lane_numbers[:count], layout.device_logit_rows[:count]
        self.steps.sample_prefill(launch.variant, computed.logits, lanes, layout.memory)
        self._finish(layout, rows, records, kept=launch.variant.kept)
        self._rows.put(places, rows)

    def memory_of(self, kind: StepKind) -> StepMemory:
        """Return what a kind of step runs over: the device's side of its staging layout."""
        return self._bucket(kind).layout.memory

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

    def row_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that integrity checks compare."""
        return self._rows.row_state()

    def _bucket(self, kind: StepKind) -> _Bucket:
        """Return the views for a kind of step; no row of it is longer than its span, 0 for any length."""
        key = kind.bucket, kind.span
        found = self._buckets.get(key)
        if found is None:
            pages = min(-(-kind.span // self._page_size), self._pages_per_row) if kind.span else self._pages_per_row
            layout, rows = self._staging.layout(kind.bucket, pages), self._rows.state.select(slice(0, kind.bucket))
            # All entries that a step may look up: a row without a page for its next token may be longer than those that run.
            pages = min(layout.rows.page_table.shape[1], self._pages_per_row)
            tables = layout.rows.page_table[: kind.bucket, :pages], rows.page_table[:, :pages]
            found = self._buckets[key] = _Bucket(layout=layout, rows=rows, copies=(*_pairs(layout.rows, rows, kind.bucket), tables))
        return found

    def _finish(self, layout: Layout, rows: RowState[np.ndarray], records: LaneRecords, *, kept: bool) -> None:
        """Read the launch's records back, advance its rows by them, and hand the records on. Mutates: `rows`, `records`."""
        count = rows.alive.size
        self._staging.receive(layout.fetch_kept if kept else layout.fetch)
        words = layout.words[:, :count]
        advance(rows, words[0], words[2])
        if kept and layout.kept_ids is not None and layout.kept_count is not None:
            records.put(words, layout.kept_ids[:count], layout.kept_count[:count])
        else:
            records.put(words, None, None)


def _pairs(staged: RowState[np.ndarray], rows: RowState[np.ndarray], count: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return target and source of everything that is staged of the first `count` lanes but their page tables."""
    return (
        (staged.ints[:, :count], rows.ints),
        (staged.floats[:, :count], rows.floats),
        (staged.seed[:count], rows.seed),
        (staged.alive[:count], rows.alive),
        (staged.stop_ids[:count], rows.stop_ids),
    )
