"""The hash is defined on integers: it equals plain integer arithmetic bit for bit, and golden values pin the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from areno.sampling.noise import gumbel, hashes, keys, member_seed, numpy_hashes, splitmix64

SEEDS = (0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF)


def _fmix32(h: int) -> int:
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_splitmix64_has_its_published_first_outputs() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_hashes_have_golden_values() -> None:
    assert numpy_hashes(7, 3, np.array([0, 1, 2, 151935])).tolist() == [1627337105, 3830167624, 3392014983, 1898035607]


@pytest.mark.parametrize("seed", SEEDS)
def test_hashes_equal_integer_arithmetic(seed: int) -> None:
    ids = np.arange(0, 200_000, 371)
    positions = [1, 2, 40_959]
    found = hashes(keys(np.full(3, seed, dtype=np.uint64), np.array(positions, dtype=np.uint64)), ids.astype(np.uint32))
    for row, position in enumerate(positions):
        key = splitmix64(seed ^ splitmix64(position))
        expected = [_fmix32(_fmix32((int(i) + (key & 0xFFFFFFFF)) & 0xFFFFFFFF) ^ key >> 32) for i in ids]
        assert found[row].tolist() == expected
        assert np.array_equal(numpy_hashes(seed, position, ids), found[row])


def test_a_rows_noise_does_not_depend_on_its_neighbours_or_on_the_shard() -> None:
    ids = torch.arange(1000, dtype=torch.int32)
    seeds, positions = torch.tensor([5, 6, -7]), torch.tensor([10, 20, 30])
    together = gumbel(seeds, positions, ids)
    alone = gumbel(seeds[1:2], positions[1:2], ids[500:])
    assert torch.equal(together[1, 500:], alone[0])


def test_noise_is_finite_and_follows_the_gumbel_distribution() -> None:
    noise = gumbel(torch.arange(64), torch.full((64,), 9), torch.arange(20_000, dtype=torch.int32)).double()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772156649) < 0.005
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    for threshold in (-1.0, 0.0, 2.0, 8.0, 11.0):
        expected = 1 - math.exp(-math.exp(-threshold))
        found = (noise > threshold).double().mean().item()
        assert abs(found - expected) < 5 * math.sqrt(expected * (1 - expected) / noise.numel()) + 1e-7


def test_member_seeds_differ_by_index_and_attempt() -> None:
    seeds = {member_seed(3, index, attempt) for index in range(100) for attempt in range(3)}
    assert len(seeds) == 300 and all(0 <= seed < 2**64 for seed in seeds)
