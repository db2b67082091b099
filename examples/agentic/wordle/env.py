"""Wordle as a multi-turn environment: guess a five-letter word; each guess is answered letter by letter.

    crane ----G       fable          the first guess is on the board; the model makes the others
    ----G             geese          G: the right letter in its place, Y: a letter of the word elsewhere, -: no more of this letter

A letter is marked as often as the word has it, first where it stands right, then from the left. Anything but a word of the list
ends the game. Invariant: the word follows from the seed, the answers from the guesses.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from examples.agentic.wordle.reward import Outcome, reward
from rollout.agent import Episode, Step, Turn

LENGTH = 5
WORDS = tuple((Path(__file__).with_name("words.txt")).read_text().split())
NUM_WORDS = 12
NUM_GUESSES = 3


def marks(guess: str, word: str) -> str:
    """Return the answer to a guess: G, Y or - for each letter."""
    unplaced = Counter(own for letter, own in zip(guess, word) if letter != own)
    found = []
    for letter, own in zip(guess, word):
        if letter == own:
            found.append("G")
        elif unplaced[letter]:
            unplaced[letter] -= 1
            found.append("Y")
        else:
            found.append("-")
    return "".join(found)


class Game:
    """One game: the word of its seed, the guesses so far, and how it ended. The list's first word opens and is never the answer."""

    __slots__ = ("_guesses", "_words", "guesses", "opening", "outcome", "word")

    def __init__(self, seed: int, words: Sequence[str], guesses: int = NUM_GUESSES):
        self.word = random.Random(seed).choice(words[1:])
        self.opening = f"{words[0]} {marks(words[0], self.word)}"
        self._words, self._guesses = frozenset(words), guesses
        self.guesses: list[str] = []
        self.outcome: Outcome | None = None

    def answer(self, text: str) -> str | None:
        """Take a guess; return its marks, or None when it ended the game."""
        assert self.outcome is None, f"the game is over: {self.outcome}"
        guess = text.strip()
        self.guesses.append(guess)
        if guess not in self._words:
            self.outcome = Outcome.NO_WORD
        elif guess == self.word:
            self.outcome = Outcome.FOUND
        elif len(self.guesses) == self._guesses:
            self.outcome = Outcome.MISSED
        else:
            return marks(guess, self.word)
        return None


class Wordle:
    """One game as an environment, played once; `words` are the list that words and guesses come from."""

    __slots__ = ("_game", "_guesses", "_words")

    def __init__(self, words: Sequence[str] = WORDS[:NUM_WORDS], guesses: int = NUM_GUESSES) -> None:
        self._words, self._guesses = words, guesses
        self._game: Game | None = None

    @property
    def outcome(self) -> Outcome | None:
        """Return how the game ended, None while it runs."""
        return self._game.outcome if self._game else None

    async def reset(self, seed: int) -> list[dict[str, str]]:
        """Choose the word of `seed` and show the first guess."""
        self._game = Game(seed, self._words, self._guesses)
        return [{"role": "user", "content": self._game.opening}]

    async def step(self, turn: Turn) -> Step:
        """Answer a guess."""
        assert self._game is not None, "step comes after reset"
        found = self._game.answer(turn.text)
        return Step(done=True) if found is None else Step(messages=[{"role": "user", "content": found}])

    async def score(self, episode: Episode) -> float:
        """Return the reward; a guess that a limit cut off is no word."""
        assert self._game is not None, "score comes after reset"
        if self._game.outcome is None:
            self._game.outcome = Outcome.NO_WORD
        return reward(self._game.outcome, len(self._game.guesses))
