"""Which elements of a checkpoint's tensor a rank holds, and how they lie in the whole one.

The parameter table keeps a shard for every tensor of a model that is cut into ranks; loading reads by it, updates stage by it.
Digests stay those of whole tensors: each rank adds up its elements under their flat indices in the whole tensor, and the group
adds up what the ranks found, a copy that several ranks hold once (`merge_digests`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from areno.weights.cut import Cut
from areno.weights.digest import MASK64


@dataclass(frozen=True, slots=True)
class Overlap:
    """Elements that a flat run of the whole tensor shares with a shard: `rows` times `width`, in the shard one after the other.

    `source` is the first one's place in the run, `target` that in the shard, `index` its flat index in the whole tensor; the next row
    begins `stride` further in the run and in the whole tensor.
    """

    source: int
    target: int
    index: int
    rows: int
    width: int
    stride: int

    def of_run(self, values_n: torch.Tensor) -> torch.Tensor:
        """Return the elements in the run. Shapes: [n], contiguous, to [rows, width]."""
        return values_n.as_strided((self.rows, self.width), (self.stride, 1), values_n.storage_offset() + self.source)

    def of_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the elements in the shard, in place. Shapes: contiguous, to [rows, width]."""
        return shard.view(-1)[self.target : self.target + self.rows * self.width].view(self.rows, self.width)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's part of a tensor: some of its rows, or of its columns. `shape` is the whole tensor's, `copies` ranks hold this part."""

    shape: tuple[int, ...]
    rows: Cut
    columns: Cut
    copies: int

    @staticmethod
    def of(rows: Cut, columns: Cut | None, *, ranks: int) -> TensorShard:
        """Return a rank's part; without `columns` the tensor has one dimension."""
        cut = rows if columns is None or not rows.is_whole else columns
        shape = (rows.total,) if columns is None else (rows.total, columns.total)
        columns = columns or Cut.whole(1)
        assert rows.is_whole or columns.is_whole, f"a tensor of shape {shape} is cut along one dimension"
        return TensorShard(shape, rows, columns, ranks if cut.is_whole else cut.copies)

    @property
    def first(self) -> int:
        """Flat index of the first element in the whole tensor."""
        return self.rows.start * self.columns.total + self.columns.start

    @property
    def run(self) -> int:
        """Elements that follow each other in the whole tensor."""
        return self.rows.size * self.columns.size if self.columns.is_whole else self.columns.size

    @property
    def stride(self) -> int:
        """How far in the whole tensor one run begins after the one before it."""
        return self.columns.total

    @property
    def place(self) -> tuple[slice, ...]:
        """The part as an index of the whole tensor."""
        return (slice(self.rows.start, self.rows.stop), slice(self.columns.start, self.columns.stop))[: len(self.shape)]

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a whole tensor, as a view."""
        return whole[self.place]

    def overlaps(self, start: int, count: int) -> Iterator[Overlap]:
        """Yield what elements `start` to `start` + `count` - 1 of the whole tensor have in common with the part."""
        length, columns, end = self.columns.total, self.columns, start + count
        if columns.is_whole:
            low, high = max(start, self.rows.start * length), min(end, self.rows.stop * length)
            if low < high:
                yield Overlap(low - start, low - self.first, low, 1, high - low, 0)
            return
        full = range(-(-start // length), end // length)
        if full:
            parts = [(start // length, int(start % length > 0)), (full.start, len(full)), (full.stop, 1)]
        else:
            parts = [(row, 1) for row in range(start // length, -(-end // length))]
        for row, rows in parts:
            low, high = max(row * length + columns.start, start), min((row + rows - 1) * length + columns.stop, end)
            width = high - (row + rows - 1) * length - (low - row * length)
            if rows and width > 0:
                target = row * columns.size + low - row * length - columns.start
                yield Overlap(low - start, target, low, rows, width, length)


def merge_digests(found: Sequence[int], copies: int) -> int | None:
    """Return the digest of a whole tensor from what each rank found in its part; None where copies of one part differ."""
    if any(found[rank] != found[rank - rank % copies] for rank in range(len(found))):
        return None
    return sum(found[::copies]) & MASK64
