"""Whether the arrays of a step fit together: the front's last look at what its engine host says.

Arrays of another length would be spread over the tokens by numpy, or cut: wrong numbers in place of an error.
"""

from __future__ import annotations

import numpy as np

from rollout.errors import WireError
from rollout.wire.codec import Arrays

_COLUMNS = ("token_ids", "logprobs", "raw_logprobs", "behaviour_logprobs", "versions")


def check_step(arrays: Arrays) -> None:
    """Raises: WireError naming what does not fit."""
    size = arrays["request_ids"].size
    for name in _COLUMNS:
        if arrays[name].size != size:
            raise _misfit(name, arrays[name].size, size)
    counts, kept = arrays.get("kept_counts"), arrays.get("kept_ids")
    if counts is not None or kept is not None:
        if counts is None or kept is None or counts.size != size:
            raise _misfit("kept_counts", 0 if counts is None else counts.size, size)
        if not _adds_up(counts, kept.size):
            raise _misfit("kept_ids", kept.size, int(counts.sum()))
    table = arrays.get("prompt_scores")
    if table is not None:
        for name in ("prompt_logprobs", "prompt_raw_logprobs"):
            values = arrays.get(name)
            if values is None or not _adds_up(table[:, 2], values.size):
                raise _misfit(name, 0 if values is None else values.size, int(table[:, 2].sum()))


def _adds_up(counts: np.ndarray, total: int) -> bool:
    """Tell whether counts are none below zero, none above the total, and the total together."""
    return (not counts.size and not total) or (bool(((counts >= 0) & (counts <= total)).all()) and int(counts.sum()) == total)


def _misfit(name: str, found: int, wanted: int) -> WireError:
    return WireError(f"array {name} of a step has {found} entries", field=name, value=found, limit=f"the others make {wanted}")
