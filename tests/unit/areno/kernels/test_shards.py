"""The kernels of ranks that hold shards of the vocabulary, against the same kernels over all of it.

The ranks of one launch run one after the other: gathers give each what a first round of all of them put down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areno.kernels.filters import FilterWorkspace, KeptRing
from areno.kernels.reduce import FIELDS, Draw
from areno.kernels.rows import LaneBuffers, begin_step
from areno.kernels.sample import SampleWorkspace, sample
from areno.parallel import TPGroup
from areno.sampling.shards import VocabularyShard
from areno.sampling.variant import Variant
from tests.unit.areno.kernels import sampling_cases as cases

VOCAB, LANES = 190, 4
VARIANTS = {
    "greedy": Variant(),
    "plain": Variant(noise=True),
    "most": Variant(noise=True, temperature=True, stop_mask=True, slots=True),
    "filters": Variant(noise=True, temperature=True, stop_mask=True, slots=True, filters=True, kept=True),
    "wide": Variant(noise=True, temperature=True, stop_mask=True, slots=True, filters=True, wide=True),
    "few": Variant(noise=True, temperature=True, stop_mask=True, slots=True, filters=True),
}


class Rounds(TPGroup):
    """A rank whose gathers give back what the ranks put down in an earlier round, and stop a round that has too little."""

    __slots__ = ("_board", "_calls")

    def __init__(self, rank: int, size: int, board: list[list[torch.Tensor]]) -> None:
        super().__init__(rank, size, torch.device("cpu"), None, None)
        self._board, self._calls = board, 0

    def _gather(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        call, self._calls = self._calls, self._calls + 1
        mine = self._board[self.rank]
        if call == len(mine):
            mine.append(tensor.clone())
        if any(len(theirs) <= call for theirs in self._board):
            raise _Later
        return out.copy_(torch.stack([theirs[call] for theirs in self._board]))


class _Later(Exception):
    """Not every rank has put its part down yet."""


def in_rounds(size: int, run: Callable[[TPGroup], Any]) -> list[Any]:
    """Run ranks over and over, from their beginnings, until all come to their end."""
    board: list[list[torch.Tensor]] = [[] for _ in range(size)]
    while True:
        results = []
        for rank in range(size):
            with contextlib.suppress(_Later):
                results.append(run(Rounds(rank, size, board)))
        if len(results) == size:
            return results


def shard_of(group: TPGroup, vocab: int) -> VocabularyShard:
    width = -(-vocab // group.size // 16) * 16
    first = group.rank * width
    return VocabularyShard(first_id=first, count=min(width, vocab - first), width=width, vocab_size=vocab, group=group)


def by_shard(
    made: cases.DecodeTables, logits: torch.Tensor, variant: Variant, num_valid: int, group: TPGroup, *, sums: bool
) -> tuple[cases.Told, cases.DecodeTables]:
    """Draw on one rank; returns what was said and the rank's tables."""
    made, shard = cases.copied(made), shard_of(group, VOCAB)
    # Rows of a shard may lie further apart than it is wide.
    room = torch.full((logits.shape[0], shard.width), float("nan"))
    part = room[:, : shard.count]
    part.copy_(logits[:, shard.first_id : shard.first_id + shard.count])
    plan = made.bucket(LANES).lanes(cases.PAGES * cases.PAGE_SIZE)
    draw = Draw(
        lanes=LANES,
        logits=part,
        state=made.state,
        slots=made.slots,
        variant=variant,
        num_valid_ids=num_valid,
        sums=sums,
        running=plan.running,
        starved=plan.starved,
        shard=shard,
    )
    workspace = SampleWorkspace.allocate(LANES, shard.count, cases.CPU, filters=False, shard=shard)
    workspace = replace(workspace, filters=FilterWorkspace.allocate(LANES, VOCAB, cases.CPU, block=128))
    for scratch in (workspace.partials, workspace.records, workspace.gathered):
        scratch.fill_(float("nan"))
    ring = torch.full((1, 6, LANES), -77, dtype=torch.int32)
    kept = KeptRing(ids=torch.full((1, LANES, 64), -77, dtype=torch.int32), counts=torch.full((1, LANES), -77, dtype=torch.int32))
    sample(draw, workspace, ring, torch.ones((), dtype=torch.int32), kept=kept)
    told, words = cases.Told(), ring[0].numpy()
    told.words, told.floats = words[:3], words[3:].view(np.float32)
    if variant.kept:
        told.kept_ids, told.kept_count = kept.ids[0].numpy(), kept.counts[0].numpy()
    return told, made


@pytest.mark.parametrize(
    ("name", "size"), [("greedy", 2), ("plain", 3), ("most", 2), ("filters", 2), pytest.param("filters", 3, marks=pytest.mark.long)]
)
def test_ranks_draw_and_advance_as_one_does_and_all_with_the_same_bits(name: str, size: int) -> None:
    variant = VARIANTS[name]
    rng = np.random.default_rng(sum(name.encode()) + size)
    for num_valid in (VOCAB, 120) if name == "plain" else (120,):
        logits = cases.random_logits(rng, LANES, VOCAB)
        expected = cases.tables(LANES, VOCAB, rng, variant)
        made = cases.copied(expected)
        reference = cases.by_torch(expected, logits, variant, num_valid)
        found = in_rounds(size, lambda group, m=made, x=logits, n=num_valid: by_shard(m, x, variant, n, group, sums=True))
        for told, tables in found:
            cases.compare(told, reference, tables, expected)
            assert np.array_equal(told.words, found[0][0].words) and told.floats.tobytes() == found[0][0].floats.tobytes()


def test_a_record_is_36_bytes_a_row_and_the_default_path_gathers_nothing_else() -> None:
    assert FIELDS.value * 4 <= 48
    made = cases.tables(LANES, VOCAB, np.random.default_rng(1), VARIANTS["plain"])
    logits = cases.random_logits(np.random.default_rng(2), LANES, VOCAB)
    groups: list[TPGroup] = []

    def run(group: TPGroup) -> None:
        by_shard(made, logits, VARIANTS["plain"], VOCAB, group, sums=True)
        groups.append(group)

    in_rounds(2, run)
    assert {(group.counts.all_gathers, group.counts.all_gather_bytes) for group in groups} == {(1, 2 * LANES * 36)}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sums", [True, False])
def test_logits_of_any_rank_that_are_not_finite_show_in_the_raw_logprob(sums: bool) -> None:
    variant = VARIANTS["most"]
    rng = np.random.default_rng(6)
    logits = cases.random_logits(rng, LANES, VOCAB)
    logits[0, 17], logits[1, 189], logits[2] = float("nan"), float("inf"), float("nan")
    made = cases.tables(LANES, VOCAB, rng, variant)
    made.state.alive.fill_(True)
    made.state.page_table.fill_(9)
    for told, _ in in_rounds(2, lambda group: by_shard(made, logits, variant, 180, group, sums=sums)):
        assert np.isfinite(told.floats[1]).tolist() == [False, False, False, True]
        assert ((told.words[2] >= 0) & (told.words[2] < VOCAB)).all()


@pytest.mark.parametrize("size", [2, 3])
def test_embeddings_of_all_ranks_add_up_to_the_whole_ones(size: int) -> None:
    rng = np.random.default_rng(9)
    made = cases.tables(LANES, VOCAB, rng, VARIANTS["plain"])
    embedding = torch.randn(VOCAB, 24, generator=torch.Generator().manual_seed(1))

    def prologue(weight: torch.Tensor, first_id: int | None) -> torch.Tensor:
        x = torch.full((LANES, 24), float("nan"))
        lanes = LaneBuffers.allocate(LANES, cases.CPU)
        begin_step(made.state, lanes, torch.zeros((), dtype=torch.int32), weight, x, page_size=cases.PAGE_SIZE, first_id=first_id)
        return x

    parts = []
    for rank in range(size):
        shard = shard_of(TPGroup(rank, size, cases.CPU, None, None), VOCAB)
        parts.append(prologue(embedding[shard.first_id : shard.first_id + shard.count].contiguous(), shard.first_id))
    assert torch.equal(torch.stack(parts).sum(dim=0), prologue(embedding, None))
