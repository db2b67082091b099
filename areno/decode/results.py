"""The result ring: what each launch says about its lanes, written by the launch and read later by the host.

Every launch that samples takes the next slot. The host reads a slot once its launch has passed, and no slot is taken
again before it was read; `run_ahead` withholds results on the CPU until that many further launches were made, so that
late news can be tested without a device. The executor writes, the engine reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from areno.decode.launch import LaunchRecord, LaunchResult
from areno.sampling.kept import MAX_KEPT
from areno.sampling.sampler import Drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRecords:
    """One ring slot. Shapes: all [B]; a lane's numbers count only where `status` is TOKEN, STOPPED or EXHAUSTED.

    `kept_ids` [B, 64] and `kept_count` [B] exist where the engine may return kept sets.
    """

    status: torch.Tensor
    generation: torch.Tensor
    token: torch.Tensor
    logprob: torch.Tensor
    raw_logprob: torch.Tensor
    behaviour_logprob: torch.Tensor
    kept_ids: torch.Tensor | None
    kept_count: torch.Tensor | None

    def write_draw(self, drawn: Drawn) -> None:
        """Store the draw's numbers in the first lanes. Mutates: this slot."""
        lanes = drawn.token.shape[0]
        self.token[:lanes] = drawn.token
        self.logprob[:lanes] = drawn.logprob
        self.raw_logprob[:lanes] = drawn.raw_logprob
        self.behaviour_logprob[:lanes] = drawn.behaviour_logprob
        if drawn.kept_ids is not None and drawn.kept_count is not None:
            assert self.kept_ids is not None and self.kept_count is not None, "kept sets were drawn without a side ring"
            self.kept_ids[:lanes, : drawn.kept_ids.shape[1]] = drawn.kept_ids
            self.kept_count[:lanes] = drawn.kept_count


class ResultRing:
    """`slots` places of `lanes` lanes each, at fixed addresses."""

    __slots__ = ("_numpy", "_pending", "_records", "_taken", "run_ahead")

    def __init__(self, *, slots: int, lanes: int, run_ahead: int, kept: bool = False) -> None:
        self.run_ahead = run_ahead
        self._records = [
            LaneRecords(
                status=torch.zeros(lanes, dtype=torch.int32),
                generation=torch.zeros(lanes, dtype=torch.int32),
                token=torch.zeros(lanes, dtype=torch.int32),
                logprob=torch.zeros(lanes),
                raw_logprob=torch.zeros(lanes),
                behaviour_logprob=torch.zeros(lanes),
                kept_ids=torch.zeros((lanes, MAX_KEPT), dtype=torch.int32) if kept else None,
                kept_count=torch.zeros(lanes, dtype=torch.int32) if kept else None,
            )
            for _ in range(slots)
        ]
        self._numpy = [
            {name: value.numpy() for name in LaneRecords.__dataclass_fields__ if (value := getattr(record, name)) is not None}
            for record in self._records
        ]
        self._pending: deque[LaunchRecord] = deque()
        self._taken = 0

    @property
    def num_pending(self) -> int:
        """Number of launches not read yet."""
        return len(self._pending)

    @property
    def last_launch(self) -> int:
        """Number of the newest launch; 0 before the first."""
        return self._taken

    @property
    def last_read(self) -> int:
        """Number of the newest launch that has been read."""
        return self._pending[0].number - 1 if self._pending else self._taken

    def take(self, *, seats: np.ndarray, generations: np.ndarray, version: int) -> tuple[LaunchRecord, LaneRecords]:
        """Reserve the next slot for a launch over the given lanes."""
        slot = self._taken % len(self._records)
        assert len(self._pending) < len(self._records), "a ring slot would be written before it was read"
        self._taken += 1
        launch = LaunchRecord(number=self._taken, slot=slot, seats=seats, generations=generations, version=version)
        self._pending.append(launch)
        records = self._records[slot]
        records.status.zero_()
        return launch, records

    def ready(self, *, drain: bool) -> list[LaunchResult]:
        """Return the launches that may be read now, oldest first; all of them with `drain`."""
        results = []
        while self._pending and (drain or len(self._pending) > self.run_ahead):
            launch = self._pending.popleft()
            lanes = launch.seats.size
            views = {name: array[:lanes].copy() for name, array in self._numpy[launch.slot].items()}
            results.append(LaunchResult(launch=launch, **views))
        return results
