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


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRecords:
    """One ring slot. Shapes: all [B]; a lane's numbers count only where `status` is TOKEN, STOPPED or EXHAUSTED."""

    status: torch.Tensor
    generation: torch.Tensor
    token: torch.Tensor
    logprob: torch.Tensor
    raw_logprob: torch.Tensor
    behaviour_logprob: torch.Tensor


class ResultRing:
    """`slots` places of `lanes` lanes each, at fixed addresses."""

    __slots__ = ("_numpy", "_pending", "_records", "_taken", "run_ahead")

    def __init__(self, *, slots: int, lanes: int, run_ahead: int) -> None:
        self.run_ahead = run_ahead
        self._records = [
            LaneRecords(
                status=torch.zeros(lanes, dtype=torch.int32),
                generation=torch.zeros(lanes, dtype=torch.int32),
                token=torch.zeros(lanes, dtype=torch.int32),
                logprob=torch.zeros(lanes),
                raw_logprob=torch.zeros(lanes),
                behaviour_logprob=torch.zeros(lanes),
            )
            for _ in range(slots)
        ]
        names = LaneRecords.__dataclass_fields__
        self._numpy = [{name: getattr(record, name).numpy() for name in names} for record in self._records]
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
