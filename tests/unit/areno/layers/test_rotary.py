"""Rotary positions against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from areno.layers.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from areno.layers.rotary import RotaryTable, frequencies

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
    table = RotaryTable(head_dim, Rope(theta=theta), 4096, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(table.select(positions_T).rotate(x_THD), reference(x_THD, positions_T, theta), atol=1e-6, rtol=0)


def test_rotation_in_bf16_is_within_one_rounding_of_transformers() -> None:
    x_THD = torch.randn(40, 6, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    positions_T = torch.arange(40) * 7
    rotated = RotaryTable(32, Rope(theta=1e4), 512, dtype=torch.bfloat16, device=CPU).select(positions_T).rotate(x_THD)
    expected = reference(x_THD, positions_T, 1e4)
    assert rotated.dtype == torch.bfloat16
    # Each product is below 4 and rounded once by transformers: half a unit in the last of 8 bits, twice.
    torch.testing.assert_close(rotated, expected, atol=2**-6, rtol=2**-7)


def test_position_zero_changes_nothing_and_the_input_stays() -> None:
    x_THD = torch.randn(3, 2, 8)
    kept = x_THD.clone()
    angles = RotaryTable(8, Rope(theta=1e4), 16, dtype=torch.float32, device=CPU).select(torch.tensor([0, 0, 5]))
    rotated = angles.rotate(x_THD)
    assert torch.equal(rotated[:2], x_THD[:2])
    assert not torch.allclose(rotated[2], x_THD[2])
    assert torch.equal(x_THD, kept)


def test_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(3)).double().float().unbind(0)
    table = RotaryTable(32, Rope(theta=1e4), 512, dtype=torch.float32, device=CPU)

    def score(at: int, distance: int) -> float:
        rotated_q = table.select(torch.tensor([at + distance])).rotate(q)
        return float((rotated_q * table.select(torch.tensor([at])).rotate(k)).sum())

    assert score(0, 9) == pytest.approx(score(400, 9), abs=1e-3)
    assert score(0, 9) != pytest.approx(score(0, 10), abs=1e-2)


def yarn(**changes: Any) -> YarnScaling:
    values = {"magnitude": 1.0, "fast_turns": 32.0, "slow_turns": 1.0, "whole_dimensions": True}
    return YarnScaling(**{"factor": 4.0, "original_positions": 32768, **values, **changes})


SCALINGS: list[tuple[dict[str, Any], Any]] = [
    ({"rope_type": "linear", "factor": 2.5}, LinearScaling(factor=2.5)),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        Llama3Scaling(factor=8.0, low_turns=1.0, high_turns=4.0, original_positions=8192),
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 3.7,
            "low_freq_factor": 0.3,
            "high_freq_factor": 9.9,
            "original_max_position_embeddings": 100,
        },
        Llama3Scaling(factor=3.7, low_turns=0.3, high_turns=9.9, original_positions=100),
    ),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, yarn()),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "truncate": False}, yarn(whole_dimensions=False)),
    (
        {"rope_type": "yarn", "factor": 40, "beta_fast": 8, "beta_slow": 2.5, "original_max_position_embeddings": 4096, "truncate": False},
        yarn(factor=40.0, fast_turns=8.0, slow_turns=2.5, original_positions=4096, whole_dimensions=False),
    ),
    # The ramp is clipped on both sides, has no width, or lies outside all dimensions.
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 7}, yarn(original_positions=7)),
    (
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2, "beta_slow": 2, "original_max_position_embeddings": 500, "truncate": False},
        yarn(fast_turns=2.0, slow_turns=2.0, original_positions=500, whole_dimensions=False),
    ),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**9}, yarn(original_positions=10**9)),
]


@pytest.mark.parametrize(("parameters", "scaling"), SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(16, 1e4), (64, 5e5), (128, 1e6)])
def test_stretched_frequencies_are_those_of_transformers(parameters: dict[str, Any], scaling: Any, head_dim: int, theta: float) -> None:
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=131072)
    config.rope_parameters = {**parameters, "rope_theta": theta}
    expected, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    torch.testing.assert_close(frequencies(head_dim, Rope(theta=theta, scaling=scaling)), expected, atol=0, rtol=2e-7)


def test_yarns_magnitude_scales_the_angles_before_they_are_rounded() -> None:
    plain = RotaryTable(32, Rope(theta=1e4, scaling=yarn()), 64, dtype=torch.float32, device=CPU).select(torch.arange(64))
    for dtype in (torch.float32, torch.bfloat16):
        scaled = RotaryTable(32, Rope(theta=1e4, scaling=yarn(magnitude=1.3)), 64, dtype=dtype, device=CPU).select(torch.arange(64))
        assert torch.equal(scaled.cos, (plain.cos * 1.3).to(dtype)) and torch.equal(scaled.sin, (plain.sin * 1.3).to(dtype))
