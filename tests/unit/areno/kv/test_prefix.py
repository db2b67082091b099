"""The prefix index: what hits, what never hits, and that references add up after any history."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from areno.kv.pool import PagePool
from areno.kv.prefix import PrefixIndex, expand_spans, run_lengths

G = 4


def _ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _stored(pool: PagePool, index: PrefixIndex, ids: np.ndarray, **kind: str | None) -> list[int]:
    """Put the full pages of `ids` into the index as a finished request would, and let go of them."""
    pages = pool.allocate(ids.size // G)
    lineage = kind.pop("lineage", None)
    if lineage is None:
        index.publish(ids, pages, salt=kind.get("salt"))
    else:
        index.remember(lineage, salt=kind.get("salt"), ids=ids, pages=pages, versions=np.zeros(len(pages) * G, dtype=np.int64))
    for page in pages:
        pool.release(page)
    return pages


def _hit(
    pool: PagePool, index: PrefixIndex, ids: np.ndarray, *, salt: str | None = None, lineage: str | None = None, oldest: int = 0
) -> list[int]:
    match = index.match(ids, salt=salt, lineage=lineage, oldest_version=oldest, at_most=ids.size)
    for page in [*match.pages, *([] if match.copy_from is None else [match.copy_from])]:
        pool.release(page)
    return match.pages


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    pool = PagePool(16, first=0)
    index = PrefixIndex(pool, G, epoch=0)
    pages = _stored(pool, index, np.arange(12))
    assert _hit(pool, index, np.arange(12)) == pages[:2]
    assert _hit(pool, index, np.arange(13)) == pages
    assert _hit(pool, index, np.arange(4)) == []
    assert _hit(pool, index, np.arange(5)) == pages[:1]


def test_ids_are_compared_in_full_whatever_their_integer_type() -> None:
    pool = PagePool(16, first=0)
    index = PrefixIndex(pool, G, epoch=0)
    pages = _stored(pool, index, np.arange(8, dtype=np.int32))
    assert _hit(pool, index, np.arange(9, dtype=np.int64)) == pages
    other = np.arange(9)
    other[6] = 99
    assert _hit(pool, index, other) == pages[:1]


def test_salt_and_epoch_separate_entries() -> None:
    pool = PagePool(16, first=0)
    index = PrefixIndex(pool, G, epoch=0)
    salted = _stored(pool, index, np.arange(8), salt="a")
    assert _hit(pool, index, np.arange(9)) == [] and _hit(pool, index, np.arange(9), salt="b") == []
    assert _hit(pool, index, np.arange(9), salt="a") == salted
    index.start_epoch(1)
    assert _hit(pool, index, np.arange(9), salt="a") == [] and pool.num_free == 16


def test_a_lineage_keeps_its_own_pages_across_epochs_up_to_its_lag() -> None:
    pool = PagePool(16, first=0)
    index = PrefixIndex(pool, G, epoch=0)
    own = _stored(pool, index, np.arange(8), lineage="episode")
    index.start_epoch(3)
    assert _hit(pool, index, np.arange(9), lineage="episode") == own
    assert _hit(pool, index, np.arange(9), lineage="other") == [] and _hit(pool, index, np.arange(9)) == []
    assert _hit(pool, index, np.arange(9), lineage="episode", oldest=1) == []
    assert _hit(pool, index, np.arange(9), lineage="episode", salt="x") == []


def test_eviction_takes_leaves_first_and_spares_pages_in_use() -> None:
    pool = PagePool(8, first=0)
    index = PrefixIndex(pool, G, epoch=0)
    first, second = _stored(pool, index, np.arange(12)), _stored(pool, index, np.arange(100, 108))
    used = index.match(np.arange(100, 109), salt=None, lineage=None, oldest_version=0, at_most=99).pages
    assert used == second
    assert index.evict(1) == 1 and _hit(pool, index, np.arange(13)) == first[:2]
    assert index.evict(99) == 2 and pool.num_free == 6
    for page in used:
        pool.release(page)
    assert index.evict(99) == 2 and pool.num_free == 8


@pytest.mark.parametrize("lineage", [None, "a"])
@pytest.mark.parametrize("begins", [1, 2, 3])
def test_an_unused_page_in_front_of_one_in_use_goes_too_once_nothing_else_is_left(begins: int, lineage: str | None) -> None:
    pool = PagePool(12, first=0)
    index = PrefixIndex(pool, G, epoch=0)
    other = _stored(pool, index, np.arange(50, 54))
    ids = np.arange(4 * G)
    _stored(pool, index, ids[: begins * G])
    # A row that had to compute the beginning itself: its later pages stand behind those of the first one.
    own = pool.allocate(4)
    index.publish(ids, own, salt=None)
    if lineage is not None:
        index.remember(lineage, salt=None, ids=ids, pages=own, versions=np.zeros(4 * G, np.int64))
        # Another one uses the pages that are found, and the lineage alone the first ones of its own.
        used = index.match(np.append(ids, 7), salt=None, lineage=None, oldest_version=0, at_most=99).pages
        for page in own:
            pool.release(page)
        own = used
    evictable = index.num_evictable
    assert evictable == begins + 1
    assert index.evict(1) == 1 and pool.references(other[0]) == 0, "what nothing stands behind goes first"
    assert index.evict(1) >= 1
    index.check_integrity()
    index.evict(99)
    assert index.num_evictable == 0 and pool.num_free == 12 - 4
    for page in own:
        pool.release(page)
    index.evict(99)
    assert pool.num_free == 12
    index.check_integrity()
    pool.check_integrity({})


@pytest.mark.parametrize("lineages", [False, True])
def test_entries_in_use_are_passed_over_once_and_not_at_every_eviction(lineages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(1000, first=0)
    index = PrefixIndex(pool, G, epoch=0)
    used = []
    for number in range(400):
        ids = np.arange(number * 1000, number * 1000 + G)
        _stored(pool, index, ids, **({"lineage": str(number)} if lineages else {}))
        if number < 300:
            used += index.match(np.append(ids, 7), salt=None, lineage=str(number), oldest_version=0, at_most=99).pages
    assert len(used) == 300 and index.num_evictable == 100
    looks = 0
    look = PagePool.in_use

    def counted(pool: PagePool, page: int) -> bool:
        nonlocal looks
        looks += 1
        return look(pool, page)

    monkeypatch.setattr(PagePool, "in_use", counted)
    assert sum(index.evict(1) for _ in range(100)) == 100 and index.num_evictable == 0
    assert looks < 600
    assert index.evict(1) == 0
    for page in used:
        pool.release(page)
    assert index.num_evictable == 300 and index.evict(1000) == 300 and pool.num_free == 1000
    index.check_integrity()
    pool.check_integrity({})


def test_a_disabled_index_never_hits_and_never_holds() -> None:
    pool = PagePool(8, first=0)
    index = PrefixIndex(pool, G, epoch=0, enabled=False)
    _stored(pool, index, np.arange(8))
    _stored(pool, index, np.arange(8), lineage="x")
    assert _hit(pool, index, np.arange(9), lineage="x") == [] and pool.num_free == 8


@pytest.mark.parametrize("seed", range(4))
def test_references_add_up_after_any_history(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = PagePool(40, first=2)
    index = PrefixIndex(pool, G, epoch=0)
    running: list[list[int]] = []
    epoch = 0
    for _ in range(600):
        choice = rng.random()
        ids = rng.integers(0, 3, size=int(rng.integers(1, 30)))
        if choice < 0.45:
            lineage = f"l{rng.integers(3)}" if rng.random() < 0.5 else None
            match = index.match(ids, salt=None, lineage=lineage, oldest_version=epoch - 2, at_most=int(rng.integers(0, 40)))
            if match.copy_from is not None:
                pool.release(match.copy_from)
            need = max(-(-ids.size // G) - len(match.pages), 0)
            if need > pool.num_free:
                index.evict(need - pool.num_free)
            if need > pool.num_free:
                for page in match.pages:
                    pool.release(page)
                continue
            pages = match.pages + pool.allocate(need)
            full, tail = divmod(int(rng.integers(0, ids.size + 1)), G)
            if lineage is not None:
                held = pages[: full + (tail > 0)]
                index.remember(lineage, salt=None, ids=ids, pages=held, versions=np.full(full * G + tail, epoch))
            elif match.spans in ((), ((0, epoch),)):
                index.publish(ids, pages[:full], salt=None, tail_page=pages[full] if tail else None, tail_tokens=tail)
            running.append(pages)
        elif choice < 0.85 and running:
            for page in running.pop(int(rng.integers(len(running)))):
                pool.release(page)
        elif choice < 0.93:
            wanted = min(int(rng.integers(1, 6)), index.num_evictable)
            assert index.evict(wanted) >= wanted
        elif choice < 0.98:
            epoch += 1
            index.start_epoch(epoch)
        index.check_integrity()
        held: Counter[int] = Counter(pool.indexed_pages)
        for pages in running:
            held.update(pages)
        pool.check_integrity(dict(held))
    for pages in running:
        for page in pages:
            pool.release(page)
    index.clear()
    assert pool.num_free == 40


def test_run_lengths_and_their_expansion_are_inverse() -> None:
    versions = np.array([0, 0, 0, 2, 2, 5, 0])
    assert run_lengths(versions) == ((0, 0), (3, 2), (5, 5), (6, 0))
    assert np.array_equal(expand_spans(run_lengths(versions), 7), versions)
    assert run_lengths(_ids()) == ()


def test_a_tail_hits_by_its_longest_common_head_and_is_copied() -> None:
    pool = PagePool(16, first=0)
    index = PrefixIndex(pool, G, epoch=0)
    ids = np.arange(11)
    pages = pool.allocate(3)
    index.publish(ids, pages[:2], salt=None, tail_page=pages[2], tail_tokens=3)
    for prompt, copied in ((np.arange(20), 3), (np.arange(10), 1), (np.array([*range(10), 77, 78]), 2), (np.array([*range(8), 77]), 0)):
        match = index.match(prompt, salt=None, lineage=None, oldest_version=0, at_most=99)
        assert match.pages == pages[:2] and match.copied == copied
        assert match.copy_from == (pages[2] if copied else None)
        assert match.spans == ((0, 0),)
        for page in [*match.pages, *([] if match.copy_from is None else [match.copy_from])]:
            pool.release(page)
    short = index.match(np.arange(20), salt=None, lineage=None, oldest_version=0, at_most=9)
    assert len(short.pages) == 2 and short.copied == 1
    index.check_integrity()


def test_a_lineages_partial_page_is_copied_too() -> None:
    pool = PagePool(16, first=0)
    index = PrefixIndex(pool, G, epoch=0)
    pages = pool.allocate(2)
    index.remember("a", salt=None, ids=np.arange(7), pages=pages, versions=np.array([0, 0, 0, 0, 1, 1, 1]))
    index.start_epoch(2)
    match = index.match(np.arange(20), salt=None, lineage="a", oldest_version=0, at_most=99)
    assert (match.pages, match.copy_from, match.copied, match.spans) == (pages[:1], pages[1], 3, ((0, 0), (4, 1)))
    nothing = index.match(np.arange(20), salt=None, lineage="a", oldest_version=1, at_most=99)
    assert nothing.pages == [] and nothing.copy_from is None


def test_no_root_outlives_its_entries() -> None:
    pool = PagePool(8, first=0)
    index = PrefixIndex(pool, G, epoch=0)
    for number in range(50):
        _stored(pool, index, np.arange(8), salt=str(number))
        index.evict(8)
    assert pool.num_free == 8 and not index._roots
