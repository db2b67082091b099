"""A trainer's model as a list of tensors that are made whole one at a time.

`push.WeightPush` reads it in order: shapes first, for the manifest, then tensor by tensor. A sharded tensor (FSDP2's DTensor)
is gathered when its turn comes, on every rank and in the same order, and freed before the next; an adapter is merged into its
base in the same way. Invariant: at most one tensor is whole at a time beyond what the trainer itself holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trainer_bridge.errors import InvalidOption
from trainer_bridge.weights.lora import AdaptedWeight, adapted_weights, has_adapters
from trainer_bridge.weights.names import DTYPE_NAMES, HEAD, plain_name


@dataclass(frozen=True, slots=True, eq=False)
class WeightSource:
    """One tensor to push: its name in the trainer's model, its whole shape, and how to make it. `load` may be a collective."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its shards. Blocks: on a sharded one, until every rank of its mesh takes part."""
    gather = getattr(tensor, "full_tensor", None)
    with torch.no_grad():
        return tensor.detach() if gather is None else gather().detach()


def _source(name: str, tensor: torch.Tensor) -> WeightSource:
    return WeightSource(name, tuple(tensor.shape), lambda: whole(tensor))


def _adapted(weight: AdaptedWeight) -> WeightSource:
    return WeightSource(weight.name, tuple(weight.base.shape), lambda: weight.merged(whole))


def model_sources(model: torch.nn.Module) -> list[WeightSource]:
    """Return the sources of a model's weights, adapters merged into their bases. Raises: UnpushableTensor."""
    if not has_adapters(model):
        return [_source(name, parameter) for name, parameter in model.named_parameters()]
    return [_adapted(weight) for weight in adapted_weights(model)]


def named_sources(named: Sequence[tuple[str, torch.Tensor]]) -> list[WeightSource]:
    """Return the sources of given pairs."""
    return [_source(name, tensor) if isinstance(tensor, torch.Tensor) else _foreign(name, tensor) for name, tensor in named]


def _foreign(name: str, value: object) -> WeightSource:
    """Return a source of what is no tensor; the check of tensors names it."""
    return WeightSource(name, (), lambda: value)  # type: ignore[arg-type,return-value]


def loaded(sources: Iterable[WeightSource] | Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor), one after the other."""
    for source in sources:
        if isinstance(source, WeightSource):
            yield source.name, source.load()
        else:
            name, tensor = source
            yield name, whole(tensor) if isinstance(tensor, torch.Tensor) else tensor


Sources = Iterable[WeightSource] | Iterable[tuple[str, torch.Tensor]]


def sources_of(named: Iterable[tuple[str, torch.Tensor]] | None, model: torch.nn.Module | None) -> tuple[Sources, bool]:
    """Return what to push, by default the model's own weights, and whether all shapes are known before a tensor is read.

    An iterator is read once and says nothing beforehand. Raises: InvalidOption with neither, UnpushableTensor.
    """
    if named is None:
        if model is None:
            raise InvalidOption(
                "push() has nothing to send",
                field="named_parameters",
                value=None,
                limit="this WeightPush was made without a model",
                remedy="WeightPush(client, model), or push(model.named_parameters())",
            )
        return model_sources(model), True
    return (named_sources(named), True) if isinstance(named, Sequence) else (named, False)


def manifest_of(sources: Iterable[WeightSource], *, dtype: torch.dtype, head_is_tied: bool) -> dict[str, dict[str, object]]:
    """Return name -> dtype and shape of every tensor that will be sent."""
    served = {plain_name(source.name): source.shape for source in sources}
    return {
        name: {"dtype": DTYPE_NAMES[dtype], "shape": list(shape)} for name, shape in served.items() if not (head_is_tied and name == HEAD)
    }
