"""Which tensors an update has by now, under which names they came, what is known of them, and whether that is as it must be.

`WeightUpdate` owns one. In a tensor-parallel engine every rank has the same set of its own parts; `learn` puts together what the ranks
found, after which all know the same of whole tensors and come to one verdict. Invariant: a tensor that comes again is not in the set
until it is whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from areno.errors import DigestMismatch
from areno.parallel import TPGroup
from areno.weights.digest import MASK64
from areno.weights.live_digests import digests_of
from areno.weights.manifest import OLD_SERVE_ON, mismatch, offered_twice
from areno.weights.names import ParameterTable, canonical_name, list_names
from areno.weights.report import UpdateCounts
from areno.weights.shards import merge_digests
from areno.weights.staged import PendingFacts, StagedFacts, known


class StagedSet:
    """Tensors by canonical name: `sources` says as what each came, `facts` what is known, `tied` the digest of one that is not stored.

    `conflicts` are those whose part here came again under an alias with other values; other ranks' parts may be equal.
    """

    __slots__ = ("_group", "_table", "conflicts", "facts", "sources", "tied")

    def __init__(self, table: ParameterTable, group: TPGroup) -> None:
        self._table, self._group = table, group
        self.sources: dict[str, str] = {}
        self.facts: dict[str, StagedFacts | PendingFacts] = {}
        self.conflicts: set[str] = set()
        self.tied: dict[str, int] = {}

    def take_back(self, name: str) -> None:
        """Forget a tensor that comes again."""
        self.sources.pop(name, None)
        self.facts.pop(name, None)

    def learn(self) -> None:
        """Read what is known of the tensors, from all ranks; refuse those that are not finite, by name.

        Blocks: for the other ranks. Raises: ManifestMismatch, DigestMismatch where ranks hold other copies of one tensor.
        """
        names = list(self.sources)
        facts = known(self.facts[name] for name in names)
        if self._group.size > 1:
            facts = self._merge(names, facts)
        self.facts.update(zip(names, facts))
        broken = [name for name in names if not self._fact(name).finite]
        if broken:
            raise mismatch(
                f"tensors that hold NaN or infinity as {self._table.dtype}: {list_names(broken)}",
                sorted(broken),
                "look for a diverged step in the trainer",
            )

    def _merge(self, names: list[str], facts: list[StagedFacts]) -> list[StagedFacts]:
        """Return what all ranks together know of whole tensors. Blocks: for the other ranks."""
        words = [word for name, one in zip(names, facts) for word in (*one.words(), int(name in self.conflicts))]
        found = self._group.gather_words(words)
        merged, torn = [], []
        for place, name in enumerate(names):
            ranks = [rank[4 * place : 4 * place + 4] for rank in found]
            if any(rank[3] for rank in ranks):
                # The other name is known only to the ranks whose part differs.
                raise offered_twice(name, "another name", self.sources[name])
            whole = merge_digests([rank[0] for rank in ranks], self._table.shards[name].copies)
            if whole is None:
                torn.append(name)
            merged.append(StagedFacts(whole or 0, all(rank[1] for rank in ranks), any(rank[2] for rank in ranks)))
        if torn:
            raise DigestMismatch(
                f"ranks hold other values of {list_names(torn)}",
                field="digests",
                value=sorted(torn),
                limit=f"copies of one tensor must be equal; {OLD_SERVE_ON}",
                remedy="push again; if it comes back, start the engine again",
            )
        return merged

    def _fact(self, name: str) -> StagedFacts:
        facts = self.facts[name]
        assert isinstance(facts, StagedFacts), f"nothing is known of {name} yet"
        return facts

    def check_complete(self, needed: Set[str]) -> None:
        """Check that every needed tensor came. Raises: ManifestMismatch naming those that did not."""
        missing = needed - self.sources.keys()
        if missing:
            raise mismatch(
                f"{len(missing)} of {len(needed)} tensors never came: {list_names(missing)}",
                sorted(missing),
                "begin again, stage every tensor, then commit",
            )
        if not self.sources:
            raise mismatch("no tensor was staged", [], "stage the tensors before the commit, or abort")

    def check_tied(self) -> None:
        """Check that a tensor stored as another one has that one's values. Blocks: for the other ranks. Raises: ManifestMismatch."""
        for name, found in self.tied.items():
            target = self._table.tied[name]
            twin = self._fact(target).digest if target in self.sources else digests_of(self._table, [target], self._group)[target]
            if found != twin:
                raise mismatch(
                    f"tensor {name} is tied to {target} in this model, but the values differ",
                    name,
                    "send them equal, or serve a model with tie_word_embeddings false",
                )

    def check_digests(self, digests: Mapping[str, int]) -> None:
        """Compare with the trainer's digests, one for each tensor. Raises: DigestMismatch naming the tensors, ManifestMismatch."""
        expected = {canonical_name(name): value for name, value in digests.items()}
        strange = [name for name, value in expected.items() if type(value) is not int]
        if strange:
            raise mismatch(
                f"digests that are no integers: {list_names(strange)}", sorted(strange), "send areno.weights.digest.digest(tensor)"
            )
        unknown = expected.keys() - self.sources.keys() - self.tied.keys() - self._table.tied.keys()
        if unknown:
            raise mismatch(
                f"digests name tensors that were not staged: {list_names(unknown)}",
                sorted(unknown),
                "send digests of the staged tensors only",
            )
        absent = self.sources.keys() - expected.keys()
        found = {name: self._fact(name).digest for name in self.sources.keys() & expected.keys()} | self.tied
        wrong = sorted(name for name, value in found.items() if name in expected and value != expected[name] & MASK64)
        if wrong or absent:
            told = [f"differ for {list_names(wrong)}"] if wrong else []
            told += [f"are missing for {list_names(absent)}"] if absent else []
            raise DigestMismatch(
                f"digests {' and '.join(told)}",
                field="digests",
                value=sorted([*wrong, *absent]),
                limit=f"they are of the tensors as {self._table.dtype}, row by row; {OLD_SERVE_ON}",
                remedy="cast on the trainer with tensor.to(dtype) before taking the digest, and send each tensor under its own name",
            )

    def count(self) -> UpdateCounts:
        """Return how much came and how much of it differs from the live weights. Units: bytes of whole tensors."""
        sizes = {name: math.prod(self._table.shape_of(name)) * self._table.dtype.itemsize for name in self.sources}
        changed = [name for name in sizes if self._fact(name).changed]
        return UpdateCounts(len(sizes), sum(sizes.values()), len(changed), sum(sizes[name] for name in changed))
