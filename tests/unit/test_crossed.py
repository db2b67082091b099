"""What is promised of a product is there, and the rest of it is only put off."""

from __future__ import annotations

import itertools

import pytest

from tests.crossed import covering_rows, every_pair, every_value


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 2, 2), (4, 2, 2), (2, 3, 2, 3), (2, 2, 2, 2)])
def test_every_two_values_of_two_parameters_meet(sizes: tuple[int, ...]) -> None:
    columns = [[f"{name}{value}" for value in range(size)] for name, size in zip("abcd", sizes)]
    rows = covering_rows(columns, 2)
    for first, second in itertools.combinations(range(len(columns)), 2):
        assert {(row[first], row[second]) for row in rows} == set(itertools.product(columns[first], columns[second]))
    largest = sorted(sizes)[-2:]
    assert largest[0] * largest[1] <= len(rows) <= largest[0] * largest[1] + 2


def test_every_value_of_each_parameter_is_there() -> None:
    assert covering_rows([["resident", "rebuilt"], [7, 64, 512]], 1) == [("resident", 7), ("resident", 512), ("rebuilt", 64)]


def test_what_is_left_of_the_product_is_long() -> None:
    values = {"path": ["resident", "rebuilt"], "run_ahead": [0, 3], "level": ["kv", "weights"]}
    for mark, fast in ((every_pair(**values), 4), (every_value(**values), 2)):
        names, rows = mark.args
        assert names == tuple(values)
        assert [row.values for row in rows] == list(itertools.product(*values.values()))
        assert sum(not row.marks for row in rows) == fast
