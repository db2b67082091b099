"""One turn: how it is to be drawn, and what was drawn, as the agent loop sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.agent.errors import InvalidEpisode
from rollout.agent.limits import Limit
from rollout.agent.record import GenerationLike, TurnRecord
from rollout.agent.tools import BadCall, ToolCall

DEFAULT_MAX_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSampling:
    """How turns are drawn; `act` may replace any of it for one turn. Values are checked by the service.

    `max_new_tokens` absent: the episode's limit, or 256 without one. `seed` absent: derived from the episode's seed and the turn's number.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    seed: int | None = None
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    forced_ids: Sequence[int] | None = None
    logprobs: bool = True
    min_version: int | None = None
    deadline_s: float | None = None

    def replaced(self, changes: Mapping[str, Any]) -> TurnSampling:
        """Return a copy with changes. Raises: InvalidEpisode for an unknown name."""
        known = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise InvalidEpisode(
                    f"there is no sampling option {name!r}",
                    field=name,
                    value=changes[name],
                    limit=f"known: {', '.join(sorted(known))}",
                    remedy="use one of these",
                )
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled turn as the agent loop sees it.

    `ids` int32 are all sampled ids, the end-of-turn included; `text` leaves that one out and keeps every other control token.
    `limit` names what cut the turn, None if it ended by itself. `record` tells how it was drawn.
    """

    index: int
    ids: np.ndarray
    text: str
    tool_calls: tuple[ToolCall, ...]
    bad_calls: tuple[BadCall, ...]
    limit: Limit | None
    record: TurnRecord
    generation: GenerationLike

    @property
    def finish_reason(self) -> str:
        """Return "stop", "length", "cancelled" or "expired"."""
        return self.record.finish_kind

    @property
    def calls_tools(self) -> bool:
        """Return whether the reply holds tool calls, good or bad."""
        return bool(self.tool_calls or self.bad_calls)
