"""Rows that come, grow, move, are killed and decode on the kernels alone, against the same rows on the torch tables."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from areno.decode.deltas import DeltaPacker
from areno.kernels.rows import LaneBuffers, apply_deltas, begin_sample, begin_step, pack_slot
from areno.kernels.sample import Draw, SampleWorkspace, sample
from areno.request import MAX_STOP_IDS
from areno.sampling.variant import Variant
from tests.unit.areno.kernels import sampling_cases as cases

ROWS, VOCAB, NUM_VALID = 6, 40, 38
VARIANT = Variant(noise=True, temperature=True, stop_mask=True, slots=True)
CPU = torch.device("cpu")


class Twins:
    """The same rows twice: `expected` on the torch form, `found` on the kernels with their own buffers."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.expected = cases.tables(ROWS, VOCAB, rng, VARIANT)
        self.expected.state.alive.fill_(False)
        self.found = cases.copied(self.expected)
        self.lanes = LaneBuffers.allocate(ROWS, CPU)
        self.ring = torch.full((cases.RING, 6, ROWS), -77, dtype=torch.int32)
        self.workspace = SampleWorkspace.allocate(ROWS, VOCAB, CPU, filters=False)
        self.counter, self.launches = torch.zeros((), dtype=torch.int32), 0
        self.buffer = torch.zeros(4096, dtype=torch.int32)

    def apply(self, packer: DeltaPacker) -> None:
        for slot in packer.take():
            self.expected.apply(slot)
            apply_deltas(self.buffer, *pack_slot(slot, self.buffer.numpy()), self.found.state)
            self.found.slots.fill(slot.contents)

    def decode(self, bucket: int, logits: torch.Tensor) -> int:
        """Run a decode step on both; returns how many lanes said a token."""
        embedding, x = torch.randn(VOCAB, 8), torch.zeros(bucket, 8)
        begin_step(self.found.state, self.lanes, self.counter, embedding, x, page_size=cases.PAGE_SIZE)
        draw = self._draw(bucket, logits, {"running": self.lanes.running, "starved": self.lanes.starved})
        return self._finish(draw, logits, None)

    def prefill(self, rows: list[int], logits: torch.Tensor) -> int:
        """Sample the rows' first tokens on both, all from one logits row."""
        begin_sample(self.counter)
        places = (rows, [0] * len(rows))
        tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in zip(("lane_rows", "logit_rows"), places)}
        return self._finish(self._draw(len(rows), logits, tensors), logits, places)

    def _draw(self, lanes: int, logits: torch.Tensor, who: dict[str, torch.Tensor]) -> Draw:
        return Draw(
            lanes=lanes,
            logits=logits,
            state=self.found.state,
            slots=self.found.slots,
            variant=VARIANT,
            num_valid_ids=NUM_VALID,
            running=who.get("running"),
            starved=who.get("starved"),
            lane_rows=who.get("lane_rows"),
            logit_rows=who.get("logit_rows"),
        )

    def _finish(self, draw: Draw, logits: torch.Tensor, places: cases.Places | None) -> int:
        self.launches += 1
        place = (self.launches - 1) % cases.RING
        self.ring[place] = -77
        sample(draw, self.workspace, self.ring, self.counter)
        told, words = cases.Told(), self.ring[place, :, : draw.lanes].numpy().copy()
        told.words, told.floats = words[:3], words[3:].view(np.float32)
        expected = cases.by_torch(self.expected, logits, VARIANT, NUM_VALID, places)
        cases.compare(told, expected, self.found, self.expected)
        return int((expected.words[0] > 0).sum())


def _fields(row: int, generation: int, rng: np.random.Generator, held: set[int]) -> dict[str, object]:
    return {
        "row": row,
        "generation": generation,
        "last_token": int(rng.integers(0, VOCAB)),
        "length": int(rng.integers(0, 2 * cases.PAGE_SIZE)),
        "remaining": int(rng.integers(1, 9)),
        "stop_wait": int(rng.integers(0, 3)),
        "sampling_slot": row if row not in held and rng.random() < 0.7 else -1,
        "temperature": float(rng.choice([0.0, 0.7, 1.0])),
        "top_p": 1.0,
        "seed": int(rng.integers(-(2**63), 2**63)),
        "stop_ids": np.where(np.arange(MAX_STOP_IDS) < 2, rng.integers(0, VOCAB, MAX_STOP_IDS), -1).astype(np.int32),
    }


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_rows_live_on_the_kernels_as_on_the_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    twins = Twins(rng)
    generations, said = [0] * ROWS, 0
    for turn in range(4):
        packer, fresh = DeltaPacker(), []
        held = set(twins.expected.field("sampling_slot").tolist())
        for _ in range(3):
            row, other = (int(number) for number in rng.permutation(ROWS)[:2])
            kind = rng.integers(0, 6)
            if kind <= 2:
                generations[row] = turn + 1
                # A moved row keeps its slot, and two rows never hold one.
                fields = _fields(row, turn + 1, rng, held)
                content = cases.slot_content(VOCAB, rng) if fields["sampling_slot"] == row else None
                packer.set_row(fields, rng.integers(2, 90, int(rng.integers(1, cases.PAGES))), content)
                fresh.append(row)
            elif kind == 3:
                packer.grow(row, generations[row], int(rng.integers(1, cases.PAGES)), rng.integers(2, 90, 1))
            elif kind == 4:
                packer.kill(row, generations[row] - int(rng.random() < 0.3))
            elif row not in fresh and other not in fresh:
                packer.move(other, row, generations[other])
                generations[row] = generations[other]
        twins.apply(packer)
        if fresh and turn % 2:
            said += twins.prefill(sorted(set(fresh)), torch.randn(1, VOCAB) * 3)
        for bucket in (ROWS, int(rng.integers(1, ROWS + 1))):
            said += twins.decode(bucket, torch.randn(bucket, VOCAB) * 3)
        for field in dataclasses.fields(twins.expected.state):
            assert torch.equal(getattr(twins.found.state, field.name), getattr(twins.expected.state, field.name)), field.name
    assert said > 8
