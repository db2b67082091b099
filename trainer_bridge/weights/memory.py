"""The weights' way through shared memory: segments of this process, filled in turn while the service copies the others.

A segment is sealed memory without a name (memfd), which the service opens through this process's descriptor, and which goes with
this process. Where the service cannot do that, it is a file of mode 0600 in /dev/shm that this process alone makes (O_EXCL); its
name carries the process id and that process's start time: those whose maker is dead are removed when a trainer makes its own.
Either is fully allocated before it is mapped, so that too little memory is an error by name here and never a SIGBUS. Invariant: a
segment is written only while no call that names it is open.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer_bridge.errors import TransportUnusable
from trainer_bridge.weights.bucket import PackedBucket, pack
from trainer_bridge.weights.names import DTYPES
from trainer_bridge.weights.transport import Bucket, BucketClient, SentCall, reached, unusable

SHARED_FOLDER = Path("/dev/shm")
# Two of them fit into the 64 MiB of /dev/shm that containers have by default.
DEFAULT_BUCKET_BYTES = 24 * 2**20
SEGMENTS = 2
# For weights that come from a device: the copies are so fast that the messages in between count. With a third segment one is always
# free while another is being copied and the third's answer is on its way.
DEVICE_BUCKET_BYTES, DEVICE_SEGMENTS = 256 * 2**20, 3
MIN_BUCKET_BYTES = 4096
MAGIC = b"AREN0WB1"
HEAD = struct.Struct("<8sQ16s")
HEAD_BYTES = 64
PREFIX = "areno-push-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-[0-9a-f]+-[0-2]")
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
    """Shared memory behind `descriptor`, allocated and mapped; `leads` is how the service gets there, `path` its name if it has one.

    Owns the descriptor. Raises: TransportUnusable where it does not fit.
    """

    def __init__(self, descriptor: int, size: int, leads: dict[str, Any], *, path: Path | None = None, pinned: bool = False) -> None:
        self.size, self.nonce = size, secrets.token_bytes(16)
        self._leads = leads
        self.call: SentCall | None = None
        total = HEAD_BYTES + size
        try:
            os.posix_fallocate(descriptor, 0, total)
            self._map = mmap.mmap(descriptor, total)
            if path is None:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(descriptor)
            raise _no_room(path, total, error) from error
        if path is not None:
            os.close(descriptor)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.memory = whole[HEAD_BYTES:]
        # Copies from a device into memory that is not pinned go at a fraction of the bus's rate. Where it cannot be pinned they go so.
        pinned = pinned and int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)) == 0
        holds = descriptor if path is None else path
        self._finalizer = weakref.finalize(self, _remove, holds, os.getpid(), whole.data_ptr() if pinned else 0, self._map)

    def label(self, bucket: int) -> None:
        """Write whose bytes follow."""
        self._map[: HEAD.size] = HEAD.pack(MAGIC, bucket, self.nonce)

    def handle(self) -> dict[str, Any]:
        """Return what leads the service here."""
        return {**self._leads, "nonce": self.nonce}

    def remove(self) -> None:
        """Give the segment up; the memory goes with the last that has it open."""
        self._finalizer()


def _no_room(path: Path | None, total: int, error: OSError) -> TransportUnusable:
    if path is None:
        return unusable("memory", f"{total} bytes of sealed memory: {error.strerror}", ONE_MACHINE, value=total)
    path.unlink(missing_ok=True)
    folder, free = path.parent, os.statvfs(path.parent)
    return unusable(
        "memory",
        f"{total} bytes are needed in {folder}, {free.f_bavail * free.f_frsize} are free: {error.strerror}",
        f"enlarge {folder} (for containers: --shm-size), pass a smaller bucket_bytes, or choose another transport",
        value=total,
    )


def sealed_segment(size: int, *, pinned: bool = False) -> Segment:
    """Return a segment without a name that cannot be cut short, so that the service may map it. Raises: TransportUnusable."""
    try:
        descriptor = os.memfd_create("areno-push", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        raise unusable("memory", f"no sealed memory can be made: {error}", ONE_MACHINE) from error
    return Segment(descriptor, size, {"kind": "memfd", "process": os.getpid(), "descriptor": descriptor}, pinned=pinned)


def file_segment(name: str, size: int, folder: Path = SHARED_FOLDER, *, pinned: bool = False) -> Segment:
    """Return a segment that is a file. Raises: TransportUnusable."""
    path = folder / name
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unusable("memory", f"{path} cannot be made: {error.strerror}", ONE_MACHINE) from error
    return Segment(descriptor, size, {"kind": "shared", "segment": name}, path=path, pinned=pinned)


def _remove(holds: int | Path, pid: int, pinned_at: int, mapped: mmap.mmap) -> None:
    """Unpin a segment and give up what it holds in the process that made it; `mapped` is held until then."""
    if os.getpid() != pid:
        return
    if pinned_at:
        torch.cuda.cudart().cudaHostUnregister(pinned_at)
    if isinstance(holds, int):
        os.close(holds)
    else:
        holds.unlink(missing_ok=True)


class SharedMemoryTransport:
    """Segments in turn; kept from one update to the next, made anew after an abort. `pinned`: weights come from a device."""

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
        self._update_id = update_id
        if self._segments:
            self._probe()
            return
        # No larger than the whole model, with room for what alignment takes.
        whole = info.engine.num_parameters * DTYPES[str(info.engine.dtype)].itemsize
        size = self.bucket_bytes = min(self._wanted_bytes, max(MIN_BUCKET_BYTES, whole + whole // 8))
        remove_segments_of_the_dead(self._folder)
        try:
            self._use(lambda _: sealed_segment(size, pinned=self._pinned))
            self.reason = "asked for"
        except TransportUnusable as error:
            name = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(8)}"
            self._use(lambda turn: file_segment(f"{name}-{turn}", size, self._folder, pinned=self._pinned))
            self.reason = f"asked for; by files in {self._folder}, not by sealed memory: {error.limit}"

    def _use(self, make: Callable[[int], Segment]) -> None:
        """Make the segments, and let the service look into one."""
        self.abort()
        for turn in range(DEVICE_SEGMENTS if self._pinned else SEGMENTS):
            self._segments.append(make(turn))
        self._probe()

    def _probe(self) -> None:
        self._next = 0
        reached("memory", lambda: self._post(PackedBucket((), 0)).result(self._timeout_s), ONE_MACHINE)

    def send(self, bucket: Bucket) -> None:
        """Copy tensors into segments and announce them. Blocks: while every segment is with the service."""
        for packed in pack(bucket, self.bucket_bytes):
            self._post(packed)

    def _post(self, packed: PackedBucket) -> SentCall:
        segment = self._segments[self._next % len(self._segments)]
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
        for ahead in range(len(self._segments)):
            self._settle(self._segments[(self._next + ahead) % len(self._segments)])

    def abort(self) -> None:
        """Leave the segments to a service that may still read them; the next update gets new ones."""
        while self._segments:
            self._segments.pop().remove()
