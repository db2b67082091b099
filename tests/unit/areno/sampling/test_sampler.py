"""The sampler: temperature before the softmax, masks in the draw only, shards that add up to the whole."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from areno.sampling.penalties import SlotTables
from areno.sampling.sampler import Drawn, LaneParams, Sampler, combine
from areno.sampling.variant import Variant

PLAIN = Variant(noise=True, temperature=True)
FULL = Variant(noise=True, temperature=True, stop_mask=True, slots=True)


def _lanes(
    count: int, *, temperature: float | list[float] = 1.0, stop_ids: list[int] | None = None, stop_wait: int = 0, forced: int = -1
) -> LaneParams:
    stops = torch.full((count, 16), -1, dtype=torch.int32)
    for place, stop in enumerate(stop_ids or []):
        stops[:, place] = stop
    values = [temperature] * count if isinstance(temperature, float) else temperature
    return LaneParams(
        temperature=torch.tensor(values),
        top_k=torch.zeros(count, dtype=torch.int32),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        seeds=torch.arange(count),
        positions=torch.full((count,), 11, dtype=torch.int32),
        stop_ids=stops,
        stop_wait=torch.full((count,), stop_wait, dtype=torch.int32),
        slots=torch.full((count,), -1),
        forced=torch.full((count,), forced, dtype=torch.int32),
        tables=SlotTables(num_slots=1, vocab_size=512, max_forced=4, device=torch.device("cpu")),
    )


def _sampler(vocab: int, *, valid: int | None = None) -> Sampler:
    return Sampler(first_id=0, width=vocab, num_valid_ids=valid or vocab)


def _draw(logits: torch.Tensor, lanes: LaneParams, variant: Variant = FULL, valid: int | None = None) -> Drawn:
    return _sampler(logits.shape[1], valid=valid).draw(logits, lanes, variant)


def test_logprobs_are_of_the_tempered_logits_and_neither_raw_nor_divided() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(4, 1)
    lanes = dataclasses.replace(_lanes(4, temperature=0.5), forced=torch.arange(4, dtype=torch.int32))
    drawn = _draw(logits, lanes)
    assert drawn.token.tolist() == [0, 1, 2, 3]
    assert np.allclose(drawn.logprob, [-0.145078, -2.145078, -4.145078, -6.145078], atol=1e-5)
    assert np.allclose(drawn.raw_logprob, [-0.440190, -1.440190, -2.440190, -3.440190], atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-6, 0.3, 1.0, 1.7, 100.0])
def test_every_returned_number_is_finite_at_any_temperature(temperature: float) -> None:
    logits = torch.randn(8, 300) * 10
    drawn = _draw(logits, _lanes(8, temperature=temperature, stop_ids=[5], stop_wait=1))
    for values in (drawn.logprob, drawn.raw_logprob, drawn.behaviour_logprob):
        assert torch.isfinite(values).all() and (values <= 1e-5).all()


def test_greedy_takes_the_largest_allowed_logit_and_the_lowest_id_on_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]]).repeat(2, 1)
    assert _draw(logits, _lanes(2, temperature=0.0), PLAIN).token.tolist() == [1, 1]
    masked = _draw(logits, _lanes(2, temperature=0.0, stop_ids=[1], stop_wait=3))
    assert masked.token.tolist() == [2, 2]
    # The trainer's quantity ignores the mask; the draw's own distribution does not.
    assert torch.allclose(masked.logprob, torch.log_softmax(logits, 1)[:, 2])
    allowed = logits.clone()
    allowed[:, 1] = -torch.inf
    assert torch.allclose(masked.behaviour_logprob, torch.log_softmax(allowed, 1)[:, 2])


def test_behaviour_logprob_is_absent_where_no_mask_is_active() -> None:
    logits = torch.randn(4, 50)
    assert _draw(logits, _lanes(4)).behaviour_logprob.isnan().all()
    assert _draw(logits, _lanes(4, stop_ids=[3], stop_wait=0)).behaviour_logprob.isnan().all()
    assert _draw(logits, _lanes(4, stop_wait=2)).behaviour_logprob.isnan().all()


def test_ids_beyond_the_tokenizer_are_never_drawn_but_count_in_the_logprob() -> None:
    logits = torch.zeros(500, 8)
    logits[:, 6:] = 4.0
    drawn = _draw(logits, _lanes(500), PLAIN, valid=6)
    assert drawn.token.max() == 5 and set(drawn.token.tolist()) == set(range(6))
    assert torch.allclose(drawn.logprob, torch.log_softmax(logits, 1)[:, 0])
    assert torch.allclose(drawn.behaviour_logprob, torch.full((500,), 1 / 6).log())


def test_shards_combine_to_the_unsharded_draw() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 301) * 3
    lanes = _lanes(40, temperature=[0.0, 0.6, 1.0, 1.7] * 10, stop_ids=[7, 200], stop_wait=1)
    whole = _draw(logits, lanes)
    bounds = [0, 100, 200, 301]
    records = [
        Sampler(first_id=low, width=high - low, num_valid_ids=301).reduce_shard(logits[:, low:high], lanes, FULL)
        for low, high in itertools.pairwise(bounds)
    ]
    sharded = combine(records, lanes, FULL, masks_ids=False)
    assert torch.equal(sharded.token, whole.token)
    for name in ("logprob", "raw_logprob", "behaviour_logprob"):
        assert torch.allclose(getattr(sharded, name), getattr(whole, name), atol=1e-5)


def test_forced_ids_win_over_draw_and_mask_in_every_shard() -> None:
    logits = torch.randn(4, 90)
    lanes = _lanes(4, stop_ids=[70], stop_wait=5, forced=70)
    assert _draw(logits, lanes).token.tolist() == [70] * 4
    assert torch.allclose(_draw(logits, lanes).logprob, torch.log_softmax(logits, 1)[:, 70], atol=1e-5)
    records = [
        Sampler(first_id=low, width=30, num_valid_ids=90).reduce_shard(logits[:, low : low + 30], lanes, FULL) for low in (0, 30, 60)
    ]
    assert combine(records, lanes, FULL, masks_ids=False).token.tolist() == [70] * 4


def test_a_plain_lane_has_the_same_bits_in_every_variant() -> None:
    logits = torch.randn(8, 264)
    lanes = _lanes(8)
    base = _draw(logits, lanes, Variant(noise=True, temperature=False))
    for variant in (PLAIN, FULL, Variant(noise=True, temperature=False, stop_mask=True, slots=True)):
        other = _draw(logits, lanes, variant)
        assert (
            torch.equal(other.token, base.token)
            and torch.equal(other.logprob, base.logprob)
            and torch.equal(other.raw_logprob, base.raw_logprob)
        )


def test_draws_follow_the_tempered_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -6.0]]).repeat(40_000, 1)
    drawn = _draw(logits, _lanes(40_000, temperature=0.8), PLAIN)
    expected = torch.softmax(logits[0] / 0.8, 0) * 40_000
    found = torch.bincount(drawn.token, minlength=5)
    chi_square = ((found - expected) ** 2 / expected).sum().item()
    assert chi_square < 23.5  # 4 degrees of freedom, p = 1e-4
