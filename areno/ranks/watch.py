"""Who is still there: every rank shows a beat, rank 0 watches the others, they watch rank 0.

One daemon thread in each process, so that a rank that waits in a collective, or hangs in one, is noticed all the same.

    rank 0    a process ends, its beat stops, or it stays at one entry while others are in the log; rank 0 itself
              stays in one piece of work that ranks do together                                        -> `on_lost`, once
    others    rank 0's end of standard input closes, or its beat stops                                 -> the process ends itself

Before a hang is told, every rank writes the stacks of its threads to standard error: only together they say who waits for whom.

A process that stood still itself blames nobody for what it missed. No torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from areno.errors import ArenoError, EngineFailure
from areno.ranks.answers import get_answer
from areno.ranks.segment import Head, LogSegment, Own, Phase

BEAT_S = 0.1
EXIT_REFUSED = 3
EXIT_FAILED = 4
EXIT_ORPHANED = 5
STACKS_SIGNAL = signal.SIGUSR1
"""Asks a rank for the stacks of its threads; it goes on afterwards."""
_STACKS_S = 0.2
_NS = 1e-9
REMEDY = "the engine cannot go on without it: start it again, and see that rank's log for the cause"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """How long a rank may show no beat, before it runs and afterwards, and how long it may stay at one entry of the log.

    Loading libraries may keep every other thread of a process waiting for seconds. The first entry has a bound of its own, `build_s`: in it
    a rank reads its checkpoint.
    """

    beat_s: float
    start_s: float
    stall_s: float
    build_s: float


class _Since:
    """How long something has been as it is, leaving out what this process slept through."""

    __slots__ = ("_awake_since", "_before")

    def __init__(self) -> None:
        self._awake_since = self._before = time.monotonic()

    def tick(self) -> None:
        """Note that the process runs."""
        now = time.monotonic()
        if now - self._before > 10 * BEAT_S:
            self._awake_since = now
        self._before = now

    def age_s(self, moment_s: float) -> float:
        """Return the seconds since a moment that this process saw pass in one piece."""
        return self._before - max(moment_s, self._awake_since)


class RankWatch:
    """Rank 0's thread. `on_lost` is called in it, with a typed error; `busy_since` says since when rank 0 is in work of all ranks."""

    def __init__(
        self,
        segment: LogSegment,
        processes: Mapping[int, subprocess.Popen[bytes]],
        limits: WatchLimits,
        on_lost: Callable[[ArenoError], None],
        busy_since: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._busy_since = busy_since
        self._mine: tuple[int, float | None] = (0, None)
        self._mine_s = 0.0
        self._segment, self._processes, self._limits, self._on_lost = segment, processes, limits, on_lost
        self._exits = {os.pidfd_open(process.pid): rank for rank, process in processes.items()}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._stopping = False
        self._done: dict[int, tuple[int, float]] = {}
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch: from here on ranks may end. Repeatable, not from the watch's own thread. Blocks: for a moment."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for fd in (*self._exits, self._wake):
            os.close(fd)

    def _run(self) -> None:
        poll, since, started_s = select.poll(), _Since(), time.monotonic()
        for fd in (*self._exits, self._wake):
            poll.register(fd, select.POLLIN)
        while not self._stopping:
            ready = poll.poll(BEAT_S * 1e3)
            self._segment.set_head(Head.BEAT, time.monotonic_ns())
            since.tick()
            ended = [self._exits[fd] for fd, _ in ready if fd in self._exits]
            error = self._why_ended(ended) if ended else self._why_silent(since, started_s)
            if error is not None and not self._stopping:
                self._on_lost(error)
                return

    def _why_ended(self, ranks: list[int]) -> ArenoError:
        """Return the error of ranks that have ended, the one that others followed first: a killed one has no words."""
        statuses = {rank: self._processes[rank].wait() for rank in ranks}
        rank = min(ranks, key=lambda one: (statuses[one] >= 0, self._segment.own(one, Own.PHASE) != Phase.FAILED, one))
        status, pid, words = statuses[rank], self._processes[rank].pid, self._segment.last_words(rank)
        if status == EXIT_REFUSED and self._segment.own(rank, Own.ANSWER_BYTES):
            refusal = get_answer(self._segment, rank).refusal
            if refusal is not None:
                return refusal
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return EngineFailure(f"rank {rank} (pid {pid}) {how}", field="tp", value=rank, limit=words or None, remedy=REMEDY)

    def _why_silent(self, since: _Since, started_s: float) -> ArenoError | None:
        limits, segment = self._limits, self._segment
        entries = segment.head(Head.ENTRIES)
        stall_s = limits.build_s if entries <= 1 else limits.stall_s
        for rank, process in self._processes.items():
            beat_s = segment.own(rank, Own.BEAT) * _NS
            runs = segment.own(rank, Own.PHASE) >= Phase.RUNNING
            age_s, limit_s = since.age_s(beat_s or started_s), limits.beat_s if runs else limits.start_s
            if age_s > limit_s:
                return EngineFailure(
                    f"rank {rank} (pid {process.pid}) has shown no sign of life for {age_s:.1f} s",
                    field="tp",
                    value=rank,
                    limit=f"rank_timeout_s allows {limit_s:g} s" if runs else f"a start may take {limit_s:g} s without one",
                    remedy=REMEDY,
                )
            done = segment.own(rank, Own.DONE)
            at, moment_s = self._done.get(rank, (-1, 0.0))
            if at != done or done >= entries:
                self._done[rank] = (done, time.monotonic())
            elif since.age_s(moment_s) > stall_s:
                self._show_stacks()
                return EngineFailure(
                    f"rank {rank} (pid {process.pid}) hangs in entry {done + 1} of {entries} of the log",
                    field="tp",
                    value=rank,
                    limit=f"it got no further in {stall_s:g} s",
                    remedy=REMEDY,
                )
        busy_s = self._busy_since()
        if self._mine != (entries, busy_s):
            self._mine, self._mine_s = (entries, busy_s), time.monotonic()
        elif busy_s is not None and since.age_s(self._mine_s) > stall_s:
            self._show_stacks()
            return EngineFailure(
                f"rank 0 hangs in work that ranks do together, at entry {entries} of the log",
                field="tp",
                value=0,
                limit=f"the others have done all before it, and it got no further in {stall_s:g} s",
                remedy="start the engine again, and see the stacks in its log for the cause",
            )
        return None

    def _show_stacks(self) -> None:
        """Let every rank that runs write its stacks, one after the other, this process too. Blocks: for the moments in which they do."""
        if sys.__stderr__ is None:
            return
        with contextlib.suppress(OSError, ValueError):
            print("areno: ranks hang; stacks of rank 0:", file=sys.__stderr__, flush=True)
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
            for rank, process in self._processes.items():
                # One that has not come so far would end by the signal.
                if self._segment.own(rank, Own.PHASE) >= Phase.ATTACHED:
                    print(f"areno: stacks of rank {rank} (pid {process.pid}):", file=sys.__stderr__, flush=True)
                    process.send_signal(STACKS_SIGNAL)
                    time.sleep(_STACKS_S)


class LeaderWatch:
    """The thread of another rank: shows its beat, and calls `on_lost` once when rank 0 is gone or shows none.

    `pipe_fd` is a pipe whose other end rank 0 holds and never writes to.
    """

    def __init__(self, segment: LogSegment, rank: int, beat_s: float, on_lost: Callable[[str, bool], None], *, pipe_fd: int = 0) -> None:
        self._segment, self._rank, self._beat_s, self._on_lost, self._pipe_fd = segment, rank, beat_s, on_lost, pipe_fd
        self._parent = os.getppid()
        segment.set_own(rank, Own.BEAT, time.monotonic_ns())
        threading.Thread(target=self._run, name="leader-watch", daemon=True).start()

    def _run(self) -> None:
        poll, since = select.poll(), _Since()
        poll.register(self._pipe_fd, select.POLLIN)
        while True:
            closed = bool(poll.poll(BEAT_S * 1e3)) and not os.read(self._pipe_fd, 4096)
            self._segment.set_own(self._rank, Own.BEAT, time.monotonic_ns())
            since.tick()
            if closed or os.getppid() != self._parent:
                self._on_lost("rank 0 has ended", True)
                return
            age_s = since.age_s(self._segment.head(Head.BEAT) * _NS)
            if age_s > self._beat_s:
                self._on_lost(f"rank 0 has shown no sign of life for {age_s:.1f} s; rank_timeout_s allows {self._beat_s:g} s", False)
                return
