"""The resident decode tables: row state at fixed addresses that launches read and advance by themselves.

The torch forms of the three small parts around the model: `DecodeTables.apply` a delta slot, the prologue (`Rows.lanes`: ids,
positions, write slots, page tables of the lanes that run) and the epilogue (`Rows.advance`: result record, advance, stop
test). The host sends changes and reads results; it never asks these tensors a question. `length` counts the KV entries
written, which is also the position of the last token, which has none yet.

Views of a bucket's rows are made once: on a CPU a step costs as many calls as arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from areno.config import SINK_PAGE, ZERO_PAGE
from areno.decode.deltas import DeltaKind, DeltaSlot
from areno.decode.launch import LaneStatus
from areno.decode.results import LaneRecords
from areno.decode.row_state import COUNTERS, FLOAT_FIELDS, INT_FIELDS, RowState
from areno.layers.attention import table_width
from areno.request import MAX_STOP_IDS
from areno.sampling.penalties import SlotTables
from areno.sampling.sampler import Drawn, LaneParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """What one launch runs. Shapes: all [B]; `tables` [B, P]. A lane that does not run reads the zero page."""

    running: torch.Tensor
    starved: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor


class Rows:
    """Some rows as the lanes of a launch: the prologue reads them, the epilogue advances them.

    Mutates (in `advance`): the state given, which is the tables' own for a bucket and a copy for gathered rows.
    """

    __slots__ = (
        "_counters",
        "_free",
        "_last_token",
        "_length",
        "_min_p",
        "_page_size",
        "_place",
        "_remaining",
        "_sampling_slot",
        "_sink_slot",
        "_slots",
        "_steps",
        "_stop_wait",
        "_tables_by_width",
        "_temperature",
        "_top_k",
        "_top_p",
        "generation",
        "state",
    )

    def __init__(self, state: RowState[torch.Tensor], *, page_size: int, slots: SlotTables) -> None:
        self.state, self._page_size, self._slots = state, page_size, slots
        device = state.ints.device
        self._last_token, self._length, self._remaining, self._stop_wait = state.ints[:4].unbind()
        self._sampling_slot, self._top_k, self.generation = state.ints[4], state.ints[6], state.ints[7]
        self._temperature, self._top_p, self._min_p = state.floats.unbind()
        self._counters = state.ints[COUNTERS]
        self._steps = torch.tensor([[1], [-1], [-1]], dtype=torch.int32, device=device)
        count, entries = state.page_table.shape
        self._place = torch.arange(count, device=device) * entries
        self._sink_slot = torch.tensor(SINK_PAGE * page_size, device=device)
        self._free = torch.full((count,), -1, dtype=torch.int32, device=device)
        self._tables_by_width: dict[int, torch.Tensor] = {}

    def lanes(self, longest: int) -> Lanes:
        """The prologue: what the rows run in this launch; none is longer than `longest` afterwards."""
        length = self._length
        entry, offset = self._split(length)
        page = self.state.page_table.take(entry.add(self._place))
        running = self.state.alive & (page != ZERO_PAGE)
        # Products with the mask put what does not run on the zero page, at position zero.
        positions = length * running
        width = table_width(longest, self._page_size)
        table = self._tables_by_width.get(width)
        if table is None:
            table = self._tables_by_width[width] = self.state.page_table[:, :width]
        return Lanes(
            running=running,
            starved=self.state.alive ^ running,
            ids=self._last_token * running,
            positions=positions,
            slots=torch.where(running, torch.add(offset, page, alpha=self._page_size), self._sink_slot),
            tables=table * running[:, None],
            lengths=positions + 1,
        )

    def _split(self, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return page-table entry and offset within the page of a position."""
        if self._page_size & (self._page_size - 1) == 0:
            return length >> (self._page_size.bit_length() - 1), length & (self._page_size - 1)
        return torch.div(length, self._page_size, rounding_mode="floor"), length % self._page_size

    def params(self, *, slots: bool) -> LaneParams:
        """Sampling state of the lanes; `slots` says whether some of them hold a sampling slot."""
        held = self._sampling_slot.to(torch.int64) if slots else self._free
        return LaneParams(
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
            seeds=self.state.seed,
            positions=self._length + 1,
            stop_ids=self.state.stop_ids,
            stop_wait=self._stop_wait,
            slots=held,
            forced=self._slots.forced(held) if slots else self._free,
            tables=self._slots,
        )

    def advance(self, running: torch.Tensor, starved: torch.Tensor | None, drawn: Drawn, records: LaneRecords, *, slots: bool) -> None:
        """The epilogue: write the result record, advance the lanes that ran, end those that are done."""
        token = drawn.token.to(torch.int32)
        stopped = (self.state.stop_ids == token[:, None]).any(dim=1).logical_and_(self._stop_wait <= 0).logical_and_(running)
        ran = running.to(torch.int32)
        self._counters.addcmul_(self._steps, ran)
        ended = (self._remaining <= 0).logical_or_(stopped).logical_and_(running)
        # TOKEN + 2 for a row that ended; a stop takes one back.
        status = torch.add(ran, ended, alpha=LaneStatus.EXHAUSTED - LaneStatus.TOKEN).sub_(stopped.to(torch.int32))
        if starved is not None:
            status.add_(starved, alpha=LaneStatus.STARVED)
        records.write(status, self.generation, token, drawn)
        if slots:
            self._slots.advance(self._sampling_slot.to(torch.int64), token, running)
        torch.where(running, token, self._last_token, out=self._last_token)
        self.state.alive.masked_fill_(ended, False)


class DecodeTables:
    """State of all rows, and the deltas that change it."""

    def __init__(self, *, num_rows: int, pages_per_row: int, page_size: int, slots: SlotTables, device: torch.device) -> None:
        self.page_size = page_size
        self.slots = slots
        self.state: RowState[torch.Tensor] = RowState(
            ints=torch.zeros((len(INT_FIELDS), num_rows), dtype=torch.int32, device=device),
            floats=torch.zeros((len(FLOAT_FIELDS), num_rows), device=device),
            alive=torch.zeros(num_rows, dtype=torch.bool, device=device),
            seed=torch.zeros(num_rows, dtype=torch.int64, device=device),
            stop_ids=torch.full((num_rows, MAX_STOP_IDS), -1, dtype=torch.int32, device=device),
            # Indices of torch are 64 bits wide; kernels read half of that.
            page_table=torch.zeros((num_rows, pages_per_row), dtype=torch.int64 if device.type == "cpu" else torch.int32, device=device),
        )
        self._generation = self.state.ints[INT_FIELDS.index("generation")]
        self._buckets: dict[int, Rows] = {}

    def field(self, name: str) -> torch.Tensor:
        """Return one field of all rows, by its name in ROW_OP. Shapes: [R]."""
        return self.state.named(name)

    def bucket(self, size: int) -> Rows:
        """Return rows 0..size - 1 in place."""
        rows = self._buckets.get(size)
        if rows is None:
            rows = self._buckets[size] = Rows(self.state.select(slice(0, size)), page_size=self.page_size, slots=self.slots)
        return rows

    def gather(self, rows: torch.Tensor) -> Rows:
        """Return copies of chosen rows; `put` writes them back. Shapes: int64 [B], each row once."""
        return Rows(self.state.select(rows), page_size=self.page_size, slots=self.slots)

    def put(self, rows: torch.Tensor, advanced: Rows) -> None:
        """Write gathered rows back after their launch. Mutates: what a launch advances of these rows."""
        self.state.ints[:, rows] = advanced.state.ints
        self.state.alive[rows] = advanced.state.alive

    def apply(self, slot: DeltaSlot) -> None:
        """Apply one delta slot. Mutates: the rows it names."""
        self.slots.fill(slot.contents)
        kinds = slot.rows["kind"]
        # SET writes the whole page-table row first; the page entries of SET and GROW follow.
        self._set(slot.rows[kinds == DeltaKind.SET])
        if slot.pages.size:
            rows, index, page = (torch.from_numpy(slot.pages[name].astype(np.int64)) for name in ("row", "index", "page"))
            self.state.page_table[rows, index] = page
        killed = slot.rows[kinds == DeltaKind.KILL]
        if killed.size:
            rows, generations = self._named(killed)
            self.state.alive[rows] &= self._generation[rows] != generations
        self._move(slot.rows[kinds == DeltaKind.MOVE])

    @staticmethod
    def _named(operations: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(operations["row"].astype(np.int64)), torch.from_numpy(operations["generation"].copy())

    def _set(self, operations: np.ndarray) -> None:
        if not operations.size:
            return
        rows, _ = self._named(operations)
        state = self.state
        state.ints[:, rows] = torch.from_numpy(np.stack([operations[name] for name in INT_FIELDS]))
        state.floats[:, rows] = torch.from_numpy(np.stack([operations[name] for name in FLOAT_FIELDS]))
        state.seed[rows] = torch.from_numpy(operations["seed"].copy())
        state.stop_ids[rows] = torch.from_numpy(operations["stop_ids"].copy())
        state.page_table[rows] = ZERO_PAGE
        state.alive[rows] = True

    def _move(self, operations: np.ndarray) -> None:
        if not operations.size:
            return
        target, generations = self._named(operations)
        source = torch.from_numpy(operations["source"].astype(np.int64))
        same = self._generation[source] == generations
        target, source = target[same], source[same]
        state = self.state
        for columns in (state.ints, state.floats):
            columns[:, target] = columns[:, source]
        for rows in (state.seed, state.stop_ids, state.page_table, state.alive):
            rows[target] = rows[source]
        state.alive[source] = False
