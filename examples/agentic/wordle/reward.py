"""How a game can end and what each ending is worth."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

FIRST_HELD_OUT_SEED = 2**48
COST_OF_GUESS = 0.1


class Outcome(enum.Enum):
    """How a game ended."""

    FOUND = "found"
    MISSED = "missed"
    NO_WORD = "no_word"


def reward(outcome: Outcome, guesses: int) -> float:
    """Return what a finished game is worth: found at once 1, each further guess a little less, missed 0, no word of the list -0.5."""
    return {Outcome.FOUND: 1.0 - COST_OF_GUESS * (guesses - 1), Outcome.MISSED: 0.0, Outcome.NO_WORD: -0.5}[outcome]


def held_out_seeds(count: int) -> range:
    """Return the seeds of games that no training step plays."""
    return range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + count)


@dataclass(frozen=True, slots=True)
class Rates:
    """How a number of games ended, each as a share of all of them."""

    games: int
    found: float
    missed: float
    no_word: float

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Rates:
        """Count outcomes. Raises: ValueError when there are none."""
        counts = Counter(outcomes)
        if not counts.total():
            raise ValueError("no game was finished, so there is no rate: play at least one")
        return cls(counts.total(), *(counts[kind] / counts.total() for kind in Outcome))
