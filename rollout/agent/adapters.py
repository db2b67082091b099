"""Environments of other libraries as environments of this one. Neither library is imported before an environment is made.

`GymText` takes any environment with Gymnasium's `reset` and `step` whose observations can be written as text; `ReasoningGym` asks
one question of a `reasoning_gym` data set. Their calls are plain functions, so the runner gives each a thread and a time-out.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollout.agent.environment import Start, Step
from rollout.agent.episode import Episode
from rollout.agent.errors import InvalidEnvironment
from rollout.agent.turn import Turn

GYM_SEEDS = 2**31
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def _library(name: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidEnvironment(
            f"{package} is not installed",
            field="make_environment",
            value=name,
            limit=f"the extra {extra!r} brings it",
            remedy=f"pip install {package}, or this package with [{extra}]",
        ) from error


class GymText:
    """A Gymnasium-style environment of text, played once: `lambda: GymText("FrozenLake-v1", actions={"left": 0, ...})`.

    `environment` is a registered name (made by `gymnasium.make` with `options`), or a function that returns an environment.
    `actions` maps what the model says to actions, or is a function from the reply's text; None means that the text is the action. A
    reply that is no action is told so with the known ones, and ends the episode after `max_invalid` of them. `describe` writes an
    observation (default: `str`), `system` says the task. The reward is the sum of the environment's rewards.
    """

    def __init__(
        self,
        environment: str | Callable[[], Any],
        *,
        actions: Mapping[str, Any] | Callable[[str], Any] | None = None,
        describe: Callable[[Any], str] = str,
        system: str | None = None,
        max_invalid: int = 3,
        **options: Any,
    ):
        self._make, self._options = environment, options
        self._actions, self._describe, self._system = actions, describe, system
        self._invalid_left = max_invalid
        self._environment: Any = None
        self.total_reward = 0.0
        self.info: Mapping[str, Any] = {}

    def reset(self, seed: int) -> Start:
        """Make the environment and return its first observation."""
        self._environment = (
            self._make() if callable(self._make) else _library("gymnasium", "gymnasium", "environments").make(self._make, **self._options)
        )
        observation, self.info = self._environment.reset(seed=seed % GYM_SEEDS)
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return Start(messages=[*system, {"role": "user", "content": self._describe(observation)}])

    def _action(self, text: str) -> Any:
        """Return the action of a reply. Raises: KeyError or ValueError if it is none."""
        if self._actions is None:
            return text
        return self._actions(text) if callable(self._actions) else self._actions[text.strip().lower()]

    def step(self, turn: Turn) -> Step:
        """Take the reply as an action and return the next observation."""
        try:
            action = self._action(turn.text)
        except (KeyError, ValueError):
            self._invalid_left -= 1
            known = f" Actions: {', '.join(self._actions)}." if isinstance(self._actions, Mapping) else ""
            return Step(messages=[{"role": "user", "content": f"That is no action.{known}"}], done=self._invalid_left <= 0)
        observation, reward, terminated, truncated, self.info = self._environment.step(action)
        if not math.isfinite(reward):
            raise InvalidEnvironment(
                f"the environment's step gave the reward {reward}",
                field="reward",
                value=str(reward),
                limit="rewards are finite",
                remedy="mend the environment",
            )
        self.total_reward += float(reward)
        return Step(messages=[{"role": "user", "content": self._describe(observation)}], done=bool(terminated or truncated))

    def score(self, episode: Episode) -> float:
        """Return the sum of the rewards."""
        return self.total_reward

    def close(self) -> None:
        """Close the environment."""
        if self._environment is not None and hasattr(self._environment, "close"):
            self._environment.close()


class ReasoningGym:
    """One question of a procedurally made data set of `reasoning_gym`: `lambda: ReasoningGym("chain_sum")`.

    The seed makes the question. The answer is what stands in the reply's last <answer></answer>, or else the whole reply; the data
    set scores it from 0 to 1. `options` are the data set's.
    """

    def __init__(self, dataset: str, *, system: str | None = "Give the final answer as <answer>...</answer>.", **options: Any):
        self._name, self._system, self._options = dataset, system, options
        self._dataset: Any = None
        self._entry: Mapping[str, Any] = {}
        self.answer: str | None = None

    def reset(self, seed: int) -> Start:
        """Make the question."""
        library = _library("reasoning_gym", "reasoning-gym", "environments")
        self._dataset = library.create_dataset(self._name, size=1, seed=seed % GYM_SEEDS, **self._options)
        self._entry = self._dataset[0]
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return Start(messages=[*system, {"role": "user", "content": self._entry["question"]}])

    def step(self, turn: Turn) -> Step:
        """Take the reply's answer."""
        tagged = ANSWER.findall(turn.text)
        self.answer = (tagged[-1] if tagged else turn.text).strip()
        return Step(done=True)

    def score(self, episode: Episode) -> float:
        """Return the data set's score of the answer; one that a limit cut off is worth nothing."""
        return 0.0 if self.answer is None else float(self._dataset.score_answer(answer=self.answer, entry=self._entry))
