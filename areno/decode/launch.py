"""What the host knows of a launch: its lanes as planned, and what it said of them. No torch: the scheduler reads these."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np


class LaneStatus(enum.IntEnum):
    """What a launch did with a lane."""

    IDLE = 0
    TOKEN = 1
    STOPPED = 2
    EXHAUSTED = 3
    STARVED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """A launch in flight: its ring slot, its lanes' seats and generations as planned, and the weights it ran with."""

    number: int
    slot: int
    seats: np.ndarray
    generations: np.ndarray
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """A launch whose results may be read. Shapes: numpy views [B] of its ring slot."""

    launch: LaunchRecord
    status: np.ndarray
    generation: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    raw_logprob: np.ndarray
    behaviour_logprob: np.ndarray
