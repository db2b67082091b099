"""The tic-tac-toe environment: rules, answers, endings, and everything from the seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from examples.agentic.tictactoe.env import LINES, MARKS, Board, Game, TicTacToe, parse_move
from examples.agentic.tictactoe.reward import Outcome

AN_EPISODE: Any = SimpleNamespace()


def a_turn(text: str) -> Any:
    """Stand in for a sampled turn, of which the environment reads the text alone."""
    return SimpleNamespace(text=text)


def play_randomly(seed: int) -> Game:
    game, moves = Game(seed), random.Random(f"answers {seed}")
    while game.outcome is None:
        game.answer(str(moves.choice(game.board.legal_moves()) + 1))
    return game


def a_game_as(mark: str) -> Game:
    return next(game for seed in range(100) if (game := Game(seed)).mark == mark)


def test_there_are_eight_lines_and_each_square_is_on_as_many_as_it_should_be() -> None:
    assert len(set(LINES)) == 8
    counts = Counter(square for line in LINES for square in line)
    assert [counts[square] for square in range(9)] == [3, 2, 3, 2, 4, 2, 3, 2, 3]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("line", LINES)
def test_three_of_a_mark_on_a_line_win_and_end_the_moves(line: tuple[int, int, int], mark: str) -> None:
    board = Board()
    for square in line[:2]:
        board.place(square, mark)
        assert board.winner() is None
    board.place(line[2], mark)
    assert board.winner() == mark
    assert board.legal_moves() == []


def test_a_mixed_line_wins_for_nobody() -> None:
    assert Board("XXO456789").winner() is None
    assert Board("XOXXOOOXX").winner() is None
    assert Board("XOXXOOOXX").legal_moves() == []


def test_an_empty_square_shows_its_own_digit() -> None:
    board = Board()
    board.place(4, "X")
    board.place(0, "O")
    assert board.render() == "O23\n4X6\n789"
    assert board.legal_moves() == [1, 2, 3, 5, 6, 7, 8]


def test_a_taken_square_cannot_be_taken_again() -> None:
    board = Board()
    board.place(4, "X")
    with pytest.raises(AssertionError, match="square 5 is taken by X"):
        board.place(4, "O")


@pytest.mark.parametrize(("text", "index"), [("2", 1), (" 2", 1), ("2\n", 1), ("9", 8)])
def test_the_digit_of_an_empty_square_is_a_move(text: str, index: int) -> None:
    assert parse_move(text, Board("X23456789")) == index


@pytest.mark.parametrize(
    "text",
    ["", " ", "0", "1", "10", "22", "2 3", "2.", "-2", "x", "X", "two", "²", "\u0662", "2<|im_end|>", "<|user|>", "\x002", "2\ufffd"],
)
def test_anything_else_is_no_move(text: str) -> None:
    assert parse_move(text, Board("X23456789")) is None


def test_the_first_message_names_the_mark_and_shows_whether_the_opponent_began() -> None:
    assert a_game_as("X").first_message() == "You play X.\n123\n456\n789"
    second = a_game_as("O")
    head, _, board = second.first_message().partition("\n")
    assert head == "You play O."
    assert Counter(board)["X"] == 1 and "O" not in board


def test_the_model_moves_first_in_about_half_of_the_games() -> None:
    assert 400 < sum(Game(seed).mark == "X" for seed in range(1000)) < 600


def test_equal_seeds_and_answers_give_equal_games_and_other_seeds_others() -> None:
    def history(seed: int) -> list[str]:
        game, moves = Game(seed), random.Random(0)
        shown = [game.first_message()]
        while game.outcome is None:
            shown.append(game.answer(str(moves.choice(game.board.legal_moves()) + 1)) or game.outcome.value)  # type: ignore[attr-defined]
        return shown

    assert history(7) == history(7)
    assert len({tuple(history(seed)) for seed in range(50)}) > 40


def test_a_finished_game_is_scored_for_the_side_the_model_plays() -> None:
    for seed in range(500):
        game = play_randomly(seed)
        winner = game.board.winner()
        wanted = Outcome.DRAW if winner is None else Outcome.WIN if winner == game.mark else Outcome.LOSS
        assert game.outcome is wanted
        marks = Counter(game.board.squares)
        assert marks["X"] - marks["O"] in (0, 1)
        if winner is None:
            assert not set("123456789") & set(game.board.squares)


def test_random_legal_play_ends_as_often_in_each_way_as_it_should() -> None:
    """Exact shares for X under uniform play: 58.5 % wins, 28.8 % losses, 12.7 % draws; the model is X in half of the games."""
    shares = Counter(play_randomly(seed).outcome for seed in range(4000))
    assert abs(shares[Outcome.WIN] / 4000 - 0.4365) < 0.03
    assert abs(shares[Outcome.DRAW] / 4000 - 0.127) < 0.02
    assert shares[Outcome.ILLEGAL] == 0


def test_an_illegal_move_ends_the_game_without_a_reply() -> None:
    game = a_game_as("O")
    taken = game.board.squares.index("X") + 1
    assert game.answer(str(taken)) is None
    assert game.outcome is Outcome.ILLEGAL
    assert "O" not in game.board.squares
    with pytest.raises(AssertionError, match="the game is over"):
        game.answer("1")


def test_an_episode_is_a_series_of_user_messages_that_ends_with_its_score() -> None:
    async def episode() -> tuple[list[str], Outcome | None, float]:
        env, moves = TicTacToe(), random.Random(3)
        assert env.outcome is None
        shown = [message["content"] for message in await env.reset(11)]
        while True:
            board = shown[-1].removeprefix("You play X.\n").removeprefix("You play O.\n")
            step = await env.step(a_turn(moves.choice([square for square in board if square.isdigit()])))
            if step.done:
                assert not step.messages
                return shown, env.outcome, await env.score(AN_EPISODE)
            assert [message["role"] for message in step.messages] == ["user"]
            shown += [message["content"] for message in step.messages]

    shown, outcome, score = asyncio.run(episode())
    assert 2 <= len(shown) <= 5
    assert outcome is not None
    assert score == {Outcome.WIN: 1.0, Outcome.DRAW: 0.5, Outcome.LOSS: 0.0}[outcome]


def test_members_of_a_group_begin_equally() -> None:
    beginnings = [asyncio.run(TicTacToe().reset(23)) for _ in range(4)]
    assert all(beginning == beginnings[0] for beginning in beginnings)


def test_an_episode_that_a_limit_ended_scores_as_an_illegal_move() -> None:
    async def cut_off() -> tuple[float, Outcome | None]:
        env = TicTacToe()
        await env.reset(0)
        return await env.score(AN_EPISODE), env.outcome

    assert asyncio.run(cut_off()) == (-0.5, Outcome.ILLEGAL)
