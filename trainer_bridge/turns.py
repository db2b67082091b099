"""The sampled turns of a row as a sample keeps them, and what is read of an episode to make them.

`rollout.agent` makes such rows and turns; nothing of it is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from trainer_bridge.errors import InvalidSample, shown

MAX_TEMPERATURE = float(np.finfo(np.float32).max)


def is_count(value: object) -> bool:
    """Whether a value is an integer of at least 0."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def is_finite(value: object) -> bool:
    """Whether a value is a number, or an array of no dimension with one, that a float can be."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def listed(value: Any) -> list[Any] | None:
    """Return what a value holds, None for one that cannot be gone through."""
    try:
        return list(value)
    except TypeError:
        return None


def _are_spans(spans: object) -> bool:
    """Whether these are (first place, version) runs in order."""
    if not isinstance(spans, (tuple, list)) or not all(isinstance(span, (tuple, list)) and len(span) == 2 for span in spans):
        return False
    return all(is_count(part) for span in spans for part in span) and all(one[0] < other[0] for one, other in pairwise(spans))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """One sampled turn: places `start` to `end` (exclusive) of the row, its draw and the versions of its KV.

    `filtered`: top-k, top-p or min-p narrowed the draw; `shaped`: penalties, biases or `min_new_tokens` changed it; the first
    `forced_tokens` were given and not drawn. `kv_spans` are (first place, version) runs over places 0 to `end`: which weights
    computed the keys and values as they were at the turn's end. `kv_rebuilt_at` are the places before which they were computed
    again on the way: the turn's earlier tokens attended to what was there before, of which nothing is known.
    """

    start: int
    end: int
    temperature: float = 1.0
    kv_spans: tuple[tuple[int, int], ...] = ()
    filtered: bool = False
    shaped: bool = False
    forced_tokens: int = 0
    kv_rebuilt_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("start", "end", "forced_tokens"):
            self._require(name, is_count(getattr(self, name)), "an integer of at least 0")
        self._require(
            "temperature", is_finite(self.temperature) and 0 <= float(self.temperature) <= MAX_TEMPERATURE, "a finite number >= 0"
        )
        for name in ("filtered", "shaped"):
            self._require(name, isinstance(getattr(self, name), (bool, np.bool_)), "True or False")
        self._require("kv_spans", _are_spans(self.kv_spans), "(first place, version) pairs of integers of at least 0, in order")
        rebuilt = self.kv_rebuilt_at
        self._require("kv_rebuilt_at", isinstance(rebuilt, (tuple, list)) and all(map(is_count, rebuilt)), "integers of at least 0")

    def _require(self, name: str, ok: bool, limit: str) -> None:
        if not ok:
            value = getattr(self, name)
            raise InvalidSample(
                f"{name}={shown(value)} of a turn", field=name, value=value, limit=limit, remedy="make turns from what the rollout reported"
            )

    def first_foreign_place(self, version: int) -> int:
        """Return the first place whose KV another version computed, `end` if there is none."""
        if not self.kv_spans or self.kv_spans[0][0] != 0:
            return 0
        return next((first for first, made_by in self.kv_spans if made_by != version), self.end)

    @property
    def first_spoken_for(self) -> int:
        """The first of the turn's places whose token attended to what `kv_spans` say: the first one behind the last rebuild."""
        return max(self.start, min(self.end, max(self.kv_rebuilt_at, default=0)))


class TurnLike(Protocol):
    """What a sample reads of a sampled turn in an episode's row."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def kv_spans(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def kv_rebuilt_at(self) -> tuple[int, ...]: ...
    @property
    def filtered(self) -> bool: ...
    @property
    def shaped(self) -> bool: ...
    @property
    def forced_tokens(self) -> int: ...


class RowLike(Protocol):
    """What a sample reads of an episode's row; `rollout.agent` makes such rows."""

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def mask(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray | None: ...
    @property
    def behaviour_logprobs(self) -> np.ndarray | None: ...
    @property
    def versions(self) -> np.ndarray: ...
    @property
    def turns(self) -> Sequence[TurnLike]: ...
    @property
    def kept_counts(self) -> np.ndarray | None: ...
    @property
    def kept_ids(self) -> np.ndarray | None: ...
