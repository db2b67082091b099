"""The result ring: what each launch says about its lanes, written by the launch and read later by the host.

Every launch that samples takes the next slot. The host reads a slot once its launch has passed, and no slot is taken
again before it was read. On a CUDA device the launch writes pinned memory, or memory of the device from which the slot's
used words are copied behind it (`decode/transport.py`); one event a slot tells that it has passed, and the host waits only
when `run_ahead` further launches are in flight. On the CPU results are withheld until that many further launches were
made, so that late news can be tested without a device.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

from areno.decode.launch import LaunchRecord, LaunchResult
from areno.decode.transport import HostTransport, Transport
from areno.sampling.kept import MAX_KEPT
from areno.sampling.sampler import Drawn

RECORD_WORDS = 6


class LaneRecords:
    """One ring slot. Shapes: `words` int32 [6, B] are status, generation, token and the bits of logprob, raw and behaviour logprob.

    A lane's numbers count only where its status is positive. `kept_ids` [B, 64] and `kept_count` [B] exist where the engine
    may return kept sets.
    """

    __slots__ = ("array", "floats", "kept_count", "kept_ids", "words")

    def __init__(self, words: torch.Tensor, kept_ids: torch.Tensor | None, kept_count: torch.Tensor | None) -> None:
        self.words, self.floats = words, words[3:].view(torch.float32)
        self.array = words.numpy()
        self.kept_ids, self.kept_count = kept_ids, kept_count

    def write(self, status: torch.Tensor, generation: torch.Tensor, token: torch.Tensor, drawn: Drawn) -> None:
        """Store what a launch did with its first lanes. Shapes: int32 [n] each. Mutates: this slot."""
        lanes = token.shape[0]
        torch.stack((status, generation, token), out=self.words[:3, :lanes])
        torch.stack((drawn.logprob, drawn.raw_logprob, drawn.behaviour_logprob), out=self.floats[:, :lanes])
        if drawn.kept_ids is not None and drawn.kept_count is not None:
            assert self.kept_ids is not None and self.kept_count is not None, "kept sets were drawn without a side ring"
            self.kept_ids[:lanes, : drawn.kept_ids.shape[1]] = drawn.kept_ids
            self.kept_count[:lanes] = drawn.kept_count

    def put(self, words: np.ndarray, kept_ids: np.ndarray | None, kept_count: np.ndarray | None) -> None:
        """Store records that the host has read back itself. Shapes: int32 [6, n], [n, 64], [n]. Mutates: this slot."""
        lanes = words.shape[1]
        self.array[:, :lanes] = words
        if kept_ids is not None and kept_count is not None:
            assert self.kept_ids is not None and self.kept_count is not None, "kept sets were drawn without a side ring"
            self.kept_ids.numpy()[:lanes], self.kept_count.numpy()[:lanes] = kept_ids, kept_count

    def read(self, launch: LaunchRecord) -> LaunchResult:
        """Return copies of the launch's lanes."""
        lanes = launch.seats.size
        words = self.array[:, :lanes].copy()
        return LaunchResult(
            launch=launch,
            status=words[0],
            generation=words[1],
            token=words[2],
            logprobs=words[3:].view(np.float32),
            kept_ids=None if self.kept_ids is None else self.kept_ids[:lanes].numpy().copy(),
            kept_count=None if self.kept_count is None else self.kept_count[:lanes].numpy().copy(),
        )


class ResultRing:
    """`slots` places of `lanes` lanes each, at fixed addresses.

    Shapes: `words` int32 [slots, 6, lanes], `kept_ids` [slots, lanes, 64] and `kept_count` [slots, lanes], in host memory;
    `launch_words`, `launch_kept_ids` and `launch_kept_count` are what launches write in their place, often the same memory.
    With `lock_step` set, results of a device come as late as on the CPU and never earlier, so that runs can be compared step by
    step. `waited_s` adds up the time that `ready` blocked.
    """

    __slots__ = (
        "_events",
        "_pending",
        "_records",
        "_taken",
        "_transport",
        "kept_count",
        "kept_ids",
        "launch_kept_count",
        "launch_kept_ids",
        "launch_words",
        "lock_step",
        "run_ahead",
        "waited_s",
        "words",
    )

    def __init__(self, *, slots: int, lanes: int, run_ahead: int, kept: bool = False, transport: Transport | None = None) -> None:
        self.run_ahead = run_ahead
        self.lock_step = False
        self.waited_s = 0.0
        self._transport = transport = transport or HostTransport()
        self.words = transport.host_zeros(slots, RECORD_WORDS, lanes)
        self.kept_ids = transport.host_zeros(slots, lanes, MAX_KEPT) if kept else None
        self.kept_count = transport.host_zeros(slots, lanes) if kept else None
        self.launch_words = transport.launch_side(self.words)
        self.launch_kept_ids = None if self.kept_ids is None else transport.launch_side(self.kept_ids)
        self.launch_kept_count = None if self.kept_count is None else transport.launch_side(self.kept_count)
        self._events = [transport.event() for _ in range(slots)]
        self._records = [
            LaneRecords(
                self.words[slot],
                None if self.kept_ids is None else self.kept_ids[slot],
                None if self.kept_count is None else self.kept_count[slot],
            )
            for slot in range(slots)
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
        return launch, self._records[slot]

    def launched(self) -> None:
        """Mark that all work of the launch that took the newest slot is in the device's queue."""
        launch = self._pending[-1]
        if self.launch_words is not self.words:
            self._fetch(launch.slot, launch.seats.size)
        event = self._events[launch.slot]
        if event is not None:
            event.record()

    def _fetch(self, slot: int, lanes: int) -> None:
        """Copy a slot's words up to the last used one, and its kept sets."""
        if not lanes:
            return
        used = (RECORD_WORDS - 1) * self.words.shape[2] + lanes
        self._transport.copy(self.words[slot].view(-1)[:used], self.launch_words[slot].view(-1)[:used])
        for host, launch in ((self.kept_ids, self.launch_kept_ids), (self.kept_count, self.launch_kept_count)):
            if host is not None and launch is not None:
                self._transport.copy(host[slot, :lanes], launch[slot, :lanes])

    def ready(self, *, drain: bool) -> list[LaunchResult]:
        """Return the launches that may be read now, oldest first; all of them with `drain`.

        Blocks: on a CUDA device with `drain`, or while more than `run_ahead` launches are unread.
        """
        results = []
        while self._pending:
            if not self._may_read(self._pending[0].slot, wait=drain or len(self._pending) > self.run_ahead):
                break
            launch = self._pending.popleft()
            results.append(self._records[launch.slot].read(launch))
        return results

    def await_newest(self, at_most_s: float) -> None:
        """Give the newest launch that time to end, without sleeping. Blocks: for as long on a CUDA device; never in lock step."""
        event = self._events[self._pending[-1].slot] if self._pending else None
        if event is None or self.lock_step:
            return
        started = time.perf_counter()
        while not event.query() and time.perf_counter() - started < at_most_s:
            pass
        self.waited_s += time.perf_counter() - started

    def _may_read(self, slot: int, *, wait: bool) -> bool:
        event = self._events[slot]
        if event is None or (self.lock_step and not wait):
            return wait
        if wait:
            started = time.perf_counter()
            event.synchronize()
            self.waited_s += time.perf_counter() - started
            return True
        return event.query()
