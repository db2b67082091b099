"""Which elements of which tensors an update has, where they come in slices; and a slice that is filled where it is staged.

`WeightUpdate` owns one ledger. Invariant: the runs of a tensor never overlap, so it is whole when their lengths add up to its
size; a run that comes again replaces itself. A large tensor comes in thousands of slices, so a slice looks at its neighbours only.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from areno.weights.manifest import mismatch
from areno.weights.names import TensorSpec
from areno.weights.staged import StagedFacts, inspect_rows, join_facts


class OpenSlice:
    """Where a slice of tensor `name` is staged, to be filled in order; `look` at a part as soon as it is there, while the caches hold it.

    Shapes: `values` flat, elements `start` and on of the tensor, of which the first `looked` were looked at. Units: `inspect_s` seconds.
    A slice that is not closed counts as not staged.
    """

    __slots__ = ("_live", "_parts", "canonical", "inspect_s", "looked", "name", "start", "values")

    def __init__(self, name: str, canonical: str, start: int, values: torch.Tensor, live: torch.Tensor) -> None:
        self.name, self.canonical, self.start, self.values, self._live = name, canonical, start, values, live
        self._parts: list[StagedFacts] = []
        self.looked = 0
        self.inspect_s = 0.0

    def look(self, count: int) -> None:
        """Find out about the next `count` elements, which are there. Mutates: the slice."""
        started, end = time.perf_counter(), self.looked + count
        part = self.values[self.looked : end]
        self._parts.append(inspect_rows(part.view(1, -1), self._live[self.looked : end], self.start + self.looked, 0))
        self.looked = end
        self.inspect_s += time.perf_counter() - started

    def facts(self) -> StagedFacts:
        """Return what is known of the slice."""
        assert self.looked == self.values.numel(), f"{self.looked} of {self.values.numel()} elements of {self.name} were looked at"
        return join_facts(self._parts)


class DeviceRun(NamedTuple):
    """`size` elements in memory of a CUDA device, which no tensor was made of yet: that costs as much as a small copy.

    `address` is that of `memory`, uint8 [bytes], `offset` counts bytes in it, and `handle` is its interprocess handle, by which other
    ranks open it too.
    """

    memory: torch.Tensor
    address: int
    offset: int
    size: int
    dtype: str
    handle: bytes

    def tensor(self) -> torch.Tensor:
        """Return the elements, flat."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.memory[self.offset : self.offset + self.size * dtype.itemsize].view(dtype)


# Named tuples, the cheapest of frozen values: some hundreds are made for every update.
class Slice(NamedTuple):
    """`values`, flat, are the elements of tensor `name`, of `spec`, from `start` on."""

    name: str
    values: torch.Tensor | DeviceRun
    start: int
    spec: TensorSpec

    @property
    def tensor(self) -> torch.Tensor:
        """The values as a tensor."""
        return self.values.tensor() if isinstance(self.values, DeviceRun) else self.values


@dataclass(slots=True)
class _Runs:
    """One tensor's runs: first index -> (length, what is known of them, None on a device); first indices in order; elements in all."""

    by_start: dict[int, tuple[int, StagedFacts | None]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    elements: int = 0

    def overlaps(self, start: int, count: int) -> bool:
        """Tell whether elements from `start` on are in another run. Those before and behind are the only ones that reach here."""
        place = bisect.bisect_left(self.starts, start)
        if place < len(self.starts) and self.starts[place] < start + count:
            return True
        return place > 0 and self.starts[place - 1] + self.by_start[self.starts[place - 1]][0] > start

    def drop(self, start: int) -> None:
        known = self.by_start.pop(start, None)
        if known is not None:
            del self.starts[bisect.bisect_left(self.starts, start)]
            self.elements -= known[0]

    def add(self, start: int, count: int, facts: StagedFacts | None) -> None:
        self.drop(start)
        self.by_start[start] = (count, facts)
        bisect.insort(self.starts, start)
        self.elements += count


class SliceLedger:
    """Runs of elements by tensor name."""

    __slots__ = ("_runs", "_wholes")

    def __init__(self) -> None:
        self._runs: dict[str, _Runs] = {}
        # Elements of tensors that came in one slice, of which nothing else is known yet.
        self._wholes: dict[str, int] = {}

    def forget(self, name: str) -> None:
        """Drop a tensor's runs: it came whole, or has to come again."""
        self._wholes.pop(name, None)
        self._runs.pop(name, None)

    def add_whole(self, name: str, count: int) -> None:
        """Take note of a tensor that nothing came of before, all in one slice; what is in it the device finds out."""
        self._wholes[name] = count

    def _runs_of(self, name: str) -> _Runs | None:
        """Return the runs of a tensor if something of it came."""
        count = self._wholes.pop(name, None)
        if count is not None:
            runs = self._runs[name] = _Runs()
            runs.add(0, count, None)
        return self._runs.get(name)

    def drop(self, name: str, start: int) -> None:
        """Drop a run that is about to be written anew."""
        runs = self._runs_of(name)
        if runs is not None:
            runs.drop(start)

    def knows(self, name: str) -> bool:
        """Tell whether something of a tensor came."""
        return name in self._runs or name in self._wholes

    def check(self, name: str, start: int, count: int) -> None:
        """Check that a run is new or one that was there. Raises: ManifestMismatch."""
        runs = self._runs_of(name)
        if runs is None or not count:
            return
        known = runs.by_start.get(start)
        if (known is None or known[0] != count) and runs.overlaps(start, count):
            raise mismatch(f"slices of {name} reach into each other at element {start}", name, "cut a tensor the same way within an update")

    def add(self, name: str, start: int, count: int, facts: StagedFacts | None, *, size: int) -> bool:
        """Take note of a run; return whether the tensor of `size` elements is whole now. A run of no elements changes nothing."""
        runs = self._runs_of(name) or self._runs.setdefault(name, _Runs())
        if count:
            runs.add(start, count, facts)
        return runs.elements == size

    def facts(self, name: str) -> StagedFacts:
        """Return what is known of a whole tensor from its runs."""
        runs = self._runs_of(name)
        assert runs is not None, f"nothing came of {name}"
        return join_facts(facts for _, facts in runs.by_start.values() if facts is not None)
