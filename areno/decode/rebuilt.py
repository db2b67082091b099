"""The rebuilt path: the host keeps the rows and builds every step's inputs anew from what it read back.

It is the baseline that the resident tables are measured against, the oracle that they must equal bit for bit, and the
path for devices without mapped memory. Honestly batched: one upload of the step's inputs, one read of its results, all
rows at once in numpy.
"""

from __future__ import annotations

import numpy as np
import torch

from areno.commands import DecodeLaunch, PrefillLaunch
from areno.config import SINK_PAGE, ZERO_PAGE
from areno.decode.deltas import DeltaSlot
from areno.decode.host_rows import HostRows, advance
from areno.decode.launch import LaneStatus
from areno.decode.results import LaneRecords
from areno.decode.row_state import RowState
from areno.decode.tables import Lanes
from areno.forward import Forward, PrefillResult
from areno.layers.attention import table_width
from areno.sampling.penalties import SlotTables
from areno.sampling.sampler import Drawn, LaneParams
from areno.sampling.variant import Variant


class RebuiltPath:
    """Row state in numpy.

    Sampling slots hold vocabulary-sized tables, which no engine rebuilds per step: they stay where the sampler runs.
    """

    def __init__(self, forward: Forward, *, num_rows: int, pages_per_row: int, page_size: int, slots: SlotTables) -> None:
        self._forward, self._page_size, self._slots = forward, page_size, slots
        self._rows = HostRows(num_rows=num_rows, pages_per_row=pages_per_row, page_dtype=np.int64)
        self._lane_numbers = np.arange(num_rows)

    def apply(self, slot: DeltaSlot) -> None:
        """Apply row operations."""
        self._slots.fill(slot.contents)
        self._rows.apply(slot)

    def decode(self, launch: DecodeLaunch, records: LaneRecords) -> None:
        """Rebuild the inputs of rows 0..bucket - 1, run them, read the results back and advance the rows."""
        rows = self._rows.state.select(slice(0, launch.bucket))
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
        rows = self._rows.gather(places)
        drawn = self._forward.draw(computed.logits[computed.places], self._params(rows, slots=launch.variant.slots), launch.variant)
        self._advance(rows, rows.alive.copy(), np.zeros(places.size, dtype=bool), drawn, records, slots=launch.variant.slots)
        self._rows.put(places, rows)

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
        return self._rows.row_state()

    def _params(self, rows: RowState[np.ndarray], *, slots: bool) -> LaneParams:
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
        self, rows: RowState[np.ndarray], running: np.ndarray, starved: np.ndarray, drawn: Drawn, records: LaneRecords, *, slots: bool
    ) -> None:
        _, _, remaining, stop_wait = rows.ints[:4]
        token = drawn.token.numpy().astype(np.int32)
        stopped = (rows.stop_ids == token[:, None]).any(axis=1) & (stop_wait <= 0) & running
        status = running * np.int32(LaneStatus.TOKEN)
        status[(remaining <= 1) & running] = LaneStatus.EXHAUSTED
        status[stopped] = LaneStatus.STOPPED
        status[starved] = LaneStatus.STARVED
        records.write(torch.from_numpy(status), torch.from_numpy(rows.ints[7]), torch.from_numpy(token), drawn)
        if slots:
            self._slots.advance(torch.from_numpy(rows.ints[4].astype(np.int64)), drawn.token, torch.from_numpy(running))
        advance(rows, status, token)
