"""The check of what is offered against the model: a manifest before a byte is taken, then each tensor as it comes.

Called when an update begins, and as it stages. Either every name of a manifest fits or the update is refused with the list of
those that do not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from areno.errors import ManifestMismatch
from areno.weights.names import SOURCE_DTYPES, ParameterTable, TensorSpec, canonical_name, dtype_name, list_names, nearest_name

SUGGESTIONS = 3
SOURCE_NAMES = tuple(dtype_name(dtype) for dtype in SOURCE_DTYPES)
OLD_SERVE_ON = "the old weights serve on"


def mismatch(what: str, value: object, remedy: str) -> ManifestMismatch:
    """Return the error for tensors that are not the model's; `value` is the name or the list of names."""
    return ManifestMismatch(what, field="manifest", value=value, limit=OLD_SERVE_ON, remedy=remedy)


def offered_twice(name: str, first: str, second: str) -> ManifestMismatch:
    """Return the error for a tensor that came under two names with other values."""
    return mismatch(
        f"tensor {name} was offered twice, as {first} and as {second}, with other values", second, "send each tensor under one name"
    )


def not_finite(name: str, dtype: torch.dtype) -> ManifestMismatch:
    """Return the error for a tensor that holds NaN or infinity once cast."""
    return mismatch(f"tensor {name} holds NaN or infinity as {dtype}", name, "look for a diverged step in the trainer")


def check_manifest(table: ParameterTable, manifest: Mapping[str, TensorSpec], *, partial: bool) -> dict[str, TensorSpec]:
    """Return the manifest under canonical names. Raises: ManifestMismatch that lists every missing, unknown, repeated or wrong name."""
    specs: dict[str, TensorSpec] = {}
    given: dict[str, str] = {}
    problems: list[str] = []
    names: list[str] = []

    def blame(name: str, problem: str) -> None:
        names.append(name)
        problems.append(problem)

    num_unknown = 0
    for name, spec in manifest.items():
        canonical = canonical_name(name)
        target = table.tied.get(canonical, canonical)
        if target not in table.views:
            # A search over all names is dear, and a forgotten prefix makes every name unknown.
            hint = f" ({nearest_name(canonical, table.views)})" if len(problems) < SUGGESTIONS else ""
            blame(name, f"unknown: {name}{hint}")
            num_unknown += 1
        elif canonical in specs:
            blame(name, f"offered twice: {canonical}, as {given[canonical]} and as {name}")
        elif tuple(spec.shape) != table.shape_of(target):
            blame(name, f"wrong shape: {name} is {tuple(spec.shape)}, the model's is {table.shape_of(target)}")
        elif spec.dtype not in SOURCE_NAMES:
            blame(name, f"wrong dtype: {name} is {spec.dtype}, accepted are {', '.join(SOURCE_NAMES)}")
        specs[canonical], given[canonical] = spec, name
    missing = set() if partial else table.views.keys() - specs.keys()
    if missing:
        names += sorted(missing)
        problems.append(f"missing: {list_names(missing)}")
    if not specs:
        blame("", "empty: no tensor is named")
    if problems:
        shown = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
        if missing:
            remedy = "send every tensor of the model under its Hugging Face name, or begin with partial=True"
        elif num_unknown == len(problems):
            remedy = "leave out what the served model does not have (value heads, buffers), name the others as it does"
        else:
            remedy = "offer tensors as the model has them"
        raise mismatch(f"the manifest does not fit the model: {'; '.join(shown)}", names, remedy)
    return specs


def check_offer(table: ParameterTable, manifest: Mapping[str, TensorSpec] | None, name: str, offered: TensorSpec) -> str:
    """Return the canonical name of a tensor that comes as `name`; `manifest` is the one announced, under canonical names.

    Raises: ManifestMismatch (unknown, not announced, wrong shape or dtype).
    """
    canonical = canonical_name(name)
    target = table.tied.get(canonical, canonical)
    if target not in table.views:
        remedy = f"leave out what the served model does not have; {nearest_name(canonical, table.views)}"
        raise mismatch(f"tensor {name} is not in the model", name, remedy)
    if offered.shape != table.shape_of(target):
        raise mismatch(
            f"tensor {name} has shape {offered.shape}, the model's is {table.shape_of(target)}",
            name,
            "send it whole and unreshaped; nothing is broadcast",
        )
    if offered.dtype not in SOURCE_NAMES:
        raise mismatch(f"tensor {name} has dtype {offered.dtype}", name, f"send {', '.join(SOURCE_NAMES)}")
    if manifest is None:
        return canonical
    announced = manifest.get(canonical)
    if announced is None:
        raise mismatch(f"tensor {name} was not announced in the manifest", name, "begin an update whose manifest names it")
    if announced.dtype != offered.dtype:
        raise mismatch(
            f"tensor {name} has dtype {offered.dtype}, the manifest says {announced.dtype}", name, "send what the manifest announces"
        )
    return canonical
