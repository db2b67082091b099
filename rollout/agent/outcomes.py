"""One episode from the runner's side: what is to be played, how long its phases may take, and how it went."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.agent.environment import Environment
from rollout.agent.errors import InvalidEpisode
from rollout.agent.limits import Limit
from rollout.agent.option_values import check_count, check_environment_maker, check_seconds, check_seed
from rollout.agent.record import EpisodeRow
from rollout.agent.standing import EpisodeStatus
from rollout.agent.tools import CallCounts
from rollout.option_names import checks_names
from rollout.seeds import derive_seed


class FailureKind(enum.StrEnum):
    """Who is answerable for an ending. Policy failures and limits are scored; the others have no reward."""

    ENVIRONMENT = "environment"
    TOOL = "tool"
    POLICY = "policy"
    LIMIT = "limit"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an episode did not end as done: whose doing, in which phase, and the error's code (None for a stranger's) and text.

    `passing`: the infrastructure's, and another attempt may succeed; a request that was refused for its values stays refused.
    """

    kind: FailureKind
    phase: str
    text: str
    code: str | None = None
    passing: bool = False


@checks_names(InvalidEpisode)
@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    """One episode to run. Members of a group share `seed` and begin equally; each draws its own tokens.

    `attempt` counts earlier tries of this member; a new attempt draws other tokens. `kv_policy` and `max_kv_lag` say what becomes
    of its KV when weights change (as in `Episode`). `info` is the caller's own.
    """

    make_environment: Callable[[], Environment]
    seed: int = 0
    group: Hashable = 0
    member: int = 0
    attempt: int = 0
    kv_policy: str = "keep"
    max_kv_lag: int = 4
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_environment_maker(self.make_environment)
        check_seed("seed", self.seed)
        for name in ("member", "attempt"):
            check_count(name, getattr(self, name), 0)

    @property
    def episode_seed(self) -> int:
        """Return the seed of this member's draws."""
        return derive_seed(self.seed, self.member, self.attempt)


@checks_names(InvalidEpisode)
def group_tasks(make_environment: Callable[[], Environment], *, seed: int, members: int, group: Hashable = 0) -> list[EpisodeTask]:
    """Return the tasks of one group: equal beginnings, draws of their own. Raises: InvalidEpisode."""
    check_count("members", members, 0)
    return [EpisodeTask(make_environment=make_environment, seed=seed, group=group, member=member) for member in range(members)]


@checks_names(InvalidEpisode)
@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimeouts:
    """The most that one call in each phase may take. Units: seconds. Tools carry their own."""

    reset_s: float = 60.0
    act_s: float = 600.0
    step_s: float = 60.0
    score_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("reset_s", "act_s", "step_s", "score_s"):
            check_seconds(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeResult:
    """How one episode went. `reward` is None unless the environment scored it; `rows` hold what was sampled in any case.

    Units: `seconds` by phase. `good_calls` and `bad_calls` count tool calls, `call_turns` the turns that held any,
    `turns_without_calls` those that held none although tools were on offer.
    """

    task: EpisodeTask
    status: EpisodeStatus
    limit: Limit | None = None
    failure: Failure | None = None
    reward: float | None = None
    rows: tuple[EpisodeRow, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    num_turns: int = 0
    good_calls: int = 0
    bad_calls: int = 0
    call_turns: int = 0
    turns_without_calls: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


def calls_of(results: Iterable[EpisodeResult]) -> CallCounts:
    """Return the tool calls of a run's episodes."""
    counts = CallCounts()
    for result in results:
        counts.add(CallCounts(result.good_calls, result.bad_calls, result.turns_without_calls))
    return counts
