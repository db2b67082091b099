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
from areno.decode.deltas import ROW_OP, DeltaKind, DeltaSlot
from areno.decode.launch import LaneStatus
from areno.decode.results import LaneRecords
from areno.decode.tables import Lanes
from areno.forward import Forward
from areno.layers.attention import table_width
from areno.sampling.penalties import SlotTables
from areno.sampling.sampler import Drawn, LaneParams


class RebuiltPath:
    """Row state in numpy. Shapes: `rows` [R] of ROW_OP, `page_table` [R, P].

    Sampling slots hold vocabulary-sized tables, which no engine rebuilds per step: they stay where the sampler runs.
    """

    def __init__(self, forward: Forward, *, num_rows: int, pages_per_row: int, page_size: int, slots: SlotTables) -> None:
        self._forward, self._page_size, self._slots = forward, page_size, slots
        self._rows = np.zeros(num_rows, dtype=ROW_OP)
        self._alive = np.zeros(num_rows, dtype=bool)
        self._page_table = np.zeros((num_rows, pages_per_row), dtype=np.int64)

    def apply(self, slot: DeltaSlot) -> None:
        """Apply row operations."""
        for sampling_slot, content in slot.contents:
            self._slots.fill(sampling_slot, content)
        for operation in slot.rows:
            row = int(operation["row"])
            if operation["kind"] == DeltaKind.SET:
                self._rows[row] = operation
                self._page_table[row] = ZERO_PAGE
                self._alive[row] = True
        self._page_table[slot.pages["row"], slot.pages["index"]] = slot.pages["page"]
        for operation in slot.rows:
            row, source = int(operation["row"]), int(operation["source"])
            if operation["kind"] == DeltaKind.KILL and self._rows[row]["generation"] == operation["generation"]:
                self._alive[row] = False
            if operation["kind"] == DeltaKind.MOVE and self._rows[source]["generation"] == operation["generation"]:
                self._rows[row], self._alive[row] = self._rows[source], self._alive[source]
                self._page_table[row] = self._page_table[source]
                self._alive[source] = False

    def decode(self, launch: DecodeLaunch, records: LaneRecords) -> None:
        """Rebuild the inputs of rows 0..bucket - 1, run them, read the results back and advance the rows."""
        rows = np.arange(launch.bucket)
        state, alive = self._rows[rows], self._alive[rows]
        length = state["length"].astype(np.int64)
        page = self._page_table[rows, length // self._page_size]
        running = alive & (page != ZERO_PAGE)
        lanes = Lanes(
            running=torch.from_numpy(running),
            starved=torch.from_numpy(alive & ~running),
            ids=torch.from_numpy(np.where(running, state["last_token"], 0)),
            positions=torch.from_numpy(np.where(running, length, 0)),
            slots=torch.from_numpy(np.where(running, page * self._page_size + length % self._page_size, SINK_PAGE * self._page_size)),
            tables=torch.from_numpy(self._page_table[: launch.bucket, : table_width(launch.longest, self._page_size)] * running[:, None]),
            lengths=torch.from_numpy(np.where(running, length + 1, 1)),
        )
        logits = self._forward.decode(lanes, launch.longest)
        drawn = self._forward.draw(logits, self._params(rows), launch.variant)
        self._advance(rows, running, alive & ~running, drawn, records)

    def sample_prefill(self, launch: PrefillLaunch, logits_BV: torch.Tensor, records: LaneRecords) -> None:
        """Draw the next token of each row whose prompt is complete and write its record."""
        rows = np.array(launch.rows, dtype=np.int64)
        drawn = self._forward.draw(logits_BV, self._params(rows), launch.variant)
        self._advance(rows, self._alive[rows], np.zeros(rows.size, dtype=bool), drawn, records)

    def row_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that integrity checks compare."""
        state = {name: torch.from_numpy(self._rows[name].copy()) for name in ("length", "generation", "last_token")}
        return {"alive": torch.from_numpy(self._alive.copy()), "page_table": torch.from_numpy(self._page_table.copy()), **state}

    def _params(self, rows: np.ndarray) -> LaneParams:
        state = self._rows[rows]
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop_ids", "stop_wait")
        tensors = {name: torch.from_numpy(state[name].copy()) for name in names}
        slots = torch.from_numpy(state["sampling_slot"].astype(np.int64))
        return LaneParams(
            temperature=tensors["temperature"],
            top_k=tensors["top_k"],
            top_p=tensors["top_p"],
            min_p=tensors["min_p"],
            seeds=tensors["seed"],
            positions=torch.from_numpy(state["length"] + 1),
            stop_ids=tensors["stop_ids"],
            stop_wait=tensors["stop_wait"],
            slots=slots,
            forced=self._slots.forced(slots),
            tables=self._slots,
        )

    def _advance(self, rows: np.ndarray, running: np.ndarray, starved: np.ndarray, drawn: Drawn, records: LaneRecords) -> None:
        state = self._rows[rows]
        token = drawn.token.numpy().astype(np.int32)
        stopped = (state["stop_ids"] == token[:, None]).any(axis=1) & (state["stop_wait"] <= 0) & running
        state["remaining"] -= running
        exhausted = (state["remaining"] <= 0) & running & ~stopped
        status = np.where(running, int(LaneStatus.TOKEN), int(LaneStatus.IDLE))
        status[stopped], status[exhausted], status[starved] = LaneStatus.STOPPED, LaneStatus.EXHAUSTED, LaneStatus.STARVED
        lanes = rows.size
        records.status.numpy()[:lanes] = status
        records.generation.numpy()[:lanes] = state["generation"]
        records.write_draw(drawn)
        self._slots.advance(torch.from_numpy(state["sampling_slot"].astype(np.int64)), drawn.token, torch.from_numpy(running))
        state["last_token"] = np.where(running, token, state["last_token"])
        state["length"] += running
        state["stop_wait"] -= running
        self._rows[rows] = state
        self._alive[rows] &= ~(stopped | exhausted)
