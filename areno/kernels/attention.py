"""Decode attention over pages: one query token per lane, grouped query heads, a row cut into chunks.

How a row is cut, and the order in which its chunks are merged, depend on its own length alone, so a row's bits are equal in
any company. Chunks reach programs in two ways: a plain grid with a bound on the chunks of a lane, whose programs beyond a
lane's last chunk end at once, or a fixed number of programs that walk over a work list which `build_work_list` makes once
per step for all layers. Both give the same bits. Chunks of a row are merged by the last of them to arrive; the count of
arrivals is zero again when a launch ends.

A lane that does not run attends to one token of page 0. Tokens at or beyond a row's length are never read. The fused form
takes the layer's raw projection instead of q: every program norms and rotates its query heads, that of the last chunk also
k, which it stores with v and merges from registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from areno.kernels.chunk import CHUNK_BITS, decode_kernel, work_kernel

LOG2E = math.log2(math.e)
COMBINED_AT_ONCE = 8
PROGRAMS_PER_PROCESSOR = 3
MAX_REGISTERS = 168
"""The most with which so many programs of four warps share a multiprocessor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How rows are cut and chunks are computed; one engine keeps to one, since a row's bits depend on it.

    A row is cut into chunks of `short_chunk` tokens; while that makes more than `split` of them, the chunk doubles, up to
    `long_chunk`. A chunk is read `block` tokens at a time.
    """

    short_chunk: int = 512
    long_chunk: int = 512
    split: int = 2
    block: int = 64
    num_warps: int = 2
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name in ("short_chunk", "long_chunk", "block"):
            value = getattr(self, name)
            assert value & (value - 1) == 0, f"{name}={value} is not a power of two"
        assert self.block <= self.short_chunk <= self.long_chunk, "a chunk holds at least one block"

    @property
    def doublings(self) -> int:
        """How often the chunk of a long row may double."""
        return (self.long_chunk // self.short_chunk).bit_length() - 1

    def max_chunks(self, longest: int) -> int:
        """Return the most chunks of a row of at most `longest` tokens."""
        most, size = 1, self.short_chunk
        while longest > self.split * size and size < self.long_chunk:
            most, size = max(most, self.split), size * 2
        return max(most, -(-longest // size))


TILING = Tiling()
FEW_ROWS_TILING = Tiling(short_chunk=256, num_warps=4, num_stages=3)
MANY_ROWS_TILING = Tiling(block=32, num_warps=1)
"""Measured on an H200: many rows want many small programs at a time, few rows want each to be fast."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results of the items of one launch, reused by the next.

    Shapes: `partials` [B, K, C, H / K, D] and `states` [B, K, C, 2, H / K] (maximum, sum) float32, `arrivals` [B, K] int32, zero
    between launches. B and C may exceed what a launch needs.
    """

    partials: torch.Tensor
    states: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(cls, *, lanes: int, num_heads: int, num_kv_heads: int, head_dim: int, chunks: int, device: torch.device) -> Workspace:
        """Allocate for `lanes` rows of at most `chunks` chunks each (`Tiling.max_chunks` of the longest)."""
        share = num_heads // num_kv_heads
        shape = (lanes, num_kv_heads, chunks)
        return cls(
            torch.empty((*shape, share, head_dim), device=device),
            torch.empty((*shape, 2, share), device=device),
            torch.zeros((lanes, num_kv_heads), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class WorkList:
    """Chunks of all lanes of a step, long chunks first. Shapes: `items` [B * C] int32 (lane << 16 | chunk), `count` [1] int32."""

    items: torch.Tensor
    count: torch.Tensor

    @classmethod
    def allocate(cls, *, lanes: int, chunks: int, device: torch.device) -> WorkList:
        """Allocate for `lanes` rows of at most `chunks` chunks each."""
        assert lanes <= 1 << 15 and chunks <= 1 << CHUNK_BITS.value, f"{lanes} lanes of {chunks} chunks do not fit an item's 32 bits"
        return cls(
            torch.zeros(lanes * chunks, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


def build_work_list(
    lengths_B: torch.Tensor,
    running_B: torch.Tensor,
    work: WorkList,
    *,
    max_chunks: int,
    page_size: int,
    window: int = 0,
    tiling: Tiling = TILING,
    pdl: bool = False,
) -> None:
    """List the chunks of a step for the layers of one window. Shapes: [B]. Mutates: `work`."""
    (lanes,) = lengths_B.shape
    assert page_size & (page_size - 1) == 0, f"G={page_size} must be a power of two"
    assert running_B.shape == (lanes,) and lanes * max_chunks <= work.items.numel(), f"{lanes} lanes of {max_chunks} chunks do not fit"
    extra = {"launch_pdl": True} if pdl else {}
    work_kernel[(max_chunks,)](
        lengths_B,
        running_B,
        work.items,
        work.count,
        lanes,
        LANES=triton.next_power_of_2(lanes),
        WINDOW=window,
        BLOCK=tiling.block,
        SHORT=tiling.short_chunk,
        DOUBLINGS=tiling.doublings,
        SPLIT=tiling.split,
        PDL=pdl,
        **extra,
    )


def decode_attention(
    q_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_RP: torch.Tensor,
    lengths_B: torch.Tensor,
    running_B: torch.Tensor,
    out_BHD: torch.Tensor,
    workspace: Workspace,
    *,
    scale: float,
    max_chunks: int,
    window: int = 0,
    work: WorkList | None = None,
    num_programs: int = 0,
    tiling: Tiling = TILING,
    pdl: bool = False,
) -> None:
    """Attend with one query per lane to the tokens of its row, this step's included.

    With `work`, `num_programs` programs walk over that list; without, the grid has `max_chunks` chunks for each lane (no row
    may have more).

    Shapes: `q_BHD` and `out_BHD` [B, H, D]; `keys` and `values` [N, G, K, D] in any strides with D contiguous; `page_table_RP` [R, P];
    `lengths_B` int32 >= 1, `running_B` bool or uint8. `window` 0 sees all tokens.
    Mutates: `out_BHD`, `workspace`.
    """
    assert q_BHD.shape == out_BHD.shape and q_BHD.is_contiguous() and q_BHD.dtype == keys.dtype, f"q has shape {tuple(q_BHD.shape)}"
    _launch(
        q_BHD, None, None, 0.0, keys, values, page_table_RP, lengths_B, running_B, out_BHD, workspace,
        scale=scale, max_chunks=max_chunks, window=window, work=work, num_programs=num_programs, tiling=tiling, pdl=pdl,
    )  # fmt: skip


def decode_attention_fused(
    qkv_BC: torch.Tensor,
    qk_norm_weight: torch.Tensor | None,
    angles: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_RP: torch.Tensor,
    lengths_B: torch.Tensor,
    running_B: torch.Tensor,
    out_BHD: torch.Tensor,
    workspace: Workspace,
    *,
    eps: float,
    scale: float,
    max_chunks: int,
    window: int = 0,
    work: WorkList | None = None,
    num_programs: int = 0,
    tiling: Tiling = TILING,
    pdl: bool = False,
) -> None:
    """Norm, rotate, store and attend: `rope_kv` and `decode_attention` in one launch. A lane that does not run stores nothing.

    Shapes: `qkv_BC` [B, (H + 2K) * D], `qk_norm_weight` [H + K, D] or None, `angles` [positions, 2, 1, D]; the rest as there.
    Mutates: `out_BHD`, `workspace`, and in `keys` and `values` the slot of each running lane's token.
    """
    lanes, num_heads, head_dim = out_BHD.shape
    num_kv_heads = keys.shape[2]
    assert qkv_BC.shape == (lanes, (num_heads + 2 * num_kv_heads) * head_dim), f"qkv has shape {tuple(qkv_BC.shape)}"
    assert qkv_BC.is_contiguous() and qkv_BC.dtype == keys.dtype and angles.is_contiguous(), "qkv and the angles must be contiguous"
    assert angles.shape[1:] == (2, 1, head_dim), f"angles have shape {tuple(angles.shape)}"
    if qk_norm_weight is not None:
        assert qk_norm_weight.shape == (num_heads + num_kv_heads, head_dim) and qk_norm_weight.is_contiguous()
    _launch(
        qkv_BC, qk_norm_weight, angles, eps, keys, values, page_table_RP, lengths_B, running_B, out_BHD, workspace,
        scale=scale, max_chunks=max_chunks, window=window, work=work, num_programs=num_programs, tiling=tiling, pdl=pdl,
    )  # fmt: skip


def _launch(
    q: torch.Tensor,
    weight: torch.Tensor | None,
    angles: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_RP: torch.Tensor,
    lengths_B: torch.Tensor,
    running_B: torch.Tensor,
    out_BHD: torch.Tensor,
    workspace: Workspace,
    *,
    scale: float,
    max_chunks: int,
    window: int,
    work: WorkList | None,
    num_programs: int,
    tiling: Tiling,
    pdl: bool,
) -> None:
    lanes, num_heads, head_dim = out_BHD.shape
    _, page_size, num_kv_heads, _ = keys.shape
    share = num_heads // num_kv_heads
    assert head_dim & (head_dim - 1) == 0 and page_size & (page_size - 1) == 0, f"D={head_dim} and G={page_size} must be powers of two"
    assert keys.stride() == values.stride() and keys.stride(3) == 1, "keys and values need equal strides with D contiguous"
    assert out_BHD.is_contiguous() and page_table_RP.stride(1) == 1, "the output and the page table's rows must be contiguous"
    assert lengths_B.shape == running_B.shape == (lanes,) and page_table_RP.shape[0] >= lanes, f"{lanes} lanes"
    assert workspace.partials.shape[1:] == (num_kv_heads, workspace.states.shape[2], share, head_dim), "the workspace is of another model"
    assert workspace.partials.shape[0] >= lanes and workspace.partials.shape[2] >= max_chunks, "the workspace is too small"
    assert work is None or num_programs > 0, "a work list needs a number of programs"
    width = triton.next_power_of_2(share)
    extra = {"launch_pdl": True} if pdl else {}
    grid = (num_kv_heads, lanes, max_chunks) if work is None else (num_programs,)
    decode_kernel[grid](
        q, keys, values, page_table_RP, lengths_B, running_B, out_BHD, workspace.partials, workspace.states, workspace.arrivals,
        weight, angles, None if work is None else work.items, None if work is None else work.count,
        scale * LOG2E, eps, page_table_RP.stride(0), workspace.partials.shape[2], keys.stride(0), keys.stride(1), keys.stride(2),
        K=num_kv_heads, SHARE=share, G=page_size, D=head_dim, HEADS=max(width, 16), WIDTH=width, WINDOW=window,
        BLOCK=tiling.block, SHORT=tiling.short_chunk, DOUBLINGS=tiling.doublings, SPLIT=tiling.split, STAGES=tiling.num_stages,
        AT_ONCE=COMBINED_AT_ONCE, FUSED=angles is not None, NORM=weight is not None, LISTED=work is not None, PDL=pdl,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, maxnreg=MAX_REGISTERS if tiling.num_warps == 4 else None, **extra,
    )  # fmt: skip
