"""Row and sampler kernels on a card: correctness against torch there and on the CPU, and times.

`python -m tests.gpu.check_rows` checks, times (`tests.gpu.sampling_times`) and prints a table; `--grid` also times other cuts of
the vocabulary than the kernels' own. The checks run side by side in threads, since most of their time is compiling, which holds
no lock, and the reference on the CPU. They are: delta slots and prologues through churn; the bits of the hash; tokens,
log-probabilities, kept sets and row state of each variant at a whole vocabulary; that a plain lane's bits are the same in all; a
chi-square over seeds; captured steps with three in flight; logits that are not finite.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from areno.decode.deltas import DeltaPacker
from areno.kernels.noise import gumbel, hashes, lane_key
from areno.kernels.reduce import Splits
from areno.kernels.rows import LaneBuffers, apply_deltas, begin_sample, begin_step, pack_slot
from areno.sampling import noise
from areno.sampling.sampler import Sampler
from areno.sampling.variant import Variant
from tests.gpu.sampling_times import compile_share, finish_compiling, start_compiling, timings
from tests.gpu.steps_in_flight import check_steps, reference_steps
from tests.unit.areno.kernels import row_cases
from tests.unit.areno.kernels import sampling_cases as cases

VOCAB, NUM_VALID = 151_936, 151_669
VARIANTS = {
    "greedy": Variant(),
    "plain": Variant(noise=True),
    "temperature": Variant(noise=True, temperature=True),
    "slots": Variant(noise=True, temperature=True, stop_mask=True, slots=True),
    "filters": Variant(noise=True, temperature=True, filters=True),
    "all": Variant(noise=True, temperature=True, stop_mask=True, slots=True, filters=True, kept=True),
}
CUDA = torch.device("cuda")


@triton.jit
def _noise_kernel(seeds, positions, out_bits, out_noise, SIZE: tl.constexpr):
    row = tl.program_id(0)
    place = row * SIZE + tl.arange(0, SIZE)
    low, high = lane_key(tl.load(seeds + row), tl.load(positions + row))
    h = hashes(tl.arange(0, SIZE) * 37, low, high)
    tl.store(out_bits + place, h.to(tl.int32, bitcast=True))
    tl.store(out_noise + place, gumbel(h))


@triton.jit
def _gumbel_kernel(bits, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, gumbel(tl.load(bits + place).to(tl.uint32, bitcast=True)))


def _exact_noise(h: np.ndarray) -> np.ndarray:
    u = np.minimum(((h.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32), np.float32(1 - 2.0**-24)).astype(np.float64)
    return -np.log(-np.log1p(-u))


def check_noise() -> dict:
    """Compare the bits of h with numpy, and the noise with fp64."""
    seeds = torch.tensor([0, 1, 7, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF, -99])
    positions = torch.tensor([1, 2, 3, 40_959, 7, 8, 2**31 - 1, 1 << 20], dtype=torch.int32)
    bits, values = torch.zeros((8, 4096), dtype=torch.int32, device=CUDA), torch.full((8, 4096), float("nan"), device=CUDA)
    _noise_kernel[(8,)](seeds.cuda(), positions.cuda(), bits, values, 4096)
    ids = np.arange(4096, dtype=np.int64) * 37
    found = bits.cpu().numpy().view(np.uint32)
    for row in range(8):
        expected = noise.numpy_hashes(int(seeds[row]) % 2**64, int(positions[row]), ids)
        assert np.array_equal(found[row], expected), f"h of seed {seeds[row]}: {found[row, :4]}, expected {expected[:4]}"
    error = np.abs(values.cpu().numpy() - _exact_noise(found)).max()
    ends = np.concatenate([np.arange(512), 2**32 - 1 - np.arange(512)]).astype(np.uint32)
    out = torch.full((1024,), float("nan"), device=CUDA)
    _gumbel_kernel[(1,)](torch.from_numpy(ends.view(np.int32)).cuda(), out, 1024)
    error = max(error, np.abs(out.cpu().numpy() - _exact_noise(ends)).max())
    assert error < 3e-6, f"noise is off by {error}"
    return {"name": "noise", "error": float(error)}


def check_deltas(rounds: int = 40) -> dict:
    """Apply random delta slots from pinned memory, and run prologues, against the torch tables on the CPU."""
    rng = np.random.default_rng(0)
    expected = row_cases.empty_tables()
    row_cases.poison(expected.state, rng)
    expected.field("last_token").clamp_(max=row_cases.VOCAB - 1)
    found = row_cases.empty_tables(device=CUDA)
    for field in dataclasses.fields(expected.state):
        getattr(found.state, field.name).copy_(getattr(expected.state, field.name))
    generations = expected.field("generation").tolist()
    buffer = torch.zeros(4096, dtype=torch.int32).pin_memory()
    embedding, counter = torch.randn((row_cases.VOCAB, 1024), device=CUDA).bfloat16(), torch.zeros((), dtype=torch.int32, device=CUDA)
    slots = 0
    for turn in range(rounds):
        packer = DeltaPacker()
        row_cases.random_operations(packer, generations, rng)
        for slot in packer.take():
            expected.apply(slot)
            apply_deltas(buffer, *pack_slot(row_cases.shuffled(slot, rng), buffer.numpy()), found.state)
            torch.cuda.synchronize()
            row_cases.assert_same(found.state, expected.state)
            slots += 1
        lanes, x = LaneBuffers.allocate(row_cases.ROWS, CUDA), torch.full((row_cases.ROWS, 1024), float("nan"), device=CUDA).bfloat16()
        begin_step(found.state, lanes, counter, embedding, x, page_size=row_cases.PAGE_SIZE, pdl=bool(turn % 2))
        plan = expected.bucket(row_cases.ROWS).lanes(row_cases.PAGES * row_cases.PAGE_SIZE)
        for name in LaneBuffers._fields:
            mine, theirs = getattr(lanes, name).tolist(), getattr(plan, name).tolist()
            assert mine == theirs, f"{name}: {mine}, expected {theirs}"
        assert torch.equal(x, embedding[plan.ids.long().cuda()]), "embedding rows"
    begin_sample(counter)
    assert counter.item() == rounds + 1, f"counted {counter.item()} launches of {rounds + 1}"
    return {"name": "deltas", "slots": slots}


def check_variant(name: str, *, lanes: int, num_valid: int) -> dict:
    """Draw and advance at a whole vocabulary, against torch on the CPU and on the card, and log-probabilities in fp64."""
    variant = VARIANTS[name]
    rng = np.random.default_rng(lanes + num_valid)
    logits = cases.random_logits(rng, lanes, VOCAB)
    expected = cases.tables(lanes, VOCAB, rng, variant)
    found, on_card, exact = (cases.copied(expected, CUDA) for _ in range(3))
    kernels = cases.by_kernels(found, logits.cuda(), variant, num_valid, filter_block=4096)
    reference = cases.by_torch(expected, logits, variant, num_valid)
    error = cases.compare(kernels, reference, found, expected, atol=5e-5)
    theirs = cases.by_torch(on_card, logits.cuda(), variant, num_valid)
    torch_error = cases.compare(kernels, theirs, found, on_card, atol=5e-5)
    exact_error = 0.0
    if not variant.filters:
        exact.slots.bias_values = exact.slots.bias_values.double()
        rows = exact.bucket(lanes)
        sampler = Sampler(first_id=0, width=VOCAB, num_valid_ids=num_valid)
        drawn = sampler.draw(logits.cuda().double(), rows.params(slots=variant.slots), variant)
        ran = (reference.words[0] > 0) & (drawn.token.cpu().numpy() == reference.words[2])
        values = torch.stack([drawn.logprob, drawn.raw_logprob, drawn.behaviour_logprob]).cpu().numpy()
        exact_error = float(np.nanmax(np.abs(kernels.floats - values)[:, ran], initial=0.0))
        assert exact_error < 5e-5, f"{name}: log-probabilities are {exact_error} from fp64"
    return {"name": name, "lanes": lanes, "error": error, "torch on the card": torch_error, "fp64": exact_error}


def check_bits() -> dict:
    """A plain lane has the same bits in every variant, and twice the same."""
    rng = np.random.default_rng(2)
    logits = cases.random_logits(rng, 8, VOCAB).cuda()
    made = cases.tables(8, VOCAB, rng, VARIANTS["all"])
    made.state.alive.fill_(True)
    made.state.page_table.fill_(9)
    for name, value in (("temperature", 1.0), ("sampling_slot", -1), ("stop_wait", 0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        made.field(name)[:4] = value
    known = None
    for name in ("plain", "plain", "temperature", "slots", "filters", "all"):
        told = cases.by_kernels(cases.copied(made, CUDA), logits, VARIANTS[name], NUM_VALID, filter_block=4096)
        bits = [told.words[:, :4].tolist(), told.floats[:2, :4].view(np.int32).tolist()]
        assert known is None or bits == known, f"{name}: {bits}, in the plain variant {known}"
        known = bits
    return {"name": "bits of plain lanes"}


def check_distribution(draws: int = 4000, vocab: int = 16) -> dict:
    """Chi-square of one distribution drawn under many seeds, at two temperatures."""
    worst = 0.0
    for temperature in (1.0, 0.6):
        rng = np.random.default_rng(5)
        logits = torch.randn((1, vocab), generator=torch.Generator().manual_seed(3))
        variant = VARIANTS["temperature"]
        made = cases.tables(draws, vocab, rng, variant, CUDA)
        made.state.alive.fill_(True)
        made.field("temperature").fill_(temperature)
        made.field("length").fill_(11)
        made.field("seed").copy_(torch.arange(draws))
        told = cases.by_kernels(made, logits.cuda(), variant, vocab, (list(range(draws)), [0] * draws))
        expected = torch.softmax(logits[0].double() / temperature, 0).numpy() * draws
        counts = np.bincount(told.words[2], minlength=vocab)
        worst = max(worst, float(((counts - expected) ** 2 / expected).sum()))
    assert worst < 45, f"chi-square {worst} of 15 degrees of freedom"
    return {"name": "distribution", "chi_square": worst}


def check_broken(name: str, *, sums: bool) -> dict:
    """NaN and +inf anywhere show in the raw log-probability of their lane alone, and every id is in range."""
    rng = np.random.default_rng(6)
    logits = cases.random_logits(rng, 6, VOCAB)
    logits[0, 17], logits[1, VOCAB - 1], logits[2], logits[4, VOCAB - 3] = float("nan"), float("inf"), float("nan"), float("nan")
    made = cases.tables(6, VOCAB, rng, VARIANTS[name])
    made.state.alive.fill_(True)
    made.state.page_table.fill_(9)
    told = cases.by_kernels(cases.copied(made, CUDA), logits.cuda(), VARIANTS[name], NUM_VALID, sums=sums, filter_block=4096)
    finite = np.isfinite(told.floats[1]).tolist()
    assert finite == [False, False, False, True, False, True], f"{name}, sums={sums}: finite {finite}"
    assert ((told.words[2] >= 0) & (told.words[2] < VOCAB)).all(), f"{name}: ids {told.words[2]}"
    return {"name": f"broken logits, {name}, sums={sums}"}


def _side_by_side(checks: list[Callable[[], dict]]) -> list[dict]:
    """Run checks in threads, those that take longest first; each has tables, logits and random numbers of its own."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda check: check(), checks))


def check() -> list[dict]:
    """Run all checks; raises AssertionError with numbers."""
    torch.cuda.init()
    # First what compiles kernels of its own, then what uses them too: one kernel is not compiled twice at a time.
    found = _side_by_side(
        [
            *(partial(check_variant, name, lanes=8, num_valid=NUM_VALID) for name in reversed(VARIANTS)),
            *(partial(check_broken, name, sums=False) for name in ("all", "plain", "greedy")),
            *(partial(check_variant, name, lanes=40, num_valid=VOCAB) for name in ("plain", "temperature")),
            check_distribution,
            check_deltas,
            check_noise,
        ]
    )
    found += _side_by_side([check_bits, *(partial(check_broken, name, sums=True) for name in ("greedy", "plain", "all"))])
    # Alone: a capture forbids others' allocations.
    steps = reference_steps(VOCAB, NUM_VALID)
    found += [check_steps(steps, pdl=pdl) for pdl in (False, True)]
    assert Splits.of(8, VOCAB).splits * 8 >= 132, "a step of few lanes fills the card"
    return found


def main() -> None:
    if "--compile" in sys.argv:
        place = sys.argv.index("--compile")
        compile_share(int(sys.argv[place + 1]), int(sys.argv[place + 2]), grid="--grid" in sys.argv)
        return
    grid = "--grid" in sys.argv
    compiling = start_compiling(grid=grid)
    for result in check():
        print("; ".join(f"{name} {value:.1e}" if isinstance(value, float) else f"{value}" for name, value in result.items()))
    finish_compiling(compiling)
    timings(grid=grid)


if __name__ == "__main__":
    main()
