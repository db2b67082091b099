"""Norm kernels against the torch layer, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from areno.kernels.norm import add_rms_norm, rms_norm
from areno.layers.norm import RMSNorm


def check_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    half = got.dtype == torch.float16
    torch.testing.assert_close(got, expected, rtol=2e-3 if half else 1e-5, atol=2e-3 if half else 1e-5)
    # Another order of rounding would differ in many elements of half precision.
    assert not half or (got == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [16, 96, 1024])
def test_the_kernels_equal_the_layer(size: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(size)
    x, delta = (torch.randn(5, size, generator=draw).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=draw).to(dtype)
    layer = RMSNorm(weight, 1e-3, size)
    out = torch.full_like(x, math.nan)
    rms_norm(x, weight, 1e-3, out)
    check_close(out, layer(x))

    out.fill_(math.nan)
    total = x + delta
    add_rms_norm(x, delta, weight, 1e-3, out)
    assert torch.equal(x, total)
    check_close(out, layer(total))
