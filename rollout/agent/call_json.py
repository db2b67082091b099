"""JSON as models write it, read strictly: nothing that two readers could understand differently, nothing unbounded.

`load_json` refuses repeated keys, NaN and numbers beyond a float's range. `JsonEnd` finds where a JSON value ends while its text still
grows, and looks at each character once.
"""

from __future__ import annotations

import json
import math
from typing import Any


def load_json(text: str) -> Any:
    """Return the value of strict JSON. Raises: ValueError with a short reason."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:64]!r} is there twice")
        found[key] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:32]} is too large for a number")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class JsonEnd:
    """Where the object or array that begins at the first bracket ends; `scan` may be called with ever longer text."""

    __slots__ = ("_depth", "_escaped", "_quoted", "at")

    def __init__(self, at: int = 0):
        self.at = at
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def scan(self, text: str) -> int | None:
        """Return the place behind the last bracket, None if it has not come yet."""
        for place in range(self.at, len(text)):
            character = text[place]
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
            elif character == '"' and self._depth:
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    self.at = place + 1
                    return self.at
        self.at = len(text)
        return None
