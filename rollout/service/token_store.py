"""Columns for the sampled tokens of all records: written and read with whole-array operations only.

The ledger owns one store. A record is a row; its tokens lie in pages of `PAGE` entries that need not be neighbours, so
rows grow without moving. A step of the engine over any number of rows is one scatter, a flush over any number of rows
is one gather; Python work is per page turned, never per token. Invariant: every page is free or in exactly one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PAGE = 64
BYTES_PER_TOKEN = 4 + 3 * 4 + 8


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Parallel columns, one entry for each token; log-probabilities may be NaN (see StepOutput of the engine)."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray

    def take(self, index: np.ndarray) -> TokenColumns:
        """Return the entries at `index`."""
        return TokenColumns(
            self.token_ids[index], self.logprobs[index], self.raw_logprobs[index], self.behaviour_logprobs[index], self.versions[index]
        )

    def put(self, index: np.ndarray, other: TokenColumns) -> None:
        """Write `other` at `index`."""
        self.token_ids[index] = other.token_ids
        self.logprobs[index] = other.logprobs
        self.raw_logprobs[index] = other.raw_logprobs
        self.behaviour_logprobs[index] = other.behaviour_logprobs
        self.versions[index] = other.versions

    @staticmethod
    def room_for(count: int) -> TokenColumns:
        """Return zeroed columns."""
        return TokenColumns(
            np.zeros(count, np.int32),
            np.zeros(count, np.float32),
            np.zeros(count, np.float32),
            np.zeros(count, np.float32),
            np.zeros(count, np.int64),
        )


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return start, start+1, ... (count of them) for every pair, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


class TokenStore:
    """Paged columns; see the module. Mutates only itself."""

    def __init__(self, rows: int = 256, pages: int = 1024) -> None:
        self.lengths = np.zeros(rows, np.int64)
        self._table = np.zeros((rows, 4), np.int64)
        self._num_pages_of = np.zeros(rows, np.int64)
        self._columns = TokenColumns.room_for(pages * PAGE)
        self._free = list(range(pages - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        """How many rows there is room for."""
        return int(self.lengths.size)

    @property
    def used_pages(self) -> int:
        """Pages in rows."""
        return int(self._columns.token_ids.size // PAGE - len(self._free))

    def grow_rows(self, rows: int) -> None:
        """Make room for more rows."""
        more = rows - self.num_rows
        self.lengths = np.concatenate([self.lengths, np.zeros(more, np.int64)])
        self._num_pages_of = np.concatenate([self._num_pages_of, np.zeros(more, np.int64)])
        self._table = np.concatenate([self._table, np.zeros((more, self._table.shape[1]), np.int64)])

    def _grow_pages(self) -> None:
        pages = self._columns.token_ids.size // PAGE
        grown = TokenColumns.room_for(2 * pages * PAGE)
        grown.put(np.arange(pages * PAGE), self._columns)
        self._columns = grown
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
        return self._table[rows, positions // PAGE] * PAGE + positions % PAGE

    def append(self, rows: np.ndarray, tokens: TokenColumns) -> np.ndarray:
        """Append each token to its row, in order, and return the rows that grew.

        Shapes: `rows` [n] names the row of each token; a row may come several times.
        """
        order = np.argsort(rows, kind="stable")
        grown, counts = np.unique(rows, return_counts=True)
        before = self.lengths[grown]
        after = before + counts
        needed = (after + PAGE - 1) // PAGE
        for which in np.flatnonzero(needed > self._num_pages_of[grown]):
            self._add_pages(int(grown[which]), int(needed[which]))
        places = np.empty(rows.size, np.int64)
        places[order] = self._places(np.repeat(grown, counts), ranges(before, counts))
        self._columns.put(places, tokens)
        self.lengths[grown] = after
        return grown

    def gather(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> TokenColumns:
        """Return `counts` tokens of each row from `starts` on, one row after the other."""
        return self._columns.take(self._places(np.repeat(rows, counts), ranges(starts, counts)))

    def clear(self, row: int) -> None:
        """Forget a row's tokens and free its pages."""
        held = int(self._num_pages_of[row])
        self._free.extend(int(page) for page in self._table[row, :held])
        self._num_pages_of[row] = 0
        self.lengths[row] = 0

    def check_integrity(self) -> None:
        """Assert that every page is free or in exactly one row, and that lengths fit their pages."""
        pages = self._columns.token_ids.size // PAGE
        held = [int(page) for row in range(self.num_rows) for page in self._table[row, : self._num_pages_of[row]]]
        assert sorted(held + self._free) == list(range(pages)), "a page is lost or held twice"
        assert bool(np.all((self.lengths + PAGE - 1) // PAGE == self._num_pages_of)), "a row's length does not fit its pages"
