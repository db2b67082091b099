"""The other ranks as rank 0 has them: their processes, the log to them, what they answer, and their end.

    start -> meet -> tell(Build) -> tell(entry)* -> close
      a rank that is lost at any time: all are ended, `failure` says why, and every later call raises it

The engine owns one where `tp` is more than 1. One thread calls it; a second one watches (`watch.py`). Processes never outlive this
object: they end with its `close`, with it, with the interpreter, and with this process however that ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areno.errors import ArenoError, EngineFailure
from areno.ranks import operations as ops
from areno.ranks.answers import Answer, get_answer, get_state, has_answered
from areno.ranks.identity import checkpoint_identity, code_identity
from areno.ranks.log import LogWriter
from areno.ranks.meeting import meet_in_thread
from areno.ranks.plan import RankPlan
from areno.ranks.segment import BROADCAST, BULK_SLOTS, LogSegment, Own, Phase, SegmentSizes
from areno.ranks.state_check import compare_states
from areno.ranks.watch import EXIT_FAILED, RankWatch, WatchLimits

if TYPE_CHECKING:
    import torch

    from areno.parallel import TPGroup

FOLLOWER = "areno.ranks.follower"
MEET_S = 120.0
BROADCAST_BYTES = 64 << 20
# Ranks that launch a step kernel by kernel end within this of each other.
_CATCH_UP_S = 2e-3
_LOST_IS_SEEN_S = 5.0
_STOP_S = 5.0
_TELL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersPlan:
    """What the ranks are to be. `devices` has one name per rank, rank 0 first; `backend` as in `RankPlan`.

    `start_s` bounds how long a rank that starts may show no sign of life; `stall_s` how long a collective, or any one entry of the log, may
    take: kernels compile in some; `build_s` the first entry, in which ranks load. With `broadcasts` weights go from device to device.
    `module` is what follows.
    """

    model: Path
    devices: tuple[str, ...]
    backend: str
    launches_ahead: int
    rank_timeout_s: float
    stall_s: float
    threads: int
    start_s: float = 60.0
    build_s: float = 1800.0
    dedicated: bool = False
    broadcasts: bool = False
    sizes: SegmentSizes | None = None
    module: str = FOLLOWER


class Peers:
    """See the module. `lost_fd` becomes readable when a rank is lost. Raises (in its constructor): OSError, CheckpointError."""

    def __init__(self, plan: PeersPlan) -> None:
        self._plan, self.size = plan, len(plan.devices)
        self.failure: ArenoError | None = None
        self._group: TPGroup | None = None
        self._close_by: float | None = None
        self._busy_since: float | None = None
        self._told = threading.Event()
        code, checkpoint = code_identity(), checkpoint_identity(plan.model)
        self._segment = LogSegment.create(plan.sizes or SegmentSizes(world=self.size))
        self._events = {rank: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for rank in range(1, self.size)}
        self.lost_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._folder = Path(tempfile.mkdtemp(prefix="areno-ranks-"))
        self._meeting = f"file://{self._folder / 'meeting'}"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._finalizer = weakref.finalize(self, _end, self._processes, self._folder)
        self._writer = LogWriter(self._segment, self._events, launches_ahead=plan.launches_ahead, check=self.check)
        self._bulk_used = [0] * BULK_SLOTS
        self._bulk_next = 0
        self._checks: tuple[int, np.ndarray] | None = None
        self._num_checks = 0
        for rank in self._events:
            self._processes[rank] = self._start(rank, code, checkpoint)
        limits = WatchLimits(
            beat_s=plan.rank_timeout_s,
            start_s=max(plan.start_s, plan.rank_timeout_s),
            stall_s=plan.stall_s,
            build_s=max(plan.build_s, plan.stall_s),
        )
        me = weakref.ref(self)

        def lost(error: ArenoError) -> None:
            peers = me()
            if peers is not None:
                peers._lost(error)

        self._watch = RankWatch(
            self._segment, self._processes, limits, lost, lambda: None if (peers := me()) is None else peers._busy_since
        )

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def waited_s(self) -> float:
        """Seconds that appending waited for other ranks."""
        return self._writer.waited_s

    def _start(self, rank: int, code: Mapping[str, str], checkpoint: str) -> subprocess.Popen[bytes]:
        plan = self._plan
        told = RankPlan(
            rank=rank,
            size=self.size,
            segment_fd=self._segment.fd,
            event_fd=self._events[rank],
            leader_pid=os.getpid(),
            dedicated=plan.dedicated,
            model=str(plan.model),
            device=plan.devices[rank],
            threads=plan.threads,
            backend=plan.backend,
            folder=str(self._folder),
            meeting=self._meeting,
            rank_timeout_s=plan.rank_timeout_s,
            stall_s=plan.stall_s,
            code=code,
            checkpoint=checkpoint,
        )
        path = self._folder / f"rank{rank}.json"
        path.write_text(told.to_json())
        # The same package as here, wherever the caller found it: not one that happens to lie in the working directory (-P).
        searched = [code["path"].removesuffix("/areno"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", plan.module, "--config", str(path)],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=(self._segment.fd, self._events[rank]),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(searched)},
            start_new_session=True,
        )

    def bound_launches(self, ahead: int) -> None:
        """Let no launch into the log while some rank is more than `ahead` launches behind."""
        self._writer.launches_ahead = ahead

    def meet(self) -> TPGroup:
        """Wait for every rank to be ready, and return the group that they are in. Blocks. Raises: what a rank refuses, EngineFailure."""
        self.wait_for(Phase.CONNECTING)
        with self.together():
            self._group = meet_in_thread(self._connect, self._writer.wait, self._plan.stall_s)
        self.wait_for(Phase.RUNNING)
        return self._group

    def wait_for(self, phase: Phase) -> None:
        """Wait until every rank is at least so far. Blocks. Raises: what a rank refuses, EngineFailure."""
        deadline = time.monotonic() + max(MEET_S, self._plan.rank_timeout_s)

        def reached() -> bool:
            if time.monotonic() > deadline:
                raise EngineFailure(f"the ranks did not start within {MEET_S:g} s", field="tp", remedy="see their log, then start again")
            # A rank that has failed is told by the watch.
            return all(phase <= self._segment.own(rank, Own.PHASE) <= Phase.RUNNING for rank in self._events)

        self._writer.wait(reached)

    def _connect(self, given_up: threading.Event) -> TPGroup:
        import torch

        from areno.parallel import TPGroup

        plan, device = self._plan, torch.device(self._plan.devices[0])
        if plan.backend == "none":
            return TPGroup.single(device)
        return TPGroup.connect(
            rank=0,
            size=self.size,
            init_method=self._meeting,
            backend=plan.backend,
            timeout_s=plan.stall_s,
            device=device,
            given_up=given_up,
        )

    def check(self) -> None:
        """Raise what a lost rank left. Raises: EngineFailure; while the ranks start, what one of them refused."""
        if self.failure is not None:
            self._told.set()
            raise self.failure
        if self._close_by is not None and time.monotonic() > self._close_by:
            raise EngineFailure(f"the ranks did not end within {_STOP_S:g} s", field="tp", remedy="they are killed")

    def tell(self, entry: ops.Entry) -> int:
        """Append an entry and return its number. Blocks: while a rank is too far behind. Raises: EngineFailure.

        Whatever ends it in the middle of an entry ends all ranks.
        """
        try:
            return self._writer.append(entry)
        except BaseException as error:
            if self._writer.torn:
                self.fail(_failure_of(error))
            raise

    def answers(self, number: int) -> list[Answer]:
        """Return every rank's answer to an entry. Blocks. Raises: EngineFailure."""
        self._writer.wait(lambda: all(has_answered(self._segment, rank, number) for rank in self._events))
        return [get_answer(self._segment, rank) for rank in self._events]

    def executed(self, number: int) -> bool:
        """Return whether every rank has done an entry. Raises: EngineFailure."""
        self.check()
        return self._writer.executed(number)

    def catch_up(self) -> None:
        """Wait until every rank has launched what it was told of. Blocks. Raises: EngineFailure."""
        newest = self._writer.entries
        self._writer.wait(lambda: self._writer.executed(newest), spin_s=_CATCH_UP_S)

    def wait_for_entry(self, number: int) -> None:
        """Wait until every rank has done an entry. Blocks. Raises: EngineFailure."""
        self._writer.wait(lambda: self._writer.executed(number))

    def expect(self, number: int) -> None:
        """Wait until every rank has done an entry. Blocks. Raises: the first refusal, EngineFailure."""
        for answer in self.answers(number):
            if answer.refusal is not None:
                raise answer.refusal

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Give errors of work in which ranks meet their cause: a lost rank, where there is one. Raises: EngineFailure.

        Whatever ends such work halfway ends all ranks, but for refusals, which all ranks share.
        """
        outer, self._busy_since = self._busy_since, time.monotonic()
        try:
            yield
        except BaseException as error:
            if isinstance(error, ArenoError) and not isinstance(error, EngineFailure):
                raise
            if not isinstance(error, RuntimeError):
                # An interrupt, or a bug: nobody knows which part of the work was done.
                self.fail(_failure_of(error))
                raise
            if not self._see_lost():
                # The others are in the middle of what rank 0 did not finish.
                self.fail(_failure_of(error))
            assert self.failure is not None, "a failure is remembered"
            self._told.set()
            if self.failure is error:
                raise
            raise self.failure from error
        finally:
            self._busy_since = outer
        # Kernels whose collective was given up end as if nothing had happened, and what they wrote is no result.
        self.check()

    def _see_lost(self) -> bool:
        """Return whether a rank is lost, giving the watch a moment to see it. Blocks: for that moment."""
        deadline = time.monotonic() + _LOST_IS_SEEN_S
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.failure is not None

    def stage(self, name: str, tensor: torch.Tensor, *, start: int, shape: tuple[int, ...], whole: bool) -> None:
        """Pass elements `start` and on of a tensor of `shape`, flat, to all ranks: through the bulk slots, or by broadcasts.

        Blocks: for ranks that are behind. Raises: EngineFailure.
        """
        flat = tensor.detach().reshape(-1)
        room = (BROADCAST_BYTES if self._plan.broadcasts else self._segment.sizes.bulk_bytes) // flat.element_size()
        for begin in range(0, max(flat.numel(), 1), room):
            part = flat[begin : begin + room]
            piece = ops.StagePiece(
                name=name,
                dtype=str(part.dtype).removeprefix("torch."),
                shape=np.array(shape, np.int64),
                start=start + begin,
                count=part.numel(),
                slot=BROADCAST,
                whole=whole,
            )
            if self._plan.broadcasts:
                self._broadcast(piece, part)
            else:
                self._put_in_slot(piece, part)

    def _broadcast(self, piece: ops.StagePiece, part: torch.Tensor) -> None:
        assert self._group is not None, "ranks meet before weights come"
        # Where there is no memory for it, the others are not told.
        sent = part.to(self._group.device).contiguous()
        with self.together():
            self.tell(piece)
            self._group.broadcast_(sent)

    def _put_in_slot(self, piece: ops.StagePiece, part: torch.Tensor) -> None:
        import torch

        slot, self._bulk_next = self._bulk_next, (self._bulk_next + 1) % BULK_SLOTS
        # One that was interrupted on its way to the log has no entry to wait for.
        self.wait_for_entry(min(self._bulk_used[slot], self._writer.entries))
        if piece.count:
            torch.frombuffer(self._segment.bulk(slot), dtype=part.dtype, count=piece.count).copy_(part)
        # Before it is told: an interrupt afterwards would leave the slot to be written over while ranks read it.
        self._bulk_used[slot] = self._writer.entries + 1
        self.tell(dataclasses.replace(piece, slot=slot))

    def begin_check(self, state_of: Callable[[], np.ndarray]) -> None:
        """Ask every rank for the state of its rows, to be compared when the answers are there; one check at a time."""
        if self._checks is None:
            self._num_checks += 1
            self.tell(ops.CheckState(number=self._num_checks))
            self._checks = (self._num_checks, state_of())

    def compare(self, *, wait: bool = False) -> None:
        """Compare what is there of an open check. Blocks: with `wait`. Raises: EngineFailure where a rank differs; all are ended then."""
        if self._checks is None:
            return
        number, mine = self._checks
        if wait:
            self._writer.wait(lambda: all(get_state(self._segment, rank, number) is not None for rank in self._events))
        told = {rank: get_state(self._segment, rank, number) for rank in self._events}
        states = {rank: state for rank, state in told.items() if state is not None}
        if len(states) < len(told):
            return
        self._checks = None
        try:
            compare_states(mine, states)
        except EngineFailure as error:
            self.fail(error)
            raise

    def fail(self, error: ArenoError) -> None:
        """End every rank for a reason that rank 0 has found itself."""
        self._lost(error)
        self._watch.stop()

    def _lost(self, error: ArenoError) -> None:
        """Remember why, end every rank, and get rank 0 out of what it waits in."""
        if self.failure is None:
            self.failure = error
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.lost_fd, 1)
        if self._plan.dedicated and threading.current_thread() is not threading.main_thread():
            threading.Thread(target=self._end_unless_told, args=(error,), name="rank-lost", daemon=True).start()
        if self._group is not None:
            self._group.abort()

    def _end_unless_told(self, error: ArenoError) -> None:
        """End a process that does nothing else, if its engine waits on in something that a lost rank will never do."""
        if not self._told.wait(_TELL_S):
            print(f"areno: {error}; rank 0 waits in vain and is ended", file=sys.stderr, flush=True)
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(EXIT_FAILED)

    def close(self, leave: Callable[[], None] | None = None) -> None:
        """End the ranks: ask, wait, then kill. Repeatable. Blocks: at most some seconds.

        `leave` drops what this rank has captured with collectives inside. The meeting's folder stays till then: a group may look there.
        """
        if not self._finalizer.alive:
            return
        self._watch.stop()
        self._close_by = time.monotonic() + _STOP_S
        if self.failure is None:
            with contextlib.suppress(ArenoError):
                self._settle()
                self._writer.append(ops.Stop())
                self._writer.wait(lambda: all(process.poll() is not None for process in self._processes.values()))
        if self._group is not None:
            # What still waits for a rank ends first, or `leave` would wait with it.
            self._group.abort()
            if leave is not None:
                with contextlib.suppress(RuntimeError):
                    leave()
            self._group.close()
        self._finalizer()
        self.failure = self.failure or EngineFailure("the engine is closed", field="tp", remedy="make a new one")
        for fd in (*self._events.values(), self.lost_fd):
            os.close(fd)
        self._segment.close()

    def _settle(self) -> None:
        """Let this rank's device finish while the others, whose memory it may read, are there. Blocks: at most some seconds."""
        if self._group is None or self._group.device.type != "cuda":
            return
        import torch

        with torch.cuda.device(self._group.device), contextlib.suppress(RuntimeError):
            passed = torch.cuda.Event()
            passed.record()
            self._writer.wait(passed.query)


def _failure_of(error: BaseException) -> EngineFailure:
    from areno.device_errors import device_failure

    if isinstance(error, EngineFailure):
        return error
    failure = device_failure(error) if isinstance(error, RuntimeError) else None
    what = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
    return failure or EngineFailure(
        f"rank 0 left the work of all ranks halfway: {what}", field="tp", value=0, remedy="start the engine again"
    )


def _end(processes: dict[int, subprocess.Popen[Any]], folder: Path) -> None:
    """End and reap what still runs; also the finalizer of an engine that nobody closed."""
    for process in processes.values():
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)
