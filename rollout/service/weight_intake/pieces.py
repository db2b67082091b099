"""Buckets in general: what may be announced, and how the pieces of one reach the engine.

`intake` calls `check_pieces` when a bucket is announced and steps through `stage_pieces` between the engine's steps. Invariant:
the slices of a tensor that the engine gets have the same bounds whenever a bucket comes again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rollout.errors import BucketRefused
from rollout.wire.weight_handles import CudaHandle, TensorPiece, WeightsStageBucket

if TYPE_CHECKING:
    import torch

    from areno.weights.slices import DeviceRun

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Small enough for the caches and for a decode step to wait for; large enough that a slice's checks cost little beside its copy.
HOST_SLICE_BYTES = 4 * 2**20
# On a device that many slices, or bytes, are handed over between two looks at everything else.
DEVICE_SLICES, DEVICE_BYTES = 128, 2**32


class Pace(enum.Enum):
    """What a step of staging leaves to be done before the next one."""

    GO_ON = "go on"
    # There is nothing to do but wait.
    WAIT = "wait"
    # The device copies; another bucket may be taken meanwhile.
    COPIES = "copies"


Steps = Generator[Pace, None, None]


class SliceEngine(Protocol):
    """What takes slices, in memory of its own if it opens one; on a device it may copy them later, at the latest in `settle_slices`.

    `launch_slices` begins those copies and returns what `slices_copied` asks about, None where all are over.
    """

    def open_slice(self, name: str, *, start: int, count: int, spec: Any) -> Any: ...
    def close_slice(self, filled: Any) -> None: ...
    def stage_slices(self, slices: Sequence[Any]) -> None: ...
    def launch_slices(self) -> object | None: ...
    def slices_copied(self, launched: Any) -> bool: ...
    def settle_slices(self) -> None: ...


class BucketSource(Protocol):
    """Where a bucket's bytes are; `slice_bytes` is the most that it gives at once.

    `values` are readable until the next call, or until the bucket ends (`stays`), and another bucket may begin before that where their
    memory is the bucket's `own`; a source that copies them anyway does so into the memory that it is given.
    """

    slice_bytes: int

    @property
    def own(self) -> bool: ...

    @property
    def stays(self) -> bool: ...

    def prepare(self) -> Steps: ...
    def values(self, piece: TensorPiece, first: int, count: int, into: torch.Tensor | None) -> torch.Tensor | DeviceRun: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


def refused(bucket: int, what: str, limit: str, remedy: str = "send the bucket again as it was announced") -> BucketRefused:
    """Return the error for a bucket that is not what it says."""
    return BucketRefused(f"bucket {bucket} is refused: {what}", field="bucket", value=bucket, limit=limit, remedy=remedy)


def check_pieces(body: WeightsStageBucket) -> None:
    """Check that every piece lies in its tensor and in its memory. Raises: BucketRefused."""
    sizes = [one.size for one in body.handle.allocations] if isinstance(body.handle, CudaHandle) else [body.size]
    for piece in body.pieces.rows:
        elements, item = math.prod(piece.shape), ITEM_BYTES[piece.dtype]
        if piece.start + piece.size > elements:
            raise refused(
                body.bucket, f"{piece.name} has elements {piece.start} to {piece.start + piece.size}", f"its shape makes {elements}"
            )
        if piece.place >= len(sizes):
            raise refused(body.bucket, f"{piece.name} lies in place {piece.place}", f"{len(sizes)} were announced")
        if piece.offset % item or piece.offset + piece.size * item > sizes[piece.place]:
            raise refused(
                body.bucket,
                f"{piece.name} lies in bytes {piece.offset} to {piece.offset + piece.size * item}",
                f"offsets are multiples of {item}, and {sizes[piece.place]} bytes were announced",
            )


def stage_pieces(engine: SliceEngine, body: WeightsStageBucket, source: BucketSource, device: torch.device) -> Steps:
    """Hand a bucket to the engine, yielding between bounded slices; on a device many are launched at a time.

    Raises: BucketRefused, and what the engine refuses.
    """
    on_host = device.type == "cpu"
    yield from _stage_slices(engine, body, source, slices=1 if on_host else DEVICE_SLICES, num_bytes=1 if on_host else DEVICE_BYTES)
    source.finish()


def _stage_slices(engine: SliceEngine, body: WeightsStageBucket, source: BucketSource, *, slices: int, num_bytes: int) -> Steps:
    from areno.weights.names import TensorSpec
    from areno.weights.slices import Slice

    yield from source.prepare()
    gathered: list[Slice] = []

    def hand_over() -> None:
        if gathered:
            engine.stage_slices(gathered)
            gathered.clear()

    made = moved = 0
    for piece in body.pieces.rows:
        item = ITEM_BYTES[piece.dtype]
        spec = TensorSpec(dtype=piece.dtype, shape=tuple(piece.shape))
        step = max(1, source.slice_bytes // item)
        # A piece is one slice where the engine gives memory for it: its checks are made once, whatever it is filled by.
        opened = None if source.stays or not piece.size else engine.open_slice(piece.name, start=piece.start, count=piece.size, spec=spec)
        for first in range(0, piece.size, step):
            count = min(step, piece.size - first)
            if opened is not None:
                source.values(piece, first, count, opened.values[first : first + count])
                opened.look(count)
            else:
                gathered.append(Slice(piece.name, source.values(piece, first, count, None), piece.start + first, spec))
                if not source.stays:
                    hand_over()
                    engine.settle_slices()
            made, moved = made + 1, moved + count * item
            if made >= slices or moved >= num_bytes:
                hand_over()
                made = moved = 0
                if source.own:
                    engine.launch_slices()
                yield Pace.GO_ON
        if opened is not None:
            engine.close_slice(opened)
    hand_over()
    if not source.own:
        engine.settle_slices()
        return
    launched = engine.launch_slices()
    while launched is not None and not engine.slices_copied(launched):
        yield Pace.COPIES


def device_uuid(device: torch.device) -> bytes:
    """Return the UUID of a CUDA device, by which two processes know that they mean the same one."""
    import uuid

    import torch

    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes


class HostBounce:
    """A few MiB of host memory for slices that have no memory of their own."""

    __slots__ = ("_bytes",)

    def __init__(self, *, pinned: bool) -> None:
        import torch

        self._bytes = torch.empty(HOST_SLICE_BYTES, dtype=torch.uint8, pin_memory=pinned)

    def elements(self, dtype: str, count: int) -> torch.Tensor:
        """Return memory of `count` elements, the same at each call."""
        import torch

        return self._bytes[: count * ITEM_BYTES[dtype]].view(getattr(torch, dtype))


def bytes_of(values: torch.Tensor) -> memoryview:
    """Return a flat host tensor's memory, to be written."""
    import torch

    return values.view(torch.uint8).numpy().data
