"""How tensors are laid into buckets of bounded size: whole where they fit, in runs of elements where they do not.

Transports with buckets of their own pack what a push hands them. Invariant: the same tensors are cut the same way each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer_bridge.weights.names import DTYPE_NAMES

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """`values`, flat, are the elements of tensor `name` from `start` on; they lie at byte `offset` of their bucket."""

    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    values: torch.Tensor


def announced(
    names: list[str], shapes: Sequence[Sequence[int]], starts: list[int], values: Sequence[torch.Tensor], offsets: list[int]
) -> dict[str, list[Any]]:
    """Return pieces as they are announced, in columns: `values` are elements of tensors of `shapes` from `starts` on, at byte `offsets`."""
    return {
        "names": names,
        "dtypes": [DTYPE_NAMES[one.dtype] for one in values],
        "shapes": [list(shape) for shape in shapes],
        "starts": starts,
        "counts": [one.numel() for one in values],
        "offsets": offsets,
    }


@dataclass(frozen=True, slots=True, eq=False)
class PackedBucket:
    """The pieces of one bucket and the bytes that they take."""

    pieces: tuple[Piece, ...]
    size: int

    def fields(self) -> dict[str, list[Any]]:
        """Return the pieces as they are announced."""
        return announced(
            [piece.name for piece in self.pieces],
            [piece.shape for piece in self.pieces],
            [piece.start for piece in self.pieces],
            [piece.values for piece in self.pieces],
            [piece.offset for piece in self.pieces],
        )

    def write(self, memory: torch.Tensor, *, wait: bool = True) -> None:
        """Copy every piece to its place in `memory` (uint8, at least `size` long). Blocks: until the bytes are there, unless told not to.

        Without `wait` pieces on a device are copied by its current stream, and may be written again behind that.
        """
        if not self.pieces:
            return
        values = [piece.values for piece in self.pieces]
        places = [memory[piece.offset : piece.offset + piece.values.nbytes].view(piece.values.dtype) for piece in self.pieces]
        torch._foreach_copy_(places, values, non_blocking=True)
        if wait or not all(one.is_cuda for one in values):
            for device in {one.device for one in (*places, *values) if one.is_cuda}:
                torch.cuda.current_stream(device).synchronize()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack(tensors: Mapping[str, torch.Tensor], capacity: int) -> Iterator[PackedBucket]:
    """Yield buckets of at most `capacity` bytes; a tensor that is larger, or no longer fits the open bucket whole, is cut.

    Tensors are contiguous. Cuts depend on names, sizes and capacity alone.
    """
    pieces: list[Piece] = []
    used = 0
    for name, tensor in tensors.items():
        flat, item, start = tensor.reshape(-1), tensor.element_size(), 0
        while start < flat.numel():
            room = max(0, capacity - used) // item
            left = flat.numel() - start
            if room < left and pieces and (room == 0 or tensor.nbytes <= capacity):
                yield _sealed(pieces)
                pieces, used = [], 0
                continue
            count = min(room, left)
            pieces.append(Piece(name, tuple(tensor.shape), start, used, flat[start : start + count]))
            start += count
            used = _aligned(used + count * item)
    if pieces:
        yield _sealed(pieces)


def _sealed(pieces: Sequence[Piece]) -> PackedBucket:
    last = pieces[-1]
    return PackedBucket(tuple(pieces), last.offset + last.values.nbytes)
