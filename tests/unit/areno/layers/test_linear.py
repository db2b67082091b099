"""Fused projections give what the separate ones give, and own their rows."""

from __future__ import annotations

import pytest
import torch

from areno.layers.linear import Linear, allocate_linear
from areno.weights.names import ParameterTable

PARTS = {"q_proj": 6, "k_proj": 4, "v_proj": 4}


def fused(dtype: torch.dtype, *, bias: bool) -> tuple[Linear, ParameterTable]:
    table = ParameterTable(dtype, torch.device("cpu"))
    linear = allocate_linear(table, "model.layers.0.self_attn", "qkv_proj", PARTS, 8, bias=bias)
    generator = torch.Generator().manual_seed(0)
    for view in table.views.values():
        view.copy_(torch.randn(view.shape, generator=generator))
    return linear, table


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_projection_is_its_parts_side_by_side(bias: bool) -> None:
    linear, table = fused(torch.float32, bias=bias)
    x = torch.randn(5, 8)
    views = {name.removeprefix("model.layers.0.self_attn."): view for name, view in table.views.items()}
    separate = [torch.nn.functional.linear(x, views[f"{part}.weight"], views.get(f"{part}.bias")) for part in PARTS]
    torch.testing.assert_close(linear(x), torch.cat(separate, -1))
    assert ("q_proj.bias" in views) == bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_adding_to_a_residual_is_projecting_and_adding(dtype: torch.dtype, bias: bool) -> None:
    linear, _ = fused(dtype, bias=bias)
    x, residual = torch.randn(5, 8).to(dtype), torch.randn(5, 14).to(dtype)
    expected = residual + linear(x)
    linear.add_to(residual, x)
    if dtype == torch.bfloat16:
        assert torch.equal(residual, expected), "bf16 rounds the projection before it is added"
    else:
        torch.testing.assert_close(residual, expected)
