"""Fused projections give what the separate ones give, and own their rows."""

from __future__ import annotations

import pytest
import torch

from areno.layers.linear import Linear, SidewaysWeight, _is_steady, allocate_linear
from areno.weights.names import ParameterTable

PARTS = {"q_proj": 6, "k_proj": 4, "v_proj": 4}


def fused(dtype: torch.dtype, *, bias: bool) -> tuple[Linear, ParameterTable]:
    table = ParameterTable(dtype, torch.device("cpu"))
    linear = allocate_linear(table, "model.layers.0.self_attn", "qkv_proj", PARTS, 8, bias=bias, pack=False)
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


@pytest.mark.parametrize("size", [(960, 576), (576, 1536), (576, 576), (14, 8), (8, 16), (264, 128)])
def test_packed_products_give_a_row_the_same_bits_at_any_number_of_rows(size: tuple[int, int]) -> None:
    out_size, in_size = size
    table = ParameterTable(torch.float32, torch.device("cpu"))
    linear = allocate_linear(table, "m", "p", {"p": out_size}, in_size, bias=False, pack=True)
    linear.weight.normal_()
    table.rebuild_derived()
    x = torch.randn(300, in_size)
    whole = linear(x)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, linear.weight), rtol=1e-4, atol=1e-4)
    if linear.packed is None:
        pytest.skip("this torch has no oneDNN")
    for rows in (1, 2, 3, 4, 5, 8, 16, 17, 24, 64, 100, 256):
        assert torch.equal(linear(x[:rows].contiguous()), whole[:rows]), f"{rows} rows"


def test_a_packed_weight_follows_its_weight_when_the_table_rebuilds() -> None:
    table = ParameterTable(torch.float32, torch.device("cpu"))
    linear = allocate_linear(table, "m", "p", {"p": 16}, 32, bias=False, pack=True)
    x = torch.randn(4, 32)
    for _ in range(2):
        linear.weight.normal_()
        table.rebuild_derived()
        torch.testing.assert_close(linear(x), x @ linear.weight.t(), rtol=1e-4, atol=1e-4)


def test_a_weight_not_taller_than_wide_is_multiplied_sideways_where_that_is_steady() -> None:
    table = ParameterTable(torch.float32, torch.device("cpu"))
    wide = allocate_linear(table, "m", "o", {"o": 48}, 64, bias=True, pack=True)
    tall = allocate_linear(table, "m", "q", {"q": 80}, 64, bias=False, pack=True)
    assert isinstance(wide.packed, SidewaysWeight) == _is_steady(48, 64)
    assert not isinstance(tall.packed, SidewaysWeight)
    wide.weight.normal_()
    assert wide.bias is not None
    wide.bias.normal_()
    for rows in (1, 4, 5, 12, 30):
        x, residual = torch.randn(rows, 64), torch.randn(rows, 48)
        expected = residual + torch.nn.functional.linear(x, wide.weight, wide.bias)
        wide.add_to(residual, x)
        torch.testing.assert_close(residual, expected)
