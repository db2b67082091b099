"""The gated activation against its torch form, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from areno.kernels.activation import silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "size", "block"), [(1, 32, 16), (5, 96, 64), (3, 1030, 1024)])
def test_silu_mul_equals_the_torch_form(tokens: int, size: int, block: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(tokens, 2 * size, generator=torch.Generator().manual_seed(size)).to(dtype) * 3
    out = torch.full((tokens, size), math.nan, dtype=dtype)
    silu_mul(gate_up, out, block=block)
    gate, up = gate_up.chunk(2, -1)
    expected = functional.silu(gate).mul_(up)
    torch.testing.assert_close(out, expected, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5)
    assert dtype == torch.float32 or (out == expected).float().mean() > 0.99
