"""Values that no option means: other types, other shapes, numbers without end, texts that no encoding holds.

Tests give each to each option of a public call, by hand or over the wire. Whatever the option is, the value is taken or refused by
name; nothing else may come out. `check_refusal` says what a refusal must hold.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MAX_TEXT = 2000


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


NUMBERS: tuple[Any, ...] = (
    True, False, np.bool_(True), 0, -1, 1, 2**31, -(2**31) - 1, 2**32, 2**63, 2**64, -(2**64), 10**400, 10**5000, -(10**5000),
    0.0, 1.5, -1.0, math.nan, math.inf, -math.inf, 1e-40, 1e39, 1e308, 1j, np.float16(0.5), np.float32(math.nan), np.int64(-5),
    np.uint64(2**64 - 1),
)  # fmt: skip
TEXTS: tuple[Any, ...] = ("", "x", "1", "\x00", "\ud800", "a" * 5000, b"", b"x", bytearray(b"abc"), memoryview(b"abc"))
CONTAINERS: tuple[Any, ...] = (
    [], [1], [1.0], [True], [None], ["a"], [[1]], [-1], [2**31], [2**70], [10**5000], [math.nan], [1] * 3000, (1,), range(20), set(), {1},
    {}, {1: 2}, {1: math.nan}, {1: 10**400}, {2**70: 1.0}, {10**5000: 1.0}, {-1: 1.0}, {"a": 1}, {"a": {2: 3}}, {None: 1}, {1: "x"},
    np.array(1), np.array([1]), np.array([[1]]), np.array([1.5]), np.array(["keep", "x"]), np.array([2**63], np.uint64),
    np.array([None], object), np.array([], np.float32),
)  # fmt: skip
STRANGERS: tuple[Any, ...] = (None, object(), float, lambda: 1, _Unprintable())
HOSTILE_VALUES = (*NUMBERS, *TEXTS, *CONTAINERS, *STRANGERS)


def check_refusal(error: Any, case: object) -> None:
    """Assert that a refusal names field, limit and remedy in a text of bounded length."""
    assert error.field and error.limit and error.remedy, case
    assert error.remedy in str(error) and error.limit in str(error) and len(str(error)) < MAX_TEXT, case
