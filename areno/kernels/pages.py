"""Whole pages of the K/V store, copied in every layer by one launch.

A fork copies the partly filled page of a row, a tail hit that of a finished one. The page lists are device tensors, so
nothing is asked of the host. Sources and targets of one launch are disjoint: programs run in any order, and one that read a
page which another writes would see either content. `kv.store` cuts its lists so.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives a kernel's arguments their types at each launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _copy_kernel(keys, values, sources, targets, num_blocks, stride_layer, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    page = tl.program_id(0) // num_blocks
    place = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    layer = tl.program_id(1).to(tl.int64) * stride_layer
    source = layer + tl.load(sources + page).to(tl.int64) * SIZE + place
    target = layer + tl.load(targets + page).to(tl.int64) * SIZE + place
    key = tl.load(keys + source, mask=inside)
    value = tl.load(values + source, mask=inside)
    tl.store(keys + target, key, mask=inside)
    tl.store(values + target, value, mask=inside)


def copy_pages(keys: torch.Tensor, values: torch.Tensor, sources_n: torch.Tensor, targets_n: torch.Tensor) -> None:
    """Copy pages `sources_n` over pages `targets_n` in every layer; no page is in both lists, no target is twice in its own.

    Shapes: `keys` and `values` [L, N, ...], contiguous; lists [n], int32 or int64, on their device. Mutates: the target pages.
    """
    assert sources_n.shape == targets_n.shape, f"{tuple(sources_n.shape)} sources for {tuple(targets_n.shape)} targets"
    assert keys.shape == values.shape and keys.dtype == values.dtype, "keys and values differ in shape or dtype"
    assert keys.is_contiguous() and values.is_contiguous(), "keys and values must be contiguous"
    num_layers, num_pages = keys.shape[:2]
    count = targets_n.numel()
    if count == 0:
        return
    size = keys.numel() // (num_layers * num_pages)
    block = min(BLOCK, triton.next_power_of_2(size))
    num_blocks = triton.cdiv(size, block)
    _copy_kernel[(count * num_blocks, num_layers)](keys, values, sources_n, targets_n, num_blocks, keys.stride(0), SIZE=size, BLOCK=block)
