"""The bounds of an episode, and the names by which an episode says what cut it."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from rollout.agent.errors import InvalidEpisode
from rollout.agent.option_values import check_count
from rollout.option_names import checks_names


class Limit(enum.StrEnum):
    """The limit that cut a turn or an episode."""

    MAX_TURNS = "max_turns"
    MAX_NEW_TOKENS = "max_new_tokens"
    MAX_TOTAL_TOKENS = "max_total_tokens"
    CONTEXT = "context"
    DEADLINE = "deadline_s"
    MAX_BAD_TURNS = "max_bad_turns"


@checks_names(InvalidEpisode)
@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Bounds of an episode, absent ones set none. `max_total_tokens` counts a row, which the service's context bounds in any case;
    `max_new_tokens` bounds each turn, whatever its sampling asks for.


    An episode ends with status `bad_calls` after `max_bad_turns` turns in a row that hold a bad tool call and no good one.
    Raises: InvalidEpisode.
    """

    max_turns: int | None = None
    max_total_tokens: int | None = None
    max_new_tokens: int | None = None
    max_bad_turns: int = 3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            check_count(field.name, value, 1)


def total_tokens(engine: Any, limits: EpisodeLimits) -> tuple[int, Limit]:
    """Return the most tokens that a row may have, and whose limit that is. Raises: InvalidEpisode."""
    served = [int(value) for name in ("max_model_len", "pool_tokens") if (value := getattr(engine, name, None)) is not None]
    if limits.max_total_tokens is not None and all(limits.max_total_tokens <= value for value in served):
        return limits.max_total_tokens, Limit.MAX_TOTAL_TOKENS
    if not served:
        raise InvalidEpisode(
            "the service does not say how long a row may be",
            field="max_total_tokens",
            limit="no engine answers it now",
            remedy="try again, or set max_total_tokens",
        )
    return min(served), Limit.CONTEXT
