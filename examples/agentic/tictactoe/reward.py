"""How a game can end, what each ending is worth, and the held-out games on which win rates are measured.

Called by the environment and by the training script, which owns how games are played; this file owns the numbers. The invariant:
training seeds and held-out seeds never meet, and every win rate of the example is `WinRate` over the same held-out games.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


class Outcome(enum.Enum):
    """How a game ended, from the model's side."""

    WIN = "win"
    DRAW = "draw"
    LOSS = "loss"
    ILLEGAL = "illegal"


REWARDS = {Outcome.WIN: 1.0, Outcome.DRAW: 0.5, Outcome.LOSS: 0.0, Outcome.ILLEGAL: -0.5}
MAX_RUNS, MAX_STEPS, MAX_GROUPS = 2**12, 2**16, 2**12
FIRST_HELD_OUT_SEED = MAX_RUNS * MAX_STEPS * MAX_GROUPS
NUM_HELD_OUT_GAMES = 200


def reward(outcome: Outcome) -> float:
    """Return what a finished game is worth: an illegal move costs more than a loss, so that losing legally is progress."""
    return REWARDS[outcome]


def held_out_seeds(count: int = NUM_HELD_OUT_GAMES) -> range:
    """Return the seeds of the games that no training step plays. The same `count` names the same games in every run."""
    return range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + count)


def training_seed(run_seed: int, step: int, group: int) -> int:
    """Return the seed of one group's game: no two groups of any runs share one, and none is held out.

    Raises: ValueError when a part is out of its range.
    """
    for name, value, limit in (("run_seed", run_seed, MAX_RUNS), ("step", step, MAX_STEPS), ("group", group, MAX_GROUPS)):
        if not 0 <= value < limit:
            raise ValueError(f"{name} is {value}; it must be at least 0 and below {limit}: choose another {name}")
    return (run_seed * MAX_STEPS + step) * MAX_GROUPS + group


@dataclass(frozen=True, slots=True)
class WinRate:
    """How a number of games ended, each as a share of all of them."""

    games: int
    win: float
    draw: float
    loss: float
    illegal: float

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> WinRate:
        """Count outcomes. Raises: ValueError when there are none, since no games have no win rate."""
        counts = Counter(outcomes)
        games = counts.total()
        if not games:
            raise ValueError("no game was finished, so there is no win rate: play at least one")
        return cls(games, *(counts[kind] / games for kind in (Outcome.WIN, Outcome.DRAW, Outcome.LOSS, Outcome.ILLEGAL)))
