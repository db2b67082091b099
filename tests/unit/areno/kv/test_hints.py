"""Hints of return: what waits for a tool goes last, for as long as it is believed, and never more than the hints' share."""

from __future__ import annotations

import numpy as np
import pytest

from areno.kv.pool import PagePool
from areno.kv.prefix import PrefixIndex

G = 4


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Cache:
    """An index over 20 pages; each lineage has a row of its own ids, two pages long behind an optional common page."""

    def __init__(self, hint_share: float = 0.5, common: bool = False) -> None:
        self.pool, self.clock, self.common = PagePool(20, first=0), Clock(), common
        self.index = PrefixIndex(self.pool, G, epoch=0, hint_share=hint_share, clock=self.clock)

    def ids(self, name: str) -> np.ndarray:
        head = np.arange(9000, 9000 + G) if self.common else np.empty(0, np.int64)
        return np.concatenate([head, np.arange(2 * G) + 100 * ord(name)])

    def store(self, name: str, *, chain: bool = True) -> None:
        """Leave what a finished request of this lineage leaves."""
        ids = self.ids(name)
        match = self.index.match(ids, salt=None, lineage=None, oldest_version=0, at_most=ids.size)
        pages = match.pages + self.pool.allocate(ids.size // G - len(match.pages))
        self.index.publish(ids, pages, salt=None, lineage=name)
        if chain:
            self.index.remember(name, salt=None, ids=ids, pages=pages, versions=np.zeros(ids.size, np.int64))
        for page in pages:
            self.pool.release(page)
        self.check()

    def expect(self, name: str, seconds: float, owner: str = "me") -> bool:
        held = self.index.expect(name, salt=None, owner=owner, seconds=seconds)
        self.check()
        return held

    def evict(self, pages: int) -> None:
        assert self.index.evict(pages) == pages
        self.check()

    def has(self, names: str) -> str:
        """Return those lineages whose pages are all here; looking changes nothing."""
        here = ""
        for name in names:
            path, _, _, _ = self.index._walk(self.ids(name).astype(np.int32), None, 99)
            here += name if len(path) == self.ids(name).size // G else ""
        return here

    def check(self) -> None:
        self.index.check_integrity()
        self.pool.check_integrity(dict(self.pool.indexed_pages))


@pytest.mark.parametrize("chain", [True, False])
def test_what_nobody_expects_goes_first_then_the_latest_return(chain: bool) -> None:
    cache = Cache()
    for name in "abcde":
        cache.store(name, chain=chain)
    assert cache.expect("a", 5) and cache.expect("b", 50) and cache.expect("c", 20)
    for left in ("abce", "abc", "ac", "a", ""):
        cache.evict(2)
        assert cache.has("abcde") == left
    assert cache.index.hint_counters["hints_dropped"] == 3 and cache.index.hint_counters["hinted_pages"] == 0


def test_a_hint_overdue_by_more_than_its_length_counts_no_more() -> None:
    cache = Cache()
    for name in "abc":
        cache.store(name)
    cache.expect("a", 5)
    cache.expect("b", 60)
    cache.clock.now += 9.9
    cache.evict(2)
    assert cache.has("abc") == "ab"
    cache.store("c")
    cache.clock.now += 0.2
    cache.evict(2)
    assert cache.has("abc") == "bc" and cache.index.hint_counters["hints_decayed"] == 1


def test_a_decayed_hint_leaves_its_entries_where_their_last_use_puts_them() -> None:
    cache = Cache()
    for name in "abc":
        cache.store(name)
    cache.expect("b", 1)
    cache.clock.now += 10
    cache.evict(2)
    assert cache.has("abc") == "bc"
    cache.evict(2)
    assert cache.has("abc") == "c"


def test_hints_hold_at_most_their_share_and_the_latest_returns_give_way() -> None:
    cache = Cache(hint_share=0.2)
    for name in "abcd":
        cache.store(name)
    assert cache.expect("a", 10) and cache.expect("b", 30)
    assert cache.index.hint_counters["hinted_pages"] == 4
    assert not cache.expect("c", 40) and cache.expect("d", 20)
    assert cache.index.hint_counters["hinted_pages"] == 4
    cache.evict(4)
    assert cache.has("abcd") == "ad"


def test_no_share_means_no_hints() -> None:
    cache = Cache(hint_share=0.0)
    cache.store("a")
    cache.store("b")
    assert not cache.expect("a", 10)
    cache.evict(2)
    assert cache.has("ab") == "b"


def test_who_is_back_is_expected_no_more() -> None:
    cache = Cache()
    for name in "ab":
        cache.store(name)
    cache.expect("a", 10)
    cache.index.arrived("a", salt=None)
    cache.check()
    assert cache.index.hint_counters["hints_kept"] == 1 and cache.index.hint_counters["hints_open"] == 0
    cache.evict(2)
    assert cache.has("ab") == "a", "what was just asked for is young"
    cache.evict(2)
    assert cache.has("ab") == ""


def test_a_later_hint_replaces_the_former() -> None:
    cache = Cache()
    for name in "ab":
        cache.store(name)
    cache.expect("a", 10)
    cache.expect("b", 20)
    cache.expect("a", 30)
    cache.evict(2)
    assert cache.has("ab") == "b" and cache.index.hint_counters["hints_ended"] == 1


def test_an_owners_end_ends_its_hints_alone() -> None:
    cache = Cache()
    for name in "abcd":
        cache.store(name)
    cache.expect("a", 10, "one")
    cache.expect("b", 10, "two")
    cache.expect("c", 10, "one")
    cache.index.end_hints("one")
    cache.check()
    cache.evict(6)
    assert cache.has("abcd") == "b"


def test_a_common_prefix_is_held_while_anyone_who_needs_it_is_expected() -> None:
    cache = Cache(common=True)
    for name in "abc":
        cache.store(name)
    cache.expect("a", 10)
    cache.expect("b", 20)
    assert cache.index.hint_counters["hinted_pages"] == 5
    cache.evict(4)
    assert cache.has("abc") == "a"
    cache.index.arrived("a", salt=None)
    cache.evict(3)
    assert cache.pool.num_free == 20


def test_nothing_to_hold_is_no_hint() -> None:
    cache = Cache()
    assert not cache.expect("z", 10)
    cache.store("a")
    cache.evict(2)
    assert not cache.expect("a", 10) and cache.index.hint_counters["hints"] == 0


def test_an_epoch_drops_shared_entries_and_a_lineages_own_pages_stay_held() -> None:
    cache = Cache()
    for name in "ab":
        cache.store(name)
    cache.expect("a", 10)
    cache.expect("b", 20)
    cache.index.start_epoch(1)
    cache.check()
    assert cache.index.hint_counters["hinted_pages"] == 4
    cache.evict(2)
    match = cache.index.match(np.append(cache.ids("a"), 1), salt=None, lineage="a", oldest_version=0, at_most=99)
    assert len(match.pages) == 2
    cache.index.clear()
    for page in match.pages:
        cache.pool.release(page)
    cache.check()
    assert cache.pool.num_free == 20 and cache.index.hint_counters["hints_open"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_entries_add_up_after_any_history_with_hints(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = Cache(hint_share=0.4, common=bool(seed % 2))
    for _ in range(400):
        name = "abcdefgh"[int(rng.integers(8))]
        choice = rng.random()
        if choice < 0.4:
            cache.index.arrived(name, salt=None)
            if cache.pool.num_free < 4:
                cache.index.evict(4 - cache.pool.num_free)
            cache.store(name, chain=rng.random() < 0.5)
        elif choice < 0.7:
            cache.expect(name, float(rng.integers(1, 9)), owner="xy"[int(rng.integers(2))])
        elif choice < 0.8:
            cache.index.evict(int(rng.integers(1, 5)))
        elif choice < 0.85:
            cache.index.end_hints("x")
        elif choice < 0.86:
            cache.index.start_epoch(0)
        cache.clock.now += float(rng.random())
        cache.check()
    cache.index.evict(20)
    assert cache.pool.num_free == 20
