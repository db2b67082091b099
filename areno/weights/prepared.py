"""Copies of staged weights in the layout that is multiplied, made beside decode so that the pause only exchanges them.

An update owns one set. Invariant: a storage has its copies as soon as every tensor in it is staged, and loses them when one of those
comes again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Set

import torch

from areno.weights.derived import DerivedCopy
from areno.weights.names import ParameterTable


class PreparedCopies:
    """Derived copies of the staged weights by storage; after a swap, of those that were live. Units: `seconds` spent making them."""

    __slots__ = ("_copies", "_staged", "_table", "seconds")

    def __init__(self, table: ParameterTable, staged: ParameterTable) -> None:
        self._table, self._staged = table, staged
        self._copies: dict[str, list[tuple[DerivedCopy, torch.Tensor]]] = {}
        self.seconds = 0.0

    def forget(self, name: str) -> None:
        """Drop the copies of the storage of a tensor that comes again."""
        if name in self._table.views:
            self._copies.pop(self._table.storage_of(name), None)

    def add(self, name: str, received: Set[str]) -> None:
        """Make the copies of a storage that tensor `name` made whole, `received` being all tensors staged."""
        storage = self._table.storage_of(name)
        if self._table.copies_of(storage) and received >= self._table.parts_of(storage):
            self._make(storage)

    def add_rest(self, received: Iterable[str]) -> None:
        """Make the copies of storages that a partial update brought in part: the rest of them holds the live values."""
        staged = set(received)
        for storage in {self._table.storage_of(name) for name in staged} - self._copies.keys():
            if self._table.copies_of(storage):
                for name in self._table.parts_of(storage) - staged:
                    self._staged.views[name].copy_(self._table.views[name])
                self._make(storage)

    def _make(self, storage: str) -> None:
        copies, started = self._table.copies_of(storage), time.perf_counter()
        if copies:
            self._copies[storage] = [(copy, copy.made_of(self._staged.live[storage])) for copy in copies]
            self.seconds += time.perf_counter() - started

    def exchange(self) -> None:
        """Put the prepared copies in the place of the current ones, and keep those."""
        for storage, prepared in self._copies.items():
            self._copies[storage] = [(copy, copy.exchange(other)) for copy, other in prepared]
