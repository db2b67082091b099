"""Buckets that a trainer broadcasts in a process group of two: its rank 0, and this engine host as rank 1.

The group has a store of its own, which the trainer keeps, and nothing to do with the ranks that train or serve. Joining blocks, and
so does receiving by gloo: each runs in a thread of its own while the engine steps on. By NCCL it is launched (`device_group`). Raw
bytes travel, never objects. NCCL needs a device for each process: two on one wait for each other for ever, so that is refused.
Invariant: a broadcast that does not come ends with the group's time-out, and a group ends with an update that fails.
"""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rollout.errors import TransportUnavailable
from rollout.service.weight_intake.device_group import DeviceReceiver
from rollout.service.weight_intake.pieces import HOST_SLICE_BYTES, ITEM_BYTES, BucketSource, Pace, Steps, device_uuid, refused
from rollout.wire.weight_handles import TensorPiece, WeightsJoinGroup, WeightsStageBucket

if TYPE_CHECKING:
    import torch

PREFIX = "areno-weights"
MAX_CAUSE = 500
GRACE_S = 0.5
ENGINE_RANK, GROUP_SIZE = 1, 2
# What the trainer says of its group in the store, before anybody joins.
SIZE_KEY = "size"


def _unavailable(what: str, why: str) -> TransportUnavailable:
    return TransportUnavailable(
        what, field="backend", limit=why, remedy="choose another transport, or let the engine host reach the trainer's host and port"
    )


class _Background:
    """A function in a daemon thread, and how it ended."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), name="weight-group", daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self.value = function()
        except BaseException as error:
            self.error = error

    @property
    def cause(self) -> str:
        """The error in words."""
        return f"{type(self.error).__name__}: {str(self.error)[:MAX_CAUSE]}"

    def wait(self, timeout_s: float) -> Steps:
        """Yield until it has ended, or until so long is over: then it goes on to its own end, and what it makes is dropped.

        Gloo keeps its time-out only roughly: a peer that counts other members holds it for five seconds at least.
        """
        deadline = time.monotonic() + timeout_s + GRACE_S
        while self._thread.is_alive():
            if time.monotonic() > deadline:
                self.error = TimeoutError(f"nothing within {timeout_s:g} s; is the trainer's group one of {GROUP_SIZE}?")
                return
            yield Pace.WAIT


def local_address(host: str, port: int) -> str:
    """Return the address by which this machine reaches a host. Raises: OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class GroupLink:
    """The open update's group; `join` makes it. One with a `name` may be used by the next update too.

    `devices`: where the engine's ranks are, rank 0 first; `tell` is called with the handle of memory that the others are to open.
    """

    def __init__(self, body: WeightsJoinGroup, devices: Sequence[torch.device], tell: Callable[[bytes], None]) -> None:
        import torch.distributed as dist

        if not dist.is_available():
            raise _unavailable("the engine host has no torch.distributed", "its torch was built without it")
        if body.backend == "nccl":
            if devices[0].type != "cuda" or not dist.is_nccl_available():
                raise _unavailable("NCCL cannot be used", f"the engine runs on {devices[0].type}")
            if body.device in [device_uuid(device) for device in devices]:
                raise _unavailable("NCCL is refused", "trainer and engine share one device, where NCCL waits for ever")
        self._body, self._devices, self._tell, self.name = body, devices, tell, body.group
        self._timeout = datetime.timedelta(seconds=body.timeout_s)
        self._group: Any = None
        self._receiver: DeviceReceiver | HostReceiver | None = None

    def join(self) -> Steps:
        """Join, yielding meanwhile. Raises: TransportUnavailable."""
        task = _Background(self._connect)
        yield from task.wait(self._body.timeout_s)
        if task.error is not None:
            raise _unavailable(
                f"the group at {self._body.host}:{self._body.port} cannot be joined",
                task.cause,
            )
        self._group, timeout_s = task.value, self._body.timeout_s
        if self._body.backend == "nccl":
            self._receiver = DeviceReceiver(self._group, self._devices, self._tell, timeout_s)
        else:
            self._receiver = HostReceiver(self._group, timeout_s)

    def _connect(self) -> Any:
        import torch.distributed as dist

        body = self._body
        store = dist.TCPStore(body.host, body.port, GROUP_SIZE, is_master=False, timeout=self._timeout)
        prefixed = dist.PrefixStore(PREFIX, store)
        size = prefixed.get(SIZE_KEY)
        if size != str(GROUP_SIZE).encode():
            raise RuntimeError(f"the trainer's group says that its size is {size!r}, not {GROUP_SIZE}")
        if body.backend == "nccl":
            from areno.parallel import nccl_group

            return nccl_group(prefixed, ENGINE_RANK, GROUP_SIZE, self._timeout, self._devices[0])
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=local_address(body.host, body.port))]
        options._timeout = self._timeout
        return gloo(prefixed, ENGINE_RANK, GROUP_SIZE, options)

    def source(self, body: WeightsStageBucket) -> BucketSource:
        """Return the bucket that the next broadcast brings. Raises: TransportUnavailable, BucketRefused."""
        assert self._receiver is not None, "a group is joined before anything comes by it"
        return self._receiver.source(body)

    def rest(self) -> None:
        """Give back what the update needed that is over."""
        assert self._receiver is not None, "an update that came by a group has joined it"
        self._receiver.rest()

    def close(self) -> None:
        """Leave the group; a broadcast under way ends with an error."""
        group, receiver, self._group, self._receiver = self._group, self._receiver, None, None
        if isinstance(receiver, DeviceReceiver):
            receiver.close()
        elif hasattr(group, "abort"):
            group.abort()


class HostReceiver:
    """Broadcasts by gloo, one after the other into one buffer."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._buffer: torch.Tensor | None = None

    def source(self, body: WeightsStageBucket) -> BucketSource:
        """Return the bucket that the next broadcast brings."""
        return HostGroupSource(body, self)

    def receive(self, bucket: int, size: int) -> Steps:
        """Take the next broadcast into the buffer, yielding meanwhile. Raises: BucketRefused."""
        import torch

        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None
            try:
                self._buffer = torch.empty(size, dtype=torch.uint8)
            except RuntimeError as error:
                limit = str(error).splitlines()[0]
                raise refused(bucket, "there is no memory to receive it", limit, "send smaller buckets (bucket_bytes)") from None
        # Handed over, for what is received too late is not to find a later bucket's.
        memory = self._buffer[:size]
        task = _Background(lambda: self._broadcast(memory))
        yield from task.wait(self._timeout_s)
        if task.error is not None:
            # Whatever still comes must not reach what a later bucket is read from.
            self._buffer = None
            raise refused(
                bucket,
                "its broadcast did not come",
                task.cause,
                "see whether the trainer lives, then begin a new update",
            )

    def _broadcast(self, memory: torch.Tensor) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([memory], options).wait(datetime.timedelta(seconds=self._timeout_s))

    def rest(self) -> None:
        """Give the buffer back."""
        self._buffer = None

    def values(self, dtype: str, offset: int, count: int) -> torch.Tensor:
        """Return elements of the last broadcast."""
        import torch

        assert self._buffer is not None, "a bucket is received before it is read"
        return self._buffer[offset : offset + count * ITEM_BYTES[dtype]].view(getattr(torch, dtype))


class HostGroupSource:
    """One bucket that comes by gloo."""

    slice_bytes, stays, own = HOST_SLICE_BYTES, True, False

    def __init__(self, body: WeightsStageBucket, receiver: HostReceiver) -> None:
        self._body, self._receiver = body, receiver

    def prepare(self) -> Steps:
        """Take the broadcast. Raises: BucketRefused."""
        if self._body.size:
            yield from self._receiver.receive(self._body.bucket, self._body.size)

    def values(self, piece: TensorPiece, first: int, count: int, into: torch.Tensor | None) -> torch.Tensor:
        """Return elements of a piece, in the buffer."""
        return self._receiver.values(piece.dtype, piece.offset + first * ITEM_BYTES[piece.dtype], count)

    def finish(self) -> None:
        """The buffer is the next bucket's."""

    def close(self) -> None:
        """The group lives as long as its update."""


def group_source(body: WeightsStageBucket, link: GroupLink | None) -> BucketSource:
    """Return a bucket that comes by broadcast. Raises: TransportUnavailable without a group, BucketRefused."""
    if link is None:
        raise _unavailable(
            f"bucket {body.bucket} is to come by broadcast", "no group was joined in this update, and none is kept by this name"
        )
    return link.source(body)
