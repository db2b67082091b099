"""Pages and rows: who may use which, by count of references. Host only, no torch.

`PagePool` owns every page's reference count; tables and index nodes hold references, a page with none is free.
`RowPool` hands out the lowest free row with a new generation, so that a row's name never means two requests.
Invariant: free + referenced = all; a page that a row writes has exactly one reference.
"""

from __future__ import annotations

import heapq


class PagePool:
    """Reference counts over pages `first`..`first + num_pages - 1`. `lists_fresh` keeps a list of what is handed out.

    The index's own references are counted apart too, so that `num_index_only` is known without looking at every page.
    """

    __slots__ = ("_first", "_free", "_fresh", "_indexed", "_lists_fresh", "_references", "num_index_only")

    def __init__(self, num_pages: int, first: int, *, lists_fresh: bool = True) -> None:
        self._first = first
        self._free = list(range(first + num_pages - 1, first - 1, -1))
        # Lists: single counts of an array cost several times as much.
        self._references = [0] * (first + num_pages)
        self._indexed = [0] * (first + num_pages)
        self._lists_fresh = lists_fresh
        self._fresh: list[int] = []
        self.num_index_only = 0
        """Number of pages that only the index refers to."""

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool."""
        return len(self._references) - self._first

    @property
    def num_free(self) -> int:
        """Number of pages nobody refers to."""
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """The pages nobody refers to; tests put garbage in them."""
        return tuple(self._free)

    @property
    def indexed_pages(self) -> dict[int, int]:
        """The index's references, by page; looks at every page."""
        return {page: count for page, count in enumerate(self._indexed) if count}

    def in_use(self, page: int) -> bool:
        """Whether somebody beside the index refers to `page`."""
        return self._references[page] > self._indexed[page]

    def references(self, page: int) -> int:
        """Return how many tables and index nodes name `page`."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, one reference each; the caller has made sure that they exist."""
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        if self._lists_fresh:
            self._fresh.extend(pages)
        return pages

    def take_fresh(self) -> list[int]:
        """Return the pages handed out since the last call, each once; what earlier owners left in them is still there."""
        fresh, self._fresh = sorted(set(self._fresh)), []
        return fresh

    def hold(self, page: int) -> None:
        """Add a row's reference to a page that has one."""
        count = self._references[page]
        assert count > 0, f"page {page} is free and can't be shared"
        if count == self._indexed[page]:
            self.num_index_only -= 1
        self._references[page] = count + 1

    def release(self, page: int) -> bool:
        """Drop a row's reference; return whether the page became free."""
        count, indexed = self._references[page] - 1, self._indexed[page]
        assert count >= indexed, f"page {page} released more often than held"
        self._references[page] = count
        if count > indexed:
            return False
        if count:
            self.num_index_only += 1
            return False
        self._free.append(page)
        return True

    def hold_for_index(self, page: int) -> None:
        """Add the index's reference to a page that has one."""
        assert self._references[page] > 0, f"page {page} is free and can't be shared"
        self._references[page] += 1
        self._indexed[page] += 1

    def release_from_index(self, page: int) -> bool:
        """Drop one of the index's references; return whether the page became free."""
        assert self._indexed[page] > 0, f"the index lets go of page {page} more often than it held it"
        self._references[page] -= 1
        self._indexed[page] -= 1
        if self._references[page]:
            return False
        self.num_index_only -= 1
        self._free.append(page)
        return True

    def check_integrity(self, expected: dict[int, int]) -> None:
        """Compare the counts with `expected` references by page, rows' and index's, and with the free list."""
        actual = {page: count for page, count in enumerate(self._references) if count}
        assert actual == expected, f"page references differ: pool {actual}, holders {expected}"
        held = self.indexed_pages
        alone = sum(1 for page, count in held.items() if count == self._references[page])
        assert alone == self.num_index_only, f"{alone} pages only the index refers to, counted {self.num_index_only}"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(self._references[page] == 0 and page >= self._first for page in self._free), "a free page is referenced or reserved"
        assert len(self._free) + len(actual) == self.num_pages, f"{len(self._free)} free + {len(actual)} referenced != {self.num_pages}"


class RowPool:
    """Rows of the decode tables; the lowest free one first, so that buckets stay small.

    `highest_used` is the largest row in use, -1 without one.
    """

    __slots__ = ("_free", "_generation", "_size", "_used", "highest_used")

    def __init__(self, max_rows: int) -> None:
        self._size = max_rows
        self._free = list(range(max_rows))
        self._used: set[int] = set()
        self._generation = 0
        self.highest_used = -1

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of rows in use."""
        return len(self._used)

    def allocate(self) -> tuple[int, int]:
        """Take the lowest free row; return it with a generation that no row ever had."""
        self._generation += 1
        return self._take_lowest(), self._generation

    def move_down(self, row: int) -> int:
        """Exchange a used row for the lowest free one and return that; the generation goes along with the request."""
        lower = self._take_lowest()
        self.release(row)
        return lower

    def _take_lowest(self) -> int:
        row = heapq.heappop(self._free)
        self._used.add(row)
        self.highest_used = max(self.highest_used, row)
        return row

    def release(self, row: int) -> None:
        """Give a row back."""
        self._used.remove(row)
        heapq.heappush(self._free, row)
        if row == self.highest_used:
            self.highest_used = max(self._used, default=-1)

    def check_integrity(self) -> None:
        """Check that every row is either free or used."""
        assert sorted([*self._free, *self._used]) == list(range(self._size)), "rows are lost or doubled"
        assert self.highest_used == max(self._used, default=-1), "the highest row is another one"
