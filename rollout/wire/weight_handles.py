"""How a bucket of weights is announced: which parts of which tensors lie where, and the handle that leads to the bytes.

    bucket = `size` bytes, behind one handle          pieces = runs of elements of tensors, at byte offsets in them
    memfd    sealed memory that the trainer holds open; its head repeats bucket and nonce
    shared   a segment of this machine's shared memory that the trainer made, with the same head
    frames   the bytes themselves, as the message's array `content`
    cuda     memory of a CUDA device, by interprocess handles; offsets count from each allocation's base
    group    the next broadcast in a process group that trainer and engine host have joined

Pydantic bodies, read by the codec like all others. Invariant: nothing in here is a path, an address in memory or an object; a
handle names bytes that the engine host can check before it takes them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from rollout.wire.fields import Count, Message, Name, Token16

SEGMENT_PATTERN = r"^areno-push-[0-9]{1,10}-[0-9]{1,20}-[0-9a-f]{8,32}-[0-2]$"
# A segment begins with this head: magic, bucket number, nonce; the bucket's bytes follow.
SEGMENT_MAGIC = b"AREN0WB1"
SEGMENT_HEAD_BYTES = 64
MAX_PIECES = 65_536
MAX_DIMENSIONS = 8
MAX_ALLOCATIONS = 4_096
CUDA_HANDLE_BYTES = 64

Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
FloatName = Literal["float64", "float32", "bfloat16", "float16"]


class TensorPiece(NamedTuple):
    """`size` elements of one tensor from `start` on, flat in row-major order, at byte `offset` of allocation `place`."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    size: int
    offset: int
    place: int


class TensorPieces(Message):
    """Pieces of tensors as columns of one length, see `TensorPiece`; without `places` all lie in place 0.

    Columns, for a bucket may have hundreds: fields of a map for each are read several times as slowly.
    """

    names: Annotated[list[Name], Field(max_length=MAX_PIECES)]
    dtypes: Annotated[list[FloatName], Field(max_length=MAX_PIECES)]
    shapes: Annotated[list[Annotated[list[Count], Field(max_length=MAX_DIMENSIONS)]], Field(max_length=MAX_PIECES)]
    starts: Annotated[list[Count], Field(max_length=MAX_PIECES)]
    counts: Annotated[list[Annotated[int, Field(ge=1, lt=2**63)]], Field(max_length=MAX_PIECES)]
    offsets: Annotated[list[Count], Field(max_length=MAX_PIECES)]
    places: Annotated[list[Count], Field(max_length=MAX_PIECES)] | None = None

    @model_validator(mode="after")
    def _columns_are_alike(self) -> TensorPieces:
        lengths = {name: len(column) for name in type(self).model_fields if (column := getattr(self, name)) is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of one length, not of {lengths}")
        return self

    @cached_property
    def rows(self) -> list[TensorPiece]:
        """The pieces one by one."""
        places = [0] * len(self.names) if self.places is None else self.places
        return list(map(TensorPiece, self.names, self.dtypes, self.shapes, self.starts, self.counts, self.offsets, places))


class SharedHandle(Message):
    """A file of this user in /dev/shm; `nonce` is in its head, so that another machine's file of that name is none."""

    kind: Literal["shared"]
    segment: Annotated[str, Field(pattern=SEGMENT_PATTERN)]
    nonce: Token16


class MemfdHandle(Message):
    """An unnamed file in memory, sealed against shrinking, that `process` holds open as `descriptor`; `nonce` as in `SharedHandle`."""

    kind: Literal["memfd"]
    process: Annotated[int, Field(ge=1, lt=2**31)]
    descriptor: Annotated[int, Field(ge=0, lt=2**31)]
    nonce: Token16


class FramesHandle(Message):
    """The bytes are in the message; their hash is needed."""

    kind: Literal["frames"]


class GroupHandle(Message):
    """The bytes come by the next broadcast of the group of this name; without a name, of the one joined in this update."""

    kind: Literal["group"]
    group: Token16 | None = None


class CudaAllocation(Message):
    """One cudaMalloc allocation: its interprocess handle and size. The driver knows its base; pieces count from there."""

    handle: Annotated[bytes, Field(min_length=CUDA_HANDLE_BYTES, max_length=CUDA_HANDLE_BYTES)]
    size: Count


class CudaHandle(Message):
    """Device memory of the card `device` (its UUID), readable once the interprocess event `event` has passed; None: it is already."""

    kind: Literal["cuda"]
    device: Token16
    event: Annotated[bytes, Field(min_length=CUDA_HANDLE_BYTES, max_length=CUDA_HANDLE_BYTES)] | None = None
    allocations: Annotated[list[CudaAllocation], Field(max_length=MAX_ALLOCATIONS)]


Handle = Annotated[MemfdHandle | SharedHandle | FramesHandle | GroupHandle | CudaHandle, Field(discriminator="kind")]


class WeightsStageBucket(Message):
    """Take a bucket; `bucket` numbers it within its update. A bucket without pieces asks whether the handle can be followed."""

    update_id: Name
    bucket: Count
    size: Count
    pieces: TensorPieces
    handle: Handle
    xxh3: Xxh3 | None = None


class WeightsJoinGroup(Message):
    """Join a process group of two, as rank 1, whose store the trainer keeps at `host`:`port`. With a name it outlives its update."""

    update_id: Name
    host: Name
    port: Annotated[int, Field(ge=1, lt=65536)]
    backend: Literal["gloo", "nccl"]
    device: Token16 | None = None
    timeout_s: Annotated[float, Field(gt=0, le=3600)]
    group: Token16 | None = None
