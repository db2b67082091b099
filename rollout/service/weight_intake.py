"""Weights on their way into the engine: files opened safely, read tensor by tensor between the engine's steps.

The engine host owns one intake and calls `advance` once per turn of its loop, which does one bounded piece of work (a
piece of a hash, or one tensor), so decoding goes on meanwhile. Only regular files of this user below the weights
folder are opened, through folder handles that follow no link; size and XXH3 are checked before a tensor is read, and
the safetensors library parses what the checked handle holds, never a path that could have changed.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from rollout.errors import NoUpdate, UpdateBusy, WeightsFileRefused, WeightUpdateError

if TYPE_CHECKING:
    import torch

HASH_PIECE_BYTES = 8 * 2**20


class UpdatableEngine(Protocol):
    """What the intake needs of an engine."""

    def begin_update(self, manifest: Mapping[str, Any] | None, *, version: int, partial: bool = False) -> None: ...
    def stage(self, name: str, tensor: torch.Tensor) -> None: ...
    def commit_update(self, *, digests: Mapping[str, int] | None = None, canaries: Sequence[Any] = ()) -> Any: ...
    def abort_update(self) -> None: ...


def _refused(path: str, why: str, remedy: str = "write the file below info().weights_dir and pass its path") -> WeightsFileRefused:
    return WeightsFileRefused(f"weights file {path!r} is refused", field="path", value=path, limit=why, remedy=remedy)


def _parts_below(folder: Path, path: str) -> tuple[str, ...]:
    given = Path(path)
    if given.is_absolute():
        if not given.is_relative_to(folder):
            raise _refused(path, f"it is not below the weights folder {folder}")
        given = given.relative_to(folder)
    if not given.parts or ".." in given.parts or "\0" in path:
        raise _refused(path, "its path must go down from the weights folder")
    return given.parts


def open_weights_file(folder: Path, path: str, size: int) -> int:
    """Return a descriptor of a regular file below `folder`, reached without any link. Raises: WeightsFileRefused."""
    *folders, name = _parts_below(folder, path)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = deeper
        # Without O_NONBLOCK the open of a FIFO would wait for a writer.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except OSError as error:
        raise _refused(path, f"it cannot be opened without following links: {error.strerror}") from None
    finally:
        os.close(at)
    found = os.fstat(fd)
    why = None
    if not stat.S_ISREG(found.st_mode):
        why = "it is not a regular file"
    elif found.st_uid != os.geteuid():
        why = f"it belongs to user {found.st_uid}, the service runs as {os.geteuid()}"
    elif found.st_nlink != 1:
        why = f"it has {found.st_nlink} links"
    elif found.st_size != size:
        why = f"it has {found.st_size} bytes, {size} were announced"
    if why is not None:
        os.close(fd)
        raise _refused(path, why)
    return fd


@dataclass(frozen=True, slots=True)
class StagedFile:
    """The end of one file's staging: the call to answer, and what went wrong if something did."""

    call_id: bytes
    error: Exception | None


@dataclass(frozen=True, slots=True)
class _Job:
    call_id: bytes
    fd: int
    steps: Generator[None, None, None]

    def close(self) -> None:
        self.steps.close()
        os.close(self.fd)


class WeightIntake:
    """Owns the open update on the engine's side; see the module."""

    def __init__(self, engine: UpdatableEngine, weights_dir: Path) -> None:
        self._engine, self._folder = engine, weights_dir
        self._update_id: str | None = None
        self._jobs: deque[_Job] = deque()
        # Files whose staging ended with their update; `advance` reports them.
        self._dropped: deque[StagedFile] = deque()

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self._jobs or self._dropped)

    def begin(self, update_id: str, version: int, manifest: Mapping[str, tuple[str, tuple[int, ...]]] | None, *, partial: bool) -> None:
        """Open an update. Raises: UpdateBusy, and what the engine refuses."""
        if self._update_id is not None:
            raise UpdateBusy(f"update {self._update_id} is open", value=self._update_id, remedy="commit or abort it first")
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
        self._jobs.append(_Job(call_id, fd, self._stage(fd, path, size, xxh3)))

    def _stage(self, fd: int, path: str, size: int, xxh3: str | None) -> Generator[None, None, None]:
        if xxh3 is not None:
            yield from self._check_hash(fd, path, size, xxh3)
        from safetensors import SafetensorError
        from safetensors.torch import load

        # Read, not mapped: a mapped file that its writer truncates ends the process that touches it.
        content, at = bytearray(size), 0
        while at < size:
            count = os.preadv(fd, [memoryview(content)[at : at + HASH_PIECE_BYTES]], at)
            if not count:
                raise _refused(path, f"it ended at byte {at} of {size}")
            at += count
            yield
        try:
            tensors = load(bytes(content))
        except SafetensorError as error:
            raise _refused(path, f"it is no whole safetensors file: {error}", "write it with safetensors, then rename it") from None
        del content
        for name, tensor in tensors.items():
            self._engine.stage(name, tensor)
            yield

    def _check_hash(self, fd: int, path: str, size: int, xxh3: str) -> Generator[None, None, None]:
        digest, at = xxhash.xxh3_64(), 0
        while at < size:
            piece = os.pread(fd, HASH_PIECE_BYTES, at)
            if not piece:
                raise _refused(path, f"it ended at byte {at} of {size}")
            digest.update(piece)
            at += len(piece)
            yield
        if digest.hexdigest() != xxh3:
            raise _refused(path, f"its XXH3 is {digest.hexdigest()}, {xxh3} was announced", "write the file again")

    def advance(self) -> StagedFile | None:
        """Do one piece of the oldest job; return its end when it ended."""
        if self._dropped:
            return self._dropped.popleft()
        if not self._jobs:
            return None
        job = self._jobs[0]
        error: Exception | None = None
        try:
            next(job.steps)
            return None
        except StopIteration:
            pass
        except Exception as raised:
            error = raised
        self._jobs.popleft().close()
        return StagedFile(job.call_id, error)

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
            if self._jobs:
                raise WeightUpdateError(
                    f"{len(self._jobs)} files are still being staged", remedy="wait for weights_stage_file to return before the commit"
                )
            return self._engine.commit_update(digests=digests, canaries=_canaries(ids, counts, logprobs, temperatures))
        except BaseException:
            self._engine.abort_update()
            raise
        finally:
            self._close()

    def abort(self, update_id: str) -> None:
        """Drop the update if it is this one; files that were being staged end with it."""
        if update_id == self._update_id:
            self._close()
            self._engine.abort_update()

    def _close(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            job.close()
            error = NoUpdate("the update ended before this file was staged", field="update_id", value=self._update_id)
            self._dropped.append(StagedFile(job.call_id, error))
        self._update_id = None


def _canaries(ids: np.ndarray, counts: np.ndarray, logprobs: np.ndarray, temperatures: Sequence[float]) -> list[Any]:
    if not counts.size and not temperatures:
        return []
    from areno.weights.update import Canary

    if (counts < 2).any() or counts.size != len(temperatures) or counts.sum() != ids.size or logprobs.size != ids.size - counts.size:
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
