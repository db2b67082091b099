"""The append-only token record of an episode: every row that a trainer gets is built here and nowhere else.

A `TokenRecord` takes environment ids and sampled turns in the order in which the model saw them. A fork starts a new row
with its own prompt; sampled tokens never move to it, so each is in exactly one row. Invariants: all arrays of a row are as
long as its ids, mask is True exactly inside its turns, and no value of a sampled token is made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollout.agent.errors import IncompleteGeneration
from rollout.agent.lineage import ROOT, Branch, BranchKind, Lineage

NO_VERSION = -1


class FinishLike(Protocol):
    """How a generation ended."""

    @property
    def kind(self) -> str: ...
    @property
    def stop_id(self) -> int | None: ...
    @property
    def stop_string(self) -> str | None: ...
    @property
    def detail(self) -> str | None: ...


class GenerationLike(Protocol):
    """What an episode reads of a finished generation."""

    @property
    def request_id(self) -> bytes: ...
    @property
    def prompt_ids(self) -> np.ndarray: ...
    @property
    def ids(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray | None: ...
    @property
    def raw_logprobs(self) -> np.ndarray | None: ...
    @property
    def behaviour_logprobs(self) -> np.ndarray | None: ...
    @property
    def versions(self) -> np.ndarray: ...
    @property
    def kv_spans(self) -> Sequence[tuple[int, int]]: ...
    @property
    def kv_rebuilt_at(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> FinishLike: ...
    @property
    def seed(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def kept_counts(self) -> np.ndarray | None: ...
    @property
    def kept_ids(self) -> np.ndarray | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What the draw of a turn's tokens was, as far as an importance ratio depends on it.

    `filtered`: top-k, top-p or min-p narrowed it; `shaped`: penalties, biases or `min_new_tokens` changed it. The first
    `forced_tokens` were not drawn at all.
    """

    temperature: float = 1.0
    filtered: bool = False
    shaped: bool = False
    forced_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One sampled turn: places `start` to `end` (exclusive) of its row and how it was drawn.

    `kv_spans` are (first place, version) runs over places 0 to `end`: which weights made the keys and values attended to, as they were at
    the turn's end. `kv_rebuilt_at` are the places before which they were made again on the way; tokens before attended to others.
    `filtered`, `shaped` and `forced_tokens` as in `Draw`. `index` counts the episode's turns from 0, across rows. Units: tokens.
    """

    index: int
    start: int
    end: int
    temperature: float
    seed: int
    finish_kind: str
    stop_id: int | None
    kv_spans: tuple[tuple[int, int], ...]
    prompt_tokens: int
    cached_tokens: int
    request_id: bytes
    filtered: bool = False
    shaped: bool = False
    forced_tokens: int = 0
    stop_string: str | None = None
    kv_rebuilt_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeRow:
    """One row for a trainer.

    Shapes: all arrays [n]. `ids` int32, `mask` bool (True = sampled), `logprobs` and `raw_logprobs` float32 and NaN where
    nothing was sampled (None if a turn was drawn without them), `behaviour_logprobs` likewise (None when equal to `logprobs`
    everywhere), `versions` int64 (-1 where nothing was sampled), `temperatures` float32 (1 there). `kept_counts` int32 cut
    `kept_ids` int32 [m], the ids that the filters kept, into places (0 where there is no kept set; None if no turn has any).
    `branch` says how the row came to be.
    """

    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray | None
    raw_logprobs: np.ndarray | None
    behaviour_logprobs: np.ndarray | None
    versions: np.ndarray
    temperatures: np.ndarray
    turns: tuple[TurnRecord, ...]
    kept_counts: np.ndarray | None = None
    kept_ids: np.ndarray | None = None
    branch: Branch = ROOT

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_sampled(self) -> int:
        """Return how many tokens the policy sampled."""
        return int(self.mask.sum())


class _Row:
    __slots__ = ("branch", "chunks", "length", "turns")

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.chunks: list[tuple[np.ndarray, GenerationLike | None, float]] = []
        self.length = 0
        self.turns: list[TurnRecord] = []

    def append(self, ids: np.ndarray, generation: GenerationLike | None, temperature: float) -> None:
        self.chunks.append((ids, generation, temperature))
        self.length += len(ids)

    def column(self, name: str) -> np.ndarray | None:
        """Return one log-probability column, None if a turn lacks it."""
        column = np.full(self.length, np.nan, np.float32)
        at = 0
        for ids, generation, _ in self.chunks:
            if generation is not None:
                values = getattr(generation, name)
                if values is None:
                    return None
                column[at : at + len(ids)] = values
            at += len(ids)
        return column

    def behaviour(self) -> np.ndarray | None:
        """Return the behaviour column, filled from `logprobs` for turns where both are equal; None if all turns are."""
        if all(generation is None or generation.behaviour_logprobs is None for _, generation, _ in self.chunks):
            return None
        column = np.full(self.length, np.nan, np.float32)
        at = 0
        for ids, generation, _ in self.chunks:
            if generation is not None:
                values = generation.behaviour_logprobs if generation.behaviour_logprobs is not None else generation.logprobs
                if values is None:
                    return None
                column[at : at + len(ids)] = values
            at += len(ids)
        return column

    def kept(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the kept sets as counts for each place and ids; None if no turn has any."""
        if all(generation is None or generation.kept_counts is None for _, generation, _ in self.chunks):
            return None, None
        counts, ids, at = np.zeros(self.length, np.int32), [np.empty(0, np.int32)], 0
        for own, generation, _ in self.chunks:
            if generation is not None and generation.kept_counts is not None and generation.kept_ids is not None:
                counts[at : at + len(own)] = generation.kept_counts
                ids.append(np.asarray(generation.kept_ids, np.int32))
            at += len(own)
        return counts, np.concatenate(ids)

    def build(self) -> EpisodeRow:
        """Return the row as arrays of one length."""
        kept_counts, kept_ids = self.kept()
        mask = np.zeros(self.length, np.bool_)
        versions = np.full(self.length, NO_VERSION, np.int64)
        temperatures = np.ones(self.length, np.float32)
        at = 0
        for ids, generation, temperature in self.chunks:
            if generation is not None:
                mask[at : at + len(ids)] = True
                versions[at : at + len(ids)] = generation.versions
                temperatures[at : at + len(ids)] = temperature
            at += len(ids)
        return EpisodeRow(
            ids=np.concatenate([np.empty(0, np.int32), *(ids for ids, _, _ in self.chunks)]),
            mask=mask,
            logprobs=self.column("logprobs"),
            raw_logprobs=self.column("raw_logprobs"),
            behaviour_logprobs=self.behaviour(),
            versions=versions,
            temperatures=temperatures,
            turns=tuple(turn for turn in self.turns if turn.start < turn.end),
            kept_counts=kept_counts,
            kept_ids=kept_ids,
            branch=self.branch,
        )


class TokenRecord:
    """Rows of one episode, branches of a tree: its own, or the one of the record that it branched off (`parent`).

    `add_environment`, `add_turn`, `fork`; nothing is ever changed or taken back.
    """

    __slots__ = ("_rows", "_tree", "is_branch", "num_turns")

    def __init__(self, tree: Lineage | None = None, *, parent: TokenRecord | None = None) -> None:
        self._tree = tree or Lineage()
        self._tree.adopt(self)
        self.is_branch = parent is not None
        if parent is None:
            branch = self._tree.branch(BranchKind.START)
        else:
            branch = self._tree.branch(BranchKind.SUBAGENT, parent._rows[-1].branch, parent.length)
        self._rows: list[_Row] = [_Row(branch)]
        self.num_turns = 0

    @property
    def length(self) -> int:
        """Return the tokens of the current row."""
        return self._rows[-1].length

    @property
    def num_rows(self) -> int:
        """Return how many rows there are; each fork adds one."""
        return len(self._rows)

    def current_ids(self) -> np.ndarray:
        """Return the ids of the current row, int32 [n]: the next prompt."""
        return np.concatenate([np.empty(0, np.int32), *(ids for ids, _, _ in self._rows[-1].chunks)])

    def add_environment(self, ids: np.ndarray) -> None:
        """Append ids that the environment wrote."""
        self._rows[-1].append(np.asarray(ids, np.int32), None, 1.0)

    def fork(self, ids: np.ndarray, kind: BranchKind = BranchKind.REWRITE) -> None:
        """Start a new row with its own prompt."""
        last = self._rows[-1]
        self._rows.append(_Row(self._tree.branch(kind, last.branch, last.length)))
        self.add_environment(ids)

    def add_turn(self, generation: GenerationLike, draw: Draw) -> TurnRecord:
        """Append a sampled turn. Raises: IncompleteGeneration (and appends nothing)."""
        row = self._rows[-1]
        ids = np.asarray(generation.ids, np.int32)
        _check_complete(generation, self.current_ids(), len(ids))
        finish = generation.finish_reason
        turn = TurnRecord(
            index=self.num_turns,
            start=row.length,
            end=row.length + len(ids),
            temperature=draw.temperature,
            seed=generation.seed,
            finish_kind=str(finish.kind),
            stop_id=finish.stop_id,
            kv_spans=tuple((int(first), int(version)) for first, version in generation.kv_spans),
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
            request_id=generation.request_id,
            filtered=draw.filtered,
            shaped=draw.shaped,
            forced_tokens=min(draw.forced_tokens, len(ids)),
            stop_string=finish.stop_string,
            kv_rebuilt_at=tuple(int(place) for place in generation.kv_rebuilt_at),
        )
        row.append(ids, generation, draw.temperature)
        row.turns.append(turn)
        self.num_turns += 1
        return turn

    def rows(self) -> list[EpisodeRow]:
        """Return the rows that hold at least one sampled token."""
        return [row.build() for row in self._rows if any(turn.start < turn.end for turn in row.turns)]

    def turns(self) -> list[TurnRecord]:
        """Return every sampled turn in order."""
        return [turn for row in self._rows for turn in row.turns]

    def check_integrity(self) -> None:
        """Assert the record's invariants."""
        rows = self.rows()
        for row in rows:
            lengths = {len(values) for values in (row.ids, row.mask, row.versions, row.temperatures)}
            lengths |= {len(values) for values in (row.logprobs, row.raw_logprobs, row.behaviour_logprobs) if values is not None}
            if row.kept_counts is not None and row.kept_ids is not None:
                lengths.add(len(row.kept_counts))
                assert int(row.kept_counts.sum()) == len(row.kept_ids), "kept sets do not add up"
                assert not row.kept_counts[~row.mask].any(), "a place that was not sampled has a kept set"
            assert lengths == {len(row)}, f"columns of lengths {sorted(lengths)} in a row of {len(row)}"
            covered = np.zeros(len(row), np.bool_)
            for turn in row.turns:
                assert not covered[turn.start : turn.end].any(), f"turn {turn.index} overlaps another"
                covered[turn.start : turn.end] = True
            assert np.array_equal(covered, row.mask), "the mask disagrees with the turns"
        sampled = sum(turn.end - turn.start for turn in self.turns())
        assert sampled == sum(row.num_sampled for row in rows), "a sampled token is in no row or in two"


def _check_complete(generation: GenerationLike, prompt_ids: np.ndarray, length: int) -> None:
    if not np.array_equal(np.asarray(generation.prompt_ids), prompt_ids):
        raise IncompleteGeneration(
            f"the service ran a prompt of {len(generation.prompt_ids)} ids that is not the {len(prompt_ids)} ids sent",
            field="prompt_ids",
            value=len(generation.prompt_ids),
            limit="ids go in as they are",
            remedy="look for a proxy or server that encodes prompts anew",
        )
    if len(generation.versions) != length:
        raise _incomplete("versions", len(generation.versions), length)
    counts, kept = generation.kept_counts, generation.kept_ids
    if counts is not None and (kept is None or len(counts) != length or int(counts.sum()) != len(kept)):
        raise _incomplete("kept_counts", len(counts), length)
    for name in ("logprobs", "raw_logprobs", "behaviour_logprobs"):
        values = getattr(generation, name)
        if values is None:
            continue
        if len(values) != length:
            raise _incomplete(name, len(values), length)
        if not np.isfinite(values).all():
            raise IncompleteGeneration(
                f"{name}[{int(np.argmin(np.isfinite(values)))}] of the generation is not finite",
                field=name,
                value=length,
                limit="every sampled token needs its log-probability",
                remedy="report the request id; the episode cannot be trained on",
            )


def _incomplete(name: str, given: int, wanted: int) -> IncompleteGeneration:
    return IncompleteGeneration(
        f"{name} has {given} entries for {wanted} sampled tokens",
        field=name,
        value=given,
        limit="one entry for each sampled token",
        remedy="report the request id; the episode cannot be trained on",
    )
