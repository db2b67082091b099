"""Whatever an option of an episode, a group or a tool is given, it is taken or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.agent import EpisodeGroup, EpisodeLimits, EpisodeTask, PhaseTimeouts, Tool, ToolLimits
from rollout.agent.errors import AgentError
from tests.hostile_values import HOSTILE_VALUES, check_refusal


def _tool(**options: Any) -> Tool:
    return Tool(**{"name": "t", "description": "d", "parameters": {"type": "object"}, "function": print, **options})


NUMBERS: list[tuple[Any, str]] = [
    *((lambda **given: EpisodeTask(make_environment=Any, **given), name) for name in ("seed", "member", "attempt")),
    *((lambda **given: EpisodeGroup(**{"make_environment": Any, "members": 2, **given}), name) for name in ("members", "extra", "attempt")),
    *((PhaseTimeouts, name) for name in PhaseTimeouts.__dataclass_fields__),
    *((ToolLimits, name) for name in ToolLimits.__dataclass_fields__),
    *((EpisodeLimits, name) for name in EpisodeLimits.__dataclass_fields__),
    *((_tool, name) for name in ("timeout_s", "max_output_chars")),
]


@pytest.mark.parametrize(("make", "name"), NUMBERS)
def test_a_number_is_taken_or_refused_whatever_it_is(make: Any, name: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            make(**{name: value})
        except AgentError as error:
            check_refusal(error, (name, number))
            assert error.field == name, number
        else:
            assert value is None or type(value) in (int, float) or isinstance(value, float), (name, number)


def test_a_tools_name_is_taken_or_refused_whatever_it_is() -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            _tool(name=value)
        except AgentError as error:
            check_refusal(error, number)


def test_a_time_without_end_sets_no_bound() -> None:
    assert PhaseTimeouts(act_s=float("inf")).act_s == _tool(timeout_s=float("inf")).timeout_s
