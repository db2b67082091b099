"""The gated activation between an MLP's two products: silu(gate) * up from the fused projection.

Rounds as `functional.silu(gate).mul_(up)` does in the model's dtype: once after the silu, once after the product.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives a kernel's arguments their types at each launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    token = tl.program_id(0).to(tl.int64)
    source = gate_up + token * (2 * SIZE) + column
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + SIZE, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * SIZE + column, product.to(gate.dtype), mask=inside)


def silu_mul(gate_up_TC: torch.Tensor, out_TI: torch.Tensor, *, block: int = 1024, num_warps: int = 4, pdl: bool = False) -> None:
    """Write silu(gate) * up. Shapes: `gate_up_TC` [T, 2I], gates first; `out_TI` [T, I]. Mutates: `out_TI`."""
    tokens, size = out_TI.shape
    assert gate_up_TC.shape == (tokens, 2 * size), f"gate_up has shape {tuple(gate_up_TC.shape)}, out {tuple(out_TI.shape)}"
    assert gate_up_TC.is_contiguous() and out_TI.is_contiguous(), "gate_up and out must be contiguous"
    assert gate_up_TC.dtype == out_TI.dtype, f"dtypes {gate_up_TC.dtype} and {out_TI.dtype} differ"
    extra = {"launch_pdl": True} if pdl else {}
    _silu_mul_kernel[(tokens, triton.cdiv(size, block))](gate_up_TC, out_TI, SIZE=size, BLOCK=block, PDL=pdl, num_warps=num_warps, **extra)
