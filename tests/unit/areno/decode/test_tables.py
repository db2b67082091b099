"""The resident tables against the rebuilt rows as oracle: random operations, slots in random order, launches between.

Both paths run over a fake forward whose tokens depend on what a lane reads, so a wrong id, position, slot, page table
or length shows in the records.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from areno.commands import DecodeLaunch
from areno.config import SINK_PAGE, ZERO_PAGE
from areno.decode.deltas import DeltaPacker, DeltaSlot
from areno.decode.launch import LaneStatus
from areno.decode.rebuilt import RebuiltPath
from areno.decode.resident import ResidentPath
from areno.decode.results import ResultRing
from areno.decode.tables import DecodeTables, Lanes
from areno.request import MAX_STOP_IDS
from areno.sampling.penalties import SlotTables
from areno.sampling.sampler import Drawn, LaneParams
from areno.sampling.slot_content import SlotContent
from areno.sampling.variant import Variant

ROWS, PAGES_PER_ROW, PAGE_SIZE, SLOTS = 8, 6, 4, 3
VARIANT = Variant(noise=True, temperature=True, stop_mask=True, slots=True)


def forced_content(forced: np.ndarray) -> SlotContent:
    """Return a slot that only forces ids."""
    nothing = np.zeros(0, dtype=np.int64)
    return SlotContent(
        forced_ids=forced,
        bias_ids=nothing,
        bias_values=nothing,
        repetition=1.0,
        presence=0.0,
        frequency=0.0,
        prompt_ids=nothing,
        output_ids=nothing,
    )


class FakeForward:
    """Answers each lane with a number made of everything it was given, and keeps the lanes for inspection."""

    def __init__(self) -> None:
        self.lanes: list[Lanes] = []

    def decode(self, lanes: Lanes, longest: int) -> torch.Tensor:
        self.lanes.append(lanes)
        assert (lanes.lengths <= longest).all()
        weights = torch.arange(1, lanes.tables.shape[1] + 1)
        return (lanes.ids * 3 + lanes.positions * 5 + lanes.slots * 7 + (lanes.tables * weights).sum(dim=1) + lanes.lengths * 11)[
            :, None
        ].double()

    def draw(self, logits: torch.Tensor, params: LaneParams, variant: Variant) -> Drawn:
        mixed = logits[:, 0].to(torch.int64) + params.seeds % 1009 + params.positions * 13
        token = torch.where(params.forced >= 0, params.forced.to(torch.int64), mixed % 40)
        score = (params.temperature + params.stop_wait).float()
        return Drawn(token=token, logprob=-score, raw_logprob=-score * 2, behaviour_logprob=-score * 3)


def _paths() -> tuple[ResidentPath, RebuiltPath]:
    sizes = {"num_rows": ROWS, "pages_per_row": PAGES_PER_ROW, "page_size": PAGE_SIZE}
    cpu = torch.device("cpu")
    slots = [SlotTables(num_slots=SLOTS, vocab_size=40, max_forced=16, device=cpu) for _ in range(2)]
    tables = DecodeTables(slots=slots[0], device=cpu, **sizes)
    return ResidentPath(FakeForward(), tables), RebuiltPath(FakeForward(), slots=slots[1], **sizes)  # type: ignore[arg-type]


def _launch(path: ResidentPath | RebuiltPath, bucket: int = ROWS) -> dict[str, list[float]]:
    ring = ResultRing(slots=2, lanes=ROWS, run_ahead=0)
    lanes = np.zeros(bucket, dtype=np.int64)
    _, records = ring.take(seats=lanes, generations=lanes.astype(np.int32), version=0)
    records.words.fill_(-77)
    path.decode(DecodeLaunch(bucket=bucket, longest=64, seats=lanes, generations=lanes.astype(np.int32), variant=VARIANT), records)
    result = ring.ready(drain=True)[0]
    # Only lanes that ran say anything; the others' numbers are whatever the padding gave.
    spoken = result.status > LaneStatus.IDLE
    told = {
        name: np.where(spoken, value, -1).tolist()
        for name, value in (("token", result.token), ("logprob", result.logprobs[0]), ("generation", result.generation))
    }
    return {"status": result.status.tolist(), **told}


def _fields(row: int, generation: int, **more: object) -> dict[str, object]:
    return {
        "row": row,
        "generation": generation,
        "last_token": 3,
        "length": 2,
        "remaining": 9,
        "sampling_slot": -1,
        "temperature": 1.0,
        "seed": row * 17,
        "stop_ids": np.full(MAX_STOP_IDS, -1, dtype=np.int32),
        **more,
    }


def _shuffled(slot: DeltaSlot, rng: np.random.Generator) -> DeltaSlot:
    return DeltaSlot(
        rows=slot.rows[rng.permutation(slot.rows.size)], pages=slot.pages[rng.permutation(slot.pages.size)], contents=slot.contents
    )


@pytest.mark.parametrize("seed", range(6))
def test_resident_equals_rebuilt_under_random_operations_in_any_order_within_a_slot(seed: int) -> None:
    rng = np.random.default_rng(seed)
    resident, rebuilt = _paths()
    generation, generations = 0, [0] * ROWS
    slot_of: list[int | None] = [None] * ROWS
    reached: set[int] = set()
    for _ in range(150):
        packer = DeltaPacker()
        for _ in range(int(rng.integers(0, 5))):
            kind, row = int(rng.integers(4)), int(rng.integers(ROWS))
            if kind == 0:
                generation += 1
                generations[row] = generation
                stops = rng.integers(-1, 40, size=MAX_STOP_IDS).astype(np.int32)
                fields = _fields(
                    row,
                    generation,
                    length=int(rng.integers(0, 20)),
                    remaining=int(rng.integers(1, 9)),
                    stop_wait=int(rng.integers(0, 3)),
                    stop_ids=stops,
                )
                forced = None
                slot_of[row] = None
                unowned = set(range(SLOTS)) - set(slot_of)
                if unowned and rng.random() < 0.3:
                    slot_of[row] = fields["sampling_slot"] = unowned.pop()
                    forced = forced_content(rng.integers(0, 40, size=int(rng.integers(1, 6))))
                packer.set_row(fields, rng.integers(2, 60, size=int(rng.integers(1, PAGES_PER_ROW + 1))), forced)
            elif kind == 1:
                packer.grow(row, generations[row], int(rng.integers(PAGES_PER_ROW)), rng.integers(2, 60, size=1))
            elif kind == 2:
                # Half of the kills are late: they name a generation that is gone.
                packer.kill(row, generations[row] - int(rng.integers(2)))
            else:
                target = int(rng.integers(ROWS))
                if target != row:
                    packer.move(row, target, generations[row])
                    generations[target] = generations[row]
                    slot_of[target], slot_of[row] = slot_of[row], None
        for slot in packer.take():
            resident.apply(_shuffled(slot, rng))
            rebuilt.apply(_shuffled(slot, rng))
        bucket = int(rng.choice([4, ROWS]))
        told = _launch(resident, bucket)
        assert told == _launch(rebuilt, bucket)
        reached |= set(told["status"])
        for name, value in resident.row_state().items():
            if name in ("alive", "length", "generation"):
                assert torch.equal(value, rebuilt.row_state()[name].to(value.dtype)), name
    assert reached == set(LaneStatus)


@pytest.mark.parametrize("which", [0, 1])
def test_a_dead_lane_reads_the_zero_page_and_writes_the_sink(which: int) -> None:
    path = _paths()[which]
    packer = DeltaPacker()
    packer.set_row(_fields(0, 1), np.array([9, 8]))
    packer.set_row(_fields(1, 2), np.array([7, 6]))
    packer.kill(0, 1)
    for slot in packer.take():
        path.apply(slot)
    _launch(path)
    lanes = path._forward.lanes[-1]  # type: ignore[attr-defined]
    assert lanes.running.tolist() == [False, True] + [False] * 6
    assert (lanes.tables[0] == ZERO_PAGE).all() and lanes.lengths[0] == 1 and lanes.positions[0] == 0
    assert lanes.slots[0] == SINK_PAGE * PAGE_SIZE and lanes.slots[1] == 7 * PAGE_SIZE + 2


@pytest.mark.parametrize("which", [0, 1])
def test_a_lane_without_its_next_page_stalls_and_goes_on_after_a_grow(which: int) -> None:
    path = _paths()[which]
    packer = DeltaPacker()
    packer.set_row(_fields(0, 1, length=PAGE_SIZE), np.array([9]))
    for slot in packer.take():
        path.apply(slot)
    assert _launch(path)["status"][0] == LaneStatus.STARVED
    assert path.row_state()["length"][0] == PAGE_SIZE
    packer.grow(0, 1, 1, np.array([12]))
    for slot in packer.take():
        path.apply(slot)
    assert _launch(path)["status"][0] == LaneStatus.TOKEN
    assert path._forward.lanes[-1].slots[0] == 12 * PAGE_SIZE  # type: ignore[attr-defined]


@pytest.mark.parametrize("which", [0, 1])
def test_a_row_ends_by_itself_and_a_late_kill_spares_its_successor(which: int) -> None:
    path = _paths()[which]
    packer = DeltaPacker()
    packer.set_row(_fields(0, 1, remaining=1), np.array([9]))
    for slot in packer.take():
        path.apply(slot)
    assert _launch(path)["status"][0] == LaneStatus.EXHAUSTED
    assert _launch(path)["status"][0] == LaneStatus.IDLE
    packer.set_row(_fields(0, 2), np.array([9]))
    packer.kill(0, 1)
    for slot in packer.take():
        path.apply(slot)
    assert _launch(path)["status"][0] == LaneStatus.TOKEN


@pytest.mark.parametrize("which", [0, 1])
def test_a_row_that_died_unseen_is_moved_dead(which: int) -> None:
    path = _paths()[which]
    packer = DeltaPacker()
    packer.set_row(_fields(5, 1, remaining=1), np.array([9]))
    for slot in packer.take():
        path.apply(slot)
    _launch(path)
    packer.move(5, 0, 1)
    for slot in packer.take():
        path.apply(slot)
    assert _launch(path)["status"] == [LaneStatus.IDLE] * ROWS


def test_table_storage_never_changes_its_address() -> None:
    resident, _ = _paths()
    tables = resident.tables

    def addresses() -> list[int]:
        fields = [getattr(tables.state, field.name) for field in dataclasses.fields(tables.state)]
        return [tensor.data_ptr() for tensor in (*fields, *(getattr(tables.slots, name) for name in SlotTables.__slots__))]

    before = addresses()
    packer = DeltaPacker()
    for step in range(40):
        packer.set_row(_fields(step % ROWS, step + 1), np.array([9, 8]))
        if step % 3 == 0:
            packer.move(step % ROWS, (step + 1) % ROWS, step + 1)
        for slot in packer.take():
            resident.apply(slot)
        _launch(resident)
    assert len(before) == 15 and addresses() == before
