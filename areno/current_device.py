"""The device that is current while an engine works: kernels, events and streams belong to the current one unless they are told.

An engine may run on any device, in a process whose current one is another's. Every method of the engine that reaches its device runs
below `on_device`; what it calls need not ask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch


class OnDevice(Protocol):
    """What has a device of its own."""

    @property
    def device(self) -> torch.device: ...


S = TypeVar("S", bound=OnDevice)
P = ParamSpec("P")
T = TypeVar("T")


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a CUDA device is the current one; on the CPU it does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_device(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let a method run with its object's device as the current one."""

    @functools.wraps(method)
    def guarded(self: S, *args: P.args, **options: P.kwargs) -> T:
        if self.device.type != "cuda":
            return method(self, *args, **options)
        with torch.cuda.device(self.device):
            return method(self, *args, **options)

    return guarded
