"""Which of a trainer's tensors go to the service, under which names, in which form.

`push.WeightPush` streams a trainer's named parameters through `serving_tensors`. Names are those of the Hugging Face model;
wrappers' additions are taken off. Invariant: every tensor that leaves is whole, contiguous, finite, in the serving
dtype, under a name that comes once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from trainer_bridge.errors import UnpushableTensor

# What wrappers call the module that they wrap; found anywhere in a name.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Of wrappers too, and names that a model may use itself further inside: taken off at the front only.
_OUTER = frozenset({"module", "model"})
# What an adapter library puts before the names of the model that it wraps.
PEFT_PREFIX = "base_model.model."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def plain_name(name: str) -> str:
    """Return the name that the plain Hugging Face model has for a tensor of a wrapped one.

    `_orig_mod.` (torch.compile) and the like go wherever they stand, `module.` (DDP) and repeated `model.` (a module that holds
    the model) at the front, in any nesting; the head has no prefix.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    inner = next((index for index, part in enumerate(parts[:-1]) if part not in _OUTER), len(parts) - 1)
    outer, rest = parts[:inner], parts[inner:]
    return ".".join(["model", *rest] if "model" in outer and rest[0] != "lm_head" else rest)


def check_tensor(name: str, tensor: object) -> torch.Tensor:
    """Return a tensor that may go out under a plain name. Raises: UnpushableTensor."""
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
            remedy="push the model itself (push() merges its adapters), or merge_lora(base, a, b, scale) under the base's name",
        )
    if not tensor.is_floating_point():
        raise UnpushableTensor(
            f"{name} has dtype {tensor.dtype}",
            field=name,
            value=str(tensor.dtype),
            limit="weights are floating-point numbers",
            remedy="push parameters, not integer buffers or quantised tensors",
        )
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise UnpushableTensor(
            f"{name} is {'on the meta device' if tensor.is_meta else f'of layout {tensor.layout}'}",
            field=name,
            value="meta" if tensor.is_meta else str(tensor.layout),
            limit="dense tensors with values are served",
            remedy="load the model's weights before the push" if tensor.is_meta else "push tensor.to_dense()",
        )
    return tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite, in one pass and without a mask in memory."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def serving_tensors(named_parameters: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) as the service must store them, on the device where they are.

    Raises: UnpushableTensor for adapters, other dtypes and layouts, non-finite values, and names that come twice.
    """
    seen: dict[str, str] = {}
    for full_name, tensor in named_parameters:
        name = plain_name(full_name)
        check_tensor(name, tensor)
        if name in seen:
            raise UnpushableTensor(
                f"{full_name} and {seen[name]} are both {name}",
                field=name,
                value=full_name,
                limit="each tensor comes once",
                remedy="pass one model's named_parameters()",
            )
        seen[name] = full_name
        served = tensor.detach().to(dtype=dtype).resolve_neg().contiguous()
        if not _is_finite(served):
            raise UnpushableTensor(
                f"{name} holds {int((~torch.isfinite(served)).sum())} non-finite values",
                field=name,
                value="nan or inf",
                limit=f"all values are finite in {DTYPE_NAMES[dtype]}",
                remedy="look at the optimizer step before this push; the service serves the previous weights",
            )
        yield name, served
