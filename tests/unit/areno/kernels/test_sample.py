"""The sampler's kernels against the torch sampler and epilogue, over random lanes, variants and cuts of the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from areno.kernels.noise import gumbel, hashes, lane_key
from areno.kernels.reduce import Splits
from areno.sampling import noise
from areno.sampling.variant import Variant
from tests.unit.areno.kernels import sampling_cases as cases

VARIANTS = {
    "greedy": Variant(),
    "plain": Variant(noise=True),
    "temperature": Variant(noise=True, temperature=True),
    "stop mask": Variant(noise=True, temperature=True, stop_mask=True),
    "slots": Variant(noise=True, slots=True),
    "greedy slots": Variant(slots=True),
    "most": Variant(noise=True, temperature=True, stop_mask=True, slots=True),
}


@triton.jit
def _noise_kernel(seeds, positions, out_bits, out_noise, VOCAB: tl.constexpr):
    row = tl.program_id(0)
    ids = tl.arange(0, VOCAB) * 371
    low, high = lane_key(tl.load(seeds + row), tl.load(positions + row))
    h = hashes(ids, low, high)
    tl.store(out_bits + row * VOCAB + tl.arange(0, VOCAB), h.to(tl.int32, bitcast=True))
    tl.store(out_noise + row * VOCAB + tl.arange(0, VOCAB), gumbel(h))


def test_hashes_have_the_bits_of_numpy_and_noise_its_values() -> None:
    seeds = torch.tensor([0, 1, 7, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
    positions = torch.tensor([1, 2, 3, 40_959, 7, 8, 2**31 - 1], dtype=torch.int32)
    bits, values = torch.zeros((7, 256), dtype=torch.int32), torch.full((7, 256), float("nan"))
    _noise_kernel[(7,)](seeds, positions, bits, values, 256)
    ids = np.arange(256, dtype=np.int64) * 371
    for row in range(7):
        expected = noise.numpy_hashes(int(seeds[row]) % 2**64, int(positions[row]), ids)
        assert np.array_equal(bits[row].numpy().view(np.uint32), expected)
    assert torch.allclose(values, noise.gumbel(seeds, positions, torch.from_numpy(ids).int()), atol=2e-6)


@triton.jit
def _gumbel_kernel(bits, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, gumbel(tl.load(bits + place).to(tl.uint32, bitcast=True)))


def test_noise_is_accurate_at_both_ends() -> None:
    h = np.concatenate([np.arange(32), 2**32 - 1 - np.arange(400), 2 ** np.arange(32), np.arange(1, 49) * 2**26]).astype(np.uint32)
    out = torch.full((512,), float("nan"))
    _gumbel_kernel[(1,)](torch.from_numpy(h.view(np.int32)), out, 512)
    u = np.minimum(((h.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32), np.float32(1 - 2.0**-24)).astype(np.float64)
    assert np.allclose(out, -np.log(-np.log1p(-u)), rtol=3e-7, atol=5e-7)


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_draw_and_advance_as_torch_does(name: str) -> None:
    variant = VARIANTS[name]
    rng = np.random.default_rng(sum(name.encode()))
    lanes, vocab, num_valid = 4, 190, 120
    logits = cases.random_logits(rng, lanes, vocab)
    expected = cases.tables(lanes + 1, vocab, rng, variant)
    found = cases.copied(expected)
    splits = Splits.cut(lanes, vocab, block=64, warps=1, programs=4 if variant.slots else 8)
    for launch in range(2 if name in ("plain", "most") else 1):
        kernels = cases.by_kernels(found, logits, variant, num_valid, splits=splits, launches=launch + 3)
        cases.compare(kernels, cases.by_torch(expected, logits, variant, num_valid), found, expected)


@pytest.mark.parametrize("name", ["greedy", "temperature"])
def test_a_vocabulary_without_ids_to_mask_needs_no_behaviour_logprob(name: str) -> None:
    variant = VARIANTS[name]
    rng = np.random.default_rng(12)
    logits = cases.random_logits(rng, 4, 100)
    expected = cases.tables(4, 100, rng, variant)
    found = cases.copied(expected)
    kernels = cases.by_kernels(found, logits, variant, 100, splits=Splits.cut(4, 100, block=32, warps=1, programs=8))
    cases.compare(kernels, cases.by_torch(expected, logits, variant, 100), found, expected)
    assert np.isnan(kernels.floats[2][kernels.words[0] > 0]).all()


@pytest.mark.parametrize("name", ["plain", "most"])
def test_a_prefill_draws_several_lanes_from_one_logits_row(name: str) -> None:
    variant = VARIANTS[name]
    rng = np.random.default_rng(3)
    logits = cases.random_logits(rng, 2, 100)
    expected = cases.tables(7, 100, rng, variant)
    found = cases.copied(expected)
    places = ([6, 1, 4, 3], [0, 1, 1, 0])
    kernels = cases.by_kernels(found, logits, variant, 90, places)
    cases.compare(kernels, cases.by_torch(expected, logits, variant, 90, places), found, expected)


def test_ties_go_to_the_lowest_id() -> None:
    variant = VARIANTS["greedy"]
    rng = np.random.default_rng(8)
    logits = cases.random_logits(rng, 4, 300, ties=True)
    expected = cases.tables(4, 300, rng, variant)
    found = cases.copied(expected)
    kernels = cases.by_kernels(found, logits, variant, 300, splits=Splits.cut(4, 300, block=64, warps=1, programs=12))
    cases.compare(kernels, cases.by_torch(expected, logits, variant, 300), found, expected)


def _bits(made: cases.DecodeTables, logits: torch.Tensor, variant: Variant, num_valid: int, lane: int) -> list[int]:
    told = cases.by_kernels(cases.copied(made), logits, variant, num_valid, splits=Splits.cut(4, 300, block=64, warps=1, programs=8))
    return [*told.words[:, lane].tolist(), *told.floats[:2, lane].view(np.int32).tolist()]


def test_a_plain_lane_has_the_same_bits_in_every_variant() -> None:
    rng = np.random.default_rng(1)
    logits = cases.random_logits(rng, 4, 300)
    made = cases.tables(4, 300, rng, Variant(noise=True, temperature=True, stop_mask=True, slots=True, filters=True))
    made.state.alive.copy_(torch.arange(4) == 1)
    made.state.page_table.fill_(9)
    for name, value in (("temperature", 1.0), ("sampling_slot", -1), ("stop_wait", 0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        made.field(name)[1] = value
    variants = (VARIANTS["plain"], VARIANTS["temperature"], VARIANTS["slots"], VARIANTS["most"], Variant(noise=True, filters=True))
    known = [_bits(made, logits, variant, 290, 1) for variant in variants]
    assert all(bits == known[0] for bits in known)


@pytest.mark.parametrize("name", ["greedy", "temperature", "most"])
def test_without_sums_the_raw_logprob_is_the_chosen_logit(name: str) -> None:
    variant = VARIANTS[name]
    rng = np.random.default_rng(4)
    logits = cases.random_logits(rng, 4, 300)
    expected = cases.tables(4, 300, rng, variant)
    found = cases.copied(expected)
    reference = cases.by_torch(expected, logits, variant, 290)
    kernels = cases.by_kernels(found, logits, variant, 290, sums=False)
    ran = np.flatnonzero(reference.words[0] > 0)
    assert ran.size and np.isnan(kernels.floats[0, ran]).all() and np.isnan(kernels.floats[2, ran]).all()
    assert np.array_equal(kernels.floats[1, ran], logits.numpy()[ran, kernels.words[2, ran]])
    reference.floats[:, ran] = kernels.floats[:, ran]
    cases.compare(kernels, reference, found, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("name", ["greedy", "most"])
def test_logits_that_are_not_finite_show_in_the_raw_logprob_and_ids_stay_in_range(name: str, sums: bool) -> None:
    variant = VARIANTS[name]
    rng = np.random.default_rng(6)
    logits = cases.random_logits(rng, 5, 190)
    logits[0, 17], logits[1, 189], logits[2], logits[4, 185] = float("nan"), float("inf"), float("nan"), float("nan")
    made = cases.tables(5, 190, rng, variant)
    made.state.alive.fill_(True)
    made.state.page_table.fill_(9)
    told = cases.by_kernels(made, logits, variant, 180, sums=sums, splits=Splits.cut(5, 190, block=64, warps=1, programs=10))
    assert np.isfinite(told.floats[1]).tolist() == [False, False, False, True, False]
    assert ((told.words[2] >= 0) & (told.words[2] < 190)).all()
