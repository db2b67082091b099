"""One training row: token ids, which of them were sampled, their log-probabilities and where they came from.

Rollout code makes samples from an episode's rows, `batch.collate` reads them; nobody edits them. All arrays run over the
row's tokens and speak about the token at that place: `logprobs[t]` is the log-probability of `ids[t]` given the ids before
it. Places that were not sampled hold NaN and version -1, so that a wrong mask shows at once. Invariant: a sample that
exists is complete at every sampled place; a missing value is an error, never 0.0.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer_bridge.errors import BridgeError, InvalidSample, shown
from trainer_bridge.turns import RowLike, TurnSpan, is_count, is_finite, listed

NO_VERSION = -1


class SampleStatus(enum.StrEnum):
    """How the episode behind a sample ended; `TRAINABLE` names those that a batch keeps by default."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    CANCELLED = "cancelled"
    FAILED = "failed"


TRAINABLE = frozenset({SampleStatus.FINISHED, SampleStatus.TRUNCATED})


def _array(name: str, value: Any, dtype: type[np.generic], length: int | None) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # rows of several lengths, numbers without end
        array = np.empty((0, 0), np.object_)
    wanted = "iu" if np.issubdtype(dtype, np.integer) else ("b" if dtype is np.bool_ else "fiu")
    if array.ndim != 1 or (array.size and array.dtype.kind not in wanted):
        raise InvalidSample(
            f"{name} has shape {array.shape} and dtype {array.dtype}",
            field=name,
            value=str(array.dtype),
            limit=f"one dimension of {np.dtype(dtype).name} is needed",
            remedy=f"pass {name} as a flat array",
        )
    if length is not None and array.size != length:
        raise InvalidSample(
            f"{name} has {array.size} entries",
            field=name,
            value=int(array.size),
            limit=f"ids has {length}",
            remedy=f"give {name} one entry for each token, NaN (or {NO_VERSION}) where nothing was sampled",
        )
    if array.size and np.issubdtype(dtype, np.integer):
        least, most = int(array.min()), int(array.max())
        bounds = np.iinfo(np.dtype(dtype))
        if least < bounds.min or most > bounds.max:
            raise InvalidSample(
                f"{name} holds {most if most > bounds.max else least}",
                field=name,
                value=most if most > bounds.max else least,
                limit=f"{bounds.min} to {bounds.max} ({bounds.dtype})",
                remedy=f"pass {name} as the service reported them",
            )
    array = array.astype(dtype, copy=True)
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSample:
    """A row that a trainer can use as it is.

    Shapes: `ids` int32 [n], `mask` bool [n] (True = sampled by the policy), `logprobs` float32 [n] (of logits / temperature
    over the whole vocabulary), `behaviour_logprobs` float32 [n] (of the distribution really drawn from; None when equal),
    `versions` int64 [n]. `kept_counts` int32 [n] cut `kept_ids` int32, the ids that the filters kept, into places (0 where there
    is no kept set; both None without any). `turns` cover exactly the sampled places. An episode that forked has several samples
    with the same `group_id` and `member` and the same `reward`. `reward` is None for members without one (failed, cancelled).
    Raises: InvalidSample naming field, value and remedy.
    """

    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    turns: tuple[TurnSpan, ...]
    behaviour_logprobs: np.ndarray | None = None
    kept_counts: np.ndarray | None = None
    kept_ids: np.ndarray | None = None
    reward: float | None = None
    group_id: Hashable = 0
    member: int = 0
    status: SampleStatus = SampleStatus.FINISHED
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("status", self._known_status())
        put("ids", _array("ids", self.ids, np.int32, None))
        if not len(self.ids) and self.status in TRAINABLE:
            raise InvalidSample(
                "ids is empty",
                field="ids",
                value=0,
                limit="a row has at least its prompt",
                remedy="give an episode that sampled nothing the status failed",
            )
        length = len(self.ids)
        put("mask", _array("mask", self.mask, np.bool_, length))
        put("logprobs", _array("logprobs", self.logprobs, np.float32, length))
        put("versions", _array("versions", self.versions, np.int64, length))
        if self.behaviour_logprobs is not None:
            put("behaviour_logprobs", _array("behaviour_logprobs", self.behaviour_logprobs, np.float32, length))
        self._check_member()
        if len(self.ids):
            self._check_places()
        self._check_turns()
        if self.kept_counts is not None or self.kept_ids is not None:
            put("kept_counts", _array("kept_counts", [] if self.kept_counts is None else self.kept_counts, np.int32, length))
            put("kept_ids", _array("kept_ids", [] if self.kept_ids is None else self.kept_ids, np.int32, None))
            self._check_kept()
        self._check_reward()

    def _known_status(self) -> SampleStatus:
        if not isinstance(self.status, str) or self.status not in set(SampleStatus):
            raise InvalidSample(
                f"status={shown(self.status)}",
                field="status",
                value=shown(self.status),
                limit=f"known: {', '.join(SampleStatus)}",
                remedy="pass a SampleStatus",
            )
        return SampleStatus(self.status)

    def _check_member(self) -> None:
        try:
            hash(self.group_id)
        except TypeError:
            raise InvalidSample(
                f"group_id is a {type(self.group_id).__name__}",
                field="group_id",
                value=type(self.group_id).__name__,
                limit="a hashable key is needed",
                remedy="name the group by a number or a text",
            ) from None
        if not is_count(self.member):
            raise InvalidSample(
                f"member={shown(self.member)}",
                field="member",
                value=self.member,
                limit="an integer of at least 0",
                remedy="number the members of a group",
            )
        turns = listed(self.turns)
        if turns is None or not all(isinstance(turn, TurnSpan) for turn in turns):
            raise InvalidSample(
                f"turns is {shown(self.turns)}",
                field="turns",
                value=type(self.turns).__name__,
                limit="a sequence of TurnSpan is needed",
                remedy="give one TurnSpan for each sampled turn",
            )
        object.__setattr__(self, "turns", tuple(turns))

    def _check_places(self) -> None:
        if self.ids.min() < 0:
            raise InvalidSample(
                f"ids holds {self.ids.min()}",
                field="ids",
                value=int(self.ids.min()),
                limit="ids are >= 0",
                remedy="pass token ids, not padding",
            )
        if self.mask[0]:
            raise InvalidSample(
                "mask[0] is True",
                field="mask",
                value=True,
                limit="a sampled token has at least one token before it",
                remedy="put the prompt's ids into the row",
            )
        for name in ("logprobs", "behaviour_logprobs"):
            values = getattr(self, name)
            if values is None:
                continue
            sampled = values[self.mask]
            bad = ~np.isfinite(sampled) | (sampled > 1e-3)
            if bad.any():
                place = int(np.flatnonzero(self.mask)[np.argmax(bad)])
                raise InvalidSample(
                    f"{name}[{place}]={values[place]} at a sampled token",
                    field=name,
                    value=float(values[place]),
                    limit="every sampled token needs a finite log-probability of at most 0",
                    remedy="generate with logprobs=True; do not fill missing values with a number",
                )
        if (self.versions[self.mask] < 0).any():
            place = int(np.flatnonzero(self.mask & (self.versions < 0))[0])
            raise InvalidSample(
                f"versions[{place}]={self.versions[place]} at a sampled token",
                field="versions",
                value=int(self.versions[place]),
                limit="versions are >= 0",
                remedy="keep the versions that the service reported",
            )

    def _check_turns(self) -> None:
        covered = np.zeros(len(self.ids), np.bool_)
        for turn in self.turns:
            if not 0 < turn.start < turn.end <= len(self.ids) or covered[turn.start :].any():
                raise InvalidSample(
                    f"turn {shown(turn.start)}:{shown(turn.end)} does not fit the row",
                    field="turns",
                    value=(turn.start, turn.end),
                    limit=f"turns are in order, apart, not empty and below {len(self.ids)}",
                    remedy="give one TurnSpan for each sampled turn",
                )
            covered[turn.start : turn.end] = True
        if not np.array_equal(covered, self.mask):
            place = int(np.flatnonzero(covered != self.mask)[0])
            raise InvalidSample(
                f"mask[{place}]={bool(self.mask[place])} disagrees with the turns",
                field="mask",
                value=bool(self.mask[place]),
                limit="exactly the places inside turns are sampled",
                remedy="make mask and turns from the same record",
            )

    def _check_kept(self) -> None:
        counts, ids = self.kept_counts, self.kept_ids
        assert counts is not None and ids is not None, "both are arrays by now"
        if (counts < 0).any() or int(counts.sum()) != ids.size:
            raise InvalidSample(
                f"kept_counts add up to {int(counts.sum())}",
                field="kept_counts",
                value=int(counts.sum()),
                limit=f"kept_ids has {ids.size} entries",
                remedy="keep the kept sets as the service reported them",
            )
        places = np.repeat(np.arange(counts.size), counts)
        holds = np.zeros(counts.size, np.bool_)
        holds[places[ids == self.ids[places]]] = True
        lacking = self.filtered_mask() & (counts > 0) & ~holds
        if lacking.any():
            place = int(np.flatnonzero(lacking)[0])
            raise InvalidSample(
                f"the kept set of place {place} lacks its id {int(self.ids[place])}",
                field="kept_ids",
                value=int(self.ids[place]),
                limit="a token is drawn from the ids that the filters kept",
                remedy="keep the kept sets as the service reported them",
            )

    def _check_reward(self) -> None:
        if self.reward is None:
            if self.status in (SampleStatus.FINISHED,):
                raise InvalidSample(
                    "a finished sample has no reward",
                    field="reward",
                    value=None,
                    limit="a number is needed",
                    remedy="score it, or give it the status failed",
                )
            return
        if not is_finite(self.reward):
            raise InvalidSample(
                f"reward={shown(self.reward)}",
                field="reward",
                value=self.reward,
                limit="a finite number is needed",
                remedy="give a broken score the status failed",
            )
        object.__setattr__(self, "reward", float(self.reward))

    @classmethod
    def from_row(
        cls,
        row: RowLike,
        *,
        reward: float | None,
        group_id: Hashable = 0,
        member: int = 0,
        status: SampleStatus = SampleStatus.FINISHED,
        info: dict[str, Any] | None = None,
    ) -> TrainingSample:
        """Make a sample from an episode's row. Raises: InvalidSample, also when the row has no log-probabilities."""
        if row.logprobs is None:
            raise InvalidSample(
                "the row has no log-probabilities",
                field="logprobs",
                value=None,
                limit="every sampled token needs one",
                remedy="generate with logprobs=True",
            )
        turns = tuple(
            TurnSpan(
                start=turn.start,
                end=turn.end,
                temperature=turn.temperature,
                kv_spans=tuple(turn.kv_spans),
                kv_rebuilt_at=tuple(turn.kv_rebuilt_at),
                filtered=turn.filtered,
                shaped=turn.shaped,
                forced_tokens=turn.forced_tokens,
            )
            for turn in row.turns
        )
        return cls(
            ids=row.ids,
            mask=row.mask,
            logprobs=row.logprobs,
            behaviour_logprobs=row.behaviour_logprobs,
            kept_counts=row.kept_counts,
            kept_ids=row.kept_ids,
            versions=row.versions,
            turns=turns,
            reward=reward,
            group_id=group_id,
            member=member,
            status=status,
            info=info or {},
        )

    @classmethod
    def empty(
        cls, *, reward: float | None = None, group_id: Hashable, member: int, status: SampleStatus, info: dict[str, Any]
    ) -> TrainingSample:
        """Make the sample of a member that failed, or was cancelled, before it sampled anything."""
        none = np.empty(0, np.float32)
        return cls(
            ids=none.astype(np.int32),
            mask=none.astype(np.bool_),
            logprobs=none,
            versions=none.astype(np.int64),
            turns=(),
            reward=reward,
            group_id=group_id,
            member=member,
            status=status,
            info=info,
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_sampled(self) -> int:
        """Return how many tokens the policy sampled."""
        return int(self.mask.sum())

    @property
    def oldest_version(self) -> int | None:
        """Return the oldest version among the sampled tokens, None if nothing was sampled."""
        sampled = self.versions[self.mask]
        return int(sampled.min()) if sampled.size else None

    @property
    def sampled_versions(self) -> list[int]:
        """Return the versions that tokens were sampled under, each once, in order."""
        return [int(version) for version in np.unique(self.versions[self.mask])]

    @property
    def is_trainable(self) -> bool:
        """Return whether a batch keeps this sample by default."""
        return self.status in TRAINABLE and self.reward is not None

    def temperatures(self) -> np.ndarray:
        """Return the divisor of the logits at each place, float32 [n].

        It is 1 outside turns and for greedy turns: their log-probabilities are those of the bare logits.
        """
        temperatures = np.ones(len(self.ids), np.float32)
        for turn in self.turns:
            temperatures[turn.start : turn.end] = turn.temperature if turn.temperature > 0 else 1.0
        return temperatures

    def _drawn_mask(self, kind: str) -> np.ndarray:
        mask = np.zeros(len(self.ids), np.bool_)
        for turn in self.turns:
            if getattr(turn, kind):
                mask[turn.start + turn.forced_tokens : turn.end] = True
        return mask

    def filtered_mask(self) -> np.ndarray:
        """Return which tokens were drawn from what filters had left of the vocabulary, bool [n]."""
        return self._drawn_mask("filtered")

    def shaped_mask(self) -> np.ndarray:
        """Return which tokens were drawn under penalties, biases or `min_new_tokens`, bool [n]."""
        return self._drawn_mask("shaped")

    def kept_sets(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the kept sets of filtered tokens as counts int32 [n] and ids; a count of 0 where there is none."""
        if self.kept_counts is None or self.kept_ids is None:
            return np.zeros(len(self.ids), np.int32), np.empty(0, np.int32)
        filtered = self.filtered_mask()
        return np.where(filtered, self.kept_counts, 0), self.kept_ids[np.repeat(filtered, self.kept_counts)]

    def exact_mask(self, version: int) -> np.ndarray:
        """Return which sampled tokens come from `version` alone, bool [n].

        Such a token was sampled by a forward of `version`, and every key and value it attended to was computed by
        `version` as well; its log-probability is that of one full forward with these weights. Tokens drawn before their row's
        cache was rebuilt are none of them: which weights had computed what they attended to is not known any more, and even a
        prompt's pages may be older than its turn's first token (a lineage reuses its own within `max_kv_lag`).
        """
        exact = self.mask & (self.versions == version)
        for turn in self.turns:
            # The token at place t attends to places 0 .. t-1, so the one right after the first foreign place is out.
            exact[max(turn.start, turn.first_foreign_place(version) + 1) : turn.end] = False
            exact[turn.start : turn.first_spoken_for] = False
        return exact


def oldest_version(samples: Sequence[TrainingSample]) -> int | None:
    """Return the oldest version among the sampled tokens of all samples, None if there is none."""
    versions = [sample.oldest_version for sample in samples]
    return min((version for version in versions if version is not None), default=None)


def as_samples(
    field: str, given: Any, *, what: str | None = None, error: Callable[..., BridgeError] = InvalidSample
) -> list[TrainingSample]:
    """Return samples as a list, one alone as a list of one; `what` is what the refusal calls them. Raises: `error`."""
    what = what or field
    entries = [given] if isinstance(given, TrainingSample) else listed(given)
    strange = given if entries is None else next((entry for entry in entries if not isinstance(entry, TrainingSample)), None)
    if entries is not None and all(isinstance(entry, TrainingSample) for entry in entries):
        return entries
    if all(hasattr(strange, part) for part in ("status", "reward", "failure", "rows")):
        remedy = "make samples with samples_of(result)"
    elif all(hasattr(strange, part) for part in ("results", "kept")):
        remedy = "make samples with samples_of_group(result)"
    elif all(hasattr(strange, part) for part in ("samples", "prompt")):
        remedy = "pass the samples of each group: [sample for group in groups for sample in group.samples]"
    else:
        remedy = "make them with samples_of(result); those of a source are in group.samples"
    raise error(
        f"{what} is {shown(given)}" if entries is None else f"{what} holds a {type(strange).__name__}",
        field=field,
        value=type(strange).__name__,
        limit="a sequence of TrainingSample",
        remedy=remedy,
    )
