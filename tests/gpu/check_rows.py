"""Row and sampler kernels on a card: correctness against torch there and on the CPU, and times.

`python -m tests.gpu.check_rows` compiles side by side, checks, times (`tests.gpu.sampling_times`) and prints a table. The
checks: delta slots and prologues through churn; the bits of the hash; tokens, log-probabilities, kept sets and row state of
each variant at a whole vocabulary; that a plain lane's bits are the same in all; a chi-square over seeds; captured steps with
three in flight, read from pinned memory as their events pass; logits that are not finite.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import deque

import numpy as np
import torch
import triton
import triton.language as tl

from areno.decode.deltas import DeltaPacker
from areno.decode.tables import DecodeTables
from areno.kernels.noise import gumbel, hashes, lane_key
from areno.kernels.reduce import Draw, Splits
from areno.kernels.rows import LaneBuffers, apply_deltas, begin_sample, begin_step, pack_slot
from areno.kernels.sample import SampleWorkspace, sample
from areno.sampling import noise
from areno.sampling.sampler import Sampler
from areno.sampling.variant import Variant
from tests.gpu.sampling_times import compile_all, compile_share, timings
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
    found, on_card, exact = cases.copied(expected, CUDA), cases.copied(expected, CUDA), cases.copied(expected)
    kernels = cases.by_kernels(found, logits.cuda(), variant, num_valid, filter_block=4096)
    reference = cases.by_torch(expected, logits, variant, num_valid)
    error = cases.compare(kernels, reference, found, expected, atol=5e-5)
    theirs = cases.by_torch(on_card, logits.cuda(), variant, num_valid)
    torch_error = cases.compare(kernels, theirs, found, on_card, atol=5e-5)
    exact_error = 0.0
    if not variant.filters:
        exact.slots.bias_values = exact.slots.bias_values.double()
        rows = exact.bucket(lanes)
        drawn = Sampler(first_id=0, width=VOCAB, num_valid_ids=num_valid).draw(logits.double(), rows.params(slots=variant.slots), variant)
        ran = (reference.words[0] > 0) & (drawn.token.numpy() == reference.words[2])
        values = np.stack([drawn.logprob.numpy(), drawn.raw_logprob.numpy(), drawn.behaviour_logprob.numpy()])
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


def check_steps(*, pdl: bool, lanes: int = 8, steps: int = 24) -> dict:
    """Replay a captured step with three in flight and read each ring slot as its event passes, against torch on the CPU."""
    variant = VARIANTS["temperature"]
    rng = np.random.default_rng(9)
    expected = cases.tables(lanes, VOCAB, rng, variant)
    expected.state.page_table[: lanes - 1] = 9
    expected.field("length").fill_(3)
    expected.field("remaining").copy_(torch.from_numpy(rng.integers(2, 2 * steps, lanes)))
    found = cases.copied(expected, CUDA)
    logits = cases.random_logits(rng, lanes, VOCAB)
    on_card = logits.cuda()
    buffers = LaneBuffers.allocate(lanes, CUDA)
    counter = torch.zeros((), dtype=torch.int32, device=CUDA)
    ring = torch.full((4, 6, lanes), -77, dtype=torch.int32).pin_memory()
    workspace = SampleWorkspace.allocate(lanes, VOCAB, CUDA, filters=False)
    embedding, x = torch.randn((VOCAB, 64), device=CUDA).bfloat16(), torch.zeros((lanes, 64), device=CUDA).bfloat16()
    draw = Draw(
        lanes=lanes,
        logits=on_card,
        state=found.state,
        slots=found.slots,
        variant=variant,
        num_valid_ids=NUM_VALID,
        running=buffers.running,
        starved=buffers.starved,
    )

    def step() -> None:
        begin_step(found.state, buffers, counter, embedding, x, page_size=cases.PAGE_SIZE, pdl=pdl)
        sample(draw, workspace, ring, counter, pdl=pdl)

    step()
    torch.cuda.synchronize()
    _restore(found, expected, counter)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    _restore(found, expected, counter)
    torch.cuda.synchronize()
    pending: deque[tuple[int, torch.cuda.Event]] = deque()
    records = []
    for number in range(steps + 3):
        if number < steps:
            graph.replay()
            event = torch.cuda.Event()
            event.record()
            pending.append((number % 4, event))
        if number >= 3:
            place, event = pending.popleft()
            event.synchronize()
            records.append(ring[place].numpy().copy())
    said = 0
    for number, record in enumerate(records):
        told = cases.by_torch(expected, logits, variant, NUM_VALID)
        ran = told.words[0] > 0
        assert record[0].tolist() == told.words[0].tolist(), f"step {number}: status {record[0]}, expected {told.words[0]}"
        assert record[2][ran].tolist() == told.words[2][ran].tolist(), f"step {number}: tokens {record[2]}, expected {told.words[2]}"
        said += int(ran.sum())
    assert said > steps, f"only {said} tokens in {steps} steps"
    return {"name": f"steps in flight, pdl={pdl}", "tokens": said}


def _restore(found: DecodeTables, source: DecodeTables, counter: torch.Tensor) -> None:
    for field in dataclasses.fields(source.state):
        getattr(found.state, field.name).copy_(getattr(source.state, field.name))
    counter.zero_()


def check_broken() -> dict:
    """NaN and +inf anywhere show in the raw log-probability of their lane alone, and every id is in range."""
    rng = np.random.default_rng(6)
    logits = cases.random_logits(rng, 6, VOCAB)
    logits[0, 17], logits[1, VOCAB - 1], logits[2], logits[4, VOCAB - 3] = float("nan"), float("inf"), float("nan"), float("nan")
    for name in ("greedy", "plain", "all"):
        for sums in (True, False):
            made = cases.tables(6, VOCAB, rng, VARIANTS[name])
            made.state.alive.fill_(True)
            made.state.page_table.fill_(9)
            told = cases.by_kernels(cases.copied(made, CUDA), logits.cuda(), VARIANTS[name], NUM_VALID, sums=sums, filter_block=4096)
            finite = np.isfinite(told.floats[1]).tolist()
            assert finite == [False, False, False, True, False, True], f"{name}, sums={sums}: finite {finite}"
            assert ((told.words[2] >= 0) & (told.words[2] < VOCAB)).all(), f"{name}: ids {told.words[2]}"
    return {"name": "broken logits"}


def check() -> list[dict]:
    """Run all checks; raises AssertionError with numbers."""
    found = [check_noise(), check_deltas(), check_bits(), check_broken(), check_distribution()]
    found += [check_variant(name, lanes=8, num_valid=NUM_VALID) for name in VARIANTS]
    found += [check_variant(name, lanes=40, num_valid=VOCAB) for name in ("plain", "temperature")]
    found += [check_steps(pdl=pdl) for pdl in (False, True)]
    assert Splits.of(8, VOCAB).splits * 8 >= 132, "a step of few lanes fills the card"
    return found


def main() -> None:
    if "--compile" in sys.argv:
        place = sys.argv.index("--compile")
        compile_share(int(sys.argv[place + 1]), int(sys.argv[place + 2]))
        return
    compile_all()
    for result in check():
        print("; ".join(f"{name} {value:.1e}" if isinstance(value, float) else f"{value}" for name, value in result.items()))
    timings()


if __name__ == "__main__":
    main()
