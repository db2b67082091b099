"""The kernel before attention against the torch layers that it replaces, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from areno.kernels.rope_kv import rope_kv
from areno.layers.norm import RMSNorm
from areno.layers.rope import Rope
from areno.layers.rotary import RotaryAngles, RotaryTable
from tests.crossed import every_pair

CPU = torch.device("cpu")


@every_pair(shape=[(4, 2, 16, False), (9, 3, 32, True), (7, 1, 64, False)], norm=[True, False], dtype=[torch.float32, torch.float16])
def test_rope_kv_equals_the_layers(shape: tuple[int, int, int, bool], norm: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, heads_first = shape
    draw = torch.Generator().manual_seed(heads)
    tokens, page, pages = 5, 4, 6
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=draw).to(dtype)
    positions = torch.tensor([0, 3, 17, 5, 39], dtype=torch.int32)
    slots = torch.tensor([9, 23, 4, 8, 14])
    table = RotaryTable(dim, Rope(theta=1000.0), 40, dtype=dtype, device=CPU)
    weight = torch.randn(heads + kv_heads, dim, generator=draw).to(dtype) if norm else None

    store = torch.full((2, pages, page, kv_heads, dim), math.nan, dtype=dtype)
    keys, values = store.transpose(2, 3).contiguous().transpose(2, 3) if heads_first else store
    q = torch.full((tokens, heads, dim), math.nan, dtype=dtype)
    rope_kv(qkv, positions, slots, table.angles, weight, q, keys, values, eps=1e-5)

    split = qkv.view(tokens, -1, dim).split((heads + kv_heads, kv_heads), 1)
    qk = split[0].clone() if weight is None else RMSNorm(weight, 1e-5, dim)(split[0])
    angles: RotaryAngles = table.select(positions)
    expected_q, expected_k = angles.rotate(qk).split((heads, kv_heads), 1)
    # Half precision pins the order of rounding: another order differs in many elements, another sum in the odd one.
    exact = 0.0 if dtype == torch.float32 else 0.99
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    held_keys, held_values = (part[slots // page, slots % page] for part in (keys, values))
    for got, expected in ((q, expected_q), (held_keys, expected_k)):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert (got == expected).float().mean() >= exact
    assert torch.equal(held_values, split[1])
    untouched = torch.ones(pages * page, dtype=torch.bool)
    untouched[slots] = False
    for part in (keys, values):
        assert part[torch.arange(pages * page)[untouched] // page, torch.arange(pages * page)[untouched] % page].isnan().all()
