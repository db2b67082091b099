"""The seam by which the engine speaks to its other ranks: `Alone` where there are none, `Peers` where there are.

`start_ranks` decides which. The engine tells every operation before it carries it out itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from areno.config import MAX_RUN_AHEAD, EngineConfig, ResolvedConfig
from areno.errors import InvalidConfig
from areno.parallel import TPGroup
from areno.ranks import operations as ops
from areno.ranks.peers import Peers, PeersPlan
from areno.weights.names import TensorSpec

STALLS = 10
"""A rank may stay at one entry of the log for this many times `rank_timeout_s`."""


class Ranks(Protocol):
    """What the engine needs of its other ranks; see `Peers` for what each method means."""

    @property
    def size(self) -> int: ...
    @property
    def lost_fd(self) -> int | None: ...
    @property
    def waited_s(self) -> float: ...
    def meet(self) -> TPGroup: ...
    def bound_launches(self, ahead: int) -> None: ...
    def tell(self, entry: ops.Entry) -> int: ...
    def catch_up(self) -> None: ...
    def executed(self, number: int) -> bool: ...
    def wait_for_entry(self, number: int) -> None: ...
    def expect(self, number: int) -> None: ...
    def together(self) -> contextlib.AbstractContextManager[None]: ...
    def stage(self, name: str, tensor: torch.Tensor, *, start: int, shape: tuple[int, ...], whole: bool) -> None: ...
    def begin_check(self, state_of: Callable[[], np.ndarray]) -> None: ...
    def compare(self, *, wait: bool = False) -> None: ...
    def check(self) -> None: ...
    def close(self, leave: Callable[[], None] | None = None) -> None: ...


class Alone:
    """An engine of one rank: nobody is told anything."""

    size = 1
    lost_fd = None
    waited_s = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def meet(self) -> TPGroup:
        """Return the group of one."""
        return TPGroup.single(self._device)

    def bound_launches(self, ahead: int) -> None:
        """Nobody is behind."""

    def tell(self, entry: ops.Entry) -> int:
        """Return 0."""
        return 0

    def catch_up(self) -> None:
        """Nobody is behind."""

    def executed(self, number: int) -> bool:
        """Nobody is behind."""
        return True

    def wait_for_entry(self, number: int) -> None:
        """Nobody is behind."""

    def expect(self, number: int) -> None:
        """Nobody answers."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def stage(self, name: str, tensor: torch.Tensor, *, start: int, shape: tuple[int, ...], whole: bool) -> None:
        """Nobody needs it."""

    def begin_check(self, state_of: Callable[[], np.ndarray]) -> None:
        """There is nothing to compare with."""

    def compare(self, *, wait: bool = False) -> None:
        """There is nothing to compare with."""

    def check(self) -> None:
        """Nobody can be lost."""

    def close(self, leave: Callable[[], None] | None = None) -> None:
        """Nothing to end."""


def rank_devices(device: torch.device, tp: int) -> tuple[str, ...]:
    """Return one device's name per rank. Raises: InvalidConfig where there are fewer devices than ranks."""
    if device.type == "cpu":
        return ("cpu",) * tp
    first, count = device.index or 0, torch.cuda.device_count()
    if first + tp > count:
        there = f"{count} CUDA devices are there" + (f", {count - first} of them from {device} on" if first else "")
        raise InvalidConfig(
            f"tp={tp} needs as many devices",
            field="tp",
            value=tp,
            limit=there,
            remedy=f"use tp={max(count - first, 1)} or less" + (", or a device with a lower number" if first else ""),
        )
    return tuple(f"cuda:{first + rank}" for rank in range(tp))


def start_ranks(config: EngineConfig, device: torch.device, *, dedicated: bool) -> Ranks:
    """Start the other ranks that `tp` asks for; they get ready by themselves until `meet`. Raises: InvalidConfig."""
    if config.tp == 1:
        return Alone(device)
    plan = PeersPlan(
        model=Path(config.model).absolute(),
        devices=rank_devices(device, config.tp),
        backend="gloo" if device.type == "cpu" else "nccl",
        launches_ahead=MAX_RUN_AHEAD + 1,
        rank_timeout_s=config.rank_timeout_s,
        stall_s=STALLS * config.rank_timeout_s,
        # A process of its own has set its part of the threads; any other one has all of them.
        threads=torch.get_num_threads() if dedicated else max(1, torch.get_num_threads() // config.tp),
        dedicated=dedicated,
        broadcasts=device.type == "cuda",
    )
    return Peers(plan)


def build_entry(config: EngineConfig, resolved: ResolvedConfig) -> ops.Build:
    """Return the entry by which the other ranks are built."""
    options = dataclasses.asdict(dataclasses.replace(config, seed=resolved.seed))
    return ops.Build(config=json.dumps(options), resolved=json.dumps(dataclasses.asdict(resolved)))


def open_entry(manifest: Mapping[str, TensorSpec] | None, *, version: int, partial: bool) -> ops.OpenUpdate:
    """Return the entry that opens an update."""
    text = "" if manifest is None else json.dumps({name: [spec.dtype, list(spec.shape)] for name, spec in manifest.items()})
    return ops.OpenUpdate(manifest=text, version=version, partial=partial)


def verify_entry(digests: Mapping[str, int] | None) -> ops.VerifyUpdate:
    """Return the entry that proves what is staged."""
    return ops.VerifyUpdate(digests="" if digests is None else json.dumps(dict(digests)))
