"""One turn: how it is to be drawn, and what was drawn, as the agent loop sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.agent.errors import InvalidEpisode
from rollout.agent.limits import Limit
from rollout.agent.record import GenerationLike, TurnRecord
from rollout.agent.tools import BadCall, ToolCall
from rollout.option_names import OTHER_PARAMETERS, checks_names, unknown_name

DEFAULT_MAX_NEW_TOKENS = 256


@checks_names(InvalidEpisode, OTHER_PARAMETERS)
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSampling:
    """How turns are drawn; `act` may replace any of it for one turn. Values are checked by the service.

    `max_new_tokens` absent: the episode's limit, or 256 without one. `seed` absent: derived from the episode's seed and the turn's number.
    A turn that a `stop` string ends keeps it, in its ids and in its text. Where `filters` narrow the draw, training with
    importance ratios needs `return_kept_ids`.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    forced_ids: Sequence[int] | None = None
    logprobs: bool = True
    return_kept_ids: bool = False
    min_version: int | None = None
    deadline_s: float | None = None

    @property
    def filters(self) -> bool:
        """Return whether top-k, top-p or min-p narrow the draw."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def shapes(self) -> bool:
        """Return whether penalties or biases change how likely ids are, or `min_new_tokens` forbids those that would end the turn."""
        penalised = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalised or bool(self.logit_bias) or self.min_new_tokens > 0

    def replaced(self, changes: Mapping[str, Any]) -> TurnSampling:
        """Return a copy with changes. Raises: InvalidEpisode for an unknown name or a budget that is no number of tokens."""
        known = [item.name for item in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise unknown_name(name, known, error=InvalidEpisode, others=OTHER_PARAMETERS)
        for name in ("max_new_tokens", "min_new_tokens"):
            value = changes.get(name, 1)
            if isinstance(value, bool) or not (isinstance(value, int) or (value is None and name == "max_new_tokens")):
                raise InvalidEpisode(
                    f"{name}={value!r} is no number of tokens",
                    field=name,
                    value=value,
                    limit="an integer is needed",
                    remedy=f"pass {name} as an int",
                )
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled turn as the agent loop sees it.

    `ids` int32 are all sampled ids, the end-of-turn included; `text` leaves that one out and keeps every other control token
    and a stop string (`generation.text` is cut before it).
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
