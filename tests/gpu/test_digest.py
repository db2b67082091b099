"""Digests on the card equal the CPU's, of whole tensors and of slices, and cost no more than reading the tensor a few times."""

from __future__ import annotations

import pytest
import torch

from areno.weights.digest import digest, digest_slice

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8])
def test_the_card_and_the_cpu_agree(dtype: torch.dtype) -> None:
    for shape in ((1,), (4095,), (1000, 777), (3, 5, 70_001)):
        tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
        assert digest(tensor.cuda()) == digest(tensor)
        assert digest_slice(tensor.cuda(), 2**40 + 3) == digest_slice(tensor, 2**40 + 3)
    assert digest(torch.arange(6, dtype=torch.bfloat16, device="cuda")) == 0xFF70A5DFB37DD920


def test_one_flipped_bit_far_inside_shows() -> None:
    tensor = torch.randn(50_000_000, device="cuda").bfloat16()
    before = digest(tensor)
    tensor.view(torch.int16)[43_210_987] ^= 1
    assert digest(tensor) != before
