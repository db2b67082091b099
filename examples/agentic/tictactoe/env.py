"""Tic-tac-toe as a multi-turn message environment.

The model plays X (moves first) or O, a seeded random opponent plays the other mark. Each message to the model shows the board as
three rows in which an empty square is its own digit; the first one also says which mark is the model's:

    You play O.        1O3
    1X3                4X6
    456                78X
    789

The model answers with the digit of an empty square and nothing else. Anything else is an illegal move, which loses and ends the
game. The invariant: everything a game does follows from its seed and the model's answers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from examples.agentic.tictactoe.reward import Outcome, reward
from rollout.agent import Episode, Step, Turn

MARKS = ("X", "O")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class Board:
    """Nine squares; an empty one holds its own digit, so the text of a board names every legal move."""

    __slots__ = ("squares",)

    def __init__(self, squares: str = "123456789") -> None:
        self.squares = list(squares)

    def legal_moves(self) -> list[int]:
        """Return the indices (0-8) of the empty squares; none once a line is complete."""
        return [] if self.winner() else [index for index, square in enumerate(self.squares) if square not in MARKS]

    def place(self, index: int, mark: str) -> None:
        assert self.squares[index] not in MARKS, f"square {index + 1} is taken by {self.squares[index]}"
        self.squares[index] = mark

    def winner(self) -> str | None:
        """Return the mark that holds a complete line."""
        for first, second, third in LINES:
            if self.squares[first] == self.squares[second] == self.squares[third]:
                return self.squares[first]
        return None

    def render(self) -> str:
        return "\n".join("".join(self.squares[row : row + 3]) for row in (0, 3, 6))


def parse_move(text: str, board: Board) -> int | None:
    """Read an answer: the index of an empty square, or None for anything but the digit of one."""
    answer = text.strip()
    if len(answer) != 1 or answer not in "123456789":
        return None
    index = int(answer) - 1
    return index if index in board.legal_moves() else None


class Game:
    """One game: the board, the marks and the opponent, all from the seed, and how it ended."""

    __slots__ = ("_opponent", "_random", "board", "mark", "outcome")

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.mark = self._random.choice(MARKS)
        self._opponent = MARKS[1 - MARKS.index(self.mark)]
        self.board = Board()
        self.outcome: Outcome | None = None
        if self._opponent == MARKS[0]:
            self._opponent_moves()

    def first_message(self) -> str:
        """Return what the model is told before its first move."""
        return f"You play {self.mark}.\n{self.board.render()}"

    def answer(self, text: str) -> str | None:
        """Play the model's answer and the opponent's reply; return the new board, or None when that ended the game."""
        assert self.outcome is None, f"the game is over: {self.outcome}"
        index = parse_move(text, self.board)
        if index is None:
            self.outcome = Outcome.ILLEGAL
            return None
        self.board.place(index, self.mark)
        if self.board.legal_moves():
            self._opponent_moves()
        if self.board.legal_moves():
            return self.board.render()
        winner = self.board.winner()
        self.outcome = Outcome.DRAW if winner is None else Outcome.WIN if winner == self.mark else Outcome.LOSS
        return None

    def _opponent_moves(self) -> None:
        self.board.place(self._random.choice(self.board.legal_moves()), self._opponent)


class TicTacToe:
    """One game as an environment for the episode runner, played once."""

    __slots__ = ("_game",)

    def __init__(self) -> None:
        self._game: Game | None = None

    @property
    def outcome(self) -> Outcome | None:
        """Return how the game ended, None while it runs."""
        return self._game.outcome if self._game else None

    async def reset(self, seed: int) -> Sequence[Mapping[str, str]]:
        """Start the game of `seed`; equal seeds give equal marks and an opponent with equal dice."""
        self._game = Game(seed)
        return [{"role": "user", "content": self._game.first_message()}]

    async def step(self, turn: Turn) -> Step:
        """Play the model's answer and, unless that ends the game, the opponent's reply."""
        assert self._game is not None, "step comes after reset"
        board = self._game.answer(turn.text)
        return Step(done=True) if board is None else Step(messages=[{"role": "user", "content": board}])

    async def score(self, episode: Episode) -> float:
        """Return the reward. A limit or a tool call that ended the episode before the game did counts as an illegal move."""
        assert self._game is not None, "score comes after reset"
        if self._game.outcome is None:
            self._game.outcome = Outcome.ILLEGAL
        return reward(self._game.outcome)
