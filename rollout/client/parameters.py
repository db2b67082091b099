"""Turns what a caller passes into the fields and arrays of a GENERATE or GENERATE_GROUP message.

Only what has no binary form is refused here (ids that are no integers); every limit is checked by the service, so that
all clients get the same answers.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import numpy as np

from rollout.errors import InvalidRequest, shown
from rollout.option_names import OTHER_PARAMETERS, unknown_name
from rollout.seeds import derive_seed
from rollout.wire.codec import Arrays
from rollout.wire.generation_messages import MAX_MEMBERS, Generate, ToolWait
from rollout.wire.messages import parse_fields
from rollout.wire.operations import Op
from rollout.wire.security import SECRET_BYTES, new_token

Ids = Sequence[int] | np.ndarray


class EvaluationOptions(TypedDict, total=False):
    """What says how tokens are drawn and where they end; defaults are in brackets.

    `max_new_tokens` [128], `min_new_tokens` [0], `temperature` [1.0; 0 = greedy], `top_k` [0 = off], `top_p` [1.0], `min_p`
    [0.0], `repetition_penalty` [1.0], `presence_penalty` [0.0], `frequency_penalty` [0.0], `logit_bias` [{}; id -> number],
    `seed` [drawn], `stop_ids` [()], `stop` [()]: strings that end the output, matched in its text; `ignore_eos` [False],
    `forced_ids` [None], `logprobs` [True], `return_kept_ids` [False], `prompt_logprobs_from` [None], `prior_output_tokens` [0],
    `lineage` [None], `cache_salt` [None], `kv_policy` ["keep"], `max_kv_lag` [4], `min_version` [None].
    """

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop_ids: Ids
    stop: str | Sequence[str]
    ignore_eos: bool
    forced_ids: Ids | None
    logprobs: bool
    return_kept_ids: bool
    prompt_logprobs_from: int | None
    prior_output_tokens: int
    lineage: str | None
    cache_salt: str | None
    kv_policy: str
    max_kv_lag: int
    min_version: int | None


class SamplingOptions(EvaluationOptions, total=False):
    """`EvaluationOptions`, and `deadline_s` [None]: seconds from receipt to the end of a request."""

    deadline_s: float | None


class GenerationOptions(SamplingOptions, total=False):
    """The keyword arguments of `generate` and `stream`: `SamplingOptions`, and `request_id` [16 random bytes]."""

    request_id: bytes | None


class GroupOptions(SamplingOptions, total=False):
    """The keyword arguments of `generate_group` and `stream_group`: `SamplingOptions`, and `request_ids` [drawn], one per member.

    `seed` is the group's: member i draws with `rollout.agent.derive_seed(seed, i)`.
    """

    request_ids: Sequence[bytes] | None


EVALUATION_DEADLINE_S = 600.0
OPTIONS = tuple(GenerationOptions.__annotations__)
GROUP_OPTIONS = tuple(GroupOptions.__annotations__)
EVALUATION_OPTIONS = tuple(EvaluationOptions.__annotations__)
# What a message leaves out or carries as arrays; every other default is the message's own.
UNSENT_DEFAULTS: Mapping[str, object] = {
    "stop": (),
    "stop_ids": (),
    "forced_ids": None,
    "logit_bias": None,
    "request_id": None,
    "request_ids": None,
}
F = TypeVar("F", bound=Callable[..., Any])


def option_defaults(options: Sequence[str]) -> dict[str, object]:
    """Return what applies to each option that a caller leaves out; None for a seed or an id means that it is drawn."""
    return {name: UNSENT_DEFAULTS[name] if name in UNSENT_DEFAULTS else Generate.model_fields[name].default for name in options}


def shows_options(options: Sequence[str]) -> Callable[[F], F]:
    """Let a method that takes `**options` show them with their defaults, in `help` and in tab completion."""

    def decorate(method: F) -> F:
        given = inspect.signature(method)
        named = [one for one in given.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        shown = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in option_defaults(options).items()]
        method.__signature__ = given.replace(parameters=[*named, *shown])  # type: ignore[attr-defined]
        return method

    return decorate


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What a request asks for beside ids."""

    logprobs: bool = True
    kept_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A message ready to be sent: a generation, or a group. `members` are the request ids whose streams it begins."""

    op: Op
    request_id: bytes
    members: tuple[bytes, ...]
    prompt_ids: np.ndarray
    wants: Wants
    fields: Mapping[str, object]
    arrays: Arrays


def _not_ids(name: str, value: object, what: str, remedy: str | None = None) -> InvalidRequest:
    return InvalidRequest(
        what,
        field=name,
        value=value,
        limit="token ids are integers in one dimension",
        remedy=remedy or f"pass {name} as a list of ints or an array",
    )


def id_array(name: str, value: Ids) -> np.ndarray:
    """Return ids as int32, or int64 where they need it. Raises: InvalidRequest."""
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        remedy = f"pass {name}=client.tokenizer().encode(text).ids"
        raise _not_ids(name, type(value).__name__, f"{name} is text; the model takes token ids", remedy)
    if hasattr(value, "ids") and hasattr(value, "tokens"):
        raise _not_ids(name, type(value).__name__, f"{name} is a tokenizer's {type(value).__name__}", f"pass its ids: {name}=encoding.ids")
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
                raise _not_ids(name, item, f"{name}[{position}]={shown(item)} is a {type(item).__name__}")
            if not -(2**63) <= item < 2**63:
                raise _not_ids(name, item, f"{name}[{position}]={shown(item)} is beyond any vocabulary")
        ids = np.array(value, dtype=np.int64)
    small = not ids.size or (ids.min() >= -(2**31) and ids.max() < 2**31)
    return ids.astype(np.int32) if small else ids


def checked_request_id(value: object, remedy: str = "leave it out, or pass secrets.token_bytes(16)") -> bytes:
    """Return a request id. Raises: InvalidRequest."""
    if not isinstance(value, bytes) or len(value) != SECRET_BYTES or not any(value):
        raise InvalidRequest(
            f"request_id={shown(value)} is no request id",
            field="request_id",
            value=value,
            limit="16 bytes, not all zero",
            remedy=remedy,
        )
    return value


def _biases(value: object) -> dict[str, np.ndarray]:
    """Return biases as two arrays; none for no biases. Raises: InvalidRequest."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"logit_bias is a {type(value).__name__}",
            field="logit_bias",
            value=type(value).__name__,
            limit="a mapping of token ids to numbers is needed",
            remedy="pass {id: bias}",
        )
    if not value:
        return {}
    ids = id_array("logit_bias", list(value))
    for token_id, bias in value.items():
        if isinstance(bias, (bool, np.bool_)) or not isinstance(bias, (int, float, np.integer, np.floating)):
            raise InvalidRequest(
                f"logit_bias[{token_id}]={shown(bias)} is not a number",
                field=f"logit_bias[{token_id}]",
                value=bias,
                limit="biases are numbers of logits",
                remedy="pass a float",
            )
    try:
        values = np.array([float(bias) for bias in value.values()], np.float64)
    except OverflowError:
        raise InvalidRequest(
            "logit_bias holds a number that no float can be",
            field="logit_bias",
            limit="biases are finite numbers of logits",
            remedy="pass floats",
        ) from None
    return {"bias_ids": ids, "bias_values": values}


_OTHER_CALLS = {
    name: "several continuations of one prompt come from generate_group(prompt_ids, n)" for name in ("n", "num_return_sequences", "best_of")
}
OTHER_NAMES: Mapping[str, str] = {**OTHER_PARAMETERS, **_OTHER_CALLS}


def _checked_seed(value: object) -> None:
    if value is None:
        return
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or not 0 <= value < 2**64:
        raise InvalidRequest(
            f"seed={shown(value)} is refused",
            field="seed",
            value=value,
            limit="a seed is an integer from 0 to 2**64 - 1",
            remedy="pass one of these, or leave seed out to have one drawn",
        )


def _message(prompt_ids: Ids, options: Mapping[str, object], known: Sequence[str]) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Return the fields and arrays of a message. Raises: InvalidRequest; an unknown option lists the known ones."""
    unknown = [name for name in options if name not in known]
    if unknown:
        raise unknown_name(unknown[0], known, error=InvalidRequest, others=OTHER_NAMES)
    _checked_seed(options.get("seed"))
    given = dict(options)
    arrays: dict[str, np.ndarray] = {"prompt_ids": id_array("prompt_ids", prompt_ids)}
    for name in ("stop_ids", "forced_ids"):
        ids = given.pop(name, None)
        if ids is not None:
            array = id_array(name, ids)  # type: ignore[arg-type]
            if array.size or name == "forced_ids":
                arrays[name] = array
    biases = given.pop("logit_bias", None)
    if biases is not None:
        arrays |= _biases(biases)
    stop = given.pop("stop", None)
    if stop is not None and not (isinstance(stop, tuple) and not stop):
        given["stop"] = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, (list, tuple)) else stop
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}, arrays


def _prepared(
    op: Op, request_id: bytes, members: Sequence[bytes], fields: Mapping[str, object], arrays: Mapping[str, np.ndarray]
) -> Prepared:
    return Prepared(
        op=op,
        request_id=request_id,
        members=tuple(members),
        prompt_ids=arrays["prompt_ids"].astype(np.int32, copy=False),
        wants=Wants(logprobs=fields.get("logprobs", True) is not False, kept_ids=fields.get("return_kept_ids", False) is True),
        fields=fields,
        arrays=arrays,
    )


def _seconds(value: object) -> object:
    """Return an int as the float that it is; one that no float can be stays for the limit to refuse."""
    try:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    except OverflowError:
        return math.inf


def tool_wait_fields(lineage: str, expect_s: float, cache_salt: str | None) -> dict[str, object]:
    """Return the fields of a hint. Raises: InvalidRequest."""
    fields: dict[str, object] = {"lineage": lineage, "expect_s": _seconds(expect_s)}
    parse_fields(ToolWait, {**fields, "cache_salt": cache_salt})
    return {**fields, "cache_salt": cache_salt}


def prepare(prompt_ids: Ids, options: Mapping[str, object]) -> Prepared:
    """Return the message of a generation. Raises: InvalidRequest; an unknown option lists the known ones."""
    fields, arrays = _message(prompt_ids, options, OPTIONS)
    given = fields.pop("request_id", None)
    request_id = new_token() if given is None else checked_request_id(given)
    return _prepared(Op.GENERATE, request_id, [request_id], fields, arrays)


def prepare_evaluation(prompts: Sequence[Ids], deadline_s: float, options: Mapping[str, object]) -> list[Prepared]:
    """Return the messages of an evaluation, one for each prompt. Raises: InvalidRequest; an unknown option lists the known ones."""
    if isinstance(prompts, (str, bytes)) or not (isinstance(prompts, Sequence) or (isinstance(prompts, np.ndarray) and prompts.ndim)):
        raise InvalidRequest(
            f"prompts is a {type(prompts).__name__}",
            field="prompts",
            value=type(prompts).__name__,
            limit="a sequence of prompts is needed",
            remedy="pass a list with one sequence of ids for each prompt",
        )
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        raise InvalidRequest(
            "prompts holds token ids and no prompts",
            field="prompts",
            value=type(prompts).__name__,
            limit="one sequence of ids for each prompt",
            remedy="pass [prompt_ids] for a single prompt",
        )
    _checked_seed(options.get("seed"))
    seed = options.get("seed")
    seeds = [{} if seed is None else {"seed": derive_seed(int(seed), index)} for index in range(len(prompts))]  # type: ignore[call-overload]
    return [prepare(prompt, {**options, "deadline_s": deadline_s, **drawn}) for prompt, drawn in zip(prompts, seeds)]


def prepare_group(prompt_ids: Ids, n: int, options: Mapping[str, object]) -> Prepared:
    """Return the message of a group. Raises: InvalidRequest, also for n < 1; an unknown option lists the known ones."""
    if isinstance(n, (bool, np.bool_)) or not isinstance(n, (int, np.integer)) or not 1 <= n <= MAX_MEMBERS:
        raise InvalidRequest(
            f"n={shown(n)} members", field="n", value=n, limit=f"an integer from 1 to {MAX_MEMBERS}", remedy="ask for at least one member"
        )
    fields, arrays = _message(prompt_ids, options, GROUP_OPTIONS)
    given = fields.pop("request_ids", None)
    if given is not None and (isinstance(given, (str, bytes)) or not isinstance(given, Sequence)):
        raise InvalidRequest(
            f"request_ids is a {type(given).__name__}",
            field="request_ids",
            value=type(given).__name__,
            limit="a sequence of one id for each member",
            remedy="leave request_ids out, or draw one for each member",
        )
    members = [new_token() for _ in range(n)] if given is None else [checked_request_id(one) for one in given]
    if len(members) != n or len(set(members)) != n:
        raise InvalidRequest(
            f"{len(members)} request_ids for n={n} members",
            field="request_ids",
            value=len(members),
            limit="one for each member, all different",
            remedy="leave request_ids out, or draw one for each member",
        )
    arrays["member_ids"] = np.frombuffer(b"".join(members), np.uint8).reshape(-1, SECRET_BYTES)
    # Made from the members' ids, so that the same group has the same message when it is sent again.
    group_id = hashlib.blake2b(b"".join(members), digest_size=SECRET_BYTES).digest()
    return _prepared(Op.GENERATE_GROUP, group_id, members, fields, arrays)
