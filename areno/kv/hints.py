"""Who said that they come back, and when: cached pages that eviction takes last. Host only, no torch.

A client whose episode waits for a tool hints when its next turn is expected. The prefix index asks here in which order hinted
entries may go after all others: latest expected return first. A hint that is overdue by more than its own length counts no more,
and hints together hold at most a share of the pool. Invariant: a page is counted once, however many hints hold it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from areno.kv.prefix import Node

Waiter: TypeAlias = tuple[str | None, str]
"""Salt and lineage."""


@dataclass(slots=True, eq=False)
class ReturnHint:
    """One waiter's hint: who may end it, when it is expected, when it counts no more, and the entries it holds."""

    waiter: Waiter
    owner: str
    expected: float
    decays: float
    nodes: list[Node] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class ReturnHints:
    """The hints of one index; `max_pages` bounds what they hold. `clock` gives seconds."""

    def __init__(self, max_pages: int, clock: Callable[[], float]) -> None:
        self._max_pages, self._clock = max_pages, clock
        self._hints: dict[Waiter, ReturnHint] = {}
        # Both heaps keep hints that ended; they are passed over.
        self._latest: list[tuple[float, int, ReturnHint]] = []
        self._decaying: list[tuple[float, int, ReturnHint]] = []
        self._numbers = itertools.count()
        self._held: Counter[int] = Counter()
        self.counters: Counter[str] = Counter()

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._hints

    def __len__(self) -> int:
        return len(self._hints)

    @property
    def num_pages(self) -> int:
        """Number of pages that hints hold."""
        return len(self._held)

    @property
    def over_share(self) -> bool:
        """Whether hints hold more than their share."""
        return len(self._held) > self._max_pages

    def has_room(self, pages: set[int], seconds: float) -> bool:
        """Whether a hint for these pages fits the share, or others with a later return could give way to it."""
        if len(pages) > self._max_pages:
            return False
        more = sum(page not in self._held for page in pages)
        if len(self._held) + more <= self._max_pages:
            return True
        latest = max((hint.expected for hint in self._hints.values()), default=0.0)
        return self._clock() + seconds < latest

    def add(self, waiter: Waiter, owner: str, seconds: float, nodes: list[Node], pages: Iterable[int]) -> ReturnHint:
        """Enter a waiter's hint; it has none."""
        assert waiter not in self._hints, "a waiter's former hint ends first"
        now = self._clock()
        hint = ReturnHint(waiter, owner, now + seconds, now + 2 * seconds, nodes, list(pages))
        self._hints[waiter] = hint
        heapq.heappush(self._latest, (-hint.expected, next(self._numbers), hint))
        heapq.heappush(self._decaying, (hint.decays, next(self._numbers), hint))
        self._held.update(hint.pages)
        self.counters["hints"] += 1
        return hint

    def pop(self, waiter: Waiter, counter: str) -> ReturnHint | None:
        """Take a waiter's hint out, counted as what ended it; None without one."""
        hint = self._hints.pop(waiter, None)
        if hint is not None:
            self._let_go(hint.pages)
            self.counters[counter] += 1
            if len(self._latest) > 2 * len(self._hints) + 64:
                self._latest = [entry for entry in self._latest if self._hints.get(entry[2].waiter) is entry[2]]
                heapq.heapify(self._latest)
        return hint

    def pop_arrived(self, waiter: Waiter) -> ReturnHint | None:
        """Take out the hint of a waiter that is back: kept, or late."""
        hint = self._hints.get(waiter)
        return self.pop(waiter, "hints_kept" if hint is not None and self._clock() <= hint.decays else "hints_decayed")

    def pop_decayed(self) -> ReturnHint | None:
        """Take out a hint that counts no more; None without one."""
        now = self._clock()
        while self._decaying and self._decaying[0][0] < now:
            hint = heapq.heappop(self._decaying)[2]
            if self._hints.get(hint.waiter) is hint:
                return self.pop(hint.waiter, "hints_decayed")
        return None

    def pop_latest(self) -> ReturnHint | None:
        """Take out the hint with the latest expected return; None without any."""
        while self._latest:
            hint = heapq.heappop(self._latest)[2]
            if self._hints.get(hint.waiter) is hint:
                return self.pop(hint.waiter, "hints_dropped")
        return None

    def of_owner(self, owner: str) -> list[Waiter]:
        """Return the waiters of one owner."""
        return [waiter for waiter, hint in self._hints.items() if hint.owner == owner]

    def waiters(self) -> list[Waiter]:
        """Return everybody with a hint."""
        return list(self._hints)

    def forget_nodes(self) -> None:
        """Let go of all nodes, which an epoch's end dropped; pages stay only where `rehold` says so."""
        for hint in self._hints.values():
            hint.nodes = []
            self._let_go(hint.pages)
            hint.pages = []

    def rehold(self, waiter: Waiter, pages: Iterable[int]) -> None:
        """Give a hint the pages that it still holds."""
        hint = self._hints[waiter]
        hint.pages = list(pages)
        self._held.update(hint.pages)

    def _let_go(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]

    def check_integrity(self) -> None:
        """Check the count of pages and that no more are held than may be. Raises: AssertionError."""
        pages = Counter(page for hint in self._hints.values() for page in hint.pages)
        assert pages == self._held, f"hinted pages differ: hints {pages}, counted {self._held}"
        assert not self.over_share, f"hints hold {len(self._held)} pages, at most {self._max_pages} are theirs"
