"""Rows, sampling slots and logits at random, drawn from by the torch sampler and by the kernels: for their tests."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from areno.decode.launch import LaneStatus
from areno.decode.tables import DecodeTables
from areno.kernels.filters import FilterWorkspace, KeptRing, find_thresholds
from areno.kernels.reduce import FIELDS, Draw, Splits, reduce_logits
from areno.kernels.sample import finish
from areno.request import MAX_STOP_IDS
from areno.sampling.penalties import SlotTables
from areno.sampling.sampler import Drawn, Sampler
from areno.sampling.slot_content import SlotContent
from areno.sampling.variant import Variant

PAGES, PAGE_SIZE, RING = 4, 8, 3
CPU = torch.device("cpu")


def tables(rows: int, vocab: int, rng: np.random.Generator, variant: Variant, device: torch.device = CPU) -> DecodeTables:
    """Return tables whose rows ask for at least what the variant has; equal for equal generators."""
    slots = SlotTables(num_slots=rows, vocab_size=vocab, max_forced=3, device=device)
    made = DecodeTables(num_rows=rows, pages_per_row=PAGES, page_size=PAGE_SIZE, slots=slots, device=device)
    state = made.state

    def fill(name: str, values: np.ndarray) -> None:
        made.field(name).copy_(torch.from_numpy(values))

    fill("last_token", rng.integers(0, vocab, rows))
    fill("length", rng.integers(0, PAGES * PAGE_SIZE, rows))
    fill("remaining", rng.choice([1, 2, 9], rows))
    fill("generation", rng.integers(0, 99, rows))
    fill("seed", rng.integers(-(2**63), 2**63, rows))
    fill("sampling_slot", np.full(rows, -1))
    temperatures = rng.choice([0.0, 0.3, 1.0, 1.7], rows) if variant.temperature else rng.choice([0.0, 1.0], rows)
    fill("temperature", temperatures if variant.noise else np.zeros(rows))
    fill("top_p", np.ones(rows))
    if variant.stop_mask:
        fill("stop_wait", rng.integers(-1, 3, rows))
    if variant.filters:
        fill("top_k", rng.choice([0, 1, 5, 40, vocab + 9], rows))
        fill("top_p", rng.choice([0.1, 0.9, 1.0], rows))
        fill("min_p", rng.choice([0.0, 0.05, 0.3], rows))
    if variant.slots:
        fill("sampling_slot", np.where(rng.random(rows) < 0.7, rng.permutation(rows), -1))
        slots.fill([(slot, slot_content(vocab, rng)) for slot in range(rows)])
    state.alive.copy_(torch.from_numpy(rng.random(rows) < 0.85))
    state.page_table.copy_(torch.from_numpy(np.where(rng.random((rows, PAGES)) < 0.1, 0, rng.integers(2, 90, (rows, PAGES)))))
    stops = rng.integers(0, vocab, (rows, MAX_STOP_IDS))
    stops[:, rng.integers(1, MAX_STOP_IDS) :] = -1
    stops[rng.random(rows) < 0.3] = -1
    state.stop_ids.copy_(torch.from_numpy(stops))
    return made


def random_logits(rng: np.random.Generator, lanes: int, vocab: int, *, ties: bool = False) -> torch.Tensor:
    """Return logits of various spread and level, a lane each; with `ties` whole numbers."""
    logits = rng.normal(size=(lanes, vocab)) * rng.choice([0.2, 2.0, 8.0], (lanes, 1)) + rng.choice([-20.0, 0.0, 30.0], (lanes, 1))
    return torch.from_numpy(np.round(logits) if ties else logits).float()


def slot_content(vocab: int, rng: np.random.Generator) -> SlotContent:
    """Return a random content: biases or none, penalties or none, forced ids or none."""
    biases = int(rng.choice([0, 3, 40]))
    penalised = rng.random() < 0.5
    return SlotContent(
        forced_ids=rng.integers(0, vocab, int(rng.choice([0, 0, 3]))),
        bias_ids=rng.permutation(vocab)[:biases],
        bias_values=rng.normal(size=biases) * 4,
        repetition=rng.choice([1.0, 1.3, 0.7]) if penalised else 1.0,
        presence=rng.choice([0.0, 0.6]) if penalised else 0.0,
        frequency=rng.choice([0.0, 0.4, -0.2]) if penalised else 0.0,
        prompt_ids=rng.integers(0, vocab, 30),
        output_ids=rng.integers(0, vocab, int(rng.integers(0, 12))),
    )


def copied(source: DecodeTables, device: torch.device = CPU) -> DecodeTables:
    """Return tables with the same contents, on a device."""
    rows, pages = source.state.page_table.shape
    slots = SlotTables(
        num_slots=source.slots.counts.shape[0],
        vocab_size=source.slots.counts.shape[1],
        max_forced=source.slots.forced_ids.shape[1] - 1,
        device=device,
    )
    made = DecodeTables(num_rows=rows, pages_per_row=pages, page_size=source.page_size, slots=slots, device=device)
    for field in dataclasses.fields(source.state):
        getattr(made.state, field.name).copy_(getattr(source.state, field.name))
    for name in SlotTables.__slots__:
        getattr(made.slots, name).copy_(getattr(source.slots, name))
    return made


class Told:
    """What a launch said of its lanes; `write` is what the torch epilogue calls.

    Shapes: `words` int32 [3, B] are status, generation and token, `floats` [3, B] the log-probabilities; kept sets [B, 64], [B].
    """

    def __init__(self) -> None:
        self.words, self.floats = np.zeros((3, 0), dtype=np.int32), np.zeros((3, 0), dtype=np.float32)
        self.kept_ids: np.ndarray | None = None
        self.kept_count: np.ndarray | None = None

    def write(self, status: torch.Tensor, generation: torch.Tensor, token: torch.Tensor, drawn: Drawn) -> None:
        """Keep what was said."""
        self.words = np.stack([values.cpu().numpy().copy() for values in (status, generation, token)])
        floats = (drawn.logprob, drawn.raw_logprob, drawn.behaviour_logprob)
        self.floats = np.stack([values.cpu().numpy().copy() for values in floats])
        if drawn.kept_ids is not None and drawn.kept_count is not None:
            self.kept_ids, self.kept_count = drawn.kept_ids.cpu().numpy(), drawn.kept_count.cpu().numpy()


Places = tuple[list[int], list[int]]
"""Rows and logits rows of a prefill's lanes."""


def by_torch(made: DecodeTables, logits: torch.Tensor, variant: Variant, num_valid: int, places: Places | None = None) -> Told:
    """Draw for rows 0..B - 1, or for the lanes of a prefill. Mutates: the tables."""
    sampler = Sampler(first_id=0, width=logits.shape[1], num_valid_ids=num_valid)
    told = Told()
    if places is None:
        rows = made.bucket(logits.shape[0])
        lanes = rows.lanes(PAGES * PAGE_SIZE)
        drawn = sampler.draw(logits, rows.params(slots=variant.slots), variant)
        rows.advance(lanes.running, lanes.starved, drawn, told, slots=variant.slots)  # type: ignore[arg-type]
    else:
        chosen = torch.tensor(places[0], device=logits.device)
        rows = made.gather(chosen)
        drawn = sampler.draw(logits[places[1]], rows.params(slots=variant.slots), variant)
        rows.advance(rows.state.alive.clone(), None, drawn, told, slots=variant.slots)  # type: ignore[arg-type]
        made.put(chosen, rows)
    return told


def by_kernels(
    made: DecodeTables,
    logits: torch.Tensor,
    variant: Variant,
    num_valid: int,
    places: Places | None = None,
    *,
    sums: bool = True,
    splits: Splits | None = None,
    filter_block: int = 128,
    launches: int = 5,
) -> Told:
    """Do the same with the kernels; poisoned scratch, ring and result. Mutates: the tables."""
    device, vocab = logits.device, logits.shape[1]
    lanes = logits.shape[0] if places is None else len(places[0])
    if places is None:
        plan = made.bucket(lanes).lanes(PAGES * PAGE_SIZE)
        who = {"running": plan.running, "starved": plan.starved}
    else:
        names = ("lane_rows", "logit_rows")
        who = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in zip(names, places)}
    draw = Draw(lanes=lanes, logits=logits, state=made.state, slots=made.slots, variant=variant, num_valid_ids=num_valid, sums=sums, **who)
    splits = splits or Splits.of(lanes, vocab)
    partials = torch.full((lanes * splits.splits * FIELDS.value,), float("nan"), device=device)
    counter = torch.tensor(launches, dtype=torch.int32, device=device)
    ring = torch.full((RING, 6, lanes + 2), -77, dtype=torch.int32)
    kept = KeptRing(
        ids=torch.full((RING, lanes + 2, 64), -77, dtype=torch.int32), counts=torch.full((RING, lanes + 2), -77, dtype=torch.int32)
    )
    if device.type == "cuda":
        ring, kept = ring.pin_memory(), KeptRing(ids=kept.ids.pin_memory(), counts=kept.counts.pin_memory())
    thresholds = None
    if variant.filters:
        workspace = FilterWorkspace.allocate(lanes, vocab, device, block=filter_block)
        for scratch in (workspace.thresholds, workspace.scores, workspace.kept_scores, workspace.kept_ids):
            scratch.fill_(77)
        warps = max(1, min(16, filter_block // 256))
        find_thresholds(draw, workspace, counter, kept=kept if variant.kept else None, warps=warps)
        thresholds = workspace.thresholds
    finish(draw, partials, reduce_logits(draw, partials, thresholds, splits=splits).splits, ring, counter)
    if device.type == "cuda":
        torch.cuda.synchronize()
    place = (launches - 1) % RING
    others = [number for number in range(RING) if number != place]
    assert (ring[others] == -77).all() and (ring[:, :, lanes:] == -77).all(), "another place of the ring was written"
    told = Told()
    words = ring[place, :, :lanes].numpy()
    told.words, told.floats = words[:3], words[3:].view(np.float32)
    if variant.kept:
        assert (kept.counts[others] == -77).all() and (kept.ids[:, lanes:] == -77).all(), "another place of the kept ring was written"
        told.kept_ids, told.kept_count = kept.ids[place, :lanes].numpy(), kept.counts[place, :lanes].numpy()
    return told


def compare(found: Told, expected: Told, made: DecodeTables, reference: DecodeTables, *, atol: float = 2e-5) -> float:
    """Assert that records and tables agree; returns the largest difference of a log-probability."""
    assert found.words[0].tolist() == expected.words[0].tolist(), f"status {found.words[0]}, expected {expected.words[0]}"
    assert found.words[1].tolist() == expected.words[1].tolist(), "generations"
    ran = expected.words[0] > LaneStatus.IDLE
    assert found.words[2][ran].tolist() == expected.words[2][ran].tolist(), f"tokens {found.words[2][ran]}, not {expected.words[2][ran]}"
    worst = 0.0
    for name, mine, theirs in zip(("logprob", "raw", "behaviour"), found.floats[:, ran], expected.floats[:, ran]):
        assert np.isnan(mine).tolist() == np.isnan(theirs).tolist(), f"{name}: {mine}, expected {theirs}"
        difference = np.abs(mine - theirs)
        # Of the number itself and of the logits it is a difference of.
        assert np.all((difference <= atol * np.maximum(1.0, np.abs(theirs))) | np.isnan(theirs)), f"{name}: {mine}, expected {theirs}"
        worst = max(worst, float(np.nanmax(difference, initial=0.0)))
    assert (found.words[2][~ran] == -77).all() and (found.words[2][ran] >= 0).all(), "a lane that does not run said something"
    for field in dataclasses.fields(reference.state):
        mine, theirs = getattr(made.state, field.name).cpu(), getattr(reference.state, field.name).cpu()
        assert torch.equal(mine.to(theirs.dtype), theirs), f"{field.name}: {mine}, expected {theirs}"
    for name in SlotTables.__slots__:
        assert torch.equal(getattr(made.slots, name).cpu(), getattr(reference.slots, name).cpu()), name
    if expected.kept_count is not None and expected.kept_ids is not None:
        assert found.kept_count is not None and found.kept_ids is not None
        for lane in np.flatnonzero(ran & (expected.kept_count <= 64)):
            count = expected.kept_count[lane]
            assert found.kept_count[lane] == count, f"lane {lane} kept {found.kept_count[lane]}, expected {count}"
            assert found.kept_ids[lane].tolist() == expected.kept_ids[lane].tolist() + [-1] * (64 - expected.kept_ids.shape[1])
        assert (found.kept_count[ran & (expected.kept_count > 64)] > 64).all(), "a kept set that does not fit"
    return worst
