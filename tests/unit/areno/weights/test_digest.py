"""Digests: golden values, slices that add up, and every kind of change seen."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch

from areno.weights.digest import MASK64, digest, digest_slice, mix64


def splitmix64(x: int) -> int:
    """The definition in plain integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def plain_digest(tensor: torch.Tensor, start: int = 0) -> int:
    size = tensor.element_size()
    words = tensor.contiguous().view(-1).view(torch.uint8).view(-1, size).tolist()
    return sum(int.from_bytes(bytes(word), sys.byteorder) * (splitmix64(start + i) | 1) for i, word in enumerate(words)) & MASK64


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_golden_values() -> None:
    assert int(mix64(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF
    assert digest(torch.tensor([0.0, 1.0, -1.0])) == 0xD25F4B71B8000000
    assert digest(torch.arange(6, dtype=torch.float32).view(2, 3)) == 0xA5DFB37DD9200000
    assert digest(torch.arange(6, dtype=torch.bfloat16)) == 0xFF70A5DFB37DD920
    assert digest(torch.arange(6, dtype=torch.float16)) == 0xF2F2E3E29D118900
    assert digest(torch.empty(0)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8])
def test_the_digest_is_its_definition_in_every_element_size(dtype: torch.dtype) -> None:
    tensor = (random_tensor(37, 11) * 50).to(dtype)
    assert digest(tensor) == plain_digest(tensor)
    assert digest_slice(tensor, 2**40 + 3) == plain_digest(tensor, 2**40 + 3)


def test_slices_begun_at_their_own_index_add_up_across_chunk_borders() -> None:
    tensor = random_tensor(300_000)
    borders = [0, 1, 777, 131_071, 131_072, 131_073, 262_145, 300_000]
    parts = [digest_slice(tensor[start:end], start) for start, end in itertools.pairwise(borders)]
    assert sum(parts) & MASK64 == digest(tensor)
    assert digest(tensor[:2000]) == plain_digest(tensor[:2000])


def test_far_elements_count_too() -> None:
    tensor = torch.zeros(5_000_000)
    for place in (2_999_999, 4_194_303, 4_194_304, 4_999_999):
        tensor.zero_()[place] = 1.5
        assert digest(tensor) == (0x3FC00000 * (splitmix64(place) | 1)) & MASK64


def test_strides_do_not_matter_but_the_order_of_elements_does() -> None:
    square = random_tensor(64, 64)
    assert digest(square.t().contiguous()) == digest(square.t())
    assert digest(square.t()) != digest(square)
    assert digest(square[1:]) != digest(square[:-1])


def test_every_single_bit_changes_the_digest() -> None:
    tensor = random_tensor(50).bfloat16()
    before, seen = digest(tensor), set()
    for index in (0, 17, 49):
        for bit in range(16):
            changed = tensor.clone()
            changed.view(torch.int16)[index] ^= -(1 << 15) if bit == 15 else 1 << bit
            seen.add(digest(changed))
    assert len(seen) == 48 and before not in seen


def test_equal_values_in_other_dtypes_and_the_two_zeros_differ() -> None:
    assert digest(torch.ones(4)) != digest(torch.ones(4).bfloat16())
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_gradients_and_inference_mode_do_not_disturb() -> None:
    tensor = random_tensor(40, 3)
    with torch.inference_mode():
        inside = digest(tensor)
    assert digest(tensor.clone().requires_grad_()) == inside == plain_digest(tensor)


def test_what_has_no_digest_is_refused() -> None:
    with pytest.raises(TypeError, match=r"complex64.*convert"):
        digest(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"start_index=-1.*pass the index"):
        digest_slice(torch.zeros(2), -1)
