"""The rebuilt path of a device against the resident one, bit for bit: the same steps over rows that are sent anew each time.

The model is a fake: a lane's logits depend on all that the lane reads, so a wrong id, position, length, page or seed shows. The
steps run on the kernels for some turns, and in their torch form for many.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from areno.commands import DecodeLaunch, PrefillChunk, PrefillLaunch
from areno.decode.capture import CapturePermit
from areno.decode.deltas import DeltaPacker, DeltaSlot
from areno.decode.graphs_rebuilt import RebuiltGraphPath
from areno.decode.launch import LaneStatus, LaunchResult
from areno.decode.results import LaneRecords, ResultRing
from areno.decode.steps import DecodeSteps, StepKind, StepMemory
from areno.decode.tables import DecodeTables, Rows
from areno.forward import PrefillResult
from areno.kernels.filters import KeptRing
from areno.kernels.rows import LaneBuffers
from areno.parallel import TPGroup
from areno.request import MAX_STOP_IDS
from areno.sampling.kept import MAX_KEPT
from areno.sampling.penalties import SlotTables
from areno.sampling.sampler import Sampler
from areno.sampling.variant import Variant
from tests.crossed import every_value
from tests.unit.areno.kernels import sampling_cases as cases

ROWS, VOCAB, PAGES, PAGE_SIZE, HIDDEN = 18, 40, 20, 4, 8
SPANS = (16, 32)
CPU = torch.device("cpu")
MODEL: Any = SimpleNamespace(num_valid_ids=38, hidden_size=HIDDEN, vocab_size=VOCAB)
VARIANTS = {
    "plain": Variant(noise=True, sums=True),
    "slots": Variant(noise=True, temperature=True, stop_mask=True, slots=True, sums=True),
    "kept": Variant(noise=True, temperature=True, filters=True, kept=True, sums=True),
}


class FakeModel:
    """Stands where the fused decoder does."""

    pdl = False

    def __init__(self) -> None:
        self.embedding = torch.randn((VOCAB, HIDDEN), generator=torch.Generator().manual_seed(0))

    def span_of(self, longest: int) -> int:
        return next((span for span in SPANS if span >= longest), 0)

    def decode(self, lanes: LaneBuffers, x: torch.Tensor, logits: torch.Tensor, page_table: torch.Tensor, *, span: int) -> None:
        for lane in range(x.shape[0]):
            length = int(lanes.lengths[lane])
            assert not span or length <= span
            read = page_table[lane, : -(-length // PAGE_SIZE)] if lanes.running[lane] else page_table[lane, :0]
            told = [int(lanes.ids[lane]), int(lanes.positions[lane]), int(lanes.slots[lane]), *read.tolist()]
            seed = hash((*told, round(float(x[lane].sum()), 3))) % 2**31
            logits[lane] = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


class TorchSteps(DecodeSteps):
    """The same steps by the torch prologue, sampler and epilogue."""

    def _launch(self, kind: StepKind, memory: StepMemory) -> None:
        # The kernels take a row that lies beyond its narrow table for one without a page.
        table = F.pad(memory.state.page_table, (0, PAGES))
        state = dataclasses.replace(memory.state, page_table=table).select(slice(0, kind.bucket))
        rows = Rows(state, page_size=PAGE_SIZE, slots=self._slots)
        lanes = rows.lanes(kind.span or PAGES * PAGE_SIZE)
        logits = torch.zeros((kind.bucket, VOCAB))
        buffers = LaneBuffers(lanes.running, lanes.starved, lanes.ids, lanes.positions, lanes.slots, lanes.lengths)
        self._fused.decode(buffers, self._fused.embedding[lanes.ids.long()], logits, memory.state.page_table, span=kind.span)
        self._advance(rows, lanes.running, lanes.starved, logits, kind.variant, memory)

    def sample_prefill(self, variant: Variant, logits: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], memory: StepMemory) -> None:
        places, chosen = (numbers.long() for numbers in rows)
        gathered = Rows(memory.state.select(places), page_size=PAGE_SIZE, slots=self._slots)
        self._advance(gathered, gathered.state.alive.clone(), None, logits[chosen], variant, memory)
        memory.state.ints[:, places], memory.state.alive[places] = gathered.state.ints, gathered.state.alive

    def _advance(
        self, rows: Rows, running: torch.Tensor, starved: torch.Tensor | None, logits: torch.Tensor, variant: Variant, memory: StepMemory
    ) -> None:
        sampler = Sampler(first_id=0, width=VOCAB, num_valid_ids=MODEL.num_valid_ids)
        drawn = sampler.draw(logits, rows.params(slots=variant.slots), variant)
        assert memory.kept is not None
        records = LaneRecords(memory.ring[0], memory.kept.ids[0], memory.kept.counts[0])
        rows.advance(running, starved, drawn, records, slots=variant.slots)


class Resident:
    """Resident tables under the same steps, with deltas by the torch form."""

    def __init__(self, kind: type[DecodeSteps]) -> None:
        slots = _slots()
        self.tables = DecodeTables(num_rows=ROWS, pages_per_row=PAGES, page_size=PAGE_SIZE, slots=slots, device=CPU)
        self.steps = _steps(slots, kind)
        self.ring = ResultRing(slots=1, lanes=ROWS, run_ahead=0, kept=True)
        assert self.ring.kept_ids is not None and self.ring.kept_count is not None
        kept = KeptRing(ids=self.ring.kept_ids, counts=self.ring.kept_count)
        self.memory = StepMemory(state=self.tables.state, ring=self.ring.words, kept=kept)

    def decode(self, launch: DecodeLaunch) -> LaunchResult:
        self.ring.take(seats=launch.seats, generations=launch.generations, version=0)
        self.steps.run(self.steps.kind_of(launch), self.memory)
        return self.ring.ready(drain=True)[0]

    def sample_prefill(self, launch: PrefillLaunch, computed: PrefillResult) -> LaunchResult:
        self.ring.take(seats=launch.seats, generations=launch.generations, version=0)
        assert computed.logits is not None
        rows = torch.tensor(launch.rows, dtype=torch.int32), torch.tensor(computed.places, dtype=torch.int32)
        self.steps.sample_prefill(launch.variant, computed.logits, rows, self.memory)
        return self.ring.ready(drain=True)[0]


class Rebuilt:
    """The path under test, with the result ring that it is given on a device too."""

    def __init__(self, kind: type[DecodeSteps]) -> None:
        slots = _slots()
        sizes = {"num_rows": ROWS, "pages_per_row": PAGES, "page_size": PAGE_SIZE}
        self.path = RebuiltGraphPath(_steps(slots, kind), slots, kept=True, device=CPU, **sizes)
        self.ring = ResultRing(slots=2, lanes=ROWS, run_ahead=0, kept=True)

    def poison(self) -> None:
        """Fill both sides of the staging memory with what no launch may read."""
        self.path._staging._outgoing.fill_(0x55)
        self.path._staging._sent.fill_(0x55)

    def decode(self, launch: DecodeLaunch) -> LaunchResult:
        self.poison()
        _, records = self.ring.take(seats=launch.seats, generations=launch.generations, version=0)
        self.path.decode(launch, records)
        return self.ring.ready(drain=True)[0]

    def sample_prefill(self, launch: PrefillLaunch, computed: PrefillResult) -> LaunchResult:
        self.poison()
        _, records = self.ring.take(seats=launch.seats, generations=launch.generations, version=0)
        self.path.sample_prefill(launch, computed, records)
        return self.ring.ready(drain=True)[0]


def _slots() -> SlotTables:
    return SlotTables(num_slots=ROWS, vocab_size=VOCAB, max_forced=6, device=CPU)


def _steps(slots: SlotTables, kind: type[DecodeSteps]) -> DecodeSteps:
    fused: Any = FakeModel()
    return kind(fused, slots, MODEL, lanes=ROWS, page_size=PAGE_SIZE, device=CPU, permit=CapturePermit(TPGroup.single(), enabled=False))


def _operations(rng: np.random.Generator, generations: list[int], held: list[int], variant: Variant) -> tuple[DeltaPacker, list[int]]:
    """Return random operations on rows and the rows that are set by them, which want their first token."""
    packer, fresh = DeltaPacker(), []
    for _ in range(int(rng.integers(1, 7))):
        row, other = (int(number) for number in rng.permutation(ROWS)[:2])
        kind = int(rng.integers(0, 6))
        if kind <= 2 and row not in fresh:
            generations[row] = max(generations) + 1
            free = sorted(set(range(ROWS)) - set(held))
            held[row] = int(rng.choice(free)) if variant.slots and rng.random() < 0.6 else -1
            fields = {
                "row": row,
                "generation": generations[row],
                "last_token": int(rng.integers(0, VOCAB)),
                "length": int(rng.integers(0, 70)) if rng.random() < 0.2 else int(rng.integers(0, 14)),
                "remaining": int(rng.integers(1, 9)),
                "stop_wait": int(rng.integers(0, 3)) if variant.stop_mask else 0,
                "sampling_slot": held[row],
                "temperature": float(rng.choice([0.0, 0.7, 1.0] if variant.temperature else [0.0, 1.0])),
                "top_k": int(rng.choice([0, 5, 20])) if variant.filters else 0,
                "top_p": float(rng.choice([0.7, 1.0])) if variant.filters else 1.0,
                "seed": int(rng.integers(-(2**63), 2**63)),
                "stop_ids": np.where(np.arange(MAX_STOP_IDS) < 2, rng.integers(0, VOCAB, MAX_STOP_IDS), -1).astype(np.int32),
            }
            content = cases.slot_content(VOCAB, rng) if held[row] >= 0 else None
            packer.set_row(fields, rng.integers(2, 90, int(rng.integers(1, PAGES + 1))), content)
            fresh.append(row)
        elif kind == 3:
            packer.grow(row, generations[row], int(rng.integers(PAGES)), rng.integers(2, 90, 1))
        elif kind == 4:
            # Half of the kills are late: they name a generation that is gone.
            packer.kill(row, generations[row] - int(rng.integers(2)))
        elif row not in fresh and other not in fresh:
            packer.move(row, other, generations[row])
            generations[other], held[other] = generations[row], held[row]
            held[row] = -1
    return packer, fresh


def _prefill(rng: np.random.Generator, rows: list[int], variant: Variant) -> tuple[PrefillLaunch, PrefillResult]:
    """Return a launch that samples these rows, the last two of them from one row of logits."""
    parts = [rows[:-2], rows[-2:]] if len(rows) > 2 else [rows]
    groups = [[row] for row in parts[0]] + parts[1:] if len(parts) > 1 else [rows]
    nothing = np.zeros(0, dtype=np.int64)
    chunks = tuple(
        PrefillChunk(
            ids=nothing,
            start=0,
            pages=nothing,
            rows=tuple(group),
            score_from=0,
            score_targets=nothing,
            temperature=1.0,
            seat=0,
            generation=0,
        )
        for group in groups
    )
    lanes = np.zeros(len(rows), dtype=np.int64)
    launch = PrefillLaunch(
        chunks=chunks, fork_sources=nothing, fork_targets=nothing, seats=lanes, generations=lanes.astype(np.int32), variant=variant
    )
    logits = torch.from_numpy(rng.normal(size=(len(groups), VOCAB)) * 3).float()
    places = [place for place, group in enumerate(groups) for _ in group]
    return launch, PrefillResult(logits=logits, places=places, scores=[])


def _same(found: LaunchResult, wanted: LaunchResult, *, kept: bool) -> set[int]:
    """Compare what two launches said; return the statuses."""
    assert np.array_equal(found.status, wanted.status) and np.array_equal(found.generation, wanted.generation)
    spoken = wanted.status > LaneStatus.IDLE
    assert np.array_equal(found.token[spoken], wanted.token[spoken])
    assert np.array_equal(found.logprobs.view(np.int32)[:, spoken], wanted.logprobs.view(np.int32)[:, spoken])
    if kept:
        assert found.kept_count is not None and wanted.kept_count is not None and found.kept_ids is not None and wanted.kept_ids is not None
        assert np.array_equal(found.kept_count[spoken], wanted.kept_count[spoken])
        counted = (np.arange(MAX_KEPT) < wanted.kept_count[:, None]) & spoken[:, None]
        assert np.array_equal(found.kept_ids[counted], wanted.kept_ids[counted])
    return set(wanted.status.tolist())


def _addresses(memory: StepMemory) -> list[int]:
    state = [getattr(memory.state, field.name).data_ptr() for field in dataclasses.fields(memory.state)]
    return [*state, memory.ring.data_ptr()]


def _shuffled(slot: DeltaSlot, rng: np.random.Generator) -> DeltaSlot:
    return DeltaSlot(
        rows=slot.rows[rng.permutation(slot.rows.size)], pages=slot.pages[rng.permutation(slot.pages.size)], contents=slot.contents
    )


def _live(variant: Variant, kind: type[DecodeSteps], buckets: list[int], *, seed: int) -> set[int]:
    """Let rows live on both paths, a turn for each bucket, and compare all they say and hold; return the statuses."""
    rng = np.random.default_rng(seed)
    resident, rebuilt = Resident(kind), Rebuilt(kind)
    generations, held = list(range(1, ROWS + 1)), [-1] * ROWS
    reached: set[int] = set()
    places: dict[StepKind, list[int]] = {}
    for turn, bucket in enumerate(buckets):
        packer, fresh = _operations(rng, generations, held, variant)
        for slot in packer.take():
            resident.tables.apply(_shuffled(slot, rng))
            rebuilt.path.apply(_shuffled(slot, rng))
        if fresh and turn % 2 == 0:
            launch, computed = _prefill(rng, fresh, variant)
            reached |= _same(rebuilt.sample_prefill(launch, computed), resident.sample_prefill(launch, computed), kept=variant.kept)
        lengths = resident.tables.field("length")[:bucket][resident.tables.state.alive[:bucket]]
        longest = int(lengths.max()) + 1 if lengths.numel() else 1
        lanes = np.zeros(bucket, dtype=np.int64)
        step = DecodeLaunch(bucket=bucket, longest=longest, seats=lanes, generations=lanes.astype(np.int32), variant=variant)
        reached |= _same(rebuilt.decode(step), resident.decode(step), kept=variant.kept)
        step_kind = rebuilt.path.steps.kind_of(step)
        # A captured step knows addresses.
        found = _addresses(rebuilt.path.memory_of(step_kind))
        assert places.setdefault(step_kind, found) == found
        for field in dataclasses.fields(resident.tables.state):
            kept_by_host = getattr(rebuilt.path._rows.state, field.name)
            assert np.array_equal(kept_by_host, getattr(resident.tables.state, field.name).numpy()), f"turn {turn}: {field.name}"
    return reached


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_sent_anew_for_each_step_give_the_bits_of_resident_rows_on_the_kernels(name: str) -> None:
    buckets = {"plain": [ROWS, 4], "slots": [8, 4], "kept": [4]}[name]
    assert LaneStatus.TOKEN in _live(VARIANTS[name], DecodeSteps, buckets, seed=3)


@every_value(seed=range(3), name=list(VARIANTS))
def test_rows_sent_anew_for_each_step_give_the_bits_of_resident_rows_over_many_turns(name: str, seed: int) -> None:
    buckets = np.random.default_rng(seed).choice([1, 2, 4, 16, ROWS], size=60).tolist()
    assert _live(VARIANTS[name], TorchSteps, buckets, seed=seed) == set(LaneStatus)


def test_a_row_without_a_page_beyond_the_bound_of_the_others_stalls_in_a_narrow_table() -> None:
    resident, rebuilt = Resident(TorchSteps), Rebuilt(TorchSteps)
    packer = DeltaPacker()
    fields = {"generation": 1, "last_token": 3, "remaining": 9, "sampling_slot": -1, "temperature": 1.0, "top_p": 1.0}
    fields["stop_ids"] = np.full(MAX_STOP_IDS, -1, dtype=np.int32)
    packer.set_row({**fields, "row": 0, "length": 2}, np.array([9]))
    packer.set_row({**fields, "row": 1, "length": SPANS[0] + PAGE_SIZE}, np.arange(10, 10 + SPANS[0] // PAGE_SIZE))
    for slot in packer.take():
        resident.tables.apply(slot)
        rebuilt.path.apply(slot)
    lanes = np.zeros(2, dtype=np.int64)
    step = DecodeLaunch(bucket=2, longest=3, seats=lanes, generations=lanes.astype(np.int32), variant=VARIANTS["plain"])
    for path in (resident, rebuilt):
        assert path.decode(step).status.tolist() == [LaneStatus.TOKEN, LaneStatus.STARVED]


def test_a_launch_that_only_scores_is_waited_for_and_changes_no_row() -> None:
    rebuilt = Rebuilt(TorchSteps)
    waits: list[object] = []
    rebuilt.path._staging.receive = waits.append  # type: ignore[method-assign]
    nothing = np.zeros(0, dtype=np.int64)
    launch = PrefillLaunch(
        chunks=(), fork_sources=nothing, fork_targets=nothing, seats=nothing, generations=nothing.astype(np.int32), variant=Variant()
    )
    before = {name: value.clone() for name, value in rebuilt.path.row_state().items()}
    _, records = rebuilt.ring.take(seats=nothing, generations=launch.generations, version=0)
    rebuilt.path.sample_prefill(launch, PrefillResult(logits=None, places=[], scores=[]), records)
    assert waits == [None]
    assert all(torch.equal(value, before[name]) for name, value in rebuilt.path.row_state().items())
