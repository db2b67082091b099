"""Parameters that are not crossed with all of each other in `make test`: every value, or every two values, meet in some test there.

The rest of the full product carries the mark `long`. Faults that need one value, or two together, show either way; a test of four
parameters with two values each runs six times and not sixteen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

Place = tuple[int, int]


def covering_rows(columns: Sequence[Sequence[Any]], together: int) -> list[tuple[Any, ...]]:
    """Return rows of the product, few and in its order, that hold every choice of values of `together` columns.

    Values are told apart by place.
    """

    def choices(row: tuple[int, ...]) -> list[tuple[Place, ...]]:
        return list(itertools.combinations(enumerate(row), together))

    product = list(itertools.product(*(range(len(column)) for column in columns)))
    wanted = {choice for row in product for choice in choices(row)}
    chosen: list[tuple[int, ...]] = []
    while wanted:
        best = max(product, key=lambda row: len(wanted.intersection(choices(row))))
        chosen.append(best)
        wanted.difference_update(choices(best))
    return [tuple(column[place] for column, place in zip(columns, row)) for row in sorted(chosen)]


def _parametrize(values: dict[str, Sequence[Any]], together: int) -> pytest.MarkDecorator:
    columns = [list(column) for column in values.values()]
    chosen = covering_rows(columns, together)
    rows = [pytest.param(*row, marks=() if row in chosen else pytest.mark.long) for row in itertools.product(*columns)]
    return pytest.mark.parametrize(tuple(values), rows)


def every_pair(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by these names, so that every two values of two of them meet; other combinations are `long`."""
    return _parametrize(values, 2)


def every_value(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by these names, so that every value is there; other combinations are `long`."""
    return _parametrize(values, 1)
