"""Turns what a caller passes into the fields and arrays of a GENERATE message.

Only what has no binary form is refused here (ids that are no integers); every limit is checked by the service, so that
all clients get the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from rollout.errors import InvalidRequest
from rollout.wire.codec import Arrays
from rollout.wire.security import SECRET_BYTES, new_token

Ids = Sequence[int] | np.ndarray


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of `generate` and `stream`; defaults are in brackets.

    `max_new_tokens` [128], `min_new_tokens` [0], `temperature` [1.0; 0 = greedy], `seed` [drawn], `stop_ids` [()],
    `ignore_eos` [False], `forced_ids` [None], `logprobs` [True], `lineage` [None], `cache_salt` [None], `kv_policy`
    ["keep"], `max_kv_lag` [4], `min_version` [None], `deadline_s` [None], `request_id` [16 random bytes].
    """

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    seed: int | None
    stop_ids: Ids
    ignore_eos: bool
    forced_ids: Ids | None
    logprobs: bool
    lineage: str | None
    cache_salt: str | None
    kv_policy: str
    max_kv_lag: int
    min_version: int | None
    deadline_s: float | None
    request_id: bytes | None


OPTIONS = tuple(GenerationOptions.__annotations__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A generation ready to be sent."""

    request_id: bytes
    prompt_ids: np.ndarray
    wants_logprobs: bool
    fields: Mapping[str, object]
    arrays: Arrays


def _not_ids(name: str, value: object, what: str) -> InvalidRequest:
    return InvalidRequest(
        what, field=name, value=value, limit="token ids are integers in one dimension", remedy=f"pass {name} as a list of ints or an array"
    )


def id_array(name: str, value: Ids) -> np.ndarray:
    """Return ids as int32, or int64 where they need it. Raises: InvalidRequest."""
    if isinstance(value, (str, bytes)):
        raise _not_ids(name, type(value).__name__, f"{name} is text; generate takes token ids")
    if not isinstance(value, np.ndarray):
        if hasattr(value, "__array__"):
            value = np.asarray(value)
        elif not isinstance(value, Sequence):
            raise _not_ids(name, type(value).__name__, f"{name} is a {type(value).__name__}")
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise _not_ids(name, f"{value.dtype}{list(value.shape)}", f"{name} is an array of shape {value.shape} and dtype {value.dtype}")
        if value.dtype == np.uint64 and value.size and value.max() >= 2**63:
            raise _not_ids(name, int(value.max()), f"{name} holds {value.max()}")
        ids = value.astype(np.int64)
    else:
        for position, item in enumerate(value):
            if type(item) is not int and (isinstance(item, (bool, np.bool_)) or not isinstance(item, (int, np.integer))):
                raise _not_ids(name, item, f"{name}[{position}]={item!r} is a {type(item).__name__}")
            if not -(2**63) <= item < 2**63:
                raise _not_ids(name, item, f"{name}[{position}]={item} is beyond any vocabulary")
        ids = np.array(value, dtype=np.int64)
    small = not ids.size or (ids.min() >= -(2**31) and ids.max() < 2**31)
    return ids.astype(np.int32) if small else ids


def checked_request_id(value: object) -> bytes:
    """Return a request id. Raises: InvalidRequest."""
    if not isinstance(value, bytes) or len(value) != SECRET_BYTES or not any(value):
        raise InvalidRequest(
            f"request_id={value!r} is no request id",
            field="request_id",
            value=value,
            limit="16 bytes, not all zero",
            remedy="leave it out, or pass secrets.token_bytes(16)",
        )
    return value


def prepare(prompt_ids: Ids, options: Mapping[str, object]) -> Prepared:
    """Return the message of a generation. Raises: InvalidRequest; an unknown option lists the known ones."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise InvalidRequest(
            f"unknown option {unknown[0]!r}",
            field=unknown[0],
            value=unknown[0],
            limit=f"known: {', '.join(OPTIONS)}",
            remedy=f"leave {unknown[0]} out",
        )
    given = dict(options)
    request_id = given.pop("request_id", None)
    prompt = id_array("prompt_ids", prompt_ids)
    arrays: dict[str, np.ndarray] = {"prompt_ids": prompt}
    for name in ("stop_ids", "forced_ids"):
        ids = given.pop(name, None)
        if ids is not None:
            array = id_array(name, ids)  # type: ignore[arg-type]
            if array.size or name == "forced_ids":
                arrays[name] = array
    return Prepared(
        request_id=new_token() if request_id is None else checked_request_id(request_id),
        prompt_ids=prompt.astype(np.int32, copy=False),
        wants_logprobs=given.get("logprobs", True) is not False,
        fields={name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()},
        arrays=arrays,
    )
