"""Refuses names that a call does not have, in the package's own error: the known names, and the one that was probably meant.

Python's own answer is a bare TypeError, which no handler of the package's errors catches and which names no remedy. `checks_names` is for
classes and functions whose parameters are spelled out; what takes names as data asks `unknown_name`. A TypeError from inside the
call passes through as it is.

Engine and service each have this module, alike, because a service's client loads nothing of the engine. The bridge uses the engine's.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rollout.errors import shown

# Names that other libraries use, and what they are here: a known name, or a remedy in words.
OTHER_OPTIONS: Mapping[str, str] = {
    "max_num_seqs": "max_rows",
    "max_running_requests": "max_rows",
    "max_batch_size": "max_rows",
    "max_num_batched_tokens": "max_prefill_tokens",
    "chunked_prefill_size": "max_prefill_tokens",
    "gpu_memory_utilization": "gpu_memory_fraction",
    "mem_fraction_static": "gpu_memory_fraction",
    "tensor_parallel_size": "tp",
    "tp_size": "tp",
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
    "context_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "enable_prefix_caching": "prefix_cache",
    "enforce_eager": "use graphs=False",
    "disable_cuda_graph": "use graphs=False",
    "disable_radix_cache": "use prefix_cache=False",
    "torch_dtype": "dtype",
    "model_path": "model",
    "tokenizer": "the tokenizer is the one in the model's folder",
    "timeout": "timeout_s",
}
OTHER_PARAMETERS: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_token_ids": "stop_ids",
    "eos_token_id": "stop_ids",
    "prompt_logprobs": "prompt_logprobs_from",
    "prompt_token_ids": "prompt_ids",
    "input_ids": "prompt_ids",
    "sampling_params": "sampling",
    "timeout": "deadline_s",
    "timeout_s": "deadline_s",
    "do_sample": "temperature=0 is greedy, any other samples",
}
C = TypeVar("C", bound=Callable[..., Any])


def unknown_name(
    name: object, known: Iterable[str], *, error: Callable[..., Exception], others: Mapping[str, str] | None = None
) -> Exception:
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
    target: Callable[..., Any], given: int, options: Mapping[str, Any], error: Callable[..., Exception], others: Mapping[str, str] | None
) -> Exception | None:
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


def checks_names(error: Callable[..., Exception], others: Mapping[str, str] | None = None) -> Callable[[C], C]:
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
