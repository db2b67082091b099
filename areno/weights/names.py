"""The parameter table: one owner of a model's weights, in the layout it runs on and under the names it is known by.

Models allocate through it; loading, updates and digests go through its views. Live storage is fused (q, k and v rows
in one tensor, gate and up rows in another) and keeps its addresses for the life of the model; every Hugging Face name
is a contiguous view of some of its rows. New storage is filled with NaN, so that a weight nobody loaded shows in the
first logits.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_SHOWN_NAMES = 20
SOURCE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a manifest is: its dtype by torch's name ("float32", "bfloat16", "float16") and its shape."""

    dtype: str
    shape: tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's own name of `dtype` without the package."""
    return str(dtype).removeprefix("torch.")


def canonical_name(name: str) -> str:
    """Return the name a Hugging Face checkpoint gives to the tensor that a wrapped trainer model calls `name`.

    Wrapper parts (module, _orig_mod and the like) go wherever they stand; a missing "model." is added, a doubled one
    removed; the head is "lm_head.*" whatever stood before it.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts and parts[0] == "model":
        parts.pop(0)
    if parts and parts[0] == "lm_head":
        return ".".join(parts)
    return ".".join(["model", *parts])


def list_names(names: Iterable[str]) -> str:
    """Return names for a message: sorted, the first twenty spelled out, the rest counted."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_SHOWN_NAMES])
    return shown if len(ordered) <= _SHOWN_NAMES else f"{shown} and {len(ordered) - _SHOWN_NAMES} more"


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint for a message about an unknown name: the closest known one, or a few of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names[:3])}, ... ({len(names)} in all)"


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite, in one pass and without a mask in memory."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


class ParameterTable:
    """A model's tensors: `live` by storage name, `views` by Hugging Face name, hooks that rebuild what derives from them.

    Several threads may read; only loading and updates write, between forwards.
    """

    __slots__ = ("_addresses", "_derived", "_parts", "_twin", "device", "dtype", "live", "tied", "views")

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self.live: dict[str, torch.Tensor] = {}
        self.views: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        self._derived: dict[str, Callable[[], None]] = {}
        self._addresses: dict[str, int] = {}
        self._parts: dict[str, dict[str, int]] = {}
        self._twin: ParameterTable | None = None

    def allocate(self, name: str, shape: tuple[int, ...], parts: Mapping[str, int] | None = None) -> torch.Tensor:
        """Return new live storage `name`; `parts` maps Hugging Face names to their counts of rows, in order.

        Without parts the storage is one tensor under its own name. Mutates: the table.
        """
        parts = dict(parts or {name: shape[0]})
        assert name not in self.live and not self.views.keys() & parts.keys(), f"{name} or a part of it is allocated twice"
        assert sum(parts.values()) == shape[0], f"the parts of {name} have {sum(parts.values())} rows, the storage has {shape[0]}"
        # A tensor made in inference mode could not be written outside of it; updates come in either mode.
        with torch.inference_mode(False):
            storage = torch.full(shape, math.nan, dtype=self.dtype, device=self.device)
            bounds = list(itertools.accumulate(parts.values(), initial=0))
            self.views.update({part: storage[start:end] for part, start, end in zip(parts, bounds, bounds[1:])})
        self.live[name] = storage
        self._addresses[name] = storage.data_ptr()
        self._parts[name] = parts
        return storage

    def tie(self, name: str, target: str) -> None:
        """Declare that `name` is another name of `target`: never stored, accepted where it is equal."""
        assert target in self.views, f"{name} is tied to {target}, which is not allocated"
        self.tied[name] = target

    def staging(self) -> ParameterTable:
        """Return storage of the same layout for weights that wait for their swap; made at first use, then kept."""
        if self._twin is None:
            twin = ParameterTable(self.dtype, self.device)
            for name, storage in self.live.items():
                twin.allocate(name, tuple(storage.shape), self._parts[name])
            self._twin = twin
        return self._twin

    def release_staging(self) -> None:
        """Give the staging storage back; the next update makes it again."""
        self._twin = None

    def register_derived(self, name: str, rebuild: Callable[[], None]) -> None:
        """Register a hook that recomputes, in place, a tensor that is a function of the weights."""
        assert name not in self._derived, f"derived tensor {name} is registered twice"
        self._derived[name] = rebuild

    def rebuild_derived(self) -> None:
        """Recompute every derived tensor; call it after the weights changed and before the next forward."""
        for rebuild in self._derived.values():
            rebuild()

    def manifest(self) -> dict[str, TensorSpec]:
        """Return the tensors that a full update must bring; tied names are not among them."""
        return {name: TensorSpec(dtype_name(view.dtype), tuple(view.shape)) for name, view in self.views.items()}

    @property
    def num_parameters(self) -> int:
        return sum(view.numel() for view in self.views.values())

    def check_integrity(self) -> None:
        """Prove that storage kept its addresses and that the views cover it exactly. Raises: AssertionError."""
        for name, storage in self.live.items():
            assert storage.data_ptr() == self._addresses[name], f"live storage {name} moved"
            assert storage.is_contiguous(), f"live storage {name} is not contiguous"
        if self._twin is not None:
            self._twin.check_integrity()
        covered = sum(view.numel() for view in self.views.values())
        stored = sum(storage.numel() for storage in self.live.values())
        assert covered == stored, f"views cover {covered} elements of {stored}"
        for name, view in self.views.items():
            assert view.is_contiguous(), f"view {name} is not contiguous"
