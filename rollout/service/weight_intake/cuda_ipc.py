"""Buckets in a trainer's device memory, on this engine's card or one that it can address: opened by interprocess handles.

Each allocation and each event is opened once in an update and closed with it. Copies run on the stream that stages, from when
the trainer's event has passed, which is looked at between steps so that no stream of the engine ever waits for a trainer; they
are complete before the bucket is answered, so the trainer may then write its memory again. Nothing is dereferenced on the host.
Invariant: a piece lies within its allocation by the size that the driver itself reports.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from rollout.errors import TransportUnavailable
from rollout.service.weight_intake.pieces import ITEM_BYTES, Pace, Steps, device_uuid, refused
from rollout.wire.weight_handles import CudaHandle, TensorPiece, WeightsStageBucket

if TYPE_CHECKING:
    import torch

    from areno.weights.slices import DeviceRun

LAZY_PEER_ACCESS = 1
# Opening one takes some 50 us.
OPENED_AT_ONCE = 32


def _unavailable(why: str) -> TransportUnavailable:
    return TransportUnavailable(
        "device memory of another process cannot be opened here",
        field="device",
        limit=why,
        remedy="serve with --device cuda and the package cuda-bindings (extra 'cuda'), or choose another transport",
    )


class _Memory:
    """Device memory as torch takes it in: bytes at an address."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class CudaImports:
    """What an update has opened of a trainer's memory, by handle. Raises: TransportUnavailable without CUDA or cuda-bindings."""

    _closing: ClassVar[threading.Thread | None] = None

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise _unavailable(f"the engine runs on {device.type}")
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise _unavailable(f"the package cuda-bindings cannot be imported: {error}") from None
        if CudaImports._closing is not None:
            # The same memory is opened again only once it is closed.
            CudaImports._closing.join()
        self._device = device
        self._memory: dict[bytes, tuple[int, int, torch.Tensor]] = {}
        self._events: dict[bytes, Any] = {}

    def check_device(self, uuid: bytes) -> None:
        """Check that this engine's card can address the trainer's. Raises: TransportUnavailable."""
        import torch

        uuids = [device_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        if uuid not in uuids:
            raise _unavailable("the trainer's card is not visible to the engine host")
        index, mine = uuids.index(uuid), self._device.index or 0
        if index != mine and not torch.cuda.can_device_access_peer(mine, index):
            raise _unavailable(f"card {mine} cannot address card {index}")

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver. Raises: TransportUnavailable with its error."""
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise _unavailable(f"{name} failed: {status!r}")
        return values[0] if len(values) == 1 else values

    def memory(self, handle: bytes, size: int, bucket: int) -> tuple[int, torch.Tensor]:
        """Return an allocation's address and bytes on the device. Raises: TransportUnavailable, BucketRefused for a wrong size."""
        import torch

        known = self._memory.get(handle)
        if known is None:
            raw = self._driver.CUipcMemHandle()
            raw.reserved = handle
            with torch.cuda.device(self._device):
                address = int(self._call("cuIpcOpenMemHandle", raw, LAZY_PEER_ACCESS))
                base, found = self._call("cuMemGetAddressRange", self._driver.CUdeviceptr(address))
                del base
                known = (address, int(found), torch.as_tensor(_Memory(address, int(found)), device=self._device))
            self._memory[handle] = known
        if size > known[1]:
            raise refused(bucket, f"an allocation of {size} bytes was announced", f"the driver says that it has {known[1]}")
        return known[0], known[2]

    def passed(self, handle: bytes) -> bool:
        """Tell whether the trainer's event has passed: what it launched before is complete."""
        event = self._events.get(handle)
        if event is None:
            raw = self._driver.CUipcEventHandle()
            raw.reserved = handle
            event = self._events[handle] = self._call("cuIpcOpenEventHandle", raw)
        status = self._driver.cuEventQuery(event)[0]
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(status) != 0:
            raise _unavailable(f"cuEventQuery failed: {status!r}")
        return True

    def close(self) -> None:
        """Close everything on a thread of its own, for it takes as long as a decode step. Nothing may still be copied from it."""
        memory, events = list(self._memory.values()), list(self._events.values())
        self._memory.clear()
        self._events.clear()
        CudaImports._closing = threading.Thread(target=self._close, args=(memory, events), name="close-weights", daemon=True)
        CudaImports._closing.start()

    def _close(self, memory: list[tuple[int, int, torch.Tensor]], events: list[Any]) -> None:
        import torch

        with torch.cuda.device(self._device):
            for address, _, _ in memory:
                self._driver.cuIpcCloseMemHandle(self._driver.CUdeviceptr(address))
            for event in events:
                self._driver.cuEventDestroy(event)


class CudaSource:
    """One bucket in device memory; see the module."""

    # Whole pieces: a copy on the card is over before a smaller one were launched.
    slice_bytes, stays, own = 2**40, True, True

    def __init__(self, body: WeightsStageBucket, handle: CudaHandle, imports: CudaImports) -> None:
        imports.check_device(handle.device)
        from areno.weights.slices import DeviceRun

        self._body, self._handle, self._imports, self._runs = body, handle, imports, DeviceRun
        self._opened: list[tuple[int, torch.Tensor]] = []

    def prepare(self) -> Steps:
        """Open the allocations and wait for the trainer's writes. Raises: TransportUnavailable, BucketRefused."""
        for number, allocation in enumerate(self._handle.allocations):
            if number % OPENED_AT_ONCE == OPENED_AT_ONCE - 1:
                yield Pace.GO_ON
            self._opened.append(self._imports.memory(allocation.handle, allocation.size, self._body.bucket))
        while self._handle.event is not None and not self._imports.passed(self._handle.event):
            yield Pace.WAIT

    def values(self, piece: TensorPiece, first: int, count: int, into: torch.Tensor | None) -> DeviceRun:
        """Return elements of a piece, where they are."""
        address, memory = self._opened[piece.place]
        return self._runs(memory, address, piece.offset + first * ITEM_BYTES[piece.dtype], count, piece.dtype)

    def finish(self) -> None:
        """The copies are complete."""

    def close(self) -> None:
        """The update closes what it opened."""
        self._opened.clear()
