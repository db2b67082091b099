"""Refuses names that a call does not have, in the package's own error: the known names, and the one that was probably meant.

Python's own answer is a bare TypeError, which no handler of the package's errors catches and which names no remedy. `checks_names` is for
classes and functions whose parameters are spelled out; what takes names as data asks `unknown_name`. A TypeError from inside the
call passes through as it is.

Engine, service and bridge each have this module, alike but for their errors and the bridge's table, because none imports another.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from trainer_bridge.errors import BridgeError, shown

# Names that other libraries use, and what they are here: a known name, or a remedy in words.
OTHER_OPTIONS: Mapping[str, str] = {
    "bucket_size": "bucket_bytes",
    "bucket_size_mb": "bucket_bytes",
    "update_weights_bucket_megabytes": "bucket_bytes",
    "backend": "transport",
    "canaries": "canary_ids",
    "timeout": "timeout_s",
    "group": "process_group",
    "dtype": "tensors are cast to the service's own dtype: serve --dtype",
    "params": "named_parameters",
    "state_dict": "named_parameters",
    "weights": "named_parameters",
    "step": "trainer_step",
    "global_step": "trainer_step",
    "num_generations": "group_size",
    "rollout_n": "group_size",
    "n": "group_size",
    "batch_size": "next(n) takes as many groups as a step trains on",
    "max_off_policy_steps": "max_staleness",
    "max_async_level": "max_staleness",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "epsilon": "clip_low",
    "epsilon_low": "clip_low",
    "epsilon_high": "clip_high",
    "clip_ratio": "clip_low",
    "clip": "clip_low",
    "cliprange": "clip_low",
    "pad_token_id": "pad_id",
    "padding_side": "pad_side",
    "pad_to_multiple_of": "multiple_of",
    "every_n": "every",
    "scaling": "scale",
    "alpha": "scale is lora_alpha / rank (or / sqrt(rank) of a rank-stabilised one)",
}
C = TypeVar("C", bound=Callable[..., Any])


def unknown_name(
    name: object, known: Iterable[str], *, error: Callable[..., BridgeError], others: Mapping[str, str] | None = None
) -> BridgeError:
    """Return the refusal of a name that is not among the known ones. `others` maps names of other places to a known name or to a remedy."""
    names = list(known)
    other = (others or {}).get(str(name), "")
    words = other if " " in other else None
    close = [other] if other in names else difflib.get_close_matches(str(name), names, 1)
    return error(
        f"unknown option {shown(name)}",
        field=str(name),
        value=name,
        limit=f"known: {', '.join(names)}",
        remedy=words or (f"did you mean {close[0]}?" if close else f"leave {str(name)[:64]} out"),
    )


def _refusal(
    target: Callable[..., Any], given: int, options: Mapping[str, Any], error: Callable[..., BridgeError], others: Mapping[str, str] | None
) -> BridgeError | None:
    """Return what is wrong with how a call was written, if anything is; `given` counts its arguments without a name."""
    parameters = list(inspect.signature(target).parameters.values())
    if given and parameters[0].name == "self":
        parameters, given = parameters[1:], given - 1
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    known = [one.name for one in named]
    unknown = [name for name in options if name not in known]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in parameters):
        return unknown_name(unknown[0], known, error=error, others=others)
    unnamed = [one.name for one in named if one.kind is one.POSITIONAL_OR_KEYWORD]
    if given > len(unnamed) and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return error(
            f"{target.__name__} was given {given} values without a name",
            field=known[0],
            value=given,
            limit=f"{len(unnamed)} may be passed so; known names: {', '.join(known)}",
            remedy=f"write {target.__name__}({known[len(unnamed)] if len(unnamed) < len(known) else known[0]}=...)",
        )
    missing = [one.name for one in named if one.default is one.empty and one.name not in options and one.name not in unnamed[:given]]
    if missing:
        return error(
            f"{missing[0]} is missing",
            field=missing[0],
            limit=f"{target.__name__} needs {', '.join(missing)}",
            remedy=f"write {target.__name__}({missing[0]}=...)",
        )
    return None


def checks_names(error: Callable[..., BridgeError], others: Mapping[str, str] | None = None) -> Callable[[C], C]:
    """Let a class or a function refuse unknown, missing and unnamed arguments with `error`; `others` as in `unknown_name`."""

    def decorate(target: C) -> C:
        is_class = isinstance(target, type)
        call = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]

        @functools.wraps(call)
        def checked(*given: Any, **options: Any) -> Any:
            try:
                return call(*given, **options)
            except TypeError:
                # The call comes first, so that a right one costs next to nothing.
                refusal = _refusal(target, len(given) - is_class, options, error, others)
                if refusal is None:
                    raise
            raise refusal

        @functools.wraps(call)
        async def awaited(*given: Any, **options: Any) -> Any:
            return await checked(*given, **options)

        if isinstance(target, type):
            target.__init__ = checked  # type: ignore[misc]
            return target
        return awaited if inspect.iscoroutinefunction(call) else checked  # type: ignore[return-value]

    return decorate
