"""A flush taken apart: whose tokens, from where on, and the columns that they lie in.

The I/O thread reads one from each DELTAS. Invariant: a flush that could be read fits together; nothing is made of counts before they are
known to be about the arrays that came.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.client.columns import Columns, FlushColumns
from rollout.client.flush_extras import FlushExtras
from rollout.wire.codec import Arrays
from rollout.wire.generation_messages import Deltas, Ending


@dataclass(frozen=True, slots=True)
class Flush:
    """Streams by index: ids (16 bytes each, joined), each one's first offset, and where its tokens are in `columns`; endings by index."""

    ids: bytes
    offsets: list[int]
    starts: list[int]
    ends: list[int]
    columns: FlushColumns
    extras: FlushExtras
    endings: dict[int, Ending]


def read_flush(arrays: Arrays, body: Deltas) -> Flush | None:
    """Return a flush; None where its arrays do not fit together."""
    raw_ids, counts = arrays["request_ids"].tobytes(), arrays["counts"]
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    fits = len(raw_ids) == 16 * ends.size and arrays["offsets"].size == ends.size and _counts_fit(arrays, total)
    columns = _flush_columns(arrays, total) if fits else None
    extras = FlushExtras(arrays, body, num_streams=ends.size, num_tokens=total)
    if columns is None or not extras.fits or any(len(column) != total for column in columns):
        return None
    return Flush(
        raw_ids,
        arrays["offsets"].tolist(),
        (ends - counts).tolist(),
        ends.tolist(),
        FlushColumns(columns),
        extras,
        {ending.index: ending for ending in body.finished},
    )


def _counts_fit(arrays: Arrays, total: int) -> bool:
    """Tell whether a flush's counts are about the tokens that came; until then nothing is made of their size."""
    if total != arrays["token_ids"].size or (total and int(arrays["counts"].min()) < 0):
        return False
    values, counts = arrays["version_values"], arrays["version_counts"]
    if values.size != counts.size or (counts.size and not 0 <= int(counts.min()) <= int(counts.max()) <= total):
        return False
    return int(counts.sum()) == total


def _flush_columns(arrays: Arrays, total: int) -> Columns:
    """Return the token columns of a flush; a column that stays away is all NaN."""
    missing = np.full(total, np.nan, np.float32)
    return Columns(
        arrays["token_ids"],
        arrays.get("logprobs", missing),
        arrays.get("raw_logprobs", missing),
        arrays.get("behaviour_logprobs", missing),
        np.repeat(arrays["version_values"], arrays["version_counts"]),
    )
