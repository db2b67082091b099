"""The norm's order of rounding is Hugging Face's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from areno.layers.norm import RMSNorm

SIZE = 64


def random_case(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, SIZE, generator=generator) * torch.rand(512, 1, generator=generator) * 10
    return x.to(dtype), (1 + 0.3 * torch.randn(SIZE, generator=generator)).to(dtype)


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    norm = LlamaRMSNorm(SIZE, eps=eps)
    norm.weight.data = weight
    with torch.no_grad():
        return norm(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_the_norm_has_the_bits_of_hugging_faces(dtype: torch.dtype, eps: float) -> None:
    x, weight = random_case(dtype)
    assert torch.equal(RMSNorm(weight, eps, SIZE)(x), reference(x, weight, eps))


def test_rounding_once_at_the_end_would_give_other_bits_in_bf16() -> None:
    x, weight = random_case(torch.bfloat16)
    late = (torch.nn.functional.rms_norm(x.float(), (SIZE,), None, 1e-6) * weight.float()).bfloat16()
    differing = (late != RMSNorm(weight, 1e-6, SIZE)(x)).float().mean()
    assert 0.1 < differing < 0.5, differing


def test_the_rounding_to_bf16_has_no_side() -> None:
    x, weight = random_case(torch.bfloat16)
    exact = reference(x.double(), weight.double(), 1e-6)
    error = RMSNorm(weight, 1e-6, SIZE)(x).double() - exact
    assert error.abs().mean() > 1e-4
    assert error.mean().abs() < 0.02 * error.abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_per_head_norms_each_head_alone(dtype: torch.dtype) -> None:
    x, _ = random_case(dtype)
    heads_THD = x.view(64, 8, SIZE)[:, :5]
    weights = torch.stack([random_case(dtype, seed)[1] for seed in range(5)])
    normed = RMSNorm(weights, 1e-6, SIZE)(heads_THD)
    for head in range(5):
        assert torch.equal(normed[:, head], reference(heads_THD[:, head], weights[head], 1e-6))


def test_the_input_is_left_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = random_case(dtype)
        kept = x.clone()
        RMSNorm(weight, 1e-6, SIZE)(x)
        assert torch.equal(x, kept)
