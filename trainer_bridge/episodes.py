"""From an episode as the runner reports it to samples: what is scored, what failed, and by whose doing.

Agent loops call `samples_of` on each result of `rollout.agent.run_episode`; it reads results and keeps nothing. Invariant: a
member always gives at least one sample, so that failures are counted and never turn into a smaller group in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from trainer_bridge.errors import InvalidSample
from trainer_bridge.option_names import OTHER_OPTIONS, checks_names
from trainer_bridge.samples import SampleStatus, TrainingSample
from trainer_bridge.turns import RowLike

_STATUS = {
    "done": SampleStatus.FINISHED,
    "truncated": SampleStatus.TRUNCATED,
    "bad_calls": SampleStatus.TRUNCATED,
    "cancelled": SampleStatus.CANCELLED,
    "failed": SampleStatus.FAILED,
}


class FailureLike(Protocol):
    """Why an episode did not end by itself."""

    @property
    def kind(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def text(self) -> str: ...


class ResultLike(Protocol):
    """What is read of a finished episode."""

    @property
    def status(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def failure(self) -> FailureLike | None: ...
    @property
    def rows(self) -> Sequence[RowLike]: ...


def _cause(result: ResultLike) -> tuple[str, str]:
    """Return who failed in which phase, for counting, and what was said."""
    if result.failure is None and result.reward is not None:
        return "nothing_sampled", f"the episode ended as {result.status} without a token of the policy"
    if result.failure is None:
        return "not_scored", f"the episode ended as {result.status} without a reward"
    return f"{result.failure.kind}_{result.failure.phase}", result.failure.text


class GroupLike(Protocol):
    """What is read of a finished group."""

    @property
    def results(self) -> Sequence[ResultLike]: ...
    @property
    def kept(self) -> Sequence[ResultLike]: ...


def _check_once(rows: Sequence[RowLike]) -> None:
    """Refuse rows that hold a sampled turn twice: its tokens would be trained twice. Raises: InvalidSample."""
    seen: set[bytes] = set()
    for request_id in (getattr(turn, "request_id", None) for row in rows for turn in row.turns):
        if request_id in seen:
            raise InvalidSample(
                f"the turn of request {request_id.hex()} is in two rows of an episode",
                field="rows",
                value=request_id.hex(),
                limit="each sampled token is trained once",
                remedy="pass the rows of `Episode.rows()` of the whole tree once, without those of its subagents again",
            )
        if request_id is not None:
            seen.add(request_id)


@checks_names(InvalidSample, OTHER_OPTIONS)
def samples_of(
    result: ResultLike,
    *,
    group_id: Hashable = 0,
    member: int = 0,
    info: Mapping[str, Any] | None = None,
    cancelled_reward: float | None = None,
) -> list[TrainingSample]:
    """Return one sample for each row of an episode, all with its reward; a failed one without rows gives one empty sample.

    A cancelled episode's samples have its tokens and are not trained, unless `cancelled_reward` gives it a reward; it then counts as
    truncated. A failed sample's `info["cause"]` names who failed in which phase, `info["error"]` says how, `info["code"]` is
    the code of what was raised, if it had one. Episodes that a limit ended are truncated, not failed; but one that ended before
    the policy sampled a token (its prompt does not fit, its deadline passed in the queue) has nothing to train and is failed.
    Raises: InvalidSample.
    """
    lacking = [part for part in ("status", "reward", "failure", "rows") if not hasattr(result, part)]
    if lacking:
        raise InvalidSample(
            f"result is a {type(result).__name__} without {', '.join(lacking)}",
            field="result",
            value=type(result).__name__,
            limit="the result of a finished episode",
            remedy="pass what `await run_episode(...)` returned; the samples of run_group come from samples_of_group",
        )
    status = _STATUS.get(str(result.status))
    if status is None:
        raise InvalidSample(
            f"an episode with status {str(result.status)!r}",
            field="status",
            value=str(result.status),
            limit=f"known: {', '.join(sorted(_STATUS))}",
            remedy="wait until the episode has ended",
        )
    if (result.reward is None or not result.rows) and status is not SampleStatus.CANCELLED:
        status = SampleStatus.FAILED
    reward = None if status is SampleStatus.FAILED else result.reward
    if status is SampleStatus.CANCELLED and cancelled_reward is not None and any(row.turns for row in result.rows):
        status, reward = SampleStatus.TRUNCATED, cancelled_reward
    facts = dict(info or {})
    if status is SampleStatus.FAILED:
        facts["cause"], facts["error"] = _cause(result)
        code = getattr(result.failure, "code", None)
        if code is not None:
            facts["code"] = str(code)
    _check_once(result.rows)
    rows = [TrainingSample.from_row(row, reward=reward, group_id=group_id, member=member, status=status, info=facts) for row in result.rows]
    return rows or [TrainingSample.empty(reward=reward, group_id=group_id, member=member, status=status, info=facts)]


@checks_names(InvalidSample, OTHER_OPTIONS)
def samples_of_group(
    group: GroupLike, *, group_id: Hashable = 0, info: Mapping[str, Any] | None = None, cancelled_reward: float | None = None
) -> list[TrainingSample]:
    """Return the samples of a group that `rollout.agent.run_group` played: members that count first, numbered from 0.

    The others follow: failed ones take the places that are still free, and members that were let go, or scored beyond the wanted
    number, come last as cancelled. Raises: InvalidSample.
    """
    kept = {id(result) for result in group.kept}
    others = [result for result in group.results if id(result) not in kept]
    failed = [result for result in others if result.reward is None and str(result.status) != "cancelled"]
    surplus = [result for result in others if result.reward is not None or str(result.status) == "cancelled"]
    samples: list[TrainingSample] = []
    for member, result in enumerate([*group.kept, *failed, *surplus]):
        late = len(kept) + len(failed) <= member and result.reward is not None
        made = samples_of(result, group_id=group_id, member=member, info=info, cancelled_reward=cancelled_reward)
        samples += [dataclasses.replace(one, status=SampleStatus.CANCELLED, reward=None) for one in made] if late else made
    return samples
