"""A trainer's model as a list of tensors that are made whole one at a time.

`push.WeightPush` reads it in order: shapes first, for the manifest, then tensor by tensor. A sharded tensor (FSDP2's DTensor)
is gathered when its turn comes, on every rank and in the same order, and freed before the next; an adapter is merged into its
base in the same way. Invariant: at most one tensor is whole at a time beyond what the trainer itself holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer_bridge.errors import InvalidOption
from trainer_bridge.weights.lora import AdaptedWeight, adapted_weights, has_adapters
from trainer_bridge.weights.names import DTYPE_NAMES, check_tensor, plain_name


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


def reshard(model: torch.nn.Module) -> None:
    """Let sharded modules (FSDP2) give up what they gathered for a forward: it is as old as that, and the optimizer writes the shards."""
    for module in model.modules():
        give_up = getattr(module, "reshard", None)
        if callable(give_up) and callable(getattr(module, "unshard", None)):
            give_up()


def _source(name: str, tensor: torch.Tensor) -> WeightSource:
    return WeightSource(name, tuple(tensor.shape), lambda: whole(tensor))


def _adapted(weight: AdaptedWeight) -> WeightSource:
    return WeightSource(weight.name, tuple(weight.base.shape), lambda: weight.merged(whole))


def model_sources(model: torch.nn.Module) -> list[WeightSource]:
    """Return the sources of a model's weights, adapters merged into their bases. Mutates: gathered shards go. Raises: UnpushableTensor."""
    reshard(model)
    if not has_adapters(model):
        return [_source(name, parameter) for name, parameter in model.named_parameters()]
    return [_adapted(weight) for weight in adapted_weights(model)]


def named_sources(named: Iterable[tuple[str, torch.Tensor]]) -> list[WeightSource]:
    """Return the sources of given pairs. Raises: InvalidOption, UnpushableTensor."""
    return [_source(name, check_tensor(plain_name(name), tensor)) for name, tensor in map(_pair, named)]


def _refuse_named(what: str, value: object, remedy: str) -> InvalidOption:
    return InvalidOption(
        what, field="named_parameters", value=value, limit="an iterable of (name, tensor) pairs, the name a str", remedy=remedy
    )


def _pair(item: object) -> tuple[str, torch.Tensor]:
    """Return one of the given pairs. Raises: InvalidOption."""
    if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str):
        return item[0], item[1]
    told = f"a pair that begins with a {type(item[0]).__name__}" if isinstance(item, (tuple, list)) and len(item) == 2 else None
    what = f"named_parameters holds {told or f'a {type(item).__name__}'}"
    raise _refuse_named(what, type(item).__name__, "pass model.named_parameters(), or pairs like those")


def _check_named(named: object) -> None:
    """Refuse what does not hold pairs at all. Raises: InvalidOption."""
    kind = type(named).__name__
    if isinstance(named, Mapping):
        raise _refuse_named(f"named_parameters is a {kind}", kind, "pass its items()")
    if isinstance(named, torch.nn.Module):
        raise _refuse_named(
            f"named_parameters is a {kind}", kind, "pass its named_parameters(), or make WeightPush(client, model) and push()"
        )
    if isinstance(named, (str, bytes, torch.Tensor)) or not isinstance(named, Iterable):
        raise _refuse_named(f"named_parameters is a {kind}", kind, "pass model.named_parameters(), or pairs like those")


Sources = Iterable[WeightSource] | Iterable[tuple[str, torch.Tensor]]


class Loaded(Iterator[tuple[str, torch.Tensor]]):
    """(name, whole tensor), one after the other. One that cannot be made raises, and those behind it come all the same."""

    def __init__(self, sources: Sources) -> None:
        self._sources: Iterator[WeightSource | tuple[str, torch.Tensor]] = iter(sources)
        self._over = False

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._over:
            raise StopIteration
        try:
            source = next(self._sources)
        except BaseException:
            self._over = True
            raise
        if isinstance(source, WeightSource):
            return source.name, source.load()
        name, tensor = _pair(source)
        return name, whole(tensor) if isinstance(tensor, torch.Tensor) else tensor

    def go_through(self) -> None:
        """Make all that is left and drop it, for the ranks that wait for this one's part. Raises: the first error, at the end."""
        first: BaseException | None = None
        while not self._over:
            try:
                next(self)
            except StopIteration:
                break
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first


def sources_of(named: Iterable[tuple[str, torch.Tensor]] | None, model: torch.nn.Module | None) -> tuple[Sources, bool]:
    """Return what to push, by default the model's own weights, and whether all shapes are known before a tensor is read.

    An iterator is read once and says nothing beforehand. Raises: InvalidOption with neither and for what holds no pairs, UnpushableTensor.
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
    _check_named(named)
    return (named_sources(named), True) if isinstance(named, Sequence) else (named, False)


def manifest_of(sources: Iterable[WeightSource], *, dtype: torch.dtype) -> dict[str, dict[str, object]]:
    """Return name -> dtype and shape of every tensor that will be sent."""
    return {plain_name(source.name): {"dtype": DTYPE_NAMES[dtype], "shape": list(source.shape)} for source in sources}
