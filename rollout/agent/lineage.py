"""The tree of an episode's token rows: how each came to be, and of which other one it is a branch.

    start --rewrite--> row --compaction--> row        a template, or the agent loop, replaces history
      |\\--retry------> row                             a turn is drawn again; the first draw stays where it is
      \\---subagent---> row --...                      an episode of its own, started by this one

One tree belongs to an episode and all that grew out of it. Invariant: every sampled turn is in exactly one row of the tree, and a row's
parent was there before it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.agent.record import EpisodeRow, TokenRecord


class BranchKind(enum.StrEnum):
    """Why a row begins."""

    START = "start"
    REWRITE = "rewrite"
    COMPACTION = "compaction"
    RETRY = "retry"
    SUBAGENT = "subagent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Where a row stands in its tree: rows are numbered from 0 as they begin; it left row `parent` when that had `left_at` tokens."""

    number: int = 0
    kind: BranchKind = BranchKind.START
    parent: int | None = None
    left_at: int = 0


ROOT = Branch()


class Lineage:
    """All branches of one tree and the token records that hold their rows."""

    __slots__ = ("_branches", "_records")

    def __init__(self) -> None:
        self._branches: list[Branch] = []
        self._records: list[TokenRecord] = []

    def adopt(self, record: TokenRecord) -> None:
        """Take a record whose rows belong to the tree."""
        self._records.append(record)

    def branch(self, kind: BranchKind, parent: Branch | None = None, left_at: int = 0) -> Branch:
        """Return a new branch, the next number."""
        made = Branch(number=len(self._branches), kind=kind, parent=None if parent is None else parent.number, left_at=left_at)
        self._branches.append(made)
        return made

    @property
    def branches(self) -> Sequence[Branch]:
        """Return all branches in the order in which they began."""
        return tuple(self._branches)

    def rows(self) -> list[EpisodeRow]:
        """Return the rows of all records that hold a sampled token, in the order in which they began."""
        return sorted((row for record in self._records for row in record.rows()), key=lambda row: row.branch.number)

    def check_integrity(self) -> None:
        """Assert the tree's invariants and those of its records."""
        for record in self._records:
            record.check_integrity()
        for place, branch in enumerate(self._branches):
            assert branch.number == place, f"branch {place} has number {branch.number}"
            assert branch.parent is None or branch.parent < place, f"branch {place} began before its parent {branch.parent}"
        rows = self.rows()
        assert len({row.branch.number for row in rows}) == len(rows), "two rows have one number"
        trained = [turn.request_id for row in rows for turn in row.turns]
        drawn = [turn.request_id for record in self._records for turn in record.turns() if turn.start < turn.end]
        assert len(set(trained)) == len(trained) and sorted(trained) == sorted(drawn), "a sampled turn is in no row of the tree or in two"
