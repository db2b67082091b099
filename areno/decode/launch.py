"""What the host knows of a launch: its lanes as planned, and what it said of them. No torch: the scheduler reads these."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np


class LaneStatus(enum.IntEnum):
    """What a launch did with a lane; what is positive brought a token."""

    STARVED = -1
    IDLE = 0
    TOKEN = 1
    STOPPED = 2
    EXHAUSTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkScores:
    """Log-probabilities of prompt ids from `position` on. Shapes: float32 [n]; seat and generation name the request."""

    seat: int
    generation: int
    position: int
    logprobs: np.ndarray
    raw_logprobs: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """A launch in flight: its ring slot, its lanes' seats and generations as planned, and the weights it ran with.

    `scores` are filled in by the launch and read with its slot.
    """

    number: int
    slot: int
    seats: np.ndarray
    generations: np.ndarray
    version: int
    scores: list[ChunkScores] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """A launch whose results may be read. Shapes: numpy copies [B] of its ring slot, `kept_ids` [B, 64].

    `logprobs` [3, B] are logprob, raw logprob and behaviour logprob.
    """

    launch: LaunchRecord
    status: np.ndarray
    generation: np.ndarray
    token: np.ndarray
    logprobs: np.ndarray
    kept_ids: np.ndarray | None = None
    kept_count: np.ndarray | None = None
