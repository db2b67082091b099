"""Small host arrays on their way to the device: one pinned buffer, one asynchronous copy, views of it.

The allocator of pinned memory gives a buffer out again only after the copy that reads it has passed, so nothing here waits
for the device. On the CPU the arrays themselves are wrapped. Callers are the executor and the prefill.
"""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 16


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Return the arrays as tensors on `device`, in stream order; the arrays may be changed afterwards only on CUDA.

    Shapes: kept. Arrays must be contiguous.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    staged = torch.empty(max(starts[-1], 1), dtype=torch.uint8, pin_memory=True)
    view = staged.numpy()
    for start, array in zip(starts, arrays):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    sent = staged.to(device, non_blocking=True)
    parts = []
    for start, array in zip(starts, arrays):
        kind = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        parts.append(sent[start : start + array.nbytes].view(kind).view(array.shape))
    return parts
