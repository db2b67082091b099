"""The columnar store against a dict of lists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollout.service.paged_rows import PAGE, PagedRows, ranges
from rollout.service.token_store import BYTES_PER_TOKEN, KeptSets, TokenColumns, TokenStore


def columns(ids: np.ndarray) -> TokenColumns:
    floats = ids.astype(np.float32)
    return TokenColumns(ids.astype(np.int32), -floats, -2 * floats, np.full(ids.size, np.nan, np.float32), ids.astype(np.int64) // 100)


def kept_sets(draw: np.random.Generator, count: int) -> list[list[int]]:
    return [draw.integers(0, 999, int(draw.integers(1, 65))).tolist() for _ in range(count)]


def packed(sets: list[list[int]]) -> KeptSets:
    return KeptSets(np.array([len(one) for one in sets], np.int32), np.array([token for one in sets for token in one], np.int32))


def unpacked(kept: KeptSets) -> list[list[int]]:
    return [part.tolist() for part in np.split(kept.ids, np.cumsum(kept.counts)[:-1])]


@pytest.mark.parametrize("seed", range(3))
def test_kept_sets_of_some_rows_among_others_equal_lists(seed: int) -> None:
    draw = np.random.default_rng(seed)
    store, oracle = TokenStore(rows=6, pages=2, kept_pages=2), {row: [] for row in range(6)}  # type: ignore[var-annotated]
    keeping = np.array([True, False, True, False, True, True])
    for _ in range(60):
        count = int(draw.integers(1, 20))
        rows = draw.integers(0, 6, count)
        sets = [one if keeping[row] else [] for one, row in zip(kept_sets(draw, count), rows)]
        tokens = replace(columns(np.arange(count)), kept=packed(sets) if any(sets) else None)
        store.append(rows, tokens, keeping[rows])
        for row, one in zip(rows.tolist(), sets):
            oracle[row].append(one)
        store.check_integrity()
        chosen = draw.permutation(6)[:4]
        starts = np.array([draw.integers(0, len(oracle[row]) + 1) for row in chosen.tolist()])
        counts = np.array([draw.integers(0, len(oracle[row]) - start + 1) for row, start in zip(chosen.tolist(), starts.tolist())])
        part = store.gather(chosen, starts, counts)
        expected = [one for row, at, size in zip(chosen.tolist(), starts, counts) for one in oracle[row][at : at + size]]
        assert (part.kept is None) == (not any(expected))
        assert part.kept is None or unpacked(part.kept) == expected
        some = np.flatnonzero(draw.random(len(expected)) < 0.5)
        assert part.kept is None or not some.size or unpacked(part.kept.take(some)) == [expected[place] for place in some]
    assert store.num_bytes(0) == len(oracle[0]) * (BYTES_PER_TOKEN + 8) + 4 * sum(map(len, oracle[0]))
    assert store.num_bytes(1) == len(oracle[1]) * BYTES_PER_TOKEN
    for row in oracle:
        store.clear(row)
    assert store.used_pages == 0


def test_ranges_lists_every_pair_in_turn() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], np.int64), np.array([], np.int64)).size == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_growth_and_clearing_equal_lists(seed: int) -> None:
    draw = np.random.default_rng(seed)
    store, oracle, next_id = TokenStore(rows=8, pages=2), {row: [] for row in range(8)}, 0
    for turn in range(300):
        if turn == 150:
            store.grow_rows(16)
            oracle |= {row: [] for row in range(8, 16)}
        count = int(draw.integers(0, 2 * PAGE if turn % 10 == 0 else 12))
        rows = draw.integers(0, len(oracle), count)
        ids = np.arange(next_id, next_id + count)
        next_id += count
        grown = store.append(rows, columns(ids)) if count else np.empty(0, np.int64)
        assert sorted(grown.tolist()) == sorted(set(rows.tolist()))
        for row, token in zip(rows.tolist(), ids.tolist()):
            oracle[row].append(token)
        if draw.random() < 0.1:
            row = int(draw.integers(0, len(oracle)))
            store.clear(row)
            oracle[row] = []
        store.check_integrity()
        chosen = draw.permutation(len(oracle))[:5]
        starts = np.array([draw.integers(0, len(oracle[row]) + 1) for row in chosen.tolist()])
        counts = np.array([len(oracle[row]) for row in chosen.tolist()]) - starts
        part = store.gather(chosen, starts, counts)
        expected = [token for row, start in zip(chosen.tolist(), starts.tolist()) for token in oracle[row][start:]]
        assert part.token_ids.tolist() == expected
        assert part.versions.tolist() == [token // 100 for token in expected]
        assert np.array_equal(part.raw_logprobs, -2 * np.array(expected, np.float32))
    assert store.lengths.tolist() == [len(oracle[row]) for row in range(len(oracle))]
    for row in oracle:
        store.clear(row)
    assert store.used_pages == 0


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_come_in_rounds_are_stored_as_any_others(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = PagedRows((np.int64,), rows=40, pages=4)
    oracle: dict[int, list[int]] = {row: [] for row in range(40)}
    at = 0
    for _ in range(30):
        chosen = draw.permutation(40)[: int(draw.integers(1, 9))]
        many = np.tile(chosen, int(draw.integers(1, 100)))
        if draw.random() < 0.3:
            many = np.append(many, draw.integers(0, 40))
        # The very array again and again, as the ledger gives it while the same requests step, or another.
        for _ in range(int(draw.integers(1, 80 if many.size < 9 else 3))):
            values = np.arange(at, at + many.size)
            at += many.size
            grown = rows.append(many, (values,))
            assert sorted(grown.tolist()) == sorted(set(many.tolist()))
            for row, value in zip(many.tolist(), values.tolist()):
                oracle[row].append(value)
        rows.check_integrity()
        if draw.random() < 0.2:
            rows.clear(cleared := int(draw.integers(0, 40)))
            oracle[cleared] = []
    every = np.arange(40)
    begun = np.flatnonzero(rows.lengths)
    last = rows.gather(begun, rows.lengths[begun] - 1, np.ones(begun.size, np.int64))[0]
    assert last.tolist() == [oracle[row][-1] for row in begun.tolist()]
    counts = rows.lengths[every]
    assert rows.gather(every, np.zeros(40, np.int64), counts)[0].tolist() == [value for row in range(40) for value in oracle[row]]
