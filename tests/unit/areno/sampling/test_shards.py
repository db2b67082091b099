"""Draws and scores on a cut vocabulary against the whole one: the same ids, the same numbers, and what travels for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from areno.parallel import TPGroup
from areno.sampling.penalties import SlotTables
from areno.sampling.sampler import Drawn, LaneParams, Sampler
from areno.sampling.shards import VocabularyShard, logprobs_of
from areno.sampling.slot_content import SlotContent
from areno.sampling.variant import Variant
from tests.tp_ranks import run_ranks

VOCAB, VALID, LANES = 1000, 990, 12
PLAIN = Variant(noise=True, sums=True)
FULL = Variant(noise=True, temperature=True, stop_mask=True, slots=True, sums=True)
NOTHING = np.zeros(0, dtype=np.int64)


def lanes_of(seed: int, **changes: torch.Tensor) -> LaneParams:
    rng = np.random.default_rng(seed)
    tables = SlotTables(num_slots=4, vocab_size=VOCAB, max_forced=4, device=torch.device("cpu"))
    for slot in range(4):
        content = SlotContent(
            forced_ids=NOTHING,
            bias_ids=rng.integers(0, VOCAB, 20),
            bias_values=rng.normal(0, 3, 20).astype(np.float32),
            repetition=1.3,
            presence=0.5,
            frequency=0.25,
            prompt_ids=rng.integers(0, VOCAB, 50),
            output_ids=rng.integers(0, VOCAB, 30),
        )
        tables.fill([(slot, content)])
    lanes = LaneParams(
        temperature=torch.tensor([0.0, 0.6, 1.0, 1.7] * 3),
        top_k=torch.zeros(LANES, dtype=torch.int32),
        top_p=torch.ones(LANES),
        min_p=torch.zeros(LANES),
        seeds=torch.from_numpy(rng.integers(-(2**62), 2**62, LANES)),
        positions=torch.full((LANES,), 5 + seed, dtype=torch.int32),
        stop_ids=torch.from_numpy(rng.integers(0, VOCAB, (LANES, 16)).astype(np.int32)),
        stop_wait=torch.tensor([1, 0, 3] * 4, dtype=torch.int32),
        slots=torch.tensor([0, -1, 1, -1, 2, -1, 3, -1, -1, -1, -1, -1]),
        forced=torch.full((LANES,), -1, dtype=torch.int32),
        tables=tables,
    )
    return replace(lanes, **changes)


def logits_of(seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn((LANES, VOCAB), generator=torch.Generator().manual_seed(seed)) * spread


def shard_of(group: TPGroup, vocab: int = VOCAB) -> VocabularyShard:
    width = -(-vocab // group.size)
    first = group.rank * width
    return VocabularyShard(first_id=first, count=min(width, vocab - first), width=width, vocab_size=vocab, group=group)


def draw_in_ranks(size: int, logits: torch.Tensor, lanes: LaneParams, variant: Variant, valid: int = VALID) -> tuple[Drawn, TPGroup]:
    def draw(group: TPGroup) -> tuple[Drawn, TPGroup]:
        shard = shard_of(group)
        part = logits[:, shard.first_id : shard.first_id + shard.count]
        return Sampler.of_shard(shard, valid).draw(part, lanes, variant), group

    found = run_ranks(size, draw)
    for name in ("token", "logprob", "raw_logprob", "behaviour_logprob"):
        bits = [getattr(drawn, name).numpy().tobytes() for drawn, _ in found]
        assert len(set(bits)) == 1, f"ranks differ in {name}"
    return found[0]


def assert_equal(found: Drawn, whole: Drawn) -> None:
    assert found.token.tolist() == whole.token.tolist()
    for name in ("logprob", "raw_logprob", "behaviour_logprob"):
        assert torch.allclose(getattr(found, name), getattr(whole, name), atol=1e-5, rtol=0, equal_nan=True), name


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("variant", [PLAIN, replace(PLAIN, temperature=True), FULL, replace(PLAIN, noise=False)])
def test_a_cut_vocabulary_draws_the_same_in_one_gather_of_at_most_48_bytes_a_row_and_rank(size: int, variant: Variant) -> None:
    for seed in range(4):
        lanes = lanes_of(seed)
        if not variant.temperature:
            lanes = replace(lanes, temperature=torch.tensor([0.0, 1.0] * 6))
        if not variant.noise:
            lanes = replace(lanes, temperature=torch.zeros(LANES))
        found, group = draw_in_ranks(size, logits_of(seed), lanes, variant)
        assert_equal(found, Sampler(first_id=0, width=VOCAB, num_valid_ids=VALID).draw(logits_of(seed), lanes, variant))
        assert group.counts.collectives == group.counts.all_gathers == 1
        assert group.counts.all_gather_bytes <= 48 * LANES * size


def test_the_default_path_sends_20_bytes_a_row() -> None:
    lanes = replace(lanes_of(0), temperature=torch.ones(LANES))
    _, group = draw_in_ranks(2, logits_of(0), lanes, PLAIN, valid=VOCAB)
    assert group.counts.all_gather_bytes == 20 * LANES * 2


FILTERS = {
    "top-k": {"top_k": [1, 5, 64, 0] * 3},
    "top-k of the ids that top-p and min-p leave": {
        "top_k": [40, 3, 10, 64] * 3,
        "top_p": [0.9, 0.5, 1.0, 0.2] * 3,
        "min_p": [0.0, 0.1, 0.02, 0.3] * 3,
    },
    "top-p": {"top_p": [0.1, 0.5, 0.95, 1.0] * 3},
    "min-p": {"min_p": [0.0, 0.01, 0.2, 1.0] * 3},
    "a large top-k": {"top_k": [65, 200, 999, 1000] * 3, "top_p": [0.9, 1.0, 0.99, 0.5] * 3},
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("size", [2, 4])
def test_filters_keep_the_same_ids_on_a_cut_vocabulary(name: str, size: int) -> None:
    kinds = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    given = {field: torch.tensor(values, dtype=kinds[field]) for field, values in FILTERS[name].items()}
    narrow = name.startswith("top-k")
    variant = replace(FULL, filters=True, kept=True)
    for seed in range(3):
        lanes = lanes_of(seed, **given)
        found, group = draw_in_ranks(size, logits_of(seed), lanes, variant)
        whole = Sampler(first_id=0, width=VOCAB, num_valid_ids=VALID).draw(logits_of(seed), lanes, variant)
        assert_equal(found, whole)
        for lane in range(LANES):
            count = int(whole.kept_count[lane])
            if count <= 64 and (lanes.top_k[lane] > 0 or lanes.top_p[lane] < 1 or lanes.min_p[lane] > 0):
                assert int(found.kept_count[lane]) == count
                assert found.kept_ids[lane, :count].tolist() == whole.kept_ids[lane, :count].tolist()
        # Candidates or the scores themselves, then the records; the vocabulary never travels where a top-k bounds what is kept.
        assert group.counts.all_gathers == 2
        assert (group.counts.all_gather_bytes < 4 * LANES * VOCAB) == narrow or size == 4


def test_more_ties_than_candidates_are_all_kept() -> None:
    logits = torch.full((LANES, VOCAB), -4.0)
    logits[:, 100:400] = 1.0
    lanes = lanes_of(0, top_k=torch.full((LANES,), 10, dtype=torch.int32), slots=torch.full((LANES,), -1))
    variant = Variant(noise=True, temperature=True, filters=True, kept=True, sums=True)
    found, group = draw_in_ranks(2, logits, lanes, variant, valid=VOCAB)
    whole = Sampler(first_id=0, width=VOCAB, num_valid_ids=VOCAB).draw(logits, lanes, variant)
    assert_equal(found, whole)
    assert found.kept_count.tolist() == [300] * LANES
    assert group.counts.all_gathers == 3


@pytest.mark.parametrize("size", [2, 4])
def test_greedy_takes_the_lowest_id_of_a_tie_across_ranks_and_forced_ids_come_from_their_own(size: int) -> None:
    logits = torch.zeros((LANES, VOCAB))
    logits[:, [300, 700, 980]] = 5.0
    lanes = lanes_of(1, temperature=torch.zeros(LANES), slots=torch.full((LANES,), -1), stop_wait=torch.zeros(LANES, dtype=torch.int32))
    found, _ = draw_in_ranks(size, logits, lanes, PLAIN, valid=VOCAB)
    assert found.token.tolist() == [300] * LANES
    forced = torch.arange(0, 12 * 90, 90, dtype=torch.int32)
    lanes = lanes_of(1, forced=forced)
    found, _ = draw_in_ranks(size, logits_of(3), lanes, FULL)
    assert found.token.tolist() == forced.tolist()
    assert_equal(found, Sampler(first_id=0, width=VOCAB, num_valid_ids=VALID).draw(logits_of(3), lanes, FULL))


@pytest.mark.parametrize("place", [3, 999])
def test_logits_that_are_not_finite_in_one_rank_spoil_the_row_on_all(place: int) -> None:
    logits = logits_of(0)
    logits[2, place] = float("nan")
    found, _ = draw_in_ranks(2, logits, lanes_of(0), FULL)
    finite = torch.isfinite(found.raw_logprob).tolist()
    assert finite == [lane != 2 for lane in range(LANES)]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_scores_of_given_ids_are_those_of_the_whole_vocabulary(temperature: float) -> None:
    logits, ids = logits_of(7), torch.randint(VOCAB, (LANES,), generator=torch.Generator().manual_seed(1))

    def score(group: TPGroup) -> tuple[torch.Tensor, torch.Tensor]:
        shard = shard_of(group)
        return logprobs_of(logits[:, shard.first_id : shard.first_id + shard.count], ids, temperature, shard)

    for tempered, raw in run_ranks(3, score):
        expected = torch.log_softmax(logits.double(), 1).gather(1, ids[:, None])[:, 0]
        assert torch.allclose(raw.double(), expected, atol=1e-5, rtol=0)
        expected = torch.log_softmax(logits.double() / (temperature or 1.0), 1).gather(1, ids[:, None])[:, 0]
        assert torch.allclose(tempered.double(), expected, atol=1e-5, rtol=0)
