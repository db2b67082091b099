"""Pieces of a bucket of weights as columns, as they are announced, from rows that are easier to write down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

COLUMNS = {
    "name": "names",
    "dtype": "dtypes",
    "shape": "shapes",
    "start": "starts",
    "count": "counts",
    "offset": "offsets",
    "place": "places",
}


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of rows `name`, `dtype`, `shape`, `start`, `count`, `offset` and, if they have it, `place`."""
    given = list(rows)
    fields = [field for field in COLUMNS if field != "place" or any("place" in row for row in given)]
    return {COLUMNS[field]: [row[field] for row in given] for field in fields}
