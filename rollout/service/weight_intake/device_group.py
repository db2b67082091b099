"""Buckets that a trainer broadcasts by NCCL: received into device memory in turn, copied from there by every rank of the engine.

    announced --> broadcast launched into the next buffer --> it has come --> all ranks copy their parts --> answered

A broadcast is launched when its bucket is announced, so the link never waits for the engine; the trainer sends no more buckets ahead
than there are buffers, which is checked. The engine's other ranks open these buffers as they open a trainer's memory. A stream of its
own takes the broadcasts, and no stream of the engine ever waits for a trainer. Invariant: a buffer is received into only once the
bucket that was in it is staged.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rollout.service.weight_intake.pieces import ITEM_BYTES, Pace, Steps, refused
from rollout.wire.weight_handles import TensorPiece, WeightsStageBucket

if TYPE_CHECKING:
    import torch

    from areno.interprocess import ExportedMemory
    from areno.weights.slices import DeviceRun

# As many as a trainer sends ahead: one comes, one is copied, one's answer is on its way.
BUFFERS = 3
# A broadcast that was announced comes at once; what takes longer is looked at now and then.
SOON_S = 0.05
ROUND_BYTES = 64 * 2**20


def _rounded(size: int) -> int:
    """Return a size that the next update's buffers have too, so that they come from the allocator's cache."""
    return 1 << (size - 1).bit_length() if size < ROUND_BYTES else -(-size // ROUND_BYTES) * ROUND_BYTES


class _Buffer:
    """Device memory for one bucket at a time; `come` passes when its broadcast has, `taken` until it is staged."""

    def __init__(self) -> None:
        import torch

        self.memory: torch.Tensor | None = None
        self.exported: ExportedMemory | None = None
        self.come = torch.cuda.Event()
        self.taken = False

    def run(self, dtype: str, offset: int, count: int) -> DeviceRun | torch.Tensor:
        """Return elements at a byte of it; a tensor, which is sent to other ranks, where these cannot open it."""
        import torch

        from areno.weights.slices import DeviceRun

        assert self.memory is not None, "a buffer is received into before it is read"
        if self.exported is None:
            return self.memory[offset : offset + count * ITEM_BYTES[dtype]].view(getattr(torch, dtype))
        base = self.memory.data_ptr() - self.exported.address
        return DeviceRun(self.exported.memory, self.exported.address, base + offset, count, dtype, self.exported.handle)


class DeviceReceiver:
    """The engine's end of a group; see the module. `devices`: where its ranks are; `tell`: called with handles that they are to open."""

    def __init__(self, group: Any, devices: Sequence[torch.device], tell: Callable[[bytes], None], timeout_s: float) -> None:
        import torch

        self._group, self._devices, self._tell, self._timeout_s = group, devices, tell, timeout_s
        self._stream = torch.cuda.Stream(devices[0])
        self._buffers = [_Buffer() for _ in range(BUFFERS)]
        self._next = 0
        self._announced: set[int] = set()
        first = devices[0].index or 0
        self._shared = all(torch.cuda.can_device_access_peer(device.index or 0, first) for device in devices[1:])

    def source(self, body: WeightsStageBucket) -> DeviceGroupSource:
        """Launch the broadcast of a bucket, and return the bucket. Raises: BucketRefused."""
        if not body.size or body.bucket in self._announced:
            # A number that comes again, for its answer was lost, is broadcast once.
            return DeviceGroupSource(body, None, self._timeout_s)
        buffer = self._buffers[self._next % BUFFERS]
        if buffer.taken:
            raise refused(
                body.bucket,
                f"{BUFFERS} others are not staged yet",
                f"{BUFFERS} are received at a time",
                "wait for answers before more is sent",
            )
        if buffer.memory is None or buffer.memory.numel() < body.size:
            self._make_room(body)
        self._receive(buffer, body.size)
        self._announced.add(body.bucket)
        self._next += 1
        return DeviceGroupSource(body, buffer, self._timeout_s)

    def _make_room(self, body: WeightsStageBucket) -> None:
        """Make every buffer that is free as large as a bucket. Memory comes from the device before a broadcast runs, or waits for it."""
        import torch

        from areno.interprocess import DriverFailure, ExportedMemory, export_memory

        for buffer in self._buffers:
            if buffer.taken or (buffer.memory is not None and buffer.memory.numel() >= body.size):
                continue
            buffer.memory = buffer.exported = None
            try:
                with torch.cuda.stream(self._stream):
                    buffer.memory = memory = torch.empty(_rounded(body.size), dtype=torch.uint8, device=self._devices[0])
            except torch.OutOfMemoryError as error:
                limit = str(error).splitlines()[0]
                raise refused(body.bucket, "the device has no memory to receive it", limit, "send smaller buckets (bucket_bytes)") from None
            if len(self._devices) == 1:
                buffer.exported = ExportedMemory(memory.data_ptr(), memory, b"")
            elif self._shared:
                with contextlib.suppress(DriverFailure):
                    buffer.exported = export_memory(memory)
                    self._tell(buffer.exported.handle)

    def _receive(self, buffer: _Buffer, size: int) -> None:
        import torch
        import torch.distributed as dist

        from areno.parallel import on_this_stream

        assert buffer.memory is not None, "room is made before a broadcast is launched"
        options = on_this_stream(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = 0, 0
        with torch.cuda.stream(self._stream):
            work = self._group.broadcast([buffer.memory[:size]], options)
            if work is not None:
                work.wait()
            buffer.come.record()
        buffer.taken = True

    def rest(self) -> None:
        """Forget an update that is over; its memory goes back to the allocator."""
        self._announced.clear()
        for buffer in self._buffers:
            assert not buffer.taken, "an update is over when all of its buckets are staged"
            buffer.memory = buffer.exported = None

    def close(self) -> None:
        """Leave the group, not here but soon; broadcasts under way end."""
        threading.Thread(target=_leave, args=(self._group, self._stream, self._buffers), name="weight-group").start()
        self._group, self._buffers = None, []


def _leave(group: Any, stream: torch.cuda.Stream, buffers: list[_Buffer]) -> None:
    """End what is under way; only then is the memory given back that it writes."""
    with contextlib.suppress(RuntimeError):
        group.abort()
    with contextlib.suppress(RuntimeError):
        stream.synchronize()
    buffers.clear()


class DeviceGroupSource:
    """One bucket that comes by NCCL; without a buffer it is empty, or one that came before."""

    # Whole pieces: a copy on the card is over before a smaller one were launched.
    slice_bytes, stays, own = 2**40, True, True

    def __init__(self, body: WeightsStageBucket, buffer: _Buffer | None, timeout_s: float) -> None:
        self._body, self._buffer, self._timeout_s = body, buffer, timeout_s

    def prepare(self) -> Steps:
        """Wait for the broadcast. Raises: BucketRefused."""
        if self._body.size and self._buffer is None:
            raise refused(self._body.bucket, "it was not staged when it came first", "a bucket is broadcast once", "begin a new update")
        started = time.monotonic()
        while self._buffer is not None and not self._buffer.come.query():
            waited_s = time.monotonic() - started
            if waited_s > self._timeout_s:
                raise refused(
                    self._body.bucket,
                    "its broadcast did not come",
                    f"nothing within {self._timeout_s:g} s",
                    "see whether the trainer lives, then begin a new update",
                )
            yield Pace.COPIES if waited_s < SOON_S else Pace.WAIT

    def values(self, piece: TensorPiece, first: int, count: int, into: torch.Tensor | None) -> DeviceRun | torch.Tensor:
        """Return elements of a piece, in the buffer."""
        assert self._buffer is not None, "an empty bucket has no pieces"
        return self._buffer.run(piece.dtype, piece.offset + first * ITEM_BYTES[piece.dtype], count)

    def finish(self) -> None:
        """Give the buffer to a later bucket: the copies are complete."""
        if self._buffer is not None:
            self._buffer.taken = False

    def close(self) -> None:
        """A buffer that was not staged is never received into again: its group ends with the update."""
        self._buffer = None
