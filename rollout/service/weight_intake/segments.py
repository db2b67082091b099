"""Buckets in shared memory: files of this user in /dev/shm, which the trainer makes, fills and removes.

The engine host reads them through a descriptor and touches no mapping: what a trainer truncates is a short read here and no
SIGBUS. For a device the segment is mapped and its pages are pinned, once in an update, so that the device copies from them at
the bus's full rate; the processor does not touch that mapping either. The segment's head names the bucket, before and after the
copy, so a segment that its trainer has filled anew in between is noticed.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import TransportUnavailable
from rollout.service.weight_intake.files import open_own_file
from rollout.service.weight_intake.pieces import HOST_SLICE_BYTES, ITEM_BYTES, HostBounce, Steps, bytes_of, refused
from rollout.wire.weight_handles import SEGMENT_HEAD_BYTES, SEGMENT_MAGIC, SharedHandle, TensorPiece, WeightsStageBucket

if TYPE_CHECKING:
    import torch

SHARED_FOLDER = Path("/dev/shm")
HEAD = struct.Struct("<8sQ16s")
PINNED_SLICE_BYTES = 64 * 2**20
# More at once leaves the cache that the kernel copies through, at half the rate.
READ_BYTES = 2**20


def _unavailable(segment: str, why: str) -> TransportUnavailable:
    return TransportUnavailable(
        f"shared memory segment {segment} cannot be read here",
        field="segment",
        value=segment,
        limit=why,
        remedy="run trainer and service on one machine, as one user and with one /dev/shm, or choose another transport",
    )


class PinnedSegments:
    """An update's segments as pinned host memory of this process, by name; those that cannot be pinned are read instead."""

    def __init__(self) -> None:
        self._pinned: dict[str, tuple[mmap.mmap, torch.Tensor] | None] = {}

    def memory(self, segment: str, descriptor: int, size: int) -> torch.Tensor | None:
        """Return a segment's bytes behind its head, or None."""
        import torch

        if segment not in self._pinned:
            # The kernel touches the pages to pin them: a file cut short meanwhile makes that fail, nothing else.
            mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            whole = torch.frombuffer(mapped, dtype=torch.uint8)
            failed = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
            self._pinned[segment] = None if failed else (mapped, whole)
        found = self._pinned[segment]
        if found is None or found[1].numel() < SEGMENT_HEAD_BYTES + size:
            return None
        return found[1][SEGMENT_HEAD_BYTES:]

    def close(self) -> None:
        """Unpin everything; the copies from it are complete."""
        import torch

        for found in self._pinned.values():
            if found is not None:
                torch.cuda.cudart().cudaHostUnregister(found[1].data_ptr())
        self._pinned.clear()


class SegmentSource:
    """One bucket in a segment; see the module. `pinned` is there for a device. Raises: TransportUnavailable."""

    def __init__(self, body: WeightsStageBucket, handle: SharedHandle, bounce: HostBounce, pinned: PinnedSegments | None) -> None:
        self._bucket, self._handle, self._bounce, self.slice_bytes = body.bucket, handle, bounce, HOST_SLICE_BYTES
        self._memory: torch.Tensor | None = None
        # A mapping can only be pinned if it is writable; nothing writes it.
        access = os.O_RDONLY if pinned is None else os.O_RDWR
        self._fd = open_own_file(SHARED_FOLDER, (handle.segment,), lambda why: _unavailable(handle.segment, why), access)
        found = os.fstat(self._fd)
        if found.st_mode & 0o077:
            self.close()
            raise _unavailable(handle.segment, f"its mode is {found.st_mode & 0o777:o}; others may write it")
        if found.st_size < SEGMENT_HEAD_BYTES + body.size:
            self.close()
            raise refused(body.bucket, f"{body.size} bytes were announced", f"its segment has {found.st_size - SEGMENT_HEAD_BYTES}")
        if pinned is not None and body.size:
            self._memory = pinned.memory(handle.segment, self._fd, body.size)
            if self._memory is not None:
                self.slice_bytes = PINNED_SLICE_BYTES

    @property
    def stays(self) -> bool:
        """Whether it is read in place, not through the bounce buffer."""
        return self._memory is not None

    def prepare(self) -> Steps:
        """Check the segment's head. Raises: TransportUnavailable, BucketRefused."""
        head = os.pread(self._fd, HEAD.size, 0)
        magic, bucket, nonce = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, b"")
        if magic != SEGMENT_MAGIC or nonce != self._handle.nonce:
            raise _unavailable(self._handle.segment, "its head does not hold what the trainer wrote")
        if bucket != self._bucket:
            raise refused(self._bucket, "its segment was filled anew", f"it holds bucket {bucket} now", "wait for a bucket's answer first")
        yield False

    def values(self, piece: TensorPiece, first: int, count: int, into: torch.Tensor | None) -> torch.Tensor:
        """Return elements of a piece: in place if pinned, else read into `into` or the bounce buffer. Raises: BucketRefused."""
        item = ITEM_BYTES[piece.dtype]
        at, end = piece.offset + first * item, piece.offset + (first + count) * item
        if self._memory is not None:
            import torch

            return self._memory[at:end].view(getattr(torch, piece.dtype))
        values = self._bounce.elements(piece.dtype, count) if into is None else into
        memory, filled = bytes_of(values), 0
        while at + filled < end:
            read = os.preadv(self._fd, [memory[filled : filled + READ_BYTES]], SEGMENT_HEAD_BYTES + at + filled)
            if not read:
                raise refused(self._bucket, f"it ended at byte {at + filled}", f"{piece.name} reaches to byte {end}")
            filled += read
        return values

    def finish(self) -> None:
        """Check that the segment still holds this bucket. Raises: BucketRefused."""
        for _ in self.prepare():
            pass

    def close(self) -> None:
        """Give the segment back."""
        self._memory = None
        os.close(self._fd)
