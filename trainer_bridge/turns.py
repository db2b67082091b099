"""The sampled turns of a row as a sample keeps them, and what is read of an episode to make them.

`rollout.agent` makes such rows and turns; nothing of it is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """One sampled turn: places `start` to `end` (exclusive) of the row, its draw and the versions of its KV.

    `filtered`: top-k, top-p or min-p narrowed the draw; `shaped`: penalties or biases changed it; the first `forced_tokens`
    were given and not drawn. `kv_spans` are (first place, version) runs over places 0 to `end`: which weights computed the keys
    and values that the turn's tokens attended to.
    """

    start: int
    end: int
    temperature: float = 1.0
    kv_spans: tuple[tuple[int, int], ...] = ()
    filtered: bool = False
    shaped: bool = False
    forced_tokens: int = 0

    def first_foreign_place(self, version: int) -> int:
        """Return the first place whose KV another version computed, `end` if there is none."""
        if not self.kv_spans or self.kv_spans[0][0] != 0:
            return 0
        return next((first for first, made_by in self.kv_spans if made_by != version), self.end)


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
