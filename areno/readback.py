"""Turns one launch's records into what the caller is told, through the lanes' seats as they were planned.

The scheduler calls `read_launch` for each launch that may be read and then ends what ended. All lanes at once, no loop over
rows. Numbers that cannot be told truly (logits that are not finite, a kept set that does not fit) are never delivered: their
seats are marked and reported. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.decode.launch import LaneStatus, LaunchResult
from areno.request import StepOutput
from areno.sampling.kept import MAX_KEPT
from areno.seats import Seats

NOT_FINITE = "the model's logits are not finite; check the last pushed weights for NaN or overflow"
KEPT_OVERFLOW = f"more than {MAX_KEPT} ids tie at the filter's threshold, so the kept set cannot be returned whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchNews:
    """What one launch said. Shapes: `seats`, `tokens`, `status` [n], one per delivered token, in the output's order.

    `broken` names the seats that failed in this launch and why; `starved` counts lanes that had no page.
    """

    output: StepOutput
    seats: np.ndarray
    tokens: np.ndarray
    status: np.ndarray
    broken: tuple[tuple[int, str], ...]
    starved: int


def read_launch(seats: Seats, result: LaunchResult) -> LaunchNews:
    """Note the tokens of a launch and return them. Mutates: ids, versions, counts and broken marks of the seats."""
    seats_of_lanes = result.launch.seats
    mine = (seats_of_lanes >= 0) & (result.generation == result.launch.generations)
    starved = int((mine & (result.status == LaneStatus.STARVED)).sum())
    sampled = np.flatnonzero(mine & (result.status >= LaneStatus.TOKEN) & (result.status <= LaneStatus.EXHAUSTED))
    lanes, broken = _drop_broken(seats, result, sampled)
    told = seats_of_lanes[lanes]
    tokens = result.token[lanes]
    seats.ids[told, seats.count[told]] = tokens
    seats.versions[told, seats.count[told]] = result.launch.version
    seats.count[told] += 1
    columns = [array[lanes] for array in (result.logprob, result.raw_logprob, result.behaviour_logprob)]
    silent = ~seats.wants_logprobs[told]
    if silent.any():
        for column in columns:
            column[silent] = np.nan
    kept_counts, kept_ids = _kept(seats, result, lanes, told)
    output = StepOutput(
        request_ids=seats.request_id[told],
        token_ids=tokens,
        logprobs=columns[0],
        raw_logprobs=columns[1],
        behaviour_logprobs=columns[2],
        versions=np.full(told.size, result.launch.version, dtype=np.int64),
        kept_counts=kept_counts,
        kept_ids=kept_ids,
    )
    return LaunchNews(output=output, seats=told, tokens=tokens, status=result.status[lanes], broken=broken, starved=starved)


def _drop_broken(seats: Seats, result: LaunchResult, lanes: np.ndarray) -> tuple[np.ndarray, tuple[tuple[int, str], ...]]:
    told = result.launch.seats[lanes]
    finite = np.isfinite(result.raw_logprob[lanes])
    good = finite
    if result.kept_count is not None:
        good = finite & (~seats.wants_kept[told] | (result.kept_count[lanes] <= MAX_KEPT))
    fresh = ~good & ~seats.broken[told]
    broken = tuple((int(seat), KEPT_OVERFLOW if is_finite else NOT_FINITE) for seat, is_finite in zip(told[fresh], finite[fresh]))
    seats.broken[told[fresh]] = True
    return lanes[~seats.broken[told]], broken


def _kept(seats: Seats, result: LaunchResult, lanes: np.ndarray, told: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the kept sets of the lanes that want them, packed."""
    wants = seats.wants_kept[told]
    if result.kept_ids is None or result.kept_count is None or not wants.any():
        return None, None
    counts = np.where(wants, result.kept_count[lanes], 0).astype(np.int32)
    ids = result.kept_ids[lanes]
    return counts, ids[np.arange(ids.shape[1])[None, :] < counts[:, None]]
