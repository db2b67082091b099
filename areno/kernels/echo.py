"""Words read from one place and written to another by a kernel: what the probe of mapped memory runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _echo_kernel(source, target, mask, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(target + place, tl.load(source + place, mask=inside) ^ mask, mask=inside)


def echo(source_n: torch.Tensor, target_n: torch.Tensor, mask: int) -> None:
    """Store each word of `source_n`, exclusive-or `mask`, in `target_n`. Shapes: int32 [n], pinned or on the device."""
    assert source_n.shape == target_n.shape and source_n.dtype == target_n.dtype == torch.int32, "source and target are int32 of one size"
    assert source_n.is_contiguous() and target_n.is_contiguous(), "source and target must be contiguous"
    count = source_n.numel()
    _echo_kernel[(triton.cdiv(count, BLOCK),)](source_n, target_n, mask, count, BLOCK=BLOCK, num_warps=1)
