"""Buckets in shared memory that the trainer makes and fills: sealed memory of its process, or files of this user in /dev/shm.

Memory that is sealed against shrinking is mapped, once in an update: no page of it can go away under a reader. A file in /dev/shm
can be cut short at any time, so it is read through its descriptor: what a trainer truncates is a short read here and no SIGBUS.
For a device either is mapped and its pages are pinned, once for a trainer, so that the device copies from them at the bus's full
rate; the processor does not touch that mapping. The segment's head names the bucket, before and after the copy, so a segment that
its trainer has filled anew in between is noticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import TransportUnavailable
from rollout.service.weight_intake.files import open_own_file
from rollout.service.weight_intake.pieces import HOST_SLICE_BYTES, ITEM_BYTES, HostBounce, Pace, Steps, bytes_of, refused
from rollout.wire.weight_handles import SEGMENT_HEAD_BYTES, SEGMENT_MAGIC, MemfdHandle, SharedHandle, TensorPiece, WeightsStageBucket

if TYPE_CHECKING:
    import torch

SHARED_FOLDER = Path("/dev/shm")
HEAD = struct.Struct("<8sQ16s")
PINNED_SLICE_BYTES = 64 * 2**20
# More at once leaves the cache that the kernel copies through, at half the rate.
READ_BYTES = 2**20
# A file by device and inode; a mapping keeps its inode from being used again.
FileKey = tuple[int, int]


ONE_MACHINE = "run trainer and service on one machine, as one user and with one /dev/shm, or choose another transport"


def _unavailable(segment: str, why: str, remedy: str = ONE_MACHINE) -> TransportUnavailable:
    return TransportUnavailable(
        f"shared memory segment {segment} cannot be read here",
        field="segment",
        value=segment,
        limit=why,
        remedy=remedy,
    )


def _name_of(handle: MemfdHandle | SharedHandle) -> str:
    return handle.segment if isinstance(handle, SharedHandle) else f"{handle.descriptor} of process {handle.process}"


def _maker_of(handle: MemfdHandle | SharedHandle) -> int:
    """Return the process that made a segment; a file's name says it."""
    return handle.process if isinstance(handle, MemfdHandle) else int(handle.segment.split("-")[2])


def _open_file(handle: SharedHandle, access: int) -> int:
    fd = open_own_file(SHARED_FOLDER, (handle.segment,), lambda why: _unavailable(handle.segment, why), access)
    mode = os.fstat(fd).st_mode & 0o777
    if mode & 0o077:
        os.close(fd)
        raise _unavailable(handle.segment, f"its mode is {mode:o}; others may write it")
    return fd


def _open_memfd(handle: MemfdHandle, access: int) -> int:
    """Return a descriptor of sealed memory that another process of this user holds. Raises: TransportUnavailable."""
    name = _name_of(handle)
    try:
        # O_PATH opens nothing yet: what the number leads to may be a device or a FIFO.
        looked_at = os.open(f"/proc/{handle.process}/fd/{handle.descriptor}", os.O_PATH | os.O_CLOEXEC)
        try:
            found = os.fstat(looked_at)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink or found.st_uid != os.geteuid():
                raise _unavailable(name, "it is no unnamed memory of this user")
            fd = os.open(f"/proc/self/fd/{looked_at}", access | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(looked_at)
    except OSError as error:
        raise _unavailable(name, f"it cannot be opened: {error.strerror}") from None
    seals = 0
    with contextlib.suppress(OSError):
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK:
        os.close(fd)
        raise _unavailable(name, "it is not sealed against shrinking", "seal it with F_SEAL_SHRINK before it is announced")
    return fd


class MappedSegments:
    """An update's sealed segments as memory of this process that is only read."""

    access = os.O_RDONLY

    def __init__(self) -> None:
        self._mapped: dict[FileKey, tuple[mmap.mmap, memoryview]] = {}

    def memory(self, key: FileKey, descriptor: int, size: int) -> memoryview:
        """Return at least `size` bytes of a segment that is sealed and has them, behind its head."""
        found = self._mapped.get(key)
        if found is None or len(found[1]) < size:
            # Populated at once, a page costs a fraction of a fault.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=flags, prot=mmap.PROT_READ)
            found = self._mapped[key] = mapped, memoryview(mapped)[SEGMENT_HEAD_BYTES:]
        return found[1]

    def close(self) -> None:
        """Unmap everything."""
        for mapped, view in self._mapped.values():
            view.release()
            mapped.close()
        self._mapped.clear()


@dataclass(slots=True)
class _Pinned:
    """A segment that is pinned. `process` made it; `used` says whether this update came by it."""

    mapped: mmap.mmap
    whole: torch.Tensor
    process: int
    used: bool = True

    def unpin(self) -> None:
        import torch

        torch.cuda.cudart().cudaHostUnregister(self.whole.data_ptr())


class PinnedSegments:
    """A trainer's segments as pinned host memory of this process; those that cannot be pinned are read instead.

    To pin them takes as long as to copy from them, so they stay from one update to the next, while their trainer lives.
    """

    # A mapping can only be pinned if it is writable; nothing writes it.
    access = os.O_RDWR

    def __init__(self) -> None:
        self._pinned: dict[FileKey, _Pinned | None] = {}

    def memory(self, key: FileKey, descriptor: int, size: int, process: int) -> torch.Tensor | None:
        """Return a segment's bytes behind its head, or None."""
        import torch

        if key not in self._pinned:
            # The kernel touches the pages to pin them: a file cut short meanwhile makes that fail, nothing else.
            mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            whole = torch.frombuffer(mapped, dtype=torch.uint8)
            failed = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
            self._pinned[key] = None if failed else _Pinned(mapped, whole, process)
        found = self._pinned[key]
        if found is None or found.whole.numel() < SEGMENT_HEAD_BYTES + size:
            return None
        found.used = True
        return found.whole[SEGMENT_HEAD_BYTES:]

    def rest(self) -> None:
        """Unpin what the update that ends here did not use; the copies from it are complete."""
        self._keep(lambda one: one.used)
        for one in self._pinned.values():
            assert one is not None, "what could not be pinned is not kept"
            one.used = False

    def tidy(self) -> bool:
        """Unpin what is left of trainers that have ended; return whether anything stays."""
        self._keep(lambda one: one.used or _lives(one.process))
        return bool(self._pinned)

    def close(self) -> None:
        """Unpin everything; the copies from it are complete."""
        self._keep(lambda one: False)

    def _keep(self, wanted: Callable[[_Pinned], bool]) -> None:
        for key, one in list(self._pinned.items()):
            if one is None or not wanted(one):
                del self._pinned[key]
                if one is not None:
                    one.unpin()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


class SegmentSource:
    """One bucket in a segment; see the module. Raises: TransportUnavailable, BucketRefused."""

    def __init__(
        self,
        body: WeightsStageBucket,
        handle: MemfdHandle | SharedHandle,
        bounce: HostBounce,
        segments: MappedSegments | PinnedSegments,
    ) -> None:
        self._bucket, self._handle, self._bounce, self.slice_bytes = body.bucket, handle, bounce, HOST_SLICE_BYTES
        self._mapped: memoryview | None = None
        self._pinned: torch.Tensor | None = None
        self._fd = _open_memfd(handle, segments.access) if isinstance(handle, MemfdHandle) else _open_file(handle, segments.access)
        found = os.fstat(self._fd)
        if found.st_size < SEGMENT_HEAD_BYTES + body.size:
            self.close()
            raise refused(body.bucket, f"{body.size} bytes were announced", f"its segment has {found.st_size - SEGMENT_HEAD_BYTES}")
        if not body.size:
            return
        key = found.st_dev, found.st_ino
        if isinstance(segments, PinnedSegments):
            self._pinned = segments.memory(key, self._fd, body.size, _maker_of(handle))
            if self._pinned is not None:
                self.slice_bytes = PINNED_SLICE_BYTES
        elif isinstance(handle, MemfdHandle):
            self._mapped = segments.memory(key, self._fd, body.size)

    @property
    def stays(self) -> bool:
        """Whether it is read in place, not through the bounce buffer."""
        return self._pinned is not None

    own = stays

    def prepare(self) -> Steps:
        """Check the segment's head. Raises: TransportUnavailable, BucketRefused."""
        head = os.pread(self._fd, HEAD.size, 0)
        magic, bucket, nonce = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, b"")
        if magic != SEGMENT_MAGIC or nonce != self._handle.nonce:
            raise _unavailable(_name_of(self._handle), "its head does not hold what the trainer wrote")
        if bucket != self._bucket:
            raise refused(self._bucket, "its segment was filled anew", f"it holds bucket {bucket} now", "wait for a bucket's answer first")
        yield Pace.GO_ON

    def values(self, piece: TensorPiece, first: int, count: int, into: torch.Tensor | None) -> torch.Tensor:
        """Return elements of a piece: in place if pinned, else copied into `into` or the bounce buffer. Raises: BucketRefused."""
        item = ITEM_BYTES[piece.dtype]
        at, end = piece.offset + first * item, piece.offset + (first + count) * item
        if self._pinned is not None:
            import torch

            return self._pinned[at:end].view(getattr(torch, piece.dtype))
        values = self._bounce.elements(piece.dtype, count) if into is None else into
        if self._mapped is not None:
            bytes_of(values)[:] = self._mapped[at:end]
        else:
            self._read(piece.name, bytes_of(values), at)
        return values

    def _read(self, name: str, memory: memoryview, at: int) -> None:
        filled = 0
        while filled < len(memory):
            read = os.preadv(self._fd, [memory[filled : filled + READ_BYTES]], SEGMENT_HEAD_BYTES + at + filled)
            if not read:
                raise refused(self._bucket, f"it ended at byte {at + filled}", f"{name} reaches to byte {at + len(memory)}")
            filled += read

    def finish(self) -> None:
        """Check that the segment still holds this bucket. Raises: BucketRefused."""
        for _ in self.prepare():
            pass

    def close(self) -> None:
        """Give the segment back."""
        self._mapped = self._pinned = None
        os.close(self._fd)
