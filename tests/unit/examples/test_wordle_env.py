"""The word game: repeated letters are marked as often as the word has them, and everything follows from seed and guesses."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.agentic.wordle.env import LENGTH, WORDS, Game, Wordle, marks
from examples.agentic.wordle.reward import Outcome, Rates, held_out_seeds, reward
from examples.agentic.wordle.train import parse_options
from examples.agentic.wordle.warm_up import careless_game
from rollout.agent import EpisodeTask, run_episode
from tests.unit.rollout.agent.byte_tokenizer import control_id, spelled
from tests.unit.rollout.agent.fake_client import FakeClient

END = control_id("<|im_end|>")


@pytest.mark.parametrize(
    ("guess", "word", "wanted"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "moist", "-----"),
        ("eerie", "geese", "YG--G"),
        ("geese", "eerie", "-GY-G"),
        ("llama", "label", "GYY--"),
        ("abbey", "cabin", "Y-G--"),
        ("mummy", "mimic", "G-G--"),
        ("level", "eagle", "YY-Y-"),
        ("sleep", "peace", "--YYY"),
        ("teeth", "beach", "-G--G"),
    ],
)
def test_letters_are_marked_as_often_as_the_word_has_them(guess: str, word: str, wanted: str) -> None:
    assert marks(guess, word) == wanted


word = st.text(alphabet="abc", min_size=LENGTH, max_size=LENGTH)


@settings(max_examples=200, deadline=None)
@given(word, word)
def test_marks_say_neither_more_nor_less_than_the_word(guess: str, secret: str) -> None:
    found = marks(guess, secret)
    for place, (mark, letter) in enumerate(zip(found, guess)):
        assert (mark == "G") == (letter == secret[place])
    for letter, times in Counter(guess).items():
        told = sum(mark != "-" for mark, own in zip(found, guess) if own == letter)
        assert told == min(times, secret.count(letter))


def test_the_list_has_words_of_five_letters_each_once_and_some_with_repeated_letters() -> None:
    assert len(WORDS) == len(set(WORDS)) >= 100
    assert all(len(one) == LENGTH and one.isascii() and one.islower() and one.isalpha() for one in WORDS)
    assert sum(len(set(one)) < LENGTH for one in WORDS[:12]) >= 3


def play(*replies: str, seed: int = 1, **options: Any) -> Any:
    made: list[Wordle] = []

    def make() -> Wordle:
        made.append(Wordle(**options))
        return made[-1]

    client = FakeClient([[*spelled(reply), END] for reply in replies])
    return asyncio.run(run_episode(client, EpisodeTask(make_environment=make, seed=seed))), made[0]


def test_a_game_is_found_missed_or_left_with_no_word() -> None:
    secret = Game(1, WORDS[:12]).word
    others = [one for one in WORDS[:12] if one != secret]
    found, game = play(others[0], secret)
    assert (found.status, found.reward, game.outcome) == ("done", pytest.approx(0.9), Outcome.FOUND)
    assert found.messages[2]["content"] == marks(others[0], secret)
    missed, game = play(*others[:3])
    assert (missed.reward, missed.num_turns, game.outcome) == (0.0, 3, Outcome.MISSED)
    no_word, game = play("xxxxx")
    assert (no_word.reward, no_word.num_turns, game.outcome) == (-0.5, 1, Outcome.NO_WORD)


def test_a_guess_that_a_limit_cut_off_is_no_word() -> None:
    from rollout.agent import EpisodeLimits

    game = Wordle()
    client = FakeClient([[*spelled("cran"), *spelled("ecrane")]])
    limits = EpisodeLimits(max_new_tokens=2)
    result = asyncio.run(run_episode(client, EpisodeTask(make_environment=lambda: game, seed=1), limits=limits))
    assert game.outcome is Outcome.NO_WORD and result.reward == -0.5


def test_rewards_fall_with_each_guess_and_rates_need_games() -> None:
    assert [reward(Outcome.FOUND, guesses) for guesses in (1, 2, 3)] == pytest.approx([1.0, 0.9, 0.8])
    rates = Rates.of([Outcome.FOUND, Outcome.FOUND, Outcome.MISSED, Outcome.NO_WORD])
    assert (rates.games, rates.found, rates.missed, rates.no_word) == (4, 0.5, 0.25, 0.25)
    with pytest.raises(ValueError, match="play at least one"):
        Rates.of([])
    assert held_out_seeds(3)[0] > 2**47


def test_careless_games_are_of_the_list_and_follow_from_their_seed() -> None:
    messages = careless_game(5, WORDS[:12], 3)
    assert messages == careless_game(5, WORDS[:12], 3) and messages[0]["role"] == "user"
    guesses = [message["content"] for message in messages if message["role"] == "assistant"]
    assert 1 <= len(guesses) <= 3 and set(guesses) <= set(WORDS[:12])


@pytest.mark.parametrize("arguments", [["--words", "1"], ["--words", "5000"], ["--members", "1"], ["--steps", "0"]])
def test_options_are_checked(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
