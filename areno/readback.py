"""Turns one launch's records into what the caller is told, through the lanes' seats as they were planned.

The scheduler calls `read_launch` for each launch that may be read and then ends what ended. All lanes at once, no loop over
rows. Numbers that cannot be told truly (logits that are not finite, a kept set that does not fit) are never delivered: their
seats are marked and reported. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.decode.launch import LaneStatus, LaunchResult
from areno.sampling.kept import MAX_KEPT
from areno.seats import Seats
from areno.step_output import StepOutput

NOT_FINITE = "the model's logits are not finite; check the last pushed weights for NaN or overflow"
KEPT_OVERFLOW = f"more than {MAX_KEPT} ids tie at the filter's threshold, so the kept set cannot be returned whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchNews:
    """What one launch said. Shapes: `seats`, `tokens`, `status` [n], one per delivered token, in the output's order.

    `ended` names the places in them whose row is done, `broken` the seats that failed in this launch and why; `starved` counts
    lanes that had no page.
    """

    output: StepOutput
    seats: np.ndarray
    tokens: np.ndarray
    status: np.ndarray
    ended: np.ndarray
    broken: tuple[tuple[int, str], ...]
    starved: int


def read_launch(seats: Seats, result: LaunchResult) -> LaunchNews:
    """Note the tokens of a launch and return them. Mutates: ids, versions, counts and broken marks of the seats."""
    launch, status = result.launch, result.status
    mine = result.generation == launch.generations
    lanes = np.flatnonzero(mine & (status > LaneStatus.IDLE))
    starved = int((mine & (status == LaneStatus.STARVED)).sum()) if lanes.size < status.size else 0
    told, logprobs = launch.seats, result.logprobs
    if lanes.size < status.size:
        told, logprobs = told[lanes], logprobs[:, lanes]
    broken: tuple[tuple[int, str], ...] = ()
    good = _good(seats, result, lanes, told, logprobs[1])
    if good is not None:
        broken = _mark_broken(seats, told, good, np.isfinite(logprobs[1]))
        kept = ~seats.broken[told]
        lanes, told, logprobs = lanes[kept], told[kept], logprobs[:, kept]
    tokens, status = (result.token, status) if lanes.size == status.size else (result.token[lanes], status[lanes])
    count = seats.count[told]
    seats.ids[told, count] = tokens
    seats.versions[told, count] = launch.version
    seats.count[told] = count + 1
    if seats.num_silent:
        logprobs[:, ~seats.wants_logprobs[told]] = np.nan
    kept_counts, kept_ids = _kept(seats, result, lanes, told)
    output = StepOutput(
        request_ids=seats.request_id[told],
        token_ids=tokens,
        logprobs=logprobs[0],
        raw_logprobs=logprobs[1],
        behaviour_logprobs=logprobs[2],
        versions=np.full(told.size, launch.version, dtype=np.int64),
        kept_counts=kept_counts,
        kept_ids=kept_ids,
    )
    return LaunchNews(
        output=output,
        seats=told,
        tokens=tokens,
        status=status,
        ended=np.flatnonzero(status > LaneStatus.TOKEN),
        broken=broken,
        starved=starved,
    )


def _good(seats: Seats, result: LaunchResult, lanes: np.ndarray, told: np.ndarray, raw_logprobs: np.ndarray) -> np.ndarray | None:
    """Return which of the lanes can be told; None where all of them can and no seat is broken."""
    # One sum sees every NaN and infinity: finite log-probabilities are far too small to overflow it.
    if result.kept_count is None and not seats.num_broken and np.isfinite(raw_logprobs.sum()):
        return None
    good = np.isfinite(raw_logprobs)
    if result.kept_count is not None:
        good &= ~seats.wants_kept[told] | (result.kept_count[lanes] <= MAX_KEPT)
    return good


def _mark_broken(seats: Seats, told: np.ndarray, good: np.ndarray, finite: np.ndarray) -> tuple[tuple[int, str], ...]:
    fresh = ~good & ~seats.broken[told]
    for seat in told[fresh]:
        seats.mark_broken(int(seat))
    return tuple((int(seat), KEPT_OVERFLOW if is_finite else NOT_FINITE) for seat, is_finite in zip(told[fresh], finite[fresh]))


def _kept(seats: Seats, result: LaunchResult, lanes: np.ndarray, told: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the kept sets of the lanes that want them, packed."""
    if result.kept_ids is None or result.kept_count is None:
        return None, None
    wants = seats.wants_kept[told]
    if not wants.any():
        return None, None
    counts = np.where(wants, result.kept_count[lanes], 0).astype(np.int32)
    ids = result.kept_ids[lanes]
    return counts, ids[np.arange(ids.shape[1])[None, :] < counts[:, None]]
