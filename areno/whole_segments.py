"""Memory that shares no segment of CUDA's caching allocator, so that it goes back to the device when its tensor gives it up.

The allocator takes a large block from the device in whole units of 2 MiB and hands what is left of the last one to others. A single
small tensor there would keep all of a sleeping engine's keys and values from whoever they were lent to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

UNIT_BYTES = 2 << 20
SMALLEST_BYTES = 10 << 20
"""What is smaller lies in segments that are shared by design."""


def whole_bytes(num_bytes: int, device: torch.device) -> int:
    """Return the bytes that storage of `num_bytes` takes on a device so that nothing is left of its last unit."""
    if device.type != "cuda" or num_bytes < SMALLEST_BYTES:
        return num_bytes
    return -(-num_bytes // UNIT_BYTES) * UNIT_BYTES


def take_again(tensor: torch.Tensor) -> None:
    """Take memory for a tensor whose storage gave it up, as much as before. Mutates: the storage, whose content is anything."""
    tensor.untyped_storage().resize_(whole_bytes(tensor.nbytes, tensor.device))


def full_segment(shape: Sequence[int], value: float, *, dtype: torch.dtype, device: torch.device, pin_memory: bool = False) -> torch.Tensor:
    """Return a contiguous tensor filled with `value`, in storage of `whole_bytes`."""
    elements = math.prod(shape)
    room = whole_bytes(elements * dtype.itemsize, device) // dtype.itemsize
    return torch.full((room,), value, dtype=dtype, device=device, pin_memory=pin_memory)[:elements].view(tuple(shape))
