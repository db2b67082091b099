"""The sampled tokens of all records as columns, with the kept sets of the records that return them.

The ledger owns one store; a record is a row. A step of the engine over any number of rows is a few scatters, a flush a few
gathers. A kept set has a length of its own: each token of a keeping row notes where its set ends among the row's kept ids.
Invariant: a row either has a note for each of its tokens or none at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout.service.paged_rows import PagedRows, ranges
from rollout.wire.generation_messages import MAX_KEPT

BYTES_PER_TOKEN = 4 + 3 * 4 + 8
KEPT_BYTES_PER_TOKEN = 8 + 4 * MAX_KEPT
_DTYPES = (np.int32, np.float32, np.float32, np.float32, np.int64)


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The ids that the filters kept for each token: `counts` int32 [n] cut `ids` int32 into the tokens' sets."""

    counts: np.ndarray
    ids: np.ndarray

    def take(self, index: np.ndarray) -> KeptSets:
        """Return the sets of the tokens at `index`."""
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        return KeptSets(self.counts[index], self.ids[ranges(starts[index], self.counts[index])])


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Parallel columns, one entry for each token; log-probabilities may be NaN (see StepOutput of the engine).

    `kept` is None where no token has a kept set.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray
    kept: KeptSets | None = None

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The columns that have one entry for each token."""
        return self.token_ids, self.logprobs, self.raw_logprobs, self.behaviour_logprobs, self.versions

    def take(self, index: np.ndarray) -> TokenColumns:
        """Return the entries at `index`."""
        return TokenColumns.of([column[index] for column in self.arrays], None if self.kept is None else self.kept.take(index))

    @staticmethod
    def of(columns: Sequence[np.ndarray], kept: KeptSets | None = None) -> TokenColumns:
        """Return the columns in the order of `arrays` as one value."""
        token_ids, logprobs, raw_logprobs, behaviour_logprobs, versions = columns
        return TokenColumns(token_ids, logprobs, raw_logprobs, behaviour_logprobs, versions, kept)

    @staticmethod
    def room_for(count: int) -> TokenColumns:
        """Return zeroed columns."""
        return TokenColumns.of([np.zeros(count, dtype) for dtype in _DTYPES])


class TokenStore:
    """See the module. Mutates only itself."""

    def __init__(self, rows: int = 256, pages: int = 1024, kept_pages: int = 16) -> None:
        self._tokens = PagedRows(_DTYPES, rows=rows, pages=pages)
        self._kept_ends = PagedRows((np.int64,), rows=rows, pages=kept_pages)
        self._kept_ids = PagedRows((np.int32,), rows=rows, pages=kept_pages)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row; not to be written."""
        return self._tokens.lengths

    @property
    def num_rows(self) -> int:
        """How many rows there is room for."""
        return self._tokens.num_rows

    @property
    def used_pages(self) -> int:
        """Pages in rows, those of kept sets included."""
        return self._tokens.used_pages + self._kept_ends.used_pages + self._kept_ids.used_pages

    def grow_rows(self, rows: int) -> None:
        """Make room for more rows."""
        for part in (self._tokens, self._kept_ends, self._kept_ids):
            part.grow_rows(rows)

    def num_bytes(self, row: int) -> int:
        """Return what a row's tokens and kept sets take."""
        kept = 8 * self._kept_ends.lengths[row] + 4 * self._kept_ids.lengths[row]
        return int(self._tokens.lengths[row] * BYTES_PER_TOKEN + kept)

    def append(self, rows: np.ndarray, tokens: TokenColumns, keeps: np.ndarray | None = None) -> np.ndarray:
        """Append each token to its row, in order, and return the rows that grew.

        Shapes: `rows` [n] names the row of each token; a row may come several times. `keeps` [n] says whose kept sets are
        stored; None stores no one's.
        """
        grown = self._tokens.append(rows, tokens.arrays)
        if keeps is not None and keeps.any():
            index = np.flatnonzero(keeps)
            nothing = KeptSets(np.zeros(index.size, np.int32), np.zeros(0, np.int32))
            self._append_kept(rows[index], nothing if tokens.kept is None else tokens.kept.take(index))
        return grown

    def _append_kept(self, rows: np.ndarray, kept: KeptSets) -> None:
        order = np.argsort(rows, kind="stable")
        sorted_rows, running = rows[order], np.cumsum(kept.counts[order], dtype=np.int64)
        first = np.searchsorted(sorted_rows, sorted_rows)
        ends = self._kept_ids.lengths[sorted_rows] + running - (running - kept.counts[order])[first]
        self._kept_ends.append(sorted_rows, (ends,))
        self._kept_ids.append(np.repeat(rows, kept.counts), (kept.ids,))

    def gather(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> TokenColumns:
        """Return `counts` tokens of each row from `starts` on, one row after the other."""
        tokens = TokenColumns.of(self._tokens.gather(rows, starts, counts))
        keeping = (self._kept_ends.lengths[rows] > 0) & (counts > 0)
        if not keeping.any():
            return tokens
        own_rows, own_starts, own_counts = rows[keeping], starts[keeping], counts[keeping]
        ends = self._kept_ends.gather(own_rows, own_starts, own_counts)[0]
        before = np.zeros(own_rows.size, np.int64)
        later = own_starts > 0
        before[later] = self._kept_ends.gather(own_rows[later], own_starts[later] - 1, np.ones(int(later.sum()), np.int64))[0]
        last = np.cumsum(own_counts) - 1
        previous = np.concatenate([[0], ends[:-1]])
        previous[last - own_counts + 1] = before
        sizes = np.zeros(int(counts.sum()), np.int32)
        sizes[np.repeat(keeping, counts)] = ends - previous
        ids = self._kept_ids.gather(own_rows, before, ends[last] - before)[0]
        return replace(tokens, kept=KeptSets(sizes, ids))

    def clear(self, row: int) -> None:
        """Forget a row's tokens and free its pages."""
        for part in (self._tokens, self._kept_ends, self._kept_ids):
            part.clear(row)

    def check_integrity(self) -> None:
        """Assert that no page is lost or held twice and that kept sets belong to tokens."""
        for part in (self._tokens, self._kept_ends, self._kept_ids):
            part.check_integrity()
        noted = self._kept_ends.lengths
        assert bool(np.all((noted == 0) | (noted == self._tokens.lengths))), "a row has kept sets for some of its tokens only"
