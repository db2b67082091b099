"""Rewards, win rates, and seeds that never meet."""

from __future__ import annotations

import pytest

from examples.agentic.tictactoe.reward import FIRST_HELD_OUT_SEED, Outcome, WinRate, held_out_seeds, reward, training_seed


def test_a_win_is_worth_most_and_an_illegal_move_least() -> None:
    values = [reward(outcome) for outcome in (Outcome.WIN, Outcome.DRAW, Outcome.LOSS, Outcome.ILLEGAL)]
    assert values == [1.0, 0.5, 0.0, -0.5]


def test_every_outcome_has_a_reward() -> None:
    assert all(isinstance(reward(outcome), float) for outcome in Outcome)


def test_no_training_seed_is_held_out_or_shared_by_two_groups() -> None:
    seeds = [training_seed(run, step, group) for run in (0, 1, 4095) for step in (0, 1, 65535) for group in (0, 1, 4095)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < FIRST_HELD_OUT_SEED <= min(held_out_seeds(200))


@pytest.mark.parametrize(
    ("run", "step", "group", "name"), [(-1, 0, 0, "run_seed"), (4096, 0, 0, "run_seed"), (0, 65536, 0, "step"), (0, 0, 4096, "group")]
)
def test_a_part_out_of_range_is_refused_with_its_limit(run: int, step: int, group: int, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .* below \d+: choose another {name}"):
        training_seed(run, step, group)


def test_the_held_out_games_are_the_same_in_every_run() -> None:
    assert list(held_out_seeds(3)) == list(held_out_seeds(200))[:3]
    assert len(held_out_seeds()) == 200


def test_win_rates_are_shares_of_all_games() -> None:
    rate = WinRate.of([Outcome.WIN, Outcome.WIN, Outcome.DRAW, Outcome.ILLEGAL])
    assert rate == WinRate(games=4, win=0.5, draw=0.25, loss=0.0, illegal=0.25)


def test_no_games_have_no_win_rate() -> None:
    with pytest.raises(ValueError, match="play at least one"):
        WinRate.of([])
