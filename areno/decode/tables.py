"""The resident decode tables: row state at fixed addresses that launches read and advance by themselves.

The torch forms of the three small parts around the model: `apply` a delta slot, the prologue (`lanes`: ids, positions,
write slots, page tables of the lanes that run) and the epilogue (`advance`: result record, advance, stop test). The
host sends changes and reads results; it never asks these tensors a question. `length` counts the KV entries written,
which is also the position of the last token, which has none yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from areno.config import SINK_PAGE, ZERO_PAGE
from areno.decode.deltas import DeltaKind, DeltaSlot
from areno.decode.launch import LaneStatus
from areno.decode.results import LaneRecords
from areno.layers.attention import table_width
from areno.request import MAX_STOP_IDS
from areno.sampling.penalties import SlotTables
from areno.sampling.sampler import Drawn, LaneParams

_INT_FIELDS = ("last_token", "length", "remaining", "stop_wait", "sampling_slot", "recurrent_slot", "top_k", "generation")
_FLOAT_FIELDS = ("temperature", "top_p", "min_p")


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


class DecodeTables:
    """State of R rows. Shapes: int fields [R] each, `stop_ids` [R, 16], `page_table` [R, P]."""

    def __init__(self, *, num_rows: int, pages_per_row: int, page_size: int, slots: SlotTables, device: torch.device) -> None:
        self.page_size = page_size
        self.slots = slots
        self._ints_FR = torch.zeros((len(_INT_FIELDS), num_rows), dtype=torch.int32, device=device)
        self._floats_FR = torch.zeros((len(_FLOAT_FIELDS), num_rows), device=device)
        (
            self.last_token,
            self.length,
            self.remaining,
            self.stop_wait,
            self.sampling_slot,
            self.recurrent_slot,
            self.top_k,
            self.generation,
        ) = self._ints_FR
        self.temperature, self.top_p, self.min_p = self._floats_FR
        self.alive = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._sink_slot = torch.tensor(SINK_PAGE * page_size, device=device)
        self.seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((num_rows, MAX_STOP_IDS), -1, dtype=torch.int32, device=device)
        self.page_table = torch.zeros((num_rows, pages_per_row), dtype=torch.int64, device=device)

    def apply(self, slot: DeltaSlot) -> None:
        """Apply one delta slot. Mutates: the rows it names."""
        for sampling_slot, content in slot.contents:
            self.slots.fill(sampling_slot, content)
        kinds = slot.rows["kind"]
        # SET writes the whole page-table row first; the page entries of SET and GROW follow.
        self._set(slot.rows[kinds == DeltaKind.SET])
        if slot.pages.size:
            rows, index, page = (torch.from_numpy(slot.pages[name].astype(np.int64)) for name in ("row", "index", "page"))
            self.page_table[rows, index] = page
        killed = slot.rows[kinds == DeltaKind.KILL]
        if killed.size:
            rows, generations = self._named(killed)
            self.alive[rows] &= self.generation[rows] != generations
        self._move(slot.rows[kinds == DeltaKind.MOVE])

    @staticmethod
    def _named(operations: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(operations["row"].astype(np.int64)), torch.from_numpy(operations["generation"].copy())

    def _set(self, operations: np.ndarray) -> None:
        if not operations.size:
            return
        rows, _ = self._named(operations)
        self._ints_FR[:, rows] = torch.from_numpy(np.stack([operations[name] for name in _INT_FIELDS]))
        self._floats_FR[:, rows] = torch.from_numpy(np.stack([operations[name] for name in _FLOAT_FIELDS]))
        self.seed[rows] = torch.from_numpy(operations["seed"].copy())
        self.stop_ids[rows] = torch.from_numpy(operations["stop_ids"].copy())
        self.page_table[rows] = ZERO_PAGE
        self.alive[rows] = True

    def _move(self, operations: np.ndarray) -> None:
        if not operations.size:
            return
        target, generations = self._named(operations)
        source = torch.from_numpy(operations["source"].astype(np.int64))
        same = self.generation[source] == generations
        target, source = target[same], source[same]
        for state in (self._ints_FR, self._floats_FR):
            state[:, target] = state[:, source]
        for state in (self.seed, self.stop_ids, self.page_table, self.alive):
            state[target] = state[source]
        self.alive[source] = False

    def lanes(self, rows: slice, longest: int) -> Lanes:
        """The prologue: what lanes `rows` run in this launch; none is longer than `longest` afterwards."""
        length = self.length[rows]
        alive = self.alive[rows]
        table = self.page_table[rows]
        index, offset = self._place(length)
        page = table.gather(1, index[:, None])[:, 0]
        running = alive & (page != ZERO_PAGE)
        # Products with the mask put what does not run on the zero page, at position zero.
        positions = length * running
        return Lanes(
            running=running,
            starved=alive & ~running,
            ids=self.last_token[rows] * running,
            positions=positions,
            slots=torch.where(running, page * self.page_size + offset, self._sink_slot),
            tables=table[:, : table_width(longest, self.page_size)] * running[:, None],
            lengths=positions + 1,
        )

    def _place(self, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return page-table entry (int64) and offset within the page of a position."""
        if self.page_size & (self.page_size - 1) == 0:
            return (length >> (self.page_size.bit_length() - 1)).to(torch.int64), length & (self.page_size - 1)
        return torch.div(length, self.page_size, rounding_mode="floor").to(torch.int64), length % self.page_size

    def params(self, rows: slice | torch.Tensor, *, slots: bool) -> LaneParams:
        """Sampling state of the lanes; `slots` says whether some of them hold a sampling slot."""
        held = self.sampling_slot[rows].to(torch.int64)
        return LaneParams(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seeds=self.seed[rows],
            positions=self.length[rows] + 1,
            stop_ids=self.stop_ids[rows],
            stop_wait=self.stop_wait[rows],
            slots=held,
            forced=self.slots.forced(held) if slots else torch.full_like(held, -1),
            tables=self.slots,
        )

    def advance(
        self,
        rows: slice | torch.Tensor,
        running: torch.Tensor,
        starved: torch.Tensor | None,
        drawn: Drawn,
        records: LaneRecords,
        *,
        slots: bool,
    ) -> None:
        """The epilogue: write the result record, advance the lanes that ran, end those that are done."""
        token = drawn.token.to(torch.int32)
        allowed = self.stop_wait[rows] <= 0
        stopped = (self.stop_ids[rows] == token[:, None]).any(dim=1) & allowed & running
        remaining = self.remaining[rows] - running.to(torch.int32)
        exhausted = (remaining <= 0) & running & ~stopped
        lanes = token.shape[0]
        status = running.to(torch.int32) * LaneStatus.TOKEN
        status.masked_fill_(stopped, LaneStatus.STOPPED).masked_fill_(exhausted, LaneStatus.EXHAUSTED)
        if starved is not None:
            status.masked_fill_(starved, LaneStatus.STARVED)
        records.status[:lanes] = status
        records.generation[:lanes] = self.generation[rows]
        records.write_draw(drawn)
        if slots:
            self.slots.advance(self.sampling_slot[rows].to(torch.int64), token, running)
        self.last_token[rows] = torch.where(running, token, self.last_token[rows])
        self.length[rows] += running
        self.remaining[rows] = remaining
        self.stop_wait[rows] -= running.to(torch.int32)
        self.alive[rows] &= ~(stopped | exhausted)
