"""The parameter table: one owner of a model's weights, in the layout it runs on and under the names it is known by.

Models allocate through it; loading, updates and digests go through its views. Live storage is fused (q, k and v rows
in one tensor, gate and up rows in another) and keeps its addresses for the life of the model; every Hugging Face name
is a contiguous view of some of its rows. New storage is filled with NaN, so that a weight nobody loaded shows in the
first logits.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from areno.weights.derived import DerivedCopy, Make
from areno.weights.shards import TensorShard
from areno.whole_segments import full_segment, take_again

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_SHOWN_NAMES = 20
_PART_BYTES = 16 << 20
STAGING_SLACK_BYTES = 1 << 29
"""Memory of a device that staged weights leave free for captures and the library's workspaces."""
SOURCE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a manifest is: its dtype by torch's name ("float32", "bfloat16", "float16") and its shape."""

    dtype: str
    shape: tuple[int, ...]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's own name of `dtype` without the package."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=8192)
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


class HostCopy:
    """The bits of tensors while their own memory is given back: in pinned memory, or in a file without a name."""

    __slots__ = ("__weakref__", "_file", "_kept")

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, pinned: bool):
        self._kept: dict[str, torch.Tensor] = {}
        self._file = None if pinned else tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        if self._file is not None:
            weakref.finalize(self, self._file.close)
        for name, tensor in tensors.items():
            if pinned:
                self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
            elif self._file is not None:
                for part in _parts(tensor):
                    # A copy: memory that numpy has seen cannot be given back.
                    self._file.write(part.clone().numpy().data)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the bits into tensors of the same names and shapes. Mutates: all of them."""
        if self._file is not None:
            self._file.seek(0)
        for name, tensor in tensors.items():
            if self._file is None:
                tensor.copy_(self._kept[name])
                continue
            for part in _parts(tensor):
                content = self._file.read(part.numel())
                assert len(content) == part.numel(), f"the copy of {name} ends early"
                part.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of a tensor's bytes in order, of bounded size."""
    return tensor.reshape(-1).view(torch.uint8).split(_PART_BYTES)


class ParameterTable:
    """A model's tensors: `live` by storage name, `views` by Hugging Face name, hooks that rebuild what derives from them.

    Of a model that is cut into ranks it holds one rank's part: storage and views are the parts, `shards` says by name which part of
    the whole tensor each one is (empty where all is whole); names, shapes and counts told to others are of whole tensors.
    `stages_on` says where staged weights lie: "device", "host", or "auto". Several threads may read; only loading and updates
    write, between forwards.
    """

    __slots__ = (
        "_addresses",
        "_copies",
        "_derived",
        "_parts",
        "_pinned",
        "_storages",
        "_twin",
        "device",
        "dtype",
        "live",
        "shards",
        "stages_on",
        "tied",
        "views",
    )

    def __init__(self, dtype: torch.dtype, device: torch.device, *, pinned: bool = False):
        self._pinned = pinned
        self.stages_on = "auto"
        self.dtype = dtype
        self.device = device
        self.live: dict[str, torch.Tensor] = {}
        self.views: dict[str, torch.Tensor] = {}
        self.shards: dict[str, TensorShard] = {}
        self.tied: dict[str, str] = {}
        self._derived: dict[str, Callable[[], None]] = {}
        # By the name of the storage that they are made of.
        self._copies: dict[str, list[DerivedCopy]] = {}
        self._addresses: dict[str, int] = {}
        self._parts: dict[str, dict[str, int]] = {}
        self._storages: dict[str, str] = {}
        self._twin: ParameterTable | None = None

    def allocate(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: Mapping[str, int] | None = None,
        shards: Mapping[str, TensorShard] | None = None,
    ) -> torch.Tensor:
        """Return new live storage `name`; `parts` maps Hugging Face names to their counts of rows, in order.

        Without parts the storage is one tensor under its own name. `shards` says of each part what it is of a whole tensor.
        Mutates: the table.
        """
        parts = dict(parts or {name: shape[0]})
        assert name not in self.live and not self.views.keys() & parts.keys(), f"{name} or a part of it is allocated twice"
        assert sum(parts.values()) == shape[0], f"the parts of {name} have {sum(parts.values())} rows, the storage has {shape[0]}"
        # A tensor made in inference mode could not be written outside of it; updates come in either mode.
        with torch.inference_mode(False):
            storage = full_segment(shape, math.nan, dtype=self.dtype, device=self.device, pin_memory=self._pinned)
            bounds = list(itertools.accumulate(parts.values(), initial=0))
            self.views.update({part: storage[start:end] for part, start, end in zip(parts, bounds, bounds[1:])})
        self.shards.update(shards or {})
        self.live[name] = storage
        self._addresses[name] = storage.data_ptr()
        self._parts[name] = parts
        self._storages.update(dict.fromkeys(parts, name))
        return storage

    def tie(self, name: str, target: str) -> None:
        """Declare that `name` is another name of `target`: never stored, accepted where it is equal."""
        assert target in self.views, f"{name} is tied to {target}, which is not allocated"
        self.tied[name] = target

    def staging(self) -> ParameterTable:
        """Return storage of the same layout for weights that wait for their swap; made at first use, then kept.

        It lies in the device's memory where that has room (`stages_on` "auto", or "device"), else in pinned memory of the host.
        """
        if self._twin is None:
            on_device = self._stages_on_device()
            twin = ParameterTable(self.dtype, self.device if on_device else torch.device("cpu"), pinned=not on_device)
            for name, storage in self.live.items():
                twin.allocate(name, tuple(storage.shape), self._parts[name])
            self._twin = twin
        return self._twin

    def _stages_on_device(self) -> bool:
        if self.device.type == "cpu" or self.stages_on == "device":
            return True
        if self.stages_on == "host":
            return False
        return torch.cuda.mem_get_info(self.device)[0] >= self.num_bytes + STAGING_SLACK_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of the live storage."""
        return sum(storage.nbytes for storage in self.live.values())

    def release_staging(self) -> None:
        """Give the staging storage back; the next update makes it again."""
        self._twin = None

    def move_out(self) -> HostCopy:
        """Move the live weights to the host and give their memory back; nothing may run until `move_in`.

        From a CUDA device they go to pinned memory, on the CPU to a file without a name. What derives from them stays.
        Mutates: live and staging storage.
        """
        self._twin = None
        with torch.inference_mode(False):
            kept = HostCopy(self.live, pinned=self.device.type == "cuda")
            for storage in self.live.values():
                storage.untyped_storage().resize_(0)
        return kept

    def move_in(self, kept: HostCopy) -> None:
        """Take memory for the weights again and fill it; its addresses may be others, which captures do not follow."""
        with torch.inference_mode(False):
            try:
                for storage in self.live.values():
                    take_again(storage)
            except BaseException:
                # All or nothing: what was taken is somebody else's until there is enough.
                for storage in self.live.values():
                    storage.untyped_storage().resize_(0)
                raise
            kept.fill(self.live)
        self._addresses = {name: storage.data_ptr() for name, storage in self.live.items()}

    def register_derived(self, name: str, rebuild: Callable[[], None]) -> None:
        """Register a hook that recomputes, in place, a tensor that is a function of the weights."""
        assert name not in self._derived, f"derived tensor {name} is registered twice"
        self._derived[name] = rebuild

    def derive(self, storage: torch.Tensor, make: Make) -> DerivedCopy:
        """Return a copy of live `storage` that is made anew whenever derived tensors are rebuilt."""
        [name] = [name for name, live in self.live.items() if live is storage]
        copy = DerivedCopy(storage, make)
        self._copies.setdefault(name, []).append(copy)
        return copy

    def rebuild_derived(self) -> None:
        """Recompute every derived tensor; call it after the weights changed and before the next forward."""
        for copy in itertools.chain.from_iterable(self._copies.values()):
            copy.rebuild()
        self.rebuild_small()

    def storage_of(self, name: str) -> str:
        """Return the storage that a tensor lies in."""
        return self._storages[name]

    def parts_of(self, storage: str) -> Set[str]:
        """Return the tensors that lie in a storage."""
        return self._parts[storage].keys()

    def copies_of(self, storage: str) -> Sequence[DerivedCopy]:
        """Return the derived copies of a storage."""
        return self._copies.get(storage, ())

    def rebuild_small(self) -> None:
        """Recompute what derives from the weights by hooks and is no copy of a storage."""
        for rebuild in self._derived.values():
            rebuild()

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor `name`, of which a rank may hold a part."""
        return self.shards[name].shape if name in self.shards else tuple(self.views[name].shape)

    def manifest(self) -> dict[str, TensorSpec]:
        """Return the tensors that a full update must bring; tied names are not among them."""
        return {name: TensorSpec(dtype_name(view.dtype), self.shape_of(name)) for name, view in self.views.items()}

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors of the model, whole."""
        return sum(math.prod(self.shape_of(name)) for name in self.views)

    @property
    def num_local_parameters(self) -> int:
        """Elements that are here."""
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
