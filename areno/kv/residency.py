"""What requests hold on the device, and nothing else: row, seat, pages and sampling slot, given and taken together.

Owns the pools and the prefix index; the scheduler decides who gets something and when. A request is admitted with pages for
what it must compute plus some steps, or for its whole budget in a pool with room for many such, and `grow` tops rows up
later, so that long budgets don't block the pool. Host only, no torch. Invariant: free + used + cached pages = all pages; a
page that a row writes has exactly one reference.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from areno.config import GROW_TOKENS, RESERVED_PAGES, EngineConfig, ResolvedConfig
from areno.kv.pool import PagePool, RowPool
from areno.kv.prefix import PrefixIndex, PrefixMatch, expand_spans
from areno.kv.slots import SlotPool
from areno.live import NO_ROW, NO_SLOT, LiveRequest
from areno.seats import NO_SEAT, Seats


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy a page, of which the first `tokens` count."""

    source: int
    target: int
    tokens: int


class Residency:
    """Rows, seats, pages and slots of one engine."""

    def __init__(self, config: EngineConfig, resolved: ResolvedConfig) -> None:
        self._page_size = resolved.page_size
        self._version = config.initial_version
        self.pool = PagePool(resolved.num_pages, RESERVED_PAGES + resolved.canary_pages, lists_fresh=resolved.clears_pages)
        self.prefix = PrefixIndex(
            self.pool, resolved.page_size, epoch=self._version, enabled=config.prefix_cache, hint_share=config.hint_share
        )
        self.rows = RowPool(resolved.max_rows)
        self.slots = SlotPool(config.sampling_slots)
        # A killed row is reused at once while its results are still in flight, hence more seats than rows.
        self.seats = Seats(num_seats=2 * resolved.max_rows, max_tokens=resolved.max_model_len)
        self._watermark = max(resolved.num_pages // 100, 1)

    @property
    def availability(self) -> tuple[int, ...]:
        """What is free; while it is unchanged a request that could not be admitted still can't."""
        return (self.pool.num_free, self.rows.num_free, self.seats.num_free, self.slots.num_free)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold the KV of `tokens` positions."""
        return max(-(-tokens // self._page_size), 1)

    def admit(self, live: LiveRequest, *, alone: bool) -> list[PageCopy] | None:
        """Give a waiting request all it needs to start; return the page copies that must run before its prefill.

        None if something is missing, and then nothing has changed. Unless it is `alone`, some pages stay free for others.
        """
        needs_slot = live.request.sampling.needs_slot
        if not self.rows.num_free or not self.seats.num_free or (needs_slot and not self.slots.num_free):
            return None
        reserve = 0 if alone else self._watermark
        match = self._match(live)
        if not self._make_room(self._missing(live, match), reserve=reserve):
            # The match itself may hold the pages that are missing: without it they can be evicted.
            for page in [*match.pages, *([] if match.copy_from is None else [match.copy_from])]:
                self.pool.release(page)
            match = PrefixMatch(pages=[], copy_from=None, copied=0, spans=())
            if not alone or not self._make_room(self._missing(live, match), reserve=reserve):
                return None
        fresh = self.pool.allocate(self._missing(live, match))
        live.pages = match.pages + fresh
        live.computed = len(match.pages) * self._page_size + match.copied
        live.base_spans = match.spans
        copies = []
        if match.copy_from is not None:
            # The copy is in the log before anything that could write the page again.
            copies.append(PageCopy(match.copy_from, fresh[0], match.copied))
            self.pool.release(match.copy_from)
        self._seat(live)
        return copies

    def _match(self, live: LiveRequest) -> PrefixMatch:
        request = live.request
        if request.lineage is not None:
            self.prefix.arrived(request.lineage, salt=request.cache_salt)
        start = None if live.prompt_logprobs is None else request.sampling.prompt_logprobs_from
        return self.prefix.match(
            live.ids,
            salt=request.cache_salt,
            lineage=request.lineage if live.keeps_kv else None,
            oldest_version=self._version - request.max_kv_lag,
            at_most=live.ids.size - 1 if start is None else start - 1,
        )

    def _missing(self, live: LiveRequest, match: PrefixMatch) -> int:
        return self.pages_for(self._wanted(live)) - len(match.pages)

    def _wanted(self, live: LiveRequest) -> int:
        """Return how many positions a request gets pages for at once: all where each free row could have as many twice over."""
        whole = live.limit - 1
        if 2 * self.pages_for(whole) * self.rows.num_free <= self.pool.num_free:
            return whole
        return min(whole, live.ids.size + GROW_TOKENS)

    def fork(self, live: LiveRequest, parent: LiveRequest) -> list[PageCopy] | None:
        """Give a waiting member the prompt's KV of `parent`, which has just computed it: pages shared, the last one copied.

        None if something is missing, and then nothing has changed.
        """
        needs_slot = live.request.sampling.needs_slot
        if not self.rows.num_free or not self.seats.num_free or (needs_slot and not self.slots.num_free):
            return None
        shared, partial = divmod(live.ids.size, self._page_size)
        missing = max(self.pages_for(self._wanted(live)), self.pages_for(live.ids.size)) - shared
        if not self._make_room(missing, reserve=self._watermark):
            return None
        for page in parent.pages[:shared]:
            self.pool.hold(page)
        live.pages = parent.pages[:shared] + self.pool.allocate(missing)
        live.computed = live.ids.size
        live.base_spans = parent.base_spans
        self._seat(live)
        if live.request.lineage is not None:
            self.prefix.arrived(live.request.lineage, salt=live.request.cache_salt)
        return [PageCopy(parent.pages[shared], live.pages[shared], partial)] if partial else []

    def grow(self, live: LiveRequest, tokens: int) -> np.ndarray:
        """Add pages until `tokens` positions are covered, as far as the pool allows; return the new ones."""
        missing = self.pages_for(min(tokens, live.limit - 1)) - len(live.pages)
        if missing <= 0:
            return np.zeros(0, dtype=np.int64)
        self._make_room(missing, reserve=0)
        pages = self.pool.allocate(min(missing, self.pool.num_free))
        live.pages.extend(pages)
        return np.array(pages, dtype=np.int64)

    def covered_tokens(self, live: LiveRequest) -> int:
        """Return how many positions its pages hold."""
        return len(live.pages) * self._page_size

    def keep_pages(self, live: LiveRequest, kv_versions: np.ndarray) -> None:
        """Enter the pages of a request that leaves into the index. Shapes: `kv_versions` [positions with KV]."""
        page_size = self._page_size
        ids = self.seats.ids[live.seat]
        other = np.flatnonzero(kv_versions != self._version)
        current = int(other[0]) if other.size else kv_versions.size
        full = current // page_size
        tail = current % page_size if current == kv_versions.size else 0
        salt = live.request.cache_salt
        self.prefix.publish(
            ids,
            live.pages[:full],
            salt=salt,
            tail_page=live.pages[full] if tail else None,
            tail_tokens=tail,
            lineage=live.request.lineage,
        )
        # Keys and values from which nothing was drawn may be no numbers. The next epoch drops what was published, but not this.
        has_drawn = self.seats.count[live.seat] > live.ids.size
        if live.request.lineage is not None and live.keeps_kv and has_drawn:
            pages = live.pages[: self.pages_for(kv_versions.size)]
            self.prefix.remember(live.request.lineage, salt=salt, ids=ids, pages=pages, versions=kv_versions)

    def publish_prompt(self, live: LiveRequest) -> None:
        """Enter the full pages that a prefill command in the log fills, if one version computed all of them."""
        if live.is_built_by(self._version):
            full = live.computed // self._page_size
            self.prefix.publish(self.seats.ids[live.seat], live.pages[:full], salt=live.request.cache_salt)

    def open_tail(self, live: LiveRequest) -> None:
        """Let prompts planned from now on copy the partial last page of a prompt that is in the log as a whole, while its row runs."""
        full, partial = divmod(live.ids.size, self._page_size)
        if partial and live.is_built_by(self._version):
            live.open_tail = self.prefix.open_tail(live.ids, live.pages[full], salt=live.request.cache_salt)

    def close_tail(self, live: LiveRequest) -> None:
        """Let nobody copy a row's last page any more."""
        if live.open_tail is not None:
            self.prefix.close_tail(live.open_tail)
            live.open_tail = None

    def leave_row(self, live: LiveRequest) -> None:
        """Give the row and its sampling slot back; commands that reuse them come later in the log."""
        self.rows.release(live.row)
        live.row = NO_ROW
        if live.sampling_slot != NO_SLOT:
            self.slots.release(live.sampling_slot)
            live.sampling_slot = NO_SLOT

    def release(self, live: LiveRequest) -> None:
        """Take back pages, slot and seat, and the row if it still has one."""
        self.close_tail(live)
        for page in live.pages:
            self.pool.release(page)
        live.pages = []
        if live.row != NO_ROW:
            self.leave_row(live)
        if live.seat != NO_SEAT:
            self.seats.release(live.seat)
            live.seat = NO_SEAT

    def start_epoch(self, version: int) -> None:
        """Drop every shared prefix; pages computed from now on are of `version`."""
        self._version = version
        self.prefix.start_epoch(version)

    def check_integrity(self, lives: Iterable[LiveRequest]) -> None:
        """Check that pages, rows, seats and slots add up over the live requests. Raises: AssertionError."""
        holders = list(lives)
        expected: Counter[int] = Counter(self.pool.indexed_pages)
        expected.update(itertools.chain.from_iterable(live.pages for live in holders))
        self.pool.check_integrity(dict(expected))
        self.prefix.check_integrity()
        self.rows.check_integrity()
        self.slots.check_integrity({live.sampling_slot for live in holders if live.sampling_slot != NO_SLOT})
        with_row = {live.row for live in holders if live.row != NO_ROW}
        assert len(with_row) == self.rows.num_used, f"rows of requests {sorted(with_row)}, rows in use {self.rows.num_used}"
        seated = {live.seat for live in holders if live.seat != NO_SEAT}
        assert len(seated) + self.seats.num_free == self.seats.num_seats, "seats are lost"

    def kv_versions(self, live: LiveRequest, count: int) -> np.ndarray:
        """Return the version that computed the KV of each position that has one, when `count` ids are known.

        The KV of an output token is computed by the launch that samples the next one; the last has none.
        """
        base = live.ids.size
        if count == base:
            return expand_spans(live.base_spans, live.computed)
        return np.concatenate([expand_spans(live.base_spans, base), self.seats.versions[live.seat, base + 1 : count]])

    def _make_room(self, count: int, *, reserve: int) -> bool:
        """Evict until `count` pages are free with `reserve` more free or evictable; return whether they are."""
        if count <= 0:
            return True
        if self.pool.num_free < count + reserve and self.pool.num_free + self.prefix.num_evictable < count + reserve:
            return False
        if self.pool.num_free < count:
            self.prefix.evict(count - self.pool.num_free)
        return self.pool.num_free >= count

    def _seat(self, live: LiveRequest) -> None:
        sampling = live.request.sampling
        live.row, live.generation = self.rows.allocate()
        if sampling.needs_slot:
            live.sampling_slot = self.slots.allocate()
        live.seat = self.seats.allocate(
            request_id=live.request.request_id, ids=live.ids, versions=live.versions, limit=live.limit, sampling=sampling
        )
