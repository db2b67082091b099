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
from areno.sampling.sampler import Drawn, LaneParams


class RebuiltPath:
    """Row state in numpy. Shapes: `rows` [R] of ROW_OP, `page_table` [R, P]."""

    def __init__(self, forward: Forward, *, num_rows: int, pages_per_row: int, page_size: int, sampling_slots: int) -> None:
        self._forward, self._page_size = forward, page_size
        self._rows = np.zeros(num_rows, dtype=ROW_OP)
        self._alive = np.zeros(num_rows, dtype=bool)
        self._page_table = np.zeros((num_rows, pages_per_row), dtype=np.int64)
        self._forced: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * max(sampling_slots, 1)
        self._emitted = np.zeros(max(sampling_slots, 1), dtype=np.int64)

    def apply(self, slot: DeltaSlot) -> None:
        """Apply row operations."""
        for sampling_slot, forced in slot.forced:
            self._forced[sampling_slot] = forced
            self._emitted[sampling_slot] = 0
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
            tables=torch.from_numpy(self._page_table[rows] * running[:, None]),
            lengths=torch.from_numpy(np.where(running, length + 1, 1)),
        )
        logits = self._forward.decode(lanes, launch.longest)
        drawn = self._forward.draw(logits, self._params(rows), launch.variant)
        self._advance(rows, running, alive & ~running, drawn, records)

    def sample_prefill(self, launch: PrefillLaunch, logits_BV: torch.Tensor, records: LaneRecords) -> None:
        """Draw the first token of each complete prompt and write its record."""
        rows = np.array([chunk.row for chunk in launch.chunks if chunk.row >= 0], dtype=np.int64)
        drawn = self._forward.draw(logits_BV[: rows.size], self._params(rows), launch.variant)
        self._advance(rows, self._alive[rows], np.zeros(rows.size, dtype=bool), drawn, records)

    def row_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that integrity checks compare."""
        state = {name: torch.from_numpy(self._rows[name].copy()) for name in ("length", "generation", "last_token")}
        return {"alive": torch.from_numpy(self._alive.copy()), "page_table": torch.from_numpy(self._page_table.copy()), **state}

    def _params(self, rows: np.ndarray) -> LaneParams:
        state = self._rows[rows]
        forced = np.full(rows.size, -1, dtype=np.int32)
        for lane in np.flatnonzero(state["sampling_slot"] >= 0):
            slot = int(state["sampling_slot"][lane])
            if self._emitted[slot] < self._forced[slot].size:
                forced[lane] = self._forced[slot][self._emitted[slot]]
        tensors = {name: torch.from_numpy(state[name].copy()) for name in ("temperature", "seed", "stop_ids", "stop_wait")}
        return LaneParams(
            temperature=tensors["temperature"],
            seeds=tensors["seed"],
            positions=torch.from_numpy(state["length"] + 1),
            stop_ids=tensors["stop_ids"],
            stop_wait=tensors["stop_wait"],
            forced=torch.from_numpy(forced),
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
        written = {"status": status, "generation": state["generation"], "token": token}
        for name, values in written.items():
            getattr(records, name).numpy()[:lanes] = values
        for name in ("logprob", "raw_logprob", "behaviour_logprob"):
            getattr(records, name).numpy()[:lanes] = getattr(drawn, name).numpy()
        held = state["sampling_slot"][running & (state["sampling_slot"] >= 0)]
        self._emitted[held] += 1
        state["last_token"] = np.where(running, token, state["last_token"])
        state["length"] += running
        state["stop_wait"] -= running
        self._rows[rows] = state
        self._alive[rows] &= ~(stopped | exhausted)
