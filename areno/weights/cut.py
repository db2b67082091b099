"""A run of places along one dimension of a tensor: what a rank holds of it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """Places `start` to `stop` - 1 of `total`; `copies` ranks in a row hold them."""

    total: int
    start: int
    stop: int
    copies: int = 1

    @staticmethod
    def whole(total: int) -> Cut:
        """Return all of them."""
        return Cut(total, 0, total)

    @staticmethod
    def part(total: int, index: int, parts: int, *, copies: int = 1) -> Cut:
        """Return one of `parts` equal runs."""
        size = total // parts
        return Cut(total, index * size, (index + 1) * size, copies)

    @property
    def size(self) -> int:
        """Number of places."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.size == self.total

    def times(self, factor: int) -> Cut:
        """Return the cut where every place stands for this many."""
        return Cut(self.total * factor, self.start * factor, self.stop * factor, self.copies)
