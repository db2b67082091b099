"""The weights' way on one card, or to a peer: the service opens this process's device memory and copies it there.

    a tensor in memory of cudaMalloc's kind     its allocation is announced, with the tensor's place in it: one copy, by the service
    any other (expandable segments, say)        copied into one of two buckets of that kind first: two copies, and the report says so

A bucket whose last write is not over carries an interprocess event recorded behind it, for which the service waits. Tensors are
kept until their bucket is staged, so nothing is freed, or written by an optimizer step, under the service's hands. Invariant:
an event and a bucket's memory are used again only after the bucket that used them was answered.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer_bridge.errors import TransportUnusable
from trainer_bridge.weights.bucket import ALIGNMENT, PackedBucket, announced, pack
from trainer_bridge.weights.transport import Bucket, BucketClient, SentCall, reached, unusable

# What is announced where it lies takes no memory: few large buckets.
DEFAULT_BUCKET_BYTES = 2 * 2**30
# What has to be copied first takes two of these.
BOUNCE_BYTES, BOUNCES = 256 * 2**20, 2
# Buckets that may wait for their answers, so that the service never waits for the next one.
UNDER_WAY = 8
HANDLE_BYTES = 64
# Allocations that one announcement may name; the service's own limit is far above.
MAX_ALLOCATIONS = 1024
INTERPROCESS_EVENT = 2 | 4  # no timing, interprocess
REMEDY = "serve with --device cuda on this machine, install cuda-bindings (extra 'cuda') on both sides, or choose another transport"


class Driver:
    """The few calls of the CUDA driver that are needed, with errors raised. Raises: TransportUnusable without cuda-bindings."""

    def __init__(self) -> None:
        try:
            self._api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise unusable("cuda", f"the package cuda-bindings cannot be imported: {error}", REMEDY) from None

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; return its one value, or a list. Raises: TransportUnusable with the driver's error."""
        status, *values = getattr(self._api, name)(*arguments)
        if int(status) != 0:
            raise unusable("cuda", f"{name} failed: {status!r}", REMEDY)
        return values[0] if len(values) == 1 else values

    def allocation(self, address: int) -> tuple[int, int]:
        """Return base and size of the allocation that an address lies in."""
        base, size = self.call("cuMemGetAddressRange", self._api.CUdeviceptr(address))
        return int(base), int(size)

    def memory_handle(self, base: int) -> bytes:
        """Return an allocation's interprocess handle; memory that is not of cudaMalloc's kind has none."""
        return bytes(self.call("cuIpcGetMemHandle", self._api.CUdeviceptr(base)).reserved)[:HANDLE_BYTES]

    def event_handle(self, event: Any) -> bytes:
        """Return an event's interprocess handle."""
        return bytes(self.call("cuIpcGetEventHandle", event).reserved)[:HANDLE_BYTES]

    def free(self, address: int) -> None:
        """Free an allocation, if the driver still lives."""
        self._api.cuMemFree(self._api.CUdeviceptr(address))


@dataclass(frozen=True, slots=True)
class Allocation:
    """Device memory that another process can open. `base` is an address of this process and stays in it."""

    base: int
    size: int
    handle: bytes


class _Memory:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Bounce:
    """One bucket of cudaMalloc's kind."""

    def __init__(self, driver: Driver, size: int, device: torch.device) -> None:
        self._driver = driver
        address = int(driver.call("cuMemAlloc", size))
        self.allocation = Allocation(address, size, driver.memory_handle(address))
        self.memory = torch.as_tensor(_Memory(address, size), device=device)
        # Where the call stands that used it last.
        self.turn: int | None = None

    def free(self) -> None:
        """Give the memory back; the service closes its own view with the update."""
        self._driver.free(self.allocation.base)


@dataclass(slots=True)
class _UnderWay:
    call: SentCall
    kept: list[torch.Tensor]


class CudaIpcTransport:
    """Buckets of device memory, several under way; see the module. `device` is the card that the weights are on."""

    name = "cuda"

    def __init__(
        self, client: BucketClient, *, device: torch.device, bucket_bytes: int = DEFAULT_BUCKET_BYTES, timeout_s: float = 120.0
    ) -> None:
        self._client, self._device, self._timeout_s = client, device, timeout_s
        self.bucket_bytes = max(bucket_bytes, ALIGNMENT)
        self._bounce_bytes = min(self.bucket_bytes, BOUNCE_BYTES)
        self._driver: Driver | None = None
        self._known: dict[int, Allocation | None] = {}
        self._events: list[tuple[Any, bytes]] = []
        self._bounces: list[_Bounce] = []
        self._under_way: list[_UnderWay | None] = [None] * UNDER_WAY
        self._bounced = self._bounces_used = 0
        self._update_id = ""
        self._uuid = b""
        self._next = 0

    @property
    def reason(self) -> str:
        """Whether tensors had to be copied twice."""
        if self._bounced:
            return f"asked for; {self._bounced} tensors bounced, for their memory is not of cudaMalloc's kind (expandable_segments?)"
        return "asked for"

    def open(self, info: Any, update_id: str) -> None:
        """Make events and let the service open a first allocation. Raises: TransportUnusable."""
        served = str(info.engine.device)
        if self._device.type != "cuda" or not served.startswith("cuda"):
            raise unusable("cuda", f"the trainer's weights are on {self._device.type}, the engine's on {served}", REMEDY)
        self._update_id, self._next, self._bounced, self._bounces_used = update_id, 0, 0, 0
        # The allocator may have given memory back since the last update, and taken other memory at the same address.
        earlier, self._known = list(self._known), {}
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()
            self._uuid = uuid.UUID(str(torch.cuda.get_device_properties(self._device).uuid)).bytes
            if self._driver is None:
                self._driver = Driver()
            while len(self._events) < UNDER_WAY:
                event = self._driver.call("cuEventCreate", INTERPROCESS_EVENT)
                self._events.append((event, self._driver.event_handle(event)))
            probe = torch.zeros(1, device=self._device)
            first = self._allocation(probe) or self._bounce(0).allocation
            # Opened now, what the last update sent from will not hold up this one's copies.
            others = [found for found in map(self._still_there, earlier) if found is not None and found.base != first.base]
            reached(
                "cuda",
                lambda: self._post(PackedBucket((), 0).fields(), [first, *others[: MAX_ALLOCATIONS - 1]], [probe]).result(self._timeout_s),
                REMEDY,
            )

    def _still_there(self, base: int) -> Allocation | None:
        try:
            return self._allocation_at(base)
        except TransportUnusable:
            return None

    def _allocation(self, tensor: torch.Tensor) -> Allocation | None:
        """Return what a tensor lies in, None if no other process can open that."""
        return self._allocation_at(tensor.data_ptr())

    def _allocation_at(self, address: int) -> Allocation | None:
        assert self._driver is not None, "a transport is opened first"
        base, size = self._driver.allocation(address)
        if base not in self._known:
            try:
                self._known[base] = Allocation(base, size, self._driver.memory_handle(base))
            except TransportUnusable:
                self._known[base] = None
        return self._known[base]

    def _bounce(self, turn: int) -> _Bounce:
        assert self._driver is not None, "a transport is opened first"
        while len(self._bounces) <= turn:
            self._bounces.append(_Bounce(self._driver, self._bounce_bytes, self._device))
        return self._bounces[turn]

    def send(self, bucket: Bucket) -> None:
        """Announce tensors where they are; copy those that cannot be opened there. Blocks: while `UNDER_WAY` buckets or two copies are."""
        with torch.cuda.device(self._device):
            direct: dict[str, tuple[torch.Tensor, Allocation]] = {}
            others: dict[str, torch.Tensor] = {}
            for name, tensor in bucket.items():
                moved = tensor if tensor.device == self._device else tensor.to(self._device)
                allocation = self._allocation(moved)
                if allocation is None:
                    others[name] = moved
                else:
                    direct[name] = (moved, allocation)
            self._bounced += len(others)
            for group in _groups(direct.items()):
                self._send_direct(dict(group))
            for packed in pack(others, self._bounce_bytes):
                bounce = self._bounce(self._bounces_used % BOUNCES)
                if bounce.turn is not None:
                    self._settle(bounce.turn)
                self._bounces_used, bounce.turn = self._bounces_used + 1, self._next % UNDER_WAY
                packed.write(bounce.memory)
                self._post(packed.fields(), [bounce.allocation], [])

    def _send_direct(self, tensors: dict[str, tuple[torch.Tensor, Allocation]]) -> None:
        places: dict[int, int] = {}
        allocations: list[Allocation] = []
        offsets, placed = [], []
        for tensor, allocation in tensors.values():
            place = places.setdefault(allocation.base, len(allocations))
            if place == len(allocations):
                allocations.append(allocation)
            placed.append(place)
            offsets.append(tensor.data_ptr() - allocation.base)
        sent = [tensor for tensor, _ in tensors.values()]
        pieces = announced(list(tensors), [tensor.shape for tensor in sent], [0] * len(sent), sent, offsets)
        self._post({**pieces, "places": placed}, allocations, sent)

    def _post(self, pieces: Mapping[str, Any], allocations: list[Allocation], kept: list[torch.Tensor]) -> SentCall:
        assert self._driver is not None, "a transport is opened first"
        turn = self._next % UNDER_WAY
        self._settle(turn)
        event_handle: bytes | None = None
        stream = torch.cuda.current_stream(self._device)
        if not stream.query():
            # The card would come to an event of this process only after what the engine has launched meanwhile.
            event, event_handle = self._events[turn]
            self._driver.call("cuEventRecord", event, stream.cuda_stream)
        handle = {
            "kind": "cuda",
            "device": self._uuid,
            "event": event_handle,
            "allocations": [{"handle": one.handle, "size": one.size} for one in allocations],
        }
        call = self._client.weights_stage_bucket(self._update_id, self._next, size=0, pieces=pieces, handle=handle)
        self._under_way[turn] = _UnderWay(call, kept)
        self._next += 1
        return call

    def _settle(self, turn: int) -> None:
        under_way, self._under_way[turn] = self._under_way[turn], None
        if under_way is not None:
            under_way.call.result(self._timeout_s)

    def close(self) -> None:
        """Wait until everything is staged. Blocks: at most the time-out for each bucket under way."""
        for ahead in range(UNDER_WAY):
            self._settle((self._next + ahead) % UNDER_WAY)

    def abort(self) -> None:
        """Forget what is under way; the service closes its handles with the update."""
        self._under_way = [None] * UNDER_WAY
        # The service may still read them until it has heard of the abort; the next update gets new ones.
        self._bounces, self._events = [], []


def _groups(
    items: Iterable[tuple[str, tuple[torch.Tensor, Allocation]]],
) -> Iterator[list[tuple[str, tuple[torch.Tensor, Allocation]]]]:
    group: list[tuple[str, tuple[torch.Tensor, Allocation]]] = []
    for item in items:
        group.append(item)
        if len(group) == MAX_ALLOCATIONS:
            yield group
            group = []
    if group:
        yield group
