"""Brings what callers hand to a request into one form: integers, numbers, token ids, biases; or refuses it by name. No torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np

from areno.errors import InvalidRequest, shown

MAX_BIASES = 256
MAX_BIAS = 1e4


def as_integer(name: str, value: object, low: int, high: int, remedy: str | None = None) -> int:
    """Return `value` as an int within [low, high]. Raises: InvalidRequest."""
    if isinstance(value, (bool, np.bool_)):
        raise InvalidRequest(
            f"{name}={shown(value)} is a bool", field=name, value=value, limit="an integer is needed", remedy=f"pass {name} as an int"
        )
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest(
            f"{name}={shown(value)} is not an integer",
            field=name,
            value=value,
            limit=f"allowed: {low} to {high}",
            remedy=f"pass {name} as an int",
        ) from None
    if not low <= number <= high:
        raise InvalidRequest(
            f"{name}={shown(number)} is out of range",
            field=name,
            value=number,
            limit=f"allowed: {low} to {high}",
            remedy=remedy or f"choose {name} within it",
        )
    return number


def as_ids(name: str, value: object, *, allow_empty: bool) -> np.ndarray:
    """Return `value` as ids, int64 [n]; range against the vocabulary is checked at the engine's door. Raises: InvalidRequest."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise InvalidRequest(
                f"{name} is an array of shape {value.shape} and dtype {value.dtype}",
                field=name,
                value=str(value.dtype),
                limit="one dimension of integers is needed",
                remedy=f"pass {name} as a 1-d integer array",
            )
        ids = value.astype(np.int64) if value.dtype != np.uint64 or not value.size or value.max() < 2**62 else None
        if ids is None:
            raise InvalidRequest(
                f"{name} holds {value.max()}", field=name, value=int(value.max()), limit="ids are below 2**31", remedy="pass token ids"
            )
    else:
        if isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, Sequence):
            raise InvalidRequest(
                f"{name} is a {type(value).__name__}",
                field=name,
                value=type(value).__name__,
                limit="a sequence of token ids is needed",
                remedy="tokenize first",
            )
        for position, item in enumerate(value):
            if type(item) is not int and (isinstance(item, (bool, np.bool_)) or not isinstance(item, np.integer)):
                raise InvalidRequest(
                    f"{name}[{position}]={shown(item)} is a {type(item).__name__}",
                    field=name,
                    value=item,
                    limit="token ids are integers",
                    remedy=f"pass {name} as ints",
                )
            if not -(2**62) < int(item) < 2**62:
                raise InvalidRequest(
                    f"{name}[{position}]={shown(item)}", field=name, value=int(item), limit="ids are below 2**31", remedy="pass token ids"
                )
        ids = np.array(value, dtype=np.int64)
    if not ids.size and not allow_empty:
        raise InvalidRequest(
            f"{name} is empty",
            field=name,
            value=[],
            limit="at least one token id is needed",
            remedy="start the prompt with a BOS or role token",
        )
    return ids


def as_number(name: str, value: object, low: float, high: float, allowed: str, remedy: str) -> float:
    """Return `value` as a finite float within [low, high]; `allowed` says so in words. Raises: InvalidRequest."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidRequest(
            f"{name}={shown(value)} is not a number", field=name, value=value, limit=f"allowed: {allowed}", remedy="pass a float"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise InvalidRequest(f"{name}={shown(value)} is out of range", field=name, value=number, limit=f"allowed: {allowed}", remedy=remedy)
    return number


def as_biases(value: object) -> dict[int, float]:
    """Return `value` as biases by token id. Raises: InvalidRequest."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"logit_bias is a {type(value).__name__}",
            field="logit_bias",
            value=type(value).__name__,
            limit="a mapping of token ids to numbers is needed",
            remedy="pass {id: bias}",
        )
    if len(value) > MAX_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(value)} entries",
            field="logit_bias",
            value=len(value),
            limit=f"at most {MAX_BIASES}",
            remedy="bias fewer ids",
        )
    ids = as_ids("logit_bias", list(value), allow_empty=True)
    remedy = f"stay within {MAX_BIAS:g}; use a large negative bias to forbid an id"
    numbers = [
        as_number(f"logit_bias[{int(one)}]", bias, -MAX_BIAS, MAX_BIAS, f"-{MAX_BIAS:g} to {MAX_BIAS:g}", remedy)
        for one, bias in zip(ids, value.values())
    ]
    return dict(zip(ids.tolist(), numbers))


def check_range(name: str, ids: np.ndarray, high: int) -> None:
    """Refuse ids outside 0..high-1. Raises: InvalidRequest."""
    bad = np.flatnonzero((ids < 0) | (ids >= high))
    if bad.size:
        where = int(bad[0])
        raise InvalidRequest(
            f"{name}[{where}]={int(ids[where])} is outside the vocabulary",
            field=name,
            value=int(ids[where]),
            limit=f"allowed: 0 to {high - 1}",
            remedy="encode with this model's tokenizer",
        )


def check_ids(name: str, value: object, vocab_size: int) -> np.ndarray:
    """Return `value` as int64 ids within the vocabulary. Raises: InvalidRequest."""
    ids = as_ids(name, value, allow_empty=False)
    check_range(name, ids, vocab_size)
    return ids
