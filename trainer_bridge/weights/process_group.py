"""The weights' way through a process group of two: this trainer's rank 0 and the engine host, with a store of their own.

The group is not torch.distributed's default one and not part of the trainer's ranks. For each bucket the service is told what
comes, then its bytes are broadcast, raw, out of buffers in turn. NCCL where trainer and engine have a device each, gloo otherwise: on
one shared device NCCL waits for ever, so the engine host refuses it. The group stays for the next update, unless this one fails or the
engine host has left it. Invariant: whatever happens to the other side, a wait ends within the time-out, and a buffer is written only
after its last broadcast.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import secrets
import socket
import threading
import uuid
import weakref
from typing import Any

import torch
import torch.distributed as dist

from areno.parallel import nccl_group, on_this_stream
from trainer_bridge.errors import TransportUnusable
from trainer_bridge.weights.bucket import PackedBucket, pack
from trainer_bridge.weights.names import DTYPES
from trainer_bridge.weights.transport import UNREACHED, Bucket, BucketClient, SentCall, reached, unusable

HOST_BUCKET_BYTES, HOST_BUFFERS = 64 * 2**20, 2
# By NCCL the copies are so fast that the messages in between count. The engine host receives as many as these at a time: one is on
# the link, one is being copied there, one's answer is on its way.
DEVICE_BUCKET_BYTES, DEVICE_BUFFERS = 512 * 2**20, 3
MIN_BUCKET_BYTES = 4096
PREFIX = "areno-weights"
TRAINER_RANK, GROUP_SIZE = 0, 2
# Read by the other side before it joins: two ranks of groups of other sizes can meet, and wait for a third for ever.
SIZE_KEY = "size"
REMEDY = "let the engine host reach this host and port, pass ProcessGroupTransport(client, host=...), or choose another transport"


class _HostLane:
    """A buffer in host memory and the gloo broadcast out of it."""

    def __init__(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8)
        self.call: SentCall | None = None
        self._work: Any = None

    def write(self, packed: PackedBucket) -> None:
        """Fill the buffer, whose last broadcast is over."""
        packed.write(self.memory)

    def broadcast(self, group: Any, size: int) -> None:
        """Begin to send the first bytes."""
        self._work = group.broadcast([self.memory[:size]], _options())

    def settle(self, timeout_s: float) -> None:
        """Wait for the bucket's answer; it comes first, for a bucket that was refused is never received."""
        call, self.call = self.call, None
        if call is not None:
            call.result(timeout_s)
            self._work.wait(datetime.timedelta(seconds=timeout_s))

    def rest(self) -> None:
        """The group has ended, and its broadcasts with it."""


class _DeviceLane:
    """A buffer in device memory and the NCCL broadcast out of it, on a stream of its own, which is never waited for here."""

    def __init__(self, size: int, stream: torch.cuda.Stream) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=stream.device)
        self.call: SentCall | None = None
        self._stream, self._sent = stream, torch.cuda.Event()

    def write(self, packed: PackedBucket) -> None:
        """Fill the buffer behind its last broadcast and all that the current stream was given."""
        with torch.cuda.device(self._stream.device):
            current = torch.cuda.current_stream()
            current.wait_event(self._sent)
            packed.write(self.memory, wait=False)
            self._stream.wait_stream(current)

    def broadcast(self, group: Any, size: int) -> None:
        """Send the first bytes once they are there."""
        with torch.cuda.stream(self._stream):
            work = group.broadcast([self.memory[:size]], _options())
            if work is not None:
                work.wait()
            self._sent.record()

    def settle(self, timeout_s: float) -> None:
        """Wait for the bucket's answer."""
        call, self.call = self.call, None
        if call is not None:
            call.result(timeout_s)

    def rest(self) -> None:
        """Wait until nothing reads the buffer: the group has ended."""
        self._stream.synchronize()


def _options() -> Any:
    options = on_this_stream(dist.BroadcastOptions())
    options.rootRank, options.rootTensor = TRAINER_RANK, 0
    return options


class ProcessGroupTransport:
    """Broadcasts; see the module. `host` is this machine as the engine host knows it, `device` where the weights are."""

    name = "group"

    def __init__(
        self,
        client: BucketClient,
        *,
        bucket_bytes: int | None = None,
        timeout_s: float = 120.0,
        host: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._client, self._wanted_bytes, self._timeout_s = client, bucket_bytes, timeout_s
        self.bucket_bytes = max(bucket_bytes or HOST_BUCKET_BYTES, MIN_BUCKET_BYTES)
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._host = host or own_address(str(getattr(client, "address", "")))
        self._device = device
        self.reason = "asked for"
        self._update_id = ""
        self._group: Any = None
        self._store: Any = None
        self._name = b""
        self._finalizer: weakref.finalize[..., ProcessGroupTransport] | None = None
        self._lanes: list[_HostLane] | list[_DeviceLane] = []
        self._next = 0

    def open(self, info: Any, update_id: str) -> None:
        """Make the group, or find the last update's. Blocks: until the engine host has joined. Raises: TransportUnusable."""
        self._update_id, self._next = update_id, 0
        if self._group is not None and self._is_kept():
            return
        on_devices = self._device is not None and str(info.engine.device).startswith("cuda") and dist.is_nccl_available()
        for backend in ("nccl", "gloo") if on_devices else ("gloo",):
            try:
                self._join(backend)
            except TransportUnusable as error:
                if backend == "gloo":
                    raise
                self.reason = f"asked for; gloo, for not NCCL: {error.limit}"
                continue
            if backend == "nccl" or not on_devices:
                self.reason = f"asked for; {backend}"
            # No larger than the whole model, with room for what alignment takes.
            whole = info.engine.num_parameters * DTYPES[str(info.engine.dtype)].itemsize
            wanted = self._wanted_bytes or (DEVICE_BUCKET_BYTES if backend == "nccl" else HOST_BUCKET_BYTES)
            self.bucket_bytes = max(MIN_BUCKET_BYTES, min(wanted, whole + whole // 8))
            if backend == "nccl":
                stream = torch.cuda.Stream(self._device)
                self._lanes = [_DeviceLane(self.bucket_bytes, stream) for _ in range(DEVICE_BUFFERS)]
            else:
                self._lanes = [_HostLane(self.bucket_bytes) for _ in range(HOST_BUFFERS)]
            # Also at the interpreter's end, while the driver still lives.
            self._finalizer = weakref.finalize(self, _end, self._group, self._lanes, os.getpid())
            return

    def _is_kept(self) -> bool:
        """Ask by an empty bucket whether the engine host still has the group; leave it if not."""
        try:
            self._announce(PackedBucket((), 0)).result(self._timeout_s)
        except Exception as error:
            if getattr(error, "code", None) not in UNREACHED:
                raise
            self._leave()
            self._next = 0
            return False
        return True

    def _join(self, backend: str) -> None:
        self._name = secrets.token_bytes(16)
        try:
            check_own(self._host)
            self._store = dist.TCPStore(self._host, 0, GROUP_SIZE, is_master=True, timeout=self._timeout, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            raise unusable("group", f"no store can be kept at {self._host}: {error}", REMEDY, value=self._host) from error
        device = uuid.UUID(str(torch.cuda.get_device_properties(self._device).uuid)).bytes if backend == "nccl" else None
        call = self._client.weights_join_group(
            self._update_id,
            host=self._host,
            port=self._store.port,
            backend=backend,
            timeout_s=self._timeout_s,
            device=device,
            group=self._name,
        )
        made: list[Any] = []
        # Making a group blocks until the other side does the same, and a refusal comes by the call.
        thread = threading.Thread(target=lambda: made.append(self._attempt(backend)), name="weight-group", daemon=True)
        thread.start()
        reached("group", lambda: call.result(self._timeout_s), REMEDY)
        thread.join(self._timeout_s)
        if not made or isinstance(made[0], BaseException):
            raise unusable("group", f"the group was not made: {made[0] if made else f'nothing within {self._timeout_s:g} s'}", REMEDY)
        self._group = made[0]

    def _attempt(self, backend: str) -> Any:
        try:
            store = dist.PrefixStore(PREFIX, self._store)
            store.set(SIZE_KEY, str(GROUP_SIZE))
            if backend == "nccl":
                assert self._device is not None, "NCCL is tried for weights on a device"
                return nccl_group(store, TRAINER_RANK, GROUP_SIZE, self._timeout, self._device)
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self._host)]
            options._timeout = self._timeout
            return gloo(store, TRAINER_RANK, GROUP_SIZE, options)
        except BaseException as error:
            return error

    def send(self, bucket: Bucket) -> None:
        """Copy tensors into buffers and broadcast them. Blocks: while every buffer is under way."""
        for packed in pack(bucket, self.bucket_bytes):
            self._post(packed)

    def _post(self, packed: PackedBucket) -> None:
        lane = self._lanes[self._next % len(self._lanes)]
        lane.settle(self._timeout_s)
        lane.write(packed)
        lane.call = self._announce(packed)
        lane.broadcast(self._group, packed.size)

    def _announce(self, packed: PackedBucket) -> SentCall:
        handle = {"kind": "group", "group": self._name}
        call = self._client.weights_stage_bucket(self._update_id, self._next, size=packed.size, pieces=packed.fields(), handle=handle)
        self._next += 1
        return call

    def close(self) -> None:
        """Wait until everything is staged. Blocks: at most the time-out for each bucket under way."""
        for ahead in range(len(self._lanes)):
            self._lanes[(self._next + ahead) % len(self._lanes)].settle(self._timeout_s)

    def abort(self) -> None:
        """Leave the group; what is under way ends with an error that nobody hears."""
        self._leave()

    def _leave(self) -> None:
        finalizer, self._finalizer = self._finalizer, None
        self._group = self._store = None
        self._lanes = []
        ending = None if finalizer is None else finalizer.detach()
        if ending is not None:
            # The interpreter waits for it at its end.
            threading.Thread(target=_end, args=ending[2], name="weight-group").start()


def _end(group: Any, lanes: list[_HostLane] | list[_DeviceLane], process: int) -> None:
    """End a group, which takes longer than a bucket; its buffers go only when nothing reads them any more.

    In a process that was forked off the one that made it, it is left as it is: its threads are not there to be ended.
    """
    if os.getpid() != process:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return
    with contextlib.suppress(RuntimeError, AttributeError):
        group.abort()
    with contextlib.suppress(RuntimeError):
        for lane in lanes:
            lane.rest()
    lanes.clear()


def check_own(host: str) -> None:
    """Check that this machine has the address; a store elsewhere would be waited for in vain. Raises: OSError."""
    family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.bind(place)


def own_address(address: str) -> str:
    """Return this machine's address as a service at `address` reaches it: loopback for a local one."""
    kind, _, rest = address.partition("://")
    if kind != "tcp":
        return "127.0.0.1"
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    family = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
