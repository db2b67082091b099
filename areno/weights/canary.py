"""A sequence by which a weight update is proven: its ids, and what the trainer says of them under the new weights.

The trainer's side makes them, the engine scores them (`areno.canary`). Invariant: a canary that exists can be scored and compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.errors import InvalidRequest
from areno.request import MAX_TEMPERATURE, MIN_TEMPERATURE


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A sequence whose log-probabilities under the new weights the trainer knows.

    Shapes: ids int64 [n], n >= 2; expected_logprobs float32 [n - 1], of ids[1:] at `temperature`.
    Raises: InvalidRequest.
    """

    ids: np.ndarray
    expected_logprobs: np.ndarray
    temperature: float = 1.0

    def __post_init__(self) -> None:
        ids, expected = np.asarray(self.ids), np.asarray(self.expected_logprobs)
        if ids.ndim != 1 or ids.size < 2 or ids.dtype.kind not in "iu":
            raise _invalid_canary("ids", f"shape {ids.shape} and dtype {ids.dtype}", "one dimension of at least two integers")
        if expected.shape != (ids.size - 1,) or expected.dtype.kind != "f":
            raise _invalid_canary(
                "expected_logprobs", f"shape {expected.shape} and dtype {expected.dtype}", f"floats of shape ({ids.size - 1},)"
            )
        if not np.isfinite(expected).all() or (expected > 0).any():
            raise _invalid_canary("expected_logprobs", "a value that is positive, infinite or NaN", "log-probabilities: finite, at most 0")
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise _invalid_canary("temperature", repr(self.temperature), f"0 or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
        object.__setattr__(self, "ids", ids.astype(np.int64))
        object.__setattr__(self, "expected_logprobs", expected.astype(np.float32))


def _invalid_canary(field: str, found: str, limit: str) -> InvalidRequest:
    return InvalidRequest(
        f"a canary's {field} has {found}",
        field=f"canary.{field}",
        value=found,
        limit=f"needed: {limit}",
        remedy="score the canary with the trainer's new weights",
    )
