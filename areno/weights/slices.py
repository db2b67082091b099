"""Which elements of which tensors an update has, where they come in slices.

`WeightUpdate` owns one ledger. Invariant: the runs of a tensor never overlap, so it is whole when their lengths add up to its
size; a run that comes again replaces itself.
"""

from __future__ import annotations

from areno.weights.manifest import mismatch
from areno.weights.staged import StagedFacts, join_facts


class SliceLedger:
    """Runs of elements by tensor name: first index -> (length, what is known of them, None on a device)."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, tuple[int, StagedFacts | None]]] = {}

    def forget(self, name: str) -> None:
        """Drop a tensor's runs: it came whole, or has to come again."""
        self._runs.pop(name, None)

    def drop(self, name: str, start: int) -> None:
        """Drop a run that is about to be written anew."""
        self._runs.get(name, {}).pop(start, None)

    def check(self, name: str, start: int, count: int) -> None:
        """Check that a run is new or one that was there. Raises: ManifestMismatch."""
        runs = self._runs.get(name, {})
        known = runs.get(start)
        if known is not None and known[0] == count:
            return
        if any(first < start + count and start < first + length for first, (length, _) in runs.items()):
            raise mismatch(f"slices of {name} reach into each other at element {start}", name, "cut a tensor the same way within an update")

    def add(self, name: str, start: int, count: int, facts: StagedFacts | None, *, size: int) -> bool:
        """Take note of a run; return whether the tensor of `size` elements is whole now."""
        runs = self._runs.setdefault(name, {})
        runs[start] = (count, facts)
        return sum(length for length, _ in runs.values()) == size

    def facts(self, name: str) -> StagedFacts:
        """Return what is known of a whole tensor from its runs."""
        return join_facts(facts for _, facts in self._runs[name].values() if facts is not None)
