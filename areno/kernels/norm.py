"""Root-mean-square norm, alone and after a residual addition, in the order of rounding of `areno.layers.norm`.

One program holds one token. Normalise in fp32, round to the model's dtype, multiply by the weight in that dtype. The
addition is rounded to the model's dtype before it is normed, as if the two had been separate operations.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives a kernel's arguments their types at each launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl

WARPS = ((1024, 2), (4096, 8), (16384, 16))
"""Warps of a program by the largest row that it holds."""


@triton.jit
def _norm_kernel(
    x,
    delta,
    weight,
    out,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + column
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(x + place, mask=inside, other=0.0)
    dtype = row.dtype
    if ADD:
        row = (row.to(tl.float32) + tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(x + place, row, mask=inside)
    wide = row.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * inverse).to(dtype)
    tl.store(out + place, (normed.to(tl.float32) * scale).to(dtype), mask=inside)


def rms_norm(x_T: torch.Tensor, weight: torch.Tensor, eps: float, out_T: torch.Tensor, *, pdl: bool = False) -> None:
    """Write x / rms(x) * weight. Shapes: x and out [T, hidden], weight [hidden]. Mutates: `out_T`."""
    _launch(x_T, None, weight, eps, out_T, pdl)


def add_rms_norm(
    x_T: torch.Tensor, delta_T: torch.Tensor, weight: torch.Tensor, eps: float, out_T: torch.Tensor, *, pdl: bool = False
) -> None:
    """Add `delta_T` to `x_T`, then norm the sum into `out_T`. Shapes: [T, hidden], weight [hidden]. Mutates: `x_T`, `out_T`."""
    assert delta_T.shape == x_T.shape and delta_T.is_contiguous(), f"delta has shape {tuple(delta_T.shape)}, x {tuple(x_T.shape)}"
    _launch(x_T, delta_T, weight, eps, out_T, pdl)


def _launch(x_T: torch.Tensor, delta_T: torch.Tensor | None, weight: torch.Tensor, eps: float, out_T: torch.Tensor, pdl: bool) -> None:
    tokens, size = x_T.shape
    assert out_T.shape == x_T.shape and weight.shape == (size,), f"out {tuple(out_T.shape)}, weight {tuple(weight.shape)}"
    assert x_T.is_contiguous() and out_T.is_contiguous() and weight.is_contiguous(), "x, out and weight must be contiguous"
    assert x_T.dtype == out_T.dtype == weight.dtype, f"dtypes {x_T.dtype}, {out_T.dtype}, {weight.dtype} differ"
    assert size <= WARPS[-1][0], f"hidden={size} is above {WARPS[-1][0]}, the longest row that a program holds"
    extra = {"launch_pdl": True} if pdl else {}
    _norm_kernel[(tokens,)](
        x_T,
        delta_T,
        weight,
        out_T,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ADD=delta_T is not None,
        PDL=pdl,
        num_warps=next(warps for limit, warps in WARPS if size <= limit),
        **extra,
    )
