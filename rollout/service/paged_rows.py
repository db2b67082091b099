"""Rows that grow without moving: entries of several parallel columns, in pages that need not be neighbours.

The token store and the store of kept sets are made of these. A write to any number of rows is one scatter, a read from any
number of rows one gather; Python work is per page turned, never per entry. Invariant: every page is free or in exactly one
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PAGE = 64
# Shift and mask in place of a division by the page, which is slow for integers.
_SHIFT, _MASK = PAGE.bit_length() - 1, PAGE - 1


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return start, start+1, ... (count of them) for every pair, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


def _rounds(rows: np.ndarray) -> np.ndarray | None:
    """Return `rows` as [rounds, m] if the same m rows come again and again, as several steps of the same rows do; None otherwise."""
    again = np.flatnonzero(rows[1:] == rows[0]) if rows.size else rows
    width = int(again[0]) + 1 if again.size else rows.size
    if not width or rows.size % width:
        return None
    rounds = rows.reshape(-1, width)
    if (rounds != rounds[0]).any() or np.unique(rounds[0]).size != width:
        return None
    return rounds


class _Grown(NamedTuple):
    """Which rows an append makes longer, and by how much; `rounds` as `_rounds` says."""

    rows: np.ndarray
    counts: np.ndarray
    rounds: np.ndarray | None

    @staticmethod
    def by(rows: np.ndarray) -> _Grown:
        rounds = _rounds(rows)
        if rounds is None:
            return _Grown(*np.unique(rows, return_counts=True), None)
        return _Grown(rounds[0], np.full(rounds.shape[1], rounds.shape[0]), rounds)


class PagedRows:
    """Columns of these dtypes in pages of `PAGE` entries. Mutates only itself."""

    def __init__(self, dtypes: Sequence[type[np.generic]], *, rows: int, pages: int) -> None:
        self.lengths = np.zeros(rows, np.int64)
        self._table = np.zeros((rows, 4), np.int64)
        self._num_pages_of = np.zeros(rows, np.int64)
        self._columns = [np.zeros(pages * PAGE, dtype) for dtype in dtypes]
        self._free = list(range(pages - 1, -1, -1))
        # The rows of the last append, and what it found out about them.
        self._last_rows: np.ndarray | None = None
        self._last_grown: _Grown | None = None

    @property
    def num_rows(self) -> int:
        """How many rows there is room for."""
        return int(self.lengths.size)

    @property
    def _num_pages(self) -> int:
        return int(self._columns[0].size // PAGE)

    @property
    def used_pages(self) -> int:
        """Pages in rows."""
        return self._num_pages - len(self._free)

    def grow_rows(self, rows: int) -> None:
        """Make room for more rows."""
        more = rows - self.num_rows
        self.lengths = np.concatenate([self.lengths, np.zeros(more, np.int64)])
        self._num_pages_of = np.concatenate([self._num_pages_of, np.zeros(more, np.int64)])
        self._table = np.concatenate([self._table, np.zeros((more, self._table.shape[1]), np.int64)])

    def _grow_pages(self) -> None:
        pages = self._num_pages
        self._columns = [np.concatenate([column, np.zeros_like(column)]) for column in self._columns]
        self._free.extend(range(2 * pages - 1, pages - 1, -1))

    def _add_pages(self, row: int, needed: int) -> None:
        if needed > self._table.shape[1]:
            wider = np.zeros((self.num_rows, max(needed, 2 * self._table.shape[1])), np.int64)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        for place in range(int(self._num_pages_of[row]), needed):
            if not self._free:
                self._grow_pages()
            self._table[row, place] = self._free.pop()
        self._num_pages_of[row] = needed

    def _places(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return (self._table[rows, positions >> _SHIFT] << _SHIFT) + (positions & _MASK)

    def append(self, rows: np.ndarray, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Append each entry to its row, in order, and return the rows that grew.

        Shapes: `rows` [n] names the row of each entry; a row may come several times. The same array as last time, unchanged, is
        not looked through again.
        """
        known = self._last_grown if rows is self._last_rows else None
        grown, counts, rounds = known = known or _Grown.by(rows)
        self._last_rows, self._last_grown = rows, known
        before = self.lengths[grown]
        after = before + counts
        short = after > self._num_pages_of[grown] << _SHIFT
        if short.any():
            for which in np.flatnonzero(short).tolist():
                self._add_pages(int(grown[which]), -(-int(after[which]) // PAGE))
        if rounds is None:
            places = np.empty(rows.size, np.int64)
            places[np.argsort(rows, kind="stable")] = self._places(np.repeat(grown, counts), ranges(before, counts))
        elif len(rounds) == 1:
            places = self._places(grown, before)
        else:
            places = self._places(rounds, before + np.arange(len(rounds))[:, None]).reshape(-1)
        for own, news in zip(self._columns, columns):
            own[places] = news
        self.lengths[grown] = after
        return grown

    def gather(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        """Return `counts` entries of each row from `starts` on, one row after the other."""
        if counts.size and counts.min() == counts.max() == 1:
            places = self._places(rows, starts)
        else:
            places = self._places(np.repeat(rows, counts), ranges(starts, counts))
        return [column[places] for column in self._columns]

    def clear(self, row: int) -> None:
        """Forget a row's entries and free its pages."""
        held = int(self._num_pages_of[row])
        self._free.extend(int(page) for page in self._table[row, :held])
        self._num_pages_of[row] = 0
        self.lengths[row] = 0

    def check_integrity(self) -> None:
        """Assert that every page is free or in exactly one row, and that lengths fit their pages."""
        held = [int(page) for row in range(self.num_rows) for page in self._table[row, : self._num_pages_of[row]]]
        assert sorted(held + self._free) == list(range(self._num_pages)), "a page is lost or held twice"
        assert bool(np.all((self.lengths + PAGE - 1) // PAGE == self._num_pages_of)), "a row's length does not fit its pages"
