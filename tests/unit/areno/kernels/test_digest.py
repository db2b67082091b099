"""The device's form of the digest against the CPU's, in Triton's interpreter: the same golden values, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from areno.kernels.digest import BLOCK, digest_sum
from areno.weights.digest import MASK64, bits_of, digest, digest_slice


def of_kernel(tensor: torch.Tensor, start: int = 0) -> int:
    return int(digest_sum(bits_of(tensor), start)) & MASK64


def test_golden_values() -> None:
    assert of_kernel(torch.tensor([0.0, 1.0, -1.0])) == 0xD25F4B71B8000000
    assert of_kernel(torch.arange(6, dtype=torch.float32).view(2, 3)) == 0xA5DFB37DD9200000
    assert of_kernel(torch.arange(6, dtype=torch.bfloat16)) == 0xFF70A5DFB37DD920
    assert of_kernel(torch.arange(6, dtype=torch.float16)) == 0xF2F2E3E29D118900
    assert of_kernel(torch.empty(0)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8])
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 7])
def test_it_equals_the_cpus_form_in_every_element_size(dtype: torch.dtype, count: int) -> None:
    tensor = (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 50).to(dtype)
    assert of_kernel(tensor) == digest(tensor)
    assert of_kernel(tensor, 2**40 + 3) == digest_slice(tensor, 2**40 + 3)
