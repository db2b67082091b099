"""A device that works off its queue only when told: launches, copies and events pass late and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

POISON = -77


class LateEvent:
    """A mark in the queue; `waits` counts the times that somebody waited for it in vain before."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._recorded = self._passed = 0
        self.waits = 0

    def record(self) -> None:
        """Set the mark."""
        self._recorded += 1
        number = self._recorded
        self._device.queue.append(lambda: setattr(self, "_passed", number))

    def query(self) -> bool:
        """Whether the mark has passed."""
        return self._passed == self._recorded

    def synchronize(self) -> None:
        """Run the queue as far as the mark."""
        self.waits += not self.query()
        while not self.query():
            self._device.run(1)


class LateDevice:
    """A transport whose launches write poisoned memory of their own, or the host's with `mapped`."""

    def __init__(self, *, mapped: bool = False) -> None:
        self.kind, self.reason, self._mapped = ("mapped" if mapped else "copy"), "a test", mapped
        self.queue: deque[Callable[[], object]] = deque()
        self.events: list[LateEvent] = []
        self.copied: list[int] = []

    def host_zeros(self, *shape: int) -> torch.Tensor:
        """Return host memory."""
        return torch.zeros(shape, dtype=torch.int32)

    def launch_side(self, host: torch.Tensor) -> torch.Tensor:
        """Return the device's memory."""
        return host if self._mapped else torch.full_like(host, POISON)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""
        assert target.is_contiguous() and source.is_contiguous()
        self.copied.append(target.numel())
        self.queue.append(lambda: target.copy_(source))

    def event(self) -> LateEvent:
        """Return an event."""
        self.events.append(LateEvent(self))
        return self.events[-1]

    def run(self, count: int | None = None) -> None:
        """Work off the queue, or its next entries."""
        for _ in range(len(self.queue) if count is None else count):
            self.queue.popleft()()


class PromptDevice(LateDevice):
    """A late device whose launches and copies happen at once, while its events still pass late."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        self.copied.append(target.numel())
        target.copy_(source)
