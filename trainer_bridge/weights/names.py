"""Which of a trainer's tensors go to the service, under which names, in which form.

`push.WeightPush` streams a trainer's named parameters through `serving_tensors`. Names are those of the Hugging Face model;
wrappers' additions are taken off. Invariant: every tensor that leaves is whole, contiguous, on the CPU, finite, in the
serving dtype, under a name that comes once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from trainer_bridge.errors import UnpushableTensor

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
HEAD = "lm_head.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def plain_name(name: str) -> str:
    """Return the name without what DDP (`module.`), torch.compile (`_orig_mod.`) and other wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def ties_head(model: torch.nn.Module | None) -> bool:
    """Return whether the model's head is its embedding, by its config or because both are one parameter."""
    if model is None:
        return False
    inner = model
    while isinstance(wrapped := getattr(inner, "module", getattr(inner, "_orig_mod", None)), torch.nn.Module):
        inner = wrapped
    if getattr(getattr(inner, "config", None), "tie_word_embeddings", False):
        return True
    names = {plain_name(name): parameter for name, parameter in inner.named_parameters(remove_duplicate=False)}
    head = names.get(HEAD)
    return head is not None and any(parameter is head for name, parameter in names.items() if name != HEAD)


def _check(name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise UnpushableTensor(
            f"{name} is a {type(tensor).__name__}",
            field=name,
            value=type(tensor).__name__,
            limit="a tensor is needed",
            remedy="pass (name, tensor) pairs",
        )
    if ".lora_" in name or name.startswith("base_model."):
        raise UnpushableTensor(
            f"{name} belongs to an adapter",
            field=name,
            value=name,
            limit="the service holds one merged model",
            remedy="merge the adapter into its base and push the merged model's named parameters",
        )
    if not tensor.is_floating_point():
        raise UnpushableTensor(
            f"{name} has dtype {tensor.dtype}",
            field=name,
            value=str(tensor.dtype),
            limit="weights are floating-point numbers",
            remedy="push parameters, not integer buffers or quantised tensors",
        )
    return tensor


def serving_tensors(
    named_parameters: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype, head_is_tied: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) as the service must store them. A tied head is left out.

    Raises: UnpushableTensor for adapters, other dtypes, non-finite values, and names that come twice.
    """
    seen: dict[str, str] = {}
    for full_name, tensor in named_parameters:
        name = plain_name(full_name)
        _check(name, tensor)
        if name in seen:
            raise UnpushableTensor(
                f"{full_name} and {seen[name]} are both {name}",
                field=name,
                value=full_name,
                limit="each tensor comes once",
                remedy="pass one model's named_parameters()",
            )
        seen[name] = full_name
        if name == HEAD and head_is_tied:
            continue
        served = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        if not bool(torch.isfinite(served).all()):
            raise UnpushableTensor(
                f"{name} holds {int((~torch.isfinite(served)).sum())} non-finite values",
                field=name,
                value="nan or inf",
                limit=f"all values are finite in {DTYPE_NAMES[dtype]}",
                remedy="look at the optimizer step before this push; the service serves the previous weights",
            )
        yield name, served
