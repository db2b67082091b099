"""Log-probabilities of given ids: what a score returns, and which ids can be scored at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areno.errors import RequestTooLong
from areno.request_values import check_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-probabilities of given ids. Shapes: float32 [n - 1], of ids[1:]; tempered and raw."""

    token_logprobs: np.ndarray
    raw_logprobs: np.ndarray
    version: int


def scorable_ids(name: str, ids: Sequence[int] | np.ndarray, *, vocab_size: int, max_model_len: int) -> np.ndarray:
    """Return ids that fit into one forward without pages. Raises: InvalidRequest, RequestTooLong."""
    array = check_ids(name, ids, vocab_size)
    if array.size > max_model_len:
        raise RequestTooLong(
            f"{name} holds {array.size} ids",
            field=name,
            value=int(array.size),
            limit=f"the context holds {max_model_len}",
            remedy="score a shorter sequence",
        )
    return array
