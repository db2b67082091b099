"""Weights on their way into the engine, whatever brings them: taken piece by piece between the engine's steps.

The engine host owns one intake and calls `advance` once per turn of its loop, which does one bounded piece of work (a
piece of a hash, a few MiB of a tensor), so decoding goes on meanwhile, or several where nothing decodes. A bucket is known by
its number within the update: one that is staged already is answered at once, so a trainer that lost an answer may send it again.

    stage_file    files.py      safetensors below the weights folder
    stage_bucket  segments.py   shared memory        frames.py    bytes in the message
                  group.py, device_group.py    a process group: gloo, NCCL
                  cuda_ipc.py   the trainer's device memory

Invariant: every call gets one answer, also when its update ends before it was done; nothing of an update outlives it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from rollout.errors import BucketRefused, NoUpdate, UpdateBusy, WeightUpdateError
from rollout.service.weight_intake.cuda_ipc import CudaImports, CudaSource
from rollout.service.weight_intake.files import open_weights_file, read_tensors
from rollout.service.weight_intake.frames import FramesSource
from rollout.service.weight_intake.group import GroupLink, group_source
from rollout.service.weight_intake.pieces import BucketSource, HostBounce, Pace, Steps, check_pieces, stage_pieces
from rollout.service.weight_intake.segments import MappedSegments, PinnedSegments, SegmentSource
from rollout.wire.weight_handles import CudaHandle, FramesHandle, GroupHandle, WeightsJoinGroup, WeightsStageBucket

if TYPE_CHECKING:
    import torch

# A trainer sends a few buckets ahead; the bytes of these wait here.
MAX_QUEUED_BYTES = 2**28
# Buckets that the device copies at once; ranks hold in memory what they are sent of these.
MAX_COPYING = 3


class UpdatableEngine(Protocol):
    """What the intake needs of an engine."""

    def begin_update(self, manifest: Mapping[str, Any] | None, *, version: int, partial: bool = False) -> None: ...
    def stage(self, name: str, tensor: torch.Tensor) -> None: ...
    def open_slice(self, name: str, *, start: int, count: int, spec: Any) -> Any: ...
    def close_slice(self, filled: Any) -> None: ...
    def open_memory(self, handle: bytes) -> None: ...
    def stage_slices(self, slices: Sequence[Any]) -> None: ...
    def launch_slices(self) -> object | None: ...
    def slices_copied(self, launched: Any) -> bool: ...
    def settle_slices(self) -> None: ...
    def inspect_update(self) -> bool: ...
    def commit_update(self, *, digests: Mapping[str, int] | None = None, canaries: Sequence[Any] = ()) -> Any: ...
    def abort_update(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StagedFile:
    """The end of one staging call, of a file or a bucket: the call to answer, and what went wrong if something did."""

    call_id: bytes
    error: Exception | None


@dataclass(frozen=True, slots=True)
class _Job:
    """One staging call; `release` frees what it holds. `bucket` is its number and fingerprint, `num_bytes` what waits in memory."""

    call_id: bytes
    steps: Steps
    release: Callable[[], None]
    bucket: tuple[int, bytes] | None = None
    num_bytes: int = 0

    def repeats(self, other: _Job) -> bool:
        return self.bucket is not None and other.bucket is not None and self.bucket[0] == other.bucket[0]

    def close(self) -> None:
        self.steps.close()
        self.release()


def _nothing() -> None:
    """What a job without resources of its own gives back."""


class WeightIntake:
    """Owns the open update on the engine's side; see the module."""

    def __init__(self, engine: UpdatableEngine, weights_dir: Path) -> None:
        self._engine, self._folder = engine, weights_dir
        self._update_id: str | None = None
        self._jobs: deque[_Job] = deque()
        # Those that only the device works on any more.
        self._copying: deque[_Job] = deque()
        # Calls whose staging ended with their update; `advance` reports them.
        self._dropped: deque[StagedFile] = deque()
        self._staged: dict[int, bytes] = {}
        # Whether a bucket was refused since the group was joined: its broadcast may come yet, or be taken for another's.
        self._refused = False
        self._device: torch.device | None = None
        self._bounce: HostBounce | None = None
        self._group: GroupLink | None = None
        # A trainer's group between its updates.
        self._kept_group: GroupLink | None = None
        self._imports: CudaImports | None = None
        self._segments: MappedSegments | PinnedSegments | None = None
        # Whether nothing can be done but wait.
        self.waits = False

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self._jobs or self._copying or self._dropped)

    def begin(self, update_id: str, version: int, manifest: Mapping[str, tuple[str, tuple[int, ...]]] | None, *, partial: bool) -> None:
        """Open an update. Raises: UpdateBusy, and what the engine refuses."""
        if self._update_id is not None:
            raise UpdateBusy(
                f"update {self._update_id} is open",
                field="update",
                value=self._update_id,
                limit="one update at a time",
                remedy="commit or abort it first",
            )
        specs = None
        if manifest is not None:
            from areno.weights.names import TensorSpec

            specs = {name: TensorSpec(dtype=dtype, shape=shape) for name, (dtype, shape) in manifest.items()}
        self._engine.begin_update(specs, version=version, partial=partial)
        self._update_id = update_id

    def _mine(self, update_id: str) -> None:
        if update_id != self._update_id:
            raise NoUpdate(f"update {update_id!r} is not open", field="update_id", value=update_id, remedy="open one with weights_begin")

    def stage_file(self, call_id: bytes, update_id: str, path: str, *, size: int, xxh3: str | None) -> None:
        """Queue a file; `advance` stages it and reports. Raises: NoUpdate, WeightsFileRefused."""
        self._mine(update_id)
        fd = open_weights_file(self._folder, path, size)
        self._jobs.append(_Job(call_id, self._stage_tensors(fd, path, size, xxh3), lambda: os.close(fd)))

    def _stage_tensors(self, fd: int, path: str, size: int, xxh3: str | None) -> Steps:
        tensors = yield from read_tensors(fd, path, size, xxh3)
        for name, tensor in tensors.items():
            self._engine.stage(name, tensor)
            yield Pace.GO_ON

    def stage_bucket(self, call_id: bytes, body: WeightsStageBucket, content: np.ndarray | None) -> None:
        """Queue a bucket; `advance` stages it and reports. Raises: NoUpdate, BucketRefused, TransportUnavailable."""
        self._mine(body.update_id)
        try:
            self._jobs.append(self._bucket_job(call_id, body, content))
        except Exception:
            self._refused = True
            raise

    def _bucket_job(self, call_id: bytes, body: WeightsStageBucket, content: np.ndarray | None) -> _Job:
        check_pieces(body)
        queued = 0 if content is None else content.nbytes
        if queued and queued + sum(job.num_bytes for job in self._jobs) > MAX_QUEUED_BYTES:
            raise BucketRefused(
                f"bucket {body.bucket} of {queued} bytes comes while others wait",
                field="bucket",
                value=body.bucket,
                limit=f"at most {MAX_QUEUED_BYTES} bytes wait to be staged",
                remedy="wait for answers before more is sent",
            )
        fingerprint = xxhash.xxh3_128_digest(body.model_dump_json(include={"size", "pieces", "xxh3"}).encode())
        if self._came_before(body.bucket):
            # What it would be read from may be gone, or no other broadcast may come, so nothing is opened while it may be staged already.
            steps, release = self._stage_again(body, fingerprint, content), _nothing
        else:
            source = self._source(body, content)
            steps, release = stage_pieces(self._engine, body, source, self._engine_device()), source.close
        return _Job(call_id, steps, release, (body.bucket, fingerprint), queued)

    def join_group(self, call_id: bytes, body: WeightsJoinGroup) -> None:
        """Queue the joining of a process group; `advance` reports. Raises: NoUpdate, TransportUnavailable."""
        self._mine(body.update_id)
        link = GroupLink(body, self._rank_devices(), self._engine.open_memory)

        def steps() -> Steps:
            yield from link.join()
            self._leave_groups()
            self._group, self._refused = link, False

        self._jobs.append(_Job(call_id, steps(), _nothing))

    def _engine_device(self) -> torch.device:
        if self._device is None:
            import torch

            self._device = torch.device(getattr(getattr(self._engine, "info", None), "device", "cpu"))
        return self._device

    def _rank_devices(self) -> list[torch.device]:
        """Return where the engine's ranks are."""
        import torch

        device, ranks = self._engine_device(), int(getattr(getattr(self._engine, "info", None), "tp", 1))
        return [torch.device(device.type, (device.index or 0) + rank) for rank in range(ranks)]

    def _source(self, body: WeightsStageBucket, content: np.ndarray | None) -> BucketSource:
        handle, device = body.handle, self._engine_device()
        if isinstance(handle, GroupHandle):
            if self._group is None and self._kept_group is not None and handle.group == self._kept_group.name:
                self._group, self._kept_group = self._kept_group, None
            return group_source(body, self._group if self._group is not None and handle.group == self._group.name else None)
        if isinstance(handle, CudaHandle):
            if self._imports is None:
                self._imports = CudaImports(self._rank_devices(), self._engine.open_memory)
            return CudaSource(body, handle, self._imports)
        if self._bounce is None:
            self._bounce = HostBounce(pinned=device.type == "cuda")
        if isinstance(handle, FramesHandle):
            return FramesSource(body, content, self._bounce)
        if self._segments is None:
            self._segments = PinnedSegments() if device.type == "cuda" else MappedSegments()
        return SegmentSource(body, handle, self._bounce, self._segments)

    def _came_before(self, bucket: int) -> bool:
        """Return whether a bucket of this number is staged or under way."""
        return bucket in self._staged or any(job.bucket is not None and job.bucket[0] == bucket for job in (*self._copying, *self._jobs))

    def _stage_again(self, body: WeightsStageBucket, fingerprint: bytes, content: np.ndarray | None) -> Steps:
        """Stage a bucket that came before, whose earlier calls are answered by now; only if all of them failed is it taken again."""
        known = self._staged.get(body.bucket)
        if known is None:
            with contextlib.closing(self._source(body, content)) as source:
                yield from stage_pieces(self._engine, body, source, self._engine_device())
        elif known != fingerprint:
            raise BucketRefused(
                f"bucket {body.bucket} was staged with other tensors",
                field="bucket",
                value=body.bucket,
                limit="a number names one bucket of an update",
                remedy="number buckets one by one, and send a bucket again as it was",
            )

    def _next_job(self) -> _Job | None:
        """Return the oldest job that may begin or go on: not beside another call of its bucket, nor beside too many others."""
        if not self._jobs or len(self._copying) >= MAX_COPYING:
            return None
        job = self._jobs[0]
        return None if any(job.repeats(other) for other in self._copying) else job

    def advance(self, for_s: float = 0.0) -> StagedFile | None:
        """Do one piece of the oldest job, and more of them for `for_s` seconds unless it waits; return the end of one that ended.

        A job whose bytes the device copies makes room for the next.
        """
        self.waits = False
        if self._dropped:
            return self._dropped.popleft()
        paces: list[Pace] = []
        # All that the device works on: each comes to its next piece while the others' copies run.
        for job in tuple(self._copying):
            outcome = self._go_on(job, 0.0)
            if isinstance(outcome, StagedFile):
                self._copying.remove(job)
                return outcome
            paces.append(outcome)
        oldest = self._next_job()
        if oldest is not None:
            outcome = self._go_on(oldest, for_s)
            if isinstance(outcome, StagedFile):
                self._jobs.popleft()
                return outcome
            if outcome is Pace.COPIES:
                self._copying.append(self._jobs.popleft())
            paces.append(outcome)
        self.waits = bool(paces) and all(pace is Pace.WAIT for pace in paces)
        return None

    def _go_on(self, job: _Job, for_s: float) -> StagedFile | Pace:
        """Do a piece of a job, and more of them for `for_s` seconds unless it waits; return what it leaves to be done, or its end."""
        error = None
        try:
            until = time.monotonic() + for_s
            while (pace := next(job.steps)) is Pace.GO_ON and time.monotonic() < until:
                pass
            return pace
        except StopIteration:
            if job.bucket is not None:
                number, fingerprint = job.bucket
                self._staged[number] = fingerprint
        except Exception as raised:
            error = raised
            if job.bucket is not None:
                self._refused = True
                # Of what it was to copy a part may be under way, or wait to be launched with the next bucket's.
                self._settle()
        job.close()
        return StagedFile(job.call_id, error)

    def inspected(self, update_id: str) -> bool:
        """Have the engine find out about what is staged; return whether it has, or whether a commit has no use for that."""
        return update_id != self._update_id or bool(self._jobs or self._copying) or self._engine.inspect_update()

    def commit(
        self,
        update_id: str,
        digests: Mapping[str, int] | None,
        ids: np.ndarray,
        counts: np.ndarray,
        logprobs: np.ndarray,
        temperatures: Sequence[float],
    ) -> Any:
        """Prove and publish the update; it is closed afterwards in any case. Returns the engine's report.

        Shapes: `counts` [C] tokens of each canary; `ids` [sum counts]; `logprobs` [sum counts - C]; `temperatures` [C].
        """
        self._mine(update_id)
        try:
            if unfinished := len(self._jobs) + len(self._copying):
                raise WeightUpdateError(
                    f"{unfinished} files or buckets are still being staged", remedy="wait for their answers before the commit"
                )
            report = self._engine.commit_update(digests=digests, canaries=_canaries(ids, counts, logprobs, temperatures))
        except BaseException:
            try:
                self._close()
            finally:
                self._engine.abort_update()
            raise
        self._close(succeeded=True)
        return report

    def abort(self, update_id: str) -> None:
        """Drop the update if it is this one; what was being staged ends with it."""
        if update_id == self._update_id:
            self._close()
            self._engine.abort_update()

    def lend(self) -> None:
        """Give back the device memory that is held between updates."""
        if self._update_id is None:
            self._leave_groups()

    def end(self) -> None:
        """Leave what others are waiting in; the engine ends."""
        self._leave_groups()

    def _leave_groups(self) -> None:
        for link in (self._group, self._kept_group):
            if link is not None:
                link.close()
        self._group = self._kept_group = None

    def tidy(self) -> bool:
        """Give back what is held of trainers that are gone; return whether anything is held between updates."""
        return isinstance(self._segments, PinnedSegments) and self._segments.tidy()

    def _settle(self) -> None:
        """Wait until the device copies from nothing that is given back. An engine that cannot say so is of no use, or has no update."""
        with contextlib.suppress(Exception):
            self._engine.settle_slices()

    def _close(self, *, succeeded: bool = False) -> None:
        if self._copying or self._jobs:
            self._settle()
        for job in (*self._copying, *self._jobs):
            job.close()
            error = NoUpdate("the update ended before this was staged", field="update_id", value=self._update_id)
            self._dropped.append(StagedFile(job.call_id, error))
        self._copying.clear()
        self._jobs.clear()
        self._staged.clear()
        self._bounce = None
        kept = self._group if succeeded and not self._refused and self._group is not None and self._group.name is not None else None
        if kept is not None:
            kept.rest()
            self._group = None
        self._leave_groups()
        self._kept_group = kept
        if self._imports is not None:
            self._imports.close()
        if succeeded and isinstance(self._segments, PinnedSegments):
            self._segments.rest()
        elif self._segments is not None:
            self._segments.close()
            self._segments = None
        self._imports = None
        self.waits = self._refused = False
        self._update_id = None


def _canaries(ids: np.ndarray, counts: np.ndarray, logprobs: np.ndarray, temperatures: Sequence[float]) -> list[Any]:
    if not counts.size and not temperatures:
        return []
    from areno.weights.canary import Canary

    if (
        (counts < 2).any()
        or (counts > ids.size).any()
        or counts.size != len(temperatures)
        or counts.sum() != ids.size
        or logprobs.size != ids.size - counts.size
    ):
        raise WeightUpdateError(
            f"{counts.size} canaries with {ids.size} ids and {logprobs.size} log-probabilities do not fit",
            field="canaries",
            limit="each has 2 or more ids, one log-probability fewer, and a temperature",
            remedy="pass CanarySpec values",
        )
    ends = np.cumsum(counts)
    return [
        Canary(
            ids=ids[end - count : end].astype(np.int64),
            expected_logprobs=logprobs[end - count - index : end - index - 1],
            temperature=float(temperatures[index]),
        )
        for index, (end, count) in enumerate(zip(ends.tolist(), counts.tolist()))
    ]
