"""Rotary positions against transformers' own functions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from areno.layers.rotary import RotaryTable

CPU = torch.device("cpu")


def reference(x_THD: torch.Tensor, positions_T: torch.Tensor, theta: float) -> torch.Tensor:
    head_dim = x_THD.shape[-1]
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, rope_parameters={"rope_type": "default", "rope_theta": theta})
    cos, sin = LlamaRotaryEmbedding(config)(x_THD, positions_T[None])
    rotated, _ = apply_rotary_pos_emb(x_THD[None], x_THD[None], cos, sin, unsqueeze_dim=2)
    return rotated[0]


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [16, 32, 128])
def test_rotation_is_that_of_transformers_in_fp32(theta: float, head_dim: int) -> None:
    x_THD = torch.randn(40, 6, head_dim, generator=torch.Generator().manual_seed(1))
    positions_T = torch.randint(0, 4000, (40,), generator=torch.Generator().manual_seed(2))
    table = RotaryTable(head_dim, theta, 4096, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(table.select(positions_T).rotate(x_THD), reference(x_THD, positions_T, theta), atol=1e-6, rtol=0)


def test_rotation_in_bf16_is_within_one_rounding_of_transformers() -> None:
    x_THD = torch.randn(40, 6, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    positions_T = torch.arange(40) * 7
    rotated = RotaryTable(32, 1e4, 512, dtype=torch.bfloat16, device=CPU).select(positions_T).rotate(x_THD)
    expected = reference(x_THD, positions_T, 1e4)
    assert rotated.dtype == torch.bfloat16
    # Each product is below 4 and rounded once by transformers: half a unit in the last of 8 bits, twice.
    torch.testing.assert_close(rotated, expected, atol=2**-6, rtol=2**-7)


def test_position_zero_changes_nothing_and_the_input_stays() -> None:
    x_THD = torch.randn(3, 2, 8)
    kept = x_THD.clone()
    angles = RotaryTable(8, 1e4, 16, dtype=torch.float32, device=CPU).select(torch.tensor([0, 0, 5]))
    rotated = angles.rotate(x_THD)
    assert torch.equal(rotated[:2], x_THD[:2])
    assert not torch.allclose(rotated[2], x_THD[2])
    assert torch.equal(x_THD, kept)


def test_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(3)).double().float().unbind(0)
    table = RotaryTable(32, 1e4, 512, dtype=torch.float32, device=CPU)

    def score(at: int, distance: int) -> float:
        rotated_q = table.select(torch.tensor([at + distance])).rotate(q)
        return float((rotated_q * table.select(torch.tensor([at])).rotate(k)).sum())

    assert score(0, 9) == pytest.approx(score(400, 9), abs=1e-3)
    assert score(0, 9) != pytest.approx(score(0, 10), abs=1e-2)
