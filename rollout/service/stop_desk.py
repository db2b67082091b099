"""Which live requests have stop strings, how far their text is, and which of their tokens come too late.

The request desk shows it the tokens of every step before the ledger takes them. A request is watched from its receipt to its
end; once a stop string is complete, its later tokens are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout.service.ledger import Counters
from rollout.service.stop_text import StopMatch, StopMatcher, StopText


@dataclass(slots=True)
class _Watch:
    matcher: StopMatcher
    match: StopMatch | None = None


class StopDesk:
    """Owns the matchers, by engine number; see the module."""

    def __init__(self, text: StopText, counters: Counters) -> None:
        self._text, self._counters = text, counters
        self._watched: dict[int, _Watch] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def matcher(self, strings: Sequence[str], *, min_new_tokens: int, earlier: Sequence[int]) -> StopMatcher:
        """Return what looks for these stop strings, which were found usable."""
        return self._text.matcher(strings, min_new_tokens=min_new_tokens, earlier=earlier)

    def watch(self, engine_id: int, matcher: StopMatcher) -> None:
        """Watch a request with a matcher of its own."""
        self._watched[engine_id] = _Watch(matcher)

    def forget(self, engine_id: int) -> None:
        """Stop watching; idempotent."""
        self._watched.pop(engine_id, None)

    def scan(self, engine_ids: np.ndarray, token_ids: np.ndarray) -> tuple[np.ndarray | None, list[int]]:
        """Read the tokens of a step, in order.

        Returns the places of the tokens that count, None for all of them, and the requests that a stop string has ended.
        """
        if not self._watched or not engine_ids.size:
            return None, []
        own = np.isin(engine_ids, np.fromiter(self._watched, np.int64, len(self._watched)))
        counts = np.ones(engine_ids.size, bool)
        completed: list[int] = []
        for place in np.flatnonzero(own).tolist():
            watch = self._watched[int(engine_ids[place])]
            if watch.match is not None:
                counts[place] = False
                continue
            watch.match = watch.matcher.add(int(token_ids[place]))
            if watch.match is not None:
                completed.append(int(engine_ids[place]))
        dropped = int(counts.size - counts.sum())
        self._counters.tokens_after_stop += dropped
        return np.flatnonzero(counts) if dropped else None, completed

    def match(self, engine_id: int) -> StopMatch | None:
        """Return the stop string that ended a request, or None."""
        watch = self._watched.get(engine_id)
        return None if watch is None else watch.match

    def text(self, engine_id: int) -> str | None:
        """Return the output's text, cut before the stop string if one ended it; None for a request without stop strings."""
        watch = self._watched.get(engine_id)
        if watch is None:
            return None
        return watch.matcher.text() if watch.match is None else watch.match.text
