"""The weights' way through a process group of two: this trainer's rank 0 and the engine host, with a store of their own.

The group is not torch.distributed's default one and not part of the trainer's ranks. For each bucket the service is told what
comes, then its bytes are broadcast, raw. NCCL where trainer and engine have a device each, gloo otherwise: on one shared device
NCCL waits for ever, so the engine host refuses it. Invariant: whatever happens to the other side, a wait ends within the time-out.
"""

from __future__ import annotations

import datetime
import socket
import threading
import uuid
from typing import Any

import torch
import torch.distributed as dist

from trainer_bridge.errors import TransportUnusable
from trainer_bridge.weights.bucket import PackedBucket, pack
from trainer_bridge.weights.transport import Bucket, BucketClient, SentCall, reached, unusable

DEFAULT_BUCKET_BYTES = 64 * 2**20
PREFIX = "areno-weights"
TRAINER_RANK, GROUP_SIZE = 0, 2
# Read by the other side before it joins: two ranks of groups of other sizes can meet, and wait for a third for ever.
SIZE_KEY = "size"
REMEDY = "let the engine host reach this host and port, pass ProcessGroupTransport(client, host=...), or choose another transport"


class ProcessGroupTransport:
    """Broadcasts out of two buffers in turn; see the module. `host` is this machine as the engine host knows it."""

    name = "group"

    def __init__(
        self,
        client: BucketClient,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 120.0,
        host: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._client, self.bucket_bytes, self._timeout_s = client, max(bucket_bytes, 4096), timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._host = host or own_address(str(getattr(client, "address", "")))
        self._device = device
        self.reason = "asked for"
        self._update_id = ""
        self._group: Any = None
        self._store: Any = None
        self._buffers: list[torch.Tensor] = []
        self._under_way: list[tuple[SentCall, Any] | None] = [None, None]
        self._next = 0

    def open(self, info: Any, update_id: str) -> None:
        """Make the group. Blocks: until the engine host has joined. Raises: TransportUnusable."""
        self._update_id, self._next = update_id, 0
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
            device = self._device if backend == "nccl" else torch.device("cpu")
            self._buffers = [torch.empty(self.bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
            return

    def _join(self, backend: str) -> None:
        self._store = dist.TCPStore(self._host, 0, GROUP_SIZE, is_master=True, timeout=self._timeout, wait_for_workers=False)
        device = uuid.UUID(str(torch.cuda.get_device_properties(self._device).uuid)).bytes if backend == "nccl" else None
        call = self._client.weights_join_group(
            self._update_id, host=self._host, port=self._store.port, backend=backend, timeout_s=self._timeout_s, device=device
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
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                with torch.cuda.device(self._device):
                    return dist.ProcessGroupNCCL(store, TRAINER_RANK, GROUP_SIZE, options)
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self._host)]
            options._timeout = self._timeout
            return gloo(store, TRAINER_RANK, GROUP_SIZE, options)
        except BaseException as error:
            return error

    def send(self, bucket: Bucket) -> None:
        """Copy tensors into buffers and broadcast them. Blocks: while both buffers are under way."""
        for packed in pack(bucket, self.bucket_bytes):
            self._post(packed)

    def _post(self, packed: PackedBucket) -> None:
        turn = self._next % 2
        self._settle(turn)
        buffer = self._buffers[turn]
        packed.write(buffer)
        call = self._client.weights_stage_bucket(
            self._update_id, self._next, size=packed.size, pieces=packed.fields(), handle={"kind": "group"}
        )
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = TRAINER_RANK, 0
        self._under_way[turn] = (call, self._group.broadcast([buffer[: packed.size]], options))
        self._next += 1

    def _settle(self, turn: int) -> None:
        """Wait for a bucket; its call comes first, for one that was refused is never received."""
        under_way, self._under_way[turn] = self._under_way[turn], None
        if under_way is not None:
            call, work = under_way
            call.result(self._timeout_s)
            work.wait(self._timeout)

    def close(self) -> None:
        """Wait until everything is staged, and leave the group. Blocks: at most the time-out for each bucket under way."""
        for turn in (self._next % 2, (self._next + 1) % 2):
            self._settle(turn)
        self._leave()

    def abort(self) -> None:
        """Leave the group; what is under way ends with an error that nobody hears."""
        self._under_way = [None, None]
        self._leave()

    def _leave(self) -> None:
        group, self._group, self._store = self._group, None, None
        abort = getattr(group, "abort", None)
        if abort is not None:
            abort()


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
