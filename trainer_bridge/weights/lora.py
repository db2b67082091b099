"""Low-rank adapters, merged on their way out: base + scale * B A, computed in fp32 once, written nowhere in the trainer.

Modules are recognised by what they have (`lora_A`, `lora_B`, a base), as PEFT's layers do; no adapter library is imported.
`sources` lists what `adapted_weights` finds. Invariant: a model with adapters leaves merged or not at all, and its own tensors
keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer_bridge.errors import UnpushableTensor, shown
from trainer_bridge.option_names import OTHER_OPTIONS, checks_names
from trainer_bridge.turns import is_finite
from trainer_bridge.weights.names import PEFT_PREFIX, plain_name

Whole = Callable[[torch.Tensor], torch.Tensor]
_SAVED = "modules_to_save"


@checks_names(UnpushableTensor, OTHER_OPTIONS)
def merge_lora(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return base + scale * (b @ a) in fp32; cast it once, to the serving dtype. `base` is not written.

    Shapes: base [out, in], a [rank, in], b [out, rank]. Raises: UnpushableTensor.
    """
    tensors = all(isinstance(one, torch.Tensor) for one in (base, a, b))
    if not tensors or not is_finite(scale):
        raise UnpushableTensor(
            f"merge_lora was given {', '.join(type(one).__name__ for one in (base, a, b))} and scale={shown(scale)}",
            field="lora" if not tensors else "scale",
            value=shown(scale),
            limit="base, A and B are tensors, the scale is a finite number",
            remedy="pass merge_lora(base, a, b, lora_alpha / rank)",
        )
    if base.ndim != 2 or a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != tuple(base.shape) or a.shape[0] != b.shape[1]:
        raise UnpushableTensor(
            f"an adapter of shapes A {tuple(a.shape)}, B {tuple(b.shape)} does not fit a base of {tuple(base.shape)}",
            field="lora",
            value=f"{tuple(a.shape)}, {tuple(b.shape)}",
            limit="A is [rank, in], B [out, rank], the base [out, in]",
            remedy="merge adapters of other kinds yourself and push the merged tensors by name",
        )
    with torch.no_grad():
        return torch.addmm(base.float(), b.float(), a.float(), alpha=float(scale))


@dataclass(frozen=True, slots=True, eq=False)
class _Adapter:
    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedWeight:
    """A weight of the plain model and the active adapters on it, mostly none. `transposed`: the base is stored [in, out]."""

    name: str
    base: torch.Tensor
    adapters: tuple[_Adapter, ...] = ()
    transposed: bool = False

    def merged(self, whole: Whole) -> torch.Tensor:
        """Return the weight with its adapters; `whole` gathers sharded tensors, in one order on every rank."""
        result = whole(self.base)
        for adapter in self.adapters:
            a, b = whole(adapter.a), whole(adapter.b)
            result = merge_lora(result.T, a, b, adapter.scale).T if self.transposed else merge_lora(result, a, b, adapter.scale)
        return result


def _is_layer(module: torch.nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "lora_B")


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether a module of the model is an adapter's layer, or a name says so."""
    return any(_is_layer(module) for module in model.modules()) or any("lora_" in name for name, _ in model.named_parameters())


def _of_kind(part: Any, adapter: str) -> Any:
    """Return one adapter's entry of a layer's part, which holds them by name or is the only one."""
    if isinstance(part, (Mapping, torch.nn.ModuleDict, torch.nn.ParameterDict)):
        return part[adapter] if adapter in part else None  # noqa: SIM401 - a ModuleDict has no get
    return part


def _weight(part: Any) -> torch.Tensor | None:
    return part if part is None or isinstance(part, torch.Tensor) else part.weight


def _active(layer: torch.nn.Module) -> list[str]:
    active = getattr(layer, "active_adapters", getattr(layer, "active_adapter", None))
    if active is None:
        part: Any = layer.lora_A
        return list(part.keys()) if isinstance(part, (Mapping, torch.nn.ModuleDict, torch.nn.ParameterDict)) else [""]
    return [active] if isinstance(active, str) else list(active)


def _refuse(prefix: str, what: str) -> UnpushableTensor:
    return UnpushableTensor(
        f"the adapter of {prefix} {what}",
        field=prefix,
        value=prefix,
        limit="linear low-rank adapters are merged: base + scale * B A",
        remedy="merge it with its own library (merge_adapter) and push; unmerge afterwards",
    )


def _adapters(prefix: str, layer: Any) -> tuple[_Adapter, ...]:
    """Return the adapters that the layer's forward applies. Raises: UnpushableTensor for kinds that are more than B A."""
    if getattr(layer, "disable_adapters", False) is True or getattr(layer, "merged", False) is True:
        return ()
    found = []
    for name in _active(layer):
        a, b = _weight(_of_kind(layer.lora_A, name)), _weight(_of_kind(layer.lora_B, name))
        if a is None or b is None:
            continue
        if _of_kind(getattr(layer, "lora_magnitude_vector", {}), name) is not None:
            raise _refuse(prefix, "scales directions by magnitudes (DoRA)")
        if getattr(_of_kind(layer.lora_B, name), "bias", None) is not None:
            raise _refuse(prefix, "has a bias")
        found.append(_Adapter(a, b, float(_of_kind(getattr(layer, "scaling", 1.0), name))))
    if any(_of_kind(getattr(layer, "lora_embedding_A", {}), name) is not None for name in _active(layer)):
        raise _refuse(prefix, "is one of an embedding")
    return tuple(found)


def adapted_weights(model: torch.nn.Module) -> Iterator[AdaptedWeight]:
    """Yield the weights of the plain model under its names, in the model's order. Raises: UnpushableTensor.

    Of modules that an adapter library trains as a whole (`modules_to_save`) the active copy counts and the original is left out. A
    parameter of several names goes out once, and again where an adapter, or a copy in the other's place, makes it another weight there:
    a head that is tied to what an embedding was before it was adapted.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {name: module for name, module in modules.items() if _is_layer(module)}
    # A library's outermost module has an attribute of that name too: a list.
    saved = {name: module for name, module in modules.items() if isinstance(getattr(module, _SAVED, None), torch.nn.ModuleDict)}
    used: set[str] = set()
    # Parameters by identity, with the layer that adapts them if one does.
    sent: set[tuple[int, int | None]] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        prefix = owner.removesuffix(".base_layer")
        plain = _plain_name(name).replace(".base_layer.", ".")
        layer = layers.get(prefix)
        if layer is not None:
            adapters = _adapters(prefix, layer) if last == "weight" else ()
            used.update(prefix for _ in adapters)
            key = id(parameter), id(layer) if adapters else None
            if key not in sent:
                sent.add(key)
                yield AdaptedWeight(plain, parameter, adapters, bool(getattr(layer, "fan_in_fan_out", False)))
        elif any(name.startswith(f"{one}.lora_") for one in layers):
            continue
        elif "lora_" in name:
            raise _refuse(name, "belongs to no layer with lora_A, lora_B and a base")
        else:
            whole_module = next((one for one in saved if name.startswith(f"{one}.")), None)
            kept = plain if whole_module is None else _kept_name(name, whole_module, saved[whole_module], plain)
            if kept is not None and (id(parameter), None) not in sent:
                sent.add((id(parameter), None))
                yield AdaptedWeight(kept, parameter)
    lost = [prefix for prefix, layer in layers.items() if _adapters(prefix, layer) and prefix not in used]
    if lost:
        raise _refuse(lost[0], "has no base weight beside it")


def _plain_name(name: str) -> str:
    """Return a tensor's name in the plain model, whatever wraps the adapter library's module and whatever that wraps."""
    outer, library, inner = plain_name(name).partition(PEFT_PREFIX)
    return plain_name(inner) if library and outer in ("", "model.") else outer + library + inner


def _kept_name(name: str, prefix: str, module: Any, plain: str) -> str | None:
    """Return the plain name of a parameter in a module that is trained as a whole, None for the copies that do not count."""
    rest = name.removeprefix(f"{prefix}.")
    active = _active(module) if hasattr(module, "active_adapters") or hasattr(module, "active_adapter") else list(getattr(module, _SAVED))
    if getattr(module, "disable_adapters", False) is True:
        return plain.replace("original_module.", "") if rest.startswith("original_module.") else None
    for adapter in active:
        start = f"{_SAVED}.{adapter}."
        if rest.startswith(start):
            return plain.replace(start, "")
    return None
