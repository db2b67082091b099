"""What a task gives the runner: the first messages, what follows each turn, and the score.

An environment lives for one episode and is used by one episode at a time. Its methods may be `async def`, which is the fast way,
or plain functions, which then run in a thread of their own; either way each call has a time-out and its failures are data.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rollout.agent.chat import Message
from rollout.agent.episode import Episode
from rollout.agent.errors import InvalidEnvironment
from rollout.agent.tools import Tool
from rollout.agent.turn import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How an episode begins: its messages and, where a task has any, the tools that the model may call."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What follows a turn: messages for the policy, or one of the others, which leave `messages` unseen.

    `done` ends the episode; `retry` has the turn drawn anew; `compact` gives the history to go on from (a `Turn` in it keeps its ids).
    """

    messages: Sequence[Message] = ()
    done: bool = False
    retry: bool = False
    compact: Sequence[Message | Turn] | None = None


StartLike: TypeAlias = Start | Sequence[Message]


class Environment(Protocol):
    """One task, played once. Optional methods: `attach(episode)` is given the episode once it began, so that tools may start subagents;
    `close()` is called at the end, whatever happened.
    """

    def reset(self, seed: int) -> StartLike | Awaitable[StartLike]:
        """Return how the episode begins; equal seeds begin equally, for every member of a group."""
        ...

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """Return what follows a turn without tool calls (turns with calls are answered by the tools)."""
        ...

    def score(self, episode: Episode) -> float | Awaitable[float]:
        """Return the reward of an episode that ended, also of one that a limit or bad calls ended (see its status)."""
        ...


def check_environment(environment: Any) -> None:
    """Refuse what lacks one of an environment's methods. Raises: InvalidEnvironment; what looking for an attribute raises."""
    # An attribute that fails when it is looked up shall do so here, where that is the environment's failure.
    for name in ("attach", "close"):
        getattr(environment, name, None)
    lacking = [name for name in ("reset", "step", "score") if not callable(getattr(environment, name, None))]
    if lacking:
        raise InvalidEnvironment(
            f"make_environment returned a {type(environment).__name__} without {', '.join(lacking)}",
            field=lacking[0],
            value=type(environment).__name__,
            limit="an environment has reset(seed), step(turn) and score(episode)",
            remedy=f"write {lacking[0]}, also where you think that no episode comes to it",
        )


class EnvironmentUses:
    """Which environments were handed to an episode already, for each is for one, and how long each kind usually takes to answer."""

    def __init__(self) -> None:
        self._playing: dict[int, Any] = {}
        self._played: dict[int, weakref.ref[Any]] = {}
        self._waits: weakref.WeakKeyDictionary[type, dict[str, float]] = weakref.WeakKeyDictionary()

    def claim(self, environment: Any) -> None:
        """Take an environment for one episode. Raises: InvalidEnvironment for what is none and for one that was played before."""
        check_environment(environment)
        key = id(environment)
        former = self._played.get(key)
        if key in self._playing or (former is not None and former() is environment):
            raise InvalidEnvironment(
                f"make_environment returned the same {type(environment).__name__} again",
                field="make_environment",
                value=type(environment).__name__,
                limit="an environment is played once",
                remedy="make a new one in each call: pass the class, or a function that calls it",
            )
        self._playing[key] = environment
        # Without a place for weak references only two episodes at once are told apart.
        with contextlib.suppress(TypeError):
            self._played[key] = weakref.ref(environment, lambda _: self._played.pop(key, None))

    def waited(self, environment: Any, phase: str, seconds: float) -> None:
        """Learn how long environments of this kind keep a turn waiting."""
        usual = self._waits.setdefault(type(environment), {})
        usual[phase] = seconds + (usual[phase] - seconds) * 0.8 if phase in usual else seconds

    def usual_wait_s(self, environment: Any, phase: str) -> float:
        """Return how long they usually do, 0 while nothing is known."""
        return self._waits.get(type(environment), {}).get(phase, 0.0)

    def release(self, environment: Any) -> None:
        """Let go of an environment whose episode is over."""
        if environment is not None and self._playing.get(id(environment)) is environment:
            del self._playing[id(environment)]


ENVIRONMENTS = EnvironmentUses()
