"""Thresholds found by searching values equal the textbook filters done by sorting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areno.sampling import filters


def _sorted_filters(scores: np.ndarray, share: float, count: int, mass: float) -> np.ndarray:
    """Return what is kept of one row, by sorting; ties with the last kept score are kept."""
    scores = scores.astype(np.float64)
    kept = np.ones(scores.size, dtype=bool)
    if share > 0:
        kept &= scores >= np.float64(np.float32(scores.max()) + np.float32(np.log(np.float32(share))))
    if 0 < count < scores.size:
        allowed = np.sort(scores[kept])[::-1]
        kept &= scores >= allowed[min(count, allowed.size) - 1]
    if mass < 1:
        weights = np.where(kept, np.exp(scores - scores.max()), 0.0)
        order = np.argsort(-weights, kind="stable")
        reached = np.searchsorted(np.cumsum(weights[order]), mass * weights.sum() * (1 - 1e-12))
        kept &= scores >= scores[order[min(reached, scores.size - 1)]]
    return kept


@pytest.mark.parametrize("seed", range(5))
def test_filters_keep_what_sorting_keeps_alone_and_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = 60
    scores = torch.from_numpy(rng.normal(size=(rows, 300)) * rng.choice([0.1, 1, 5])).float()
    share = torch.tensor(rng.choice([0.0, 0.01, 0.2, 1.0], size=rows)).float()
    count = torch.tensor(rng.choice([0, 1, 2, 40, 299, 300, 10**6], size=rows)).int()
    mass = torch.tensor(rng.choice([1.0, 0.999, 0.9, 0.3, 1e-6], size=rows)).float()
    kept = filters.apply(scores, min_p_B=share, top_k_B=count, top_p_B=mass) > -torch.inf
    for row in range(rows):
        expected = _sorted_filters(scores[row].numpy(), float(share[row]), int(count[row]), float(mass[row]))
        assert np.array_equal(kept[row].numpy(), expected), (share[row], count[row], mass[row])


def test_scores_equal_to_the_threshold_are_all_kept() -> None:
    scores = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0, -1.0]])
    assert (filters.top_k(scores, torch.tensor([2])) > -torch.inf)[0].tolist() == [True, True, True, True, False, False]
    assert (filters.top_p(scores, torch.tensor([0.5])) > -torch.inf)[0].tolist() == [True, True, True, True, False, False]


def test_each_filter_sees_the_mass_that_those_before_it_left() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    alone = filters.top_p(probabilities.log(), torch.tensor([0.75])) > -torch.inf
    assert alone[0].tolist() == [True, True, True, False]
    # After top-k keeps two, they hold all of the mass: 0.4 / 0.7 = 0.57, so 0.55 keeps one.
    both = filters.apply(probabilities.log(), min_p_B=torch.zeros(1), top_k_B=torch.tensor([2]), top_p_B=torch.tensor([0.55]))
    assert (both > -torch.inf)[0].tolist() == [True, False, False, False]


def test_masked_scores_stay_masked_and_the_best_is_always_kept() -> None:
    scores = torch.tensor([[-torch.inf, 5.0, -torch.inf, 4.0]]).repeat(3, 1)
    out = filters.apply(
        scores, min_p_B=torch.tensor([1.0, 0.0, 0.0]), top_k_B=torch.tensor([0, 3, 0]), top_p_B=torch.tensor([1.0, 1.0, 1e-9])
    )
    assert (out > -torch.inf).tolist() == [[False, True, False, False], [False, True, False, True], [False, True, False, False]]


def test_negative_zero_and_denormals_are_ordered_like_the_floats() -> None:
    scores = torch.tensor([[0.0, -0.0, 1e-42, -1e-42, -3.0]])
    assert (filters.top_k(scores, torch.tensor([1])) > -torch.inf)[0].tolist() == [False, False, True, False, False]
    assert (filters.top_k(scores, torch.tensor([4])) > -torch.inf)[0].tolist() == [True, True, True, True, False]
