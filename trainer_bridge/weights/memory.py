"""The weights' way through shared memory: two segments of this process, filled in turn while the service copies the other.

A segment is a file of mode 0600 in /dev/shm that this process alone makes (O_EXCL), fully allocated before it is mapped, so
that too little shared memory is an error by name here and never a SIGBUS. Its name carries the process id and that process's
start time: segments whose maker is dead are removed when a trainer makes its own. Invariant: a segment is written only while
no call that names it is open.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import stat
import struct
import weakref
from pathlib import Path
from typing import Any

import torch

from trainer_bridge.weights.bucket import PackedBucket, pack
from trainer_bridge.weights.names import DTYPES
from trainer_bridge.weights.transport import Bucket, BucketClient, SentCall, reached, unusable

SHARED_FOLDER = Path("/dev/shm")
# Two of them fit into the 64 MiB of /dev/shm that containers have by default.
DEFAULT_BUCKET_BYTES = 24 * 2**20
# For weights that come from a device: the copies are so fast that the messages in between count.
DEVICE_BUCKET_BYTES = 256 * 2**20
MIN_BUCKET_BYTES = 4096
MAGIC = b"AREN0WB1"
HEAD = struct.Struct("<8sQ16s")
HEAD_BYTES = 64
PREFIX = "areno-push-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-[0-9a-f]+-[01]")
ONE_MACHINE = "run trainer and service on one machine, as one user and with one /dev/shm, or choose another transport"


def start_time(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks since boot; None if it is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name may hold anything; what counts comes behind its closing bracket.
    return int(text.rpartition(")")[2].split()[19])


def remove_segments_of_the_dead(folder: Path = SHARED_FOLDER) -> None:
    """Remove segments of this user whose maker has ended; a later process of the same number has another start time."""
    for path in folder.glob(f"{PREFIX}*"):
        match = _NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):
            found = path.lstat()
            if match is None or not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if start_time(int(match[1])) != int(match[2]):
                path.unlink()


class Segment:
    """One file of shared memory, allocated and mapped. Raises: TransportUnusable where it does not fit."""

    def __init__(self, name: str, size: int, folder: Path = SHARED_FOLDER, *, pinned: bool = False) -> None:
        self.name, self.size, self.nonce = name, size, secrets.token_bytes(16)
        self.call: SentCall | None = None
        path = folder / name
        total = HEAD_BYTES + size
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unusable("memory", f"{path} cannot be made: {error.strerror}", ONE_MACHINE) from error
        try:
            os.posix_fallocate(descriptor, 0, total)
            self._map = mmap.mmap(descriptor, total)
        except OSError as error:
            path.unlink(missing_ok=True)
            free = os.statvfs(folder)
            raise unusable(
                "memory",
                f"{total} bytes are needed in {folder}, {free.f_bavail * free.f_frsize} are free: {error.strerror}",
                f"enlarge {folder} (for containers: --shm-size), pass a smaller bucket_bytes, or choose another transport",
                value=total,
            ) from error
        finally:
            os.close(descriptor)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.memory = whole[HEAD_BYTES:]
        # Copies from a device into memory that is not pinned go at a fraction of the bus's rate. Where it cannot be pinned they go so.
        pinned = pinned and int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)) == 0
        self._finalizer = weakref.finalize(self, _remove, path, os.getpid(), whole.data_ptr() if pinned else 0, self._map)

    def label(self, bucket: int) -> None:
        """Write whose bytes follow."""
        self._map[: HEAD.size] = HEAD.pack(MAGIC, bucket, self.nonce)

    def handle(self) -> dict[str, Any]:
        """Return what leads the service here."""
        return {"kind": "shared", "segment": self.name, "nonce": self.nonce}

    def remove(self) -> None:
        """Remove the file; the memory goes with the last that has it open."""
        self._finalizer()


def _remove(path: Path, pid: int, pinned_at: int, mapped: mmap.mmap) -> None:
    """Unpin and remove a segment in the process that made it; `mapped` is held until then."""
    if os.getpid() != pid:
        return
    if pinned_at:
        torch.cuda.cudart().cudaHostUnregister(pinned_at)
    path.unlink(missing_ok=True)


class SharedMemoryTransport:
    """Two segments in turn; kept from one update to the next, made anew after an abort. `pinned`: weights come from a device."""

    name = "memory"

    def __init__(
        self,
        client: BucketClient,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 120.0,
        folder: Path = SHARED_FOLDER,
        pinned: bool = False,
    ) -> None:
        self._client, self._timeout_s, self._folder, self._pinned = client, timeout_s, folder, pinned
        self._wanted_bytes = self.bucket_bytes = max(bucket_bytes, MIN_BUCKET_BYTES)
        self.reason = "asked for"
        self._segments: list[Segment] = []
        self._update_id = ""
        self._next = 0

    def open(self, info: Any, update_id: str) -> None:
        """Make the segments, and let the service look into one. Raises: TransportUnusable."""
        self._update_id, self._next = update_id, 0
        if not self._segments:
            # No larger than the whole model, with room for what alignment takes.
            whole = info.engine.num_parameters * DTYPES[str(info.engine.dtype)].itemsize
            self.bucket_bytes = min(self._wanted_bytes, max(MIN_BUCKET_BYTES, whole + whole // 8))
            remove_segments_of_the_dead(self._folder)
            pid, token = os.getpid(), secrets.token_hex(8)
            for turn in (0, 1):
                name = f"{PREFIX}{pid}-{start_time(pid)}-{token}-{turn}"
                self._segments.append(Segment(name, self.bucket_bytes, self._folder, pinned=self._pinned))
        reached("memory", lambda: self._post(PackedBucket((), 0)).result(self._timeout_s), ONE_MACHINE)

    def send(self, bucket: Bucket) -> None:
        """Copy tensors into segments and announce them. Blocks: while both segments are with the service."""
        for packed in pack(bucket, self.bucket_bytes):
            self._post(packed)

    def _post(self, packed: PackedBucket) -> SentCall:
        segment = self._segments[self._next % 2]
        self._settle(segment)
        segment.label(self._next)
        packed.write(segment.memory)
        call = self._client.weights_stage_bucket(
            self._update_id, self._next, size=packed.size, pieces=packed.fields(), handle=segment.handle()
        )
        segment.call = call
        self._next += 1
        return call

    def _settle(self, segment: Segment) -> None:
        """Wait until the service is done with a segment. Raises: what it says of the bucket."""
        call, segment.call = segment.call, None
        if call is not None:
            call.result(self._timeout_s)

    def close(self) -> None:
        """Wait until everything is staged. Blocks: at most the time-out."""
        for turn in (self._next, self._next + 1):
            self._settle(self._segments[turn % 2])

    def abort(self) -> None:
        """Leave the segments to a service that may still read them; the next update gets new ones."""
        while self._segments:
            self._segments.pop().remove()
