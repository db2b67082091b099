"""Environments of other libraries: their observations become messages, their rewards the score, and their faults failures."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from rollout.agent import EpisodeTask, FailureKind, run_episode
from rollout.agent.adapters import GymText, ReasoningGym
from tests.unit.rollout.agent.byte_tokenizer import control_id, spelled
from tests.unit.rollout.agent.fake_client import FakeClient

END = control_id("<|im_end|>")


class Corridor:
    """Three steps to the right are the goal."""

    def __init__(self, rewards: tuple[float, ...] = (0.0, 0.5, 1.0)) -> None:
        self.rewards, self.place, self.seed, self.closed = rewards, 0, None, False

    def reset(self, *, seed: int | None = None) -> tuple[int, dict[str, Any]]:
        self.seed = seed
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += action
        return self.place, self.rewards[self.place - 1], self.place == 3, False, {"place": self.place}

    def close(self) -> None:
        self.closed = True


def play(make: Any, *replies: str, seed: int = 5) -> Any:
    client = FakeClient([[*spelled(reply), END] for reply in replies])
    return asyncio.run(run_episode(client, EpisodeTask(make_environment=make, seed=seed)))


def test_observations_are_messages_and_rewards_add_up() -> None:
    corridors: list[Corridor] = []

    def make() -> Corridor:
        corridors.append(Corridor())
        return corridors[-1]

    result = play(
        lambda: GymText(make, actions={"right": 1}, describe="place {}".format, system="Walk."), "right", " Right", "right", seed=2**40
    )
    assert (result.status, result.reward, result.num_turns) == ("done", 1.5, 3)
    assert [message["content"] for message in result.messages if message["role"] != "assistant"] == [
        "Walk.",
        "place 0",
        "place 1",
        "place 2",
    ]
    assert corridors[0].closed and corridors[0].seed == 2**40 % 2**31


def test_a_reply_that_is_no_action_is_told_so_and_ends_the_episode_in_the_end() -> None:
    result = play(lambda: GymText(Corridor, actions={"right": 1}, max_invalid=2), "left", "right", "up")
    assert (result.status, result.reward, result.num_turns) == ("done", 0.0, 3)
    assert "That is no action. Actions: right." in [message["content"] for message in result.messages]


def test_actions_may_be_read_by_a_function() -> None:
    result = play(lambda: GymText(Corridor, actions=int), "1", "x", "1", "1")
    assert result.reward == 1.5


def test_a_reward_that_is_no_number_is_the_environments_failure() -> None:
    result = play(lambda: GymText(lambda: Corridor((0.0, float("nan"), 1.0)), actions=int), "1", "1")
    assert result.reward is None and result.failure.kind is FailureKind.ENVIRONMENT and "rewards are finite" in result.failure.text


def test_a_missing_library_is_named_with_its_extra() -> None:
    adapters = __import__("rollout.agent.adapters", fromlist=["_library"])
    with pytest.raises(ValueError, match=r"nowhere-gym is not installed.*pip install nowhere-gym.*\[environments\]"):
        adapters._library("nowhere_gym", "nowhere-gym", "environments")


def test_a_registered_environment_of_gymnasium_is_played() -> None:
    actions = {"left": 0, "down": 1, "right": 2, "up": 3}
    make = lambda: GymText("FrozenLake-v1", actions=actions, is_slippery=False)  # noqa: E731
    result = play(make, "down", "down", "right", "right", "down", "right")
    assert (result.status, result.reward, result.num_turns) == ("done", 1.0, 6)


class Sums:
    """What is used of `reasoning_gym`: a data set of one question."""

    asked: list[dict[str, Any]] = []

    @classmethod
    def create_dataset(cls, name: str, **options: Any) -> Sums:
        cls.asked.append({"name": name, **options})
        return cls()

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"question": "2 + 5 =", "answer": "7"}

    def score_answer(self, *, answer: str | None, entry: dict[str, str]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


@pytest.mark.parametrize("form", ["<answer>{}</answer>", "I think <answer>0</answer>, no: <answer> {} </answer>", "{}"])
def test_a_question_of_reasoning_gym_is_asked_and_scored(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", Sums)  # type: ignore[arg-type]
    right, wrong = (play(lambda: ReasoningGym("sums", terms=2), reply, seed=2**33 + 1) for reply in (form.format(7), "no idea"))
    assert (right.reward, wrong.reward) == (1.0, 0.01) and "2 + 5 =" in [message["content"] for message in right.messages]
    assert Sums.asked[-1] == {"name": "sums", "size": 1, "seed": 1, "terms": 2}


def test_the_real_reasoning_gym_is_asked_and_scores() -> None:
    library = pytest.importorskip("reasoning_gym", reason="the extra 'environments' is not installed")
    entry = library.create_dataset("chain_sum", size=1, seed=5)[0]
    result = play(lambda: ReasoningGym("chain_sum"), f"<answer>{entry['answer']}</answer>")
    assert result.reward == 1.0 and entry["question"] in [message["content"] for message in result.messages]
