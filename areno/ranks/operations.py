"""What happens to a rank beside the commands of a step: built, scored, updated, put to sleep, compared, stopped.

The engine appends them to the same ordered log as the commands, and every rank carries them out in that order. Host only, no
torch. Operations of `ANSWERED` are followed by an answer of each rank, for which the first one waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.commands import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Allocate the rank and load its part of the checkpoint. `config` and `resolved` are both options as JSON."""

    config: str
    resolved: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreIds:
    """Run the plain forward over `ids` int64 [n] and reduce the log-probabilities of ids[1:]."""

    ids: np.ndarray
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenUpdate:
    """Open an update. `manifest` is a JSON object of name to [dtype, shape], empty for none."""

    manifest: str
    version: int
    partial: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePiece:
    """Elements `start` to `start + count` of a tensor of `shape`, flat, lie in bulk slot `slot`; at -1 the group's next broadcast has them.

    `whole` says that the tensor was staged whole: its pieces come in order, and it is staged with the one that ends it.
    Otherwise the piece is a slice and staged as one.
    """

    name: str
    dtype: str
    shape: np.ndarray
    start: int
    count: int
    slot: int
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """Elements `start` to `start + count` of a tensor of `shape`, flat, lie at byte `offset` of the memory that `handle` opens, in hex."""

    name: str
    dtype: str
    shape: np.ndarray
    start: int
    count: int
    handle: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMemory:
    """Open the memory of `handle`, in hex, which runs will be staged from: it takes longer than to copy them."""

    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSlices:
    """Begin to copy the slices that are there to where they are staged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRuns:
    """As `LaunchSlices`, and done when that is over: what runs were copied from may change then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectUpdate:
    """Begin to find out about everything that is staged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyUpdate:
    """Prove that everything is staged. `digests` are a JSON object of name to number, empty where none were given."""

    digests: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapUpdate:
    """Exchange live and staged weights, or exchange them back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureCanaries:
    """Score canaries. Shapes: `counts` [C] ids of each; `ids` and `logprobs` one after the other; `temperatures` [C]."""

    counts: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    temperatures: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishUpdate:
    """The swapped weights are `version` from here on; the update is closed."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortUpdate:
    """Drop the open update, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeDigests:
    """Take part in the digests of the live weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherTensor:
    """Take part in putting a live tensor together."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseKV:
    """Give the memory of keys and values back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOutWeights:
    """Move the weights to the host and give their memory back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUp:
    """Take the memory back, all of it or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Get ready for steps, after every rank has its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckState:
    """Tell the state of the rows as it is after everything before this; `number` counts the checks from 1."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The end of the log."""


Operation = (
    Build
    | ScoreIds
    | OpenUpdate
    | StagePiece
    | OpenMemory
    | StageRun
    | LaunchSlices
    | CopyRuns
    | InspectUpdate
    | VerifyUpdate
    | SwapUpdate
    | MeasureCanaries
    | PublishUpdate
    | AbortUpdate
    | TakeDigests
    | GatherTensor
    | ReleaseKV
    | MoveOutWeights
    | WakeUp
    | WarmUp
    | CheckState
    | Stop
)
Entry = Command | Operation
"""What the log holds."""

ANSWERED = (Build, VerifyUpdate, PublishUpdate, ReleaseKV, MoveOutWeights, WakeUp)
