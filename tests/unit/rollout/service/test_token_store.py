"""The columnar store against a dict of lists."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.service.paged_rows import PAGE, ranges
from rollout.service.token_store import TokenColumns, TokenStore


def columns(ids: np.ndarray) -> TokenColumns:
    floats = ids.astype(np.float32)
    return TokenColumns(ids.astype(np.int32), -floats, -2 * floats, np.full(ids.size, np.nan, np.float32), ids.astype(np.int64) // 100)


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
