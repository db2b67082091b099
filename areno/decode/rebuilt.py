"""The rebuilt path: the host keeps the rows and builds every step's inputs anew from what it read back.

It is the baseline that the resident tables are measured against, the oracle that they must equal bit for bit, and the
path for devices without mapped memory. Honestly batched: one upload of the step's inputs, one read of its results, all
rows at once in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from areno.commands import DecodeLaunch, PrefillLaunch
from areno.config import SINK_PAGE, ZERO_PAGE
from areno.decode.deltas import DeltaKind, DeltaSlot
from areno.decode.launch import LaneStatus
from areno.decode.results import LaneRecords
from areno.decode.tables import FLOAT_FIELDS, INT_FIELDS, Lanes
from areno.forward import Forward, PrefillResult
from areno.layers.attention import table_width
from areno.request import MAX_STOP_IDS
from areno.sampling.penalties import SlotTables
from areno.sampling.sampler import Drawn, LaneParams
from areno.sampling.variant import Variant

_STEPS = np.array([[1], [-1], [-1]], dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostRows:
    """The state of R rows in numpy, field by field as in the resident tables. Shapes: `ints` [8, R], `floats` [3, R]."""

    ints: np.ndarray
    floats: np.ndarray
    alive: np.ndarray
    seed: np.ndarray
    stop_ids: np.ndarray
    page_table: np.ndarray

    def select(self, rows: slice | np.ndarray) -> _HostRows:
        """Return the state of some rows: views for a slice, copies for indices."""
        return _HostRows(
            ints=self.ints[:, rows],
            floats=self.floats[:, rows],
            alive=self.alive[rows],
            seed=self.seed[rows],
            stop_ids=self.stop_ids[rows],
            page_table=self.page_table[rows],
        )


class RebuiltPath:
    """Row state in numpy.

    Sampling slots hold vocabulary-sized tables, which no engine rebuilds per step: they stay where the sampler runs.
    """

    def __init__(self, forward: Forward, *, num_rows: int, pages_per_row: int, page_size: int, slots: SlotTables) -> None:
        self._forward, self._page_size, self._slots = forward, page_size, slots
        self._rows = _HostRows(
            ints=np.zeros((len(INT_FIELDS), num_rows), dtype=np.int32),
            floats=np.zeros((len(FLOAT_FIELDS), num_rows), dtype=np.float32),
            alive=np.zeros(num_rows, dtype=bool),
            seed=np.zeros(num_rows, dtype=np.int64),
            stop_ids=np.full((num_rows, MAX_STOP_IDS), -1, dtype=np.int32),
            page_table=np.zeros((num_rows, pages_per_row), dtype=np.int64),
        )
        self._generation = self._rows.ints[INT_FIELDS.index("generation")]
        self._lane_numbers = np.arange(num_rows)

    def apply(self, slot: DeltaSlot) -> None:
        """Apply row operations."""
        for sampling_slot, content in slot.contents:
            self._slots.fill(sampling_slot, content)
        rows = self._rows
        for operation in slot.rows:
            row = int(operation["row"])
            if operation["kind"] == DeltaKind.SET:
                for place, name in enumerate(INT_FIELDS):
                    rows.ints[place, row] = operation[name]
                for place, name in enumerate(FLOAT_FIELDS):
                    rows.floats[place, row] = operation[name]
                rows.seed[row], rows.stop_ids[row] = operation["seed"], operation["stop_ids"]
                rows.page_table[row] = ZERO_PAGE
                rows.alive[row] = True
        rows.page_table[slot.pages["row"], slot.pages["index"]] = slot.pages["page"]
        for operation in slot.rows:
            row, source = int(operation["row"]), int(operation["source"])
            if operation["kind"] == DeltaKind.KILL and self._generation[row] == operation["generation"]:
                rows.alive[row] = False
            if operation["kind"] == DeltaKind.MOVE and self._generation[source] == operation["generation"]:
                for columns in (rows.ints, rows.floats):
                    columns[:, row] = columns[:, source]
                for state in (rows.seed, rows.stop_ids, rows.page_table, rows.alive):
                    state[row] = state[source]
                rows.alive[source] = False

    def decode(self, launch: DecodeLaunch, records: LaneRecords) -> None:
        """Rebuild the inputs of rows 0..bucket - 1, run them, read the results back and advance the rows."""
        rows = self._rows.select(slice(0, launch.bucket))
        last_token, length = rows.ints[0], rows.ints[1]
        entry, offset = np.divmod(length, self._page_size)
        page = rows.page_table[self._lane_numbers[: launch.bucket], entry]
        running = rows.alive & (page != ZERO_PAGE)
        # Products with the mask put what does not run on the zero page, at position zero.
        positions = length * running
        tables = rows.page_table[:, : table_width(launch.longest, self._page_size)] * running[:, None]
        starved = rows.alive ^ running
        lanes = Lanes(
            running=torch.from_numpy(running),
            starved=torch.from_numpy(starved),
            ids=torch.from_numpy(last_token * running),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(np.where(running, page * self._page_size + offset, SINK_PAGE * self._page_size)),
            tables=torch.from_numpy(tables),
            lengths=torch.from_numpy(positions + 1),
        )
        logits = self._forward.decode(lanes, launch.longest)
        drawn = self._forward.draw(logits, self._params(rows, slots=launch.variant.slots), launch.variant)
        self._advance(rows, running, starved, drawn, records, slots=launch.variant.slots)

    def sample_prefill(self, launch: PrefillLaunch, computed: PrefillResult, records: LaneRecords) -> None:
        """Draw the next token of each row whose prompt is complete and write its record."""
        if computed.logits is None:
            return
        places = np.array(launch.rows, dtype=np.int64)
        rows = self._rows.select(places)
        drawn = self._forward.draw(computed.logits[computed.places], self._params(rows, slots=launch.variant.slots), launch.variant)
        self._advance(rows, rows.alive.copy(), np.zeros(places.size, dtype=bool), drawn, records, slots=launch.variant.slots)
        self._rows.ints[:, places], self._rows.alive[places] = rows.ints, rows.alive

    def warm_up(self, buckets: tuple[int, ...], variant: Variant) -> None:
        """Nothing to compile here."""

    def row_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that integrity checks compare."""
        state = {name: torch.from_numpy(self._rows.ints[place].copy()) for place, name in enumerate(INT_FIELDS)}
        return {
            **{name: state[name] for name in ("length", "generation", "last_token")},
            "alive": torch.from_numpy(self._rows.alive.copy()),
            "page_table": torch.from_numpy(self._rows.page_table.copy()),
        }

    def _params(self, rows: _HostRows, *, slots: bool) -> LaneParams:
        # One upload each for the integers and the floats; the rows advance before the sampler's tensors are dropped.
        ints, floats = torch.from_numpy(rows.ints.copy()), torch.from_numpy(rows.floats.copy())
        held = ints[4].to(torch.int64) if slots else torch.full_like(ints[4], -1)
        return LaneParams(
            temperature=floats[0],
            top_k=ints[6],
            top_p=floats[1],
            min_p=floats[2],
            seeds=torch.from_numpy(rows.seed.copy()),
            positions=ints[1] + 1,
            stop_ids=torch.from_numpy(rows.stop_ids.copy()),
            stop_wait=ints[3],
            slots=held,
            forced=self._slots.forced(held) if slots else held,
            tables=self._slots,
        )

    def _advance(
        self, rows: _HostRows, running: np.ndarray, starved: np.ndarray, drawn: Drawn, records: LaneRecords, *, slots: bool
    ) -> None:
        last_token, _, remaining, stop_wait = rows.ints[:4]
        token = drawn.token.numpy().astype(np.int32)
        stopped = (rows.stop_ids == token[:, None]).any(axis=1) & (stop_wait <= 0) & running
        rows.ints[1:4] += _STEPS * running
        ended = ((remaining <= 0) | stopped) & running
        status = running * np.int32(LaneStatus.TOKEN)
        status[ended] = LaneStatus.EXHAUSTED
        status[stopped] = LaneStatus.STOPPED
        status[starved] = LaneStatus.STARVED
        records.write(torch.from_numpy(status), torch.from_numpy(rows.ints[7]), torch.from_numpy(token), drawn)
        if slots:
            self._slots.advance(torch.from_numpy(rows.ints[4].astype(np.int64)), drawn.token, torch.from_numpy(running))
        np.copyto(last_token, token, where=running)
        rows.alive[ended] = False
