"""The draw that makes noise only for ids that can win equals the full draw bit for bit, and makes little noise."""

from __future__ import annotations

import pytest
import torch

from areno.sampling import noise, race

VOCAB = 8192


def _weights(shaped: torch.Tensor) -> torch.Tensor:
    return (shaped - shaped.amax(dim=1, keepdim=True)).exp()


def _both(shaped: torch.Tensor, greedy: torch.Tensor, *, seed: int, first_id: int = 0) -> None:
    assert shaped.numel() > race._SMALL, "the sizes here are those of a race"
    rows = shaped.shape[0]
    seeds = torch.arange(rows) * 7919 + seed * 104729 - 2**40
    positions = torch.arange(rows) * 13 + seed
    place, score = race.draw(shaped, _weights(shaped), greedy, seeds, positions, first_id)
    expected, expected_score = race._draw_all(shaped, greedy, seeds, positions, first_id)
    assert torch.equal(place, expected)
    assert torch.equal(score, expected_score)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.3, 1.0, 5.0, 100.0, 1e4, 1e8])
@pytest.mark.parametrize("shift", [0.0, -300.0, 1e4])
def test_the_winner_is_that_of_the_full_draw(scale: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(int(scale * 7) + int(abs(shift)))
    for seed in range(12):
        shaped = torch.randn((5, VOCAB), generator=generator) * scale + shift
        _both(shaped, torch.tensor([False, False, True, False, False]), seed=seed, first_id=seed * 1000)


def test_masked_ids_ties_and_rows_of_one_id_are_drawn_alike() -> None:
    generator = torch.Generator().manual_seed(3)
    for seed in range(20):
        shaped = torch.randn((6, VOCAB), generator=generator).mul_(3.0)
        shaped[0, torch.randperm(VOCAB, generator=generator)[: VOCAB - 1]] = float("-inf")
        shaped[1, torch.rand(VOCAB, generator=generator) < 0.9] = float("-inf")
        shaped[2] = shaped[2].round()
        shaped[3] = 0.0
        _both(shaped, torch.tensor([False, False, False, False, True, False]), seed=seed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite_end_as_in_the_full_draw(bad: float) -> None:
    shaped = torch.randn((3, 20_000), generator=torch.Generator().manual_seed(1))
    shaped[1] = bad
    seeds, positions, greedy = torch.arange(3), torch.arange(3), torch.zeros(3, dtype=torch.bool)
    place, score = race.draw(shaped, _weights(shaped), greedy, seeds, positions, 0)
    expected, expected_score = race._draw_all(shaped, greedy, seeds, positions, 0)
    assert torch.equal(place, expected)
    assert torch.equal(score, expected_score) or score.isnan().equal(expected_score.isnan())


def test_noise_is_made_for_few_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = noise.of_hashes
    monkeypatch.setattr(noise, "of_hashes", lambda hashed: made.append(hashed.size) or original(hashed))
    shaped = torch.randn((16, 49152), generator=torch.Generator().manual_seed(5)).mul_(4.0)
    race.draw(shaped, _weights(shaped), torch.zeros(16, dtype=torch.bool), torch.arange(16), torch.arange(16), 0)
    assert sum(made) < shaped.numel() // 100
