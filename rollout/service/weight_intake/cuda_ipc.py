"""Buckets in a trainer's device memory, on this engine's card or one that it can address: opened by interprocess handles.

Each allocation and each event is opened once in an update and closed with it, allocations by every rank of the engine. Copies run on
the stream that stages, from when the trainer's event has passed, which is looked at between steps so that no stream of the engine ever
waits for a trainer; they are complete before the bucket is answered, so the trainer may then write its memory again. Nothing is
dereferenced on the host. Invariant: a piece lies within its allocation by the size that the driver itself reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rollout.errors import TransportUnavailable
from rollout.service.weight_intake.pieces import ITEM_BYTES, Pace, Steps, device_uuid, refused
from rollout.wire.weight_handles import CudaHandle, TensorPiece, WeightsStageBucket

if TYPE_CHECKING:
    import torch

    from areno.interprocess import ImportedMemory
    from areno.weights.slices import DeviceRun

# Opening one takes some 50 us.
OPENED_AT_ONCE = 32


def _unavailable(why: str) -> TransportUnavailable:
    return TransportUnavailable(
        "device memory of another process cannot be opened here",
        field="device",
        limit=why,
        remedy="serve with --device cuda and the package cuda-bindings (extra 'cuda'), or choose another transport",
    )


class CudaImports:
    """What an update has opened of a trainer's memory, by handle. Raises: TransportUnavailable without CUDA or cuda-bindings."""

    def __init__(self, devices: Sequence[torch.device], tell: Callable[[bytes], None]) -> None:
        """`devices`: where the engine's ranks are, rank 0 first; `tell` is called with the handle of each allocation that is opened."""
        if devices[0].type != "cuda":
            raise _unavailable(f"the engine runs on {devices[0].type}")
        from areno.interprocess import DeviceImports, DriverFailure

        self._failure, self._devices, self._tell = DriverFailure, devices, tell
        self._told: set[bytes] = set()
        self._reachable: set[bytes] = set()
        try:
            self._imports = DeviceImports(devices[0])
        except DriverFailure as error:
            raise _unavailable(str(error)) from None

    def check_device(self, uuid: bytes) -> None:
        """Check, once in an update, that every rank's card can address the trainer's. Raises: TransportUnavailable."""
        if uuid in self._reachable:
            return
        import torch

        uuids = [device_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        if uuid not in uuids:
            raise _unavailable("the trainer's card is not visible to the engine host")
        index = uuids.index(uuid)
        for device in self._devices:
            mine = device.index or 0
            if index != mine and not torch.cuda.can_device_access_peer(mine, index):
                raise _unavailable(f"card {mine} cannot address card {index}")
        self._reachable.add(uuid)

    def memory(self, handle: bytes, size: int, bucket: int) -> ImportedMemory:
        """Return an allocation on the device. Raises: TransportUnavailable, BucketRefused for a wrong size."""
        try:
            found = self._imports.memory(handle)
        except self._failure as error:
            raise _unavailable(str(error)) from None
        if handle not in self._told:
            self._told.add(handle)
            self._tell(handle)
        if size > found.size:
            raise refused(bucket, f"an allocation of {size} bytes was announced", f"the driver says that it has {found.size}")
        return found

    def passed(self, handle: bytes) -> bool:
        """Tell whether the trainer's event has passed: what it launched before is complete. Raises: TransportUnavailable."""
        try:
            return self._imports.passed(handle)
        except self._failure as error:
            raise _unavailable(str(error)) from None

    def close(self) -> None:
        """Close everything, not here but soon. Nothing may still be copied from it."""
        self._imports.close()


class CudaSource:
    """One bucket in device memory; see the module."""

    # Whole pieces: a copy on the card is over before a smaller one were launched.
    slice_bytes, stays, own = 2**40, True, True

    def __init__(self, body: WeightsStageBucket, handle: CudaHandle, imports: CudaImports) -> None:
        from areno.weights.slices import DeviceRun

        self._body, self._handle, self._imports, self._run_of = body, handle, imports, DeviceRun
        self._opened: list[ImportedMemory] = []
        imports.check_device(handle.device)

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
        opened, handle = self._opened[piece.place], self._handle.allocations[piece.place].handle
        return self._run_of(opened.memory, opened.address, piece.offset + first * ITEM_BYTES[piece.dtype], count, piece.dtype, handle)

    def finish(self) -> None:
        """The copies are complete."""

    def close(self) -> None:
        """The update closes what it opened."""
        self._opened.clear()
