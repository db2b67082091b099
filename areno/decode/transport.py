"""How words cross between the host and launches: memory on both sides, copies in the launches' order, events.

    host    launches run on the host and write where it reads
    mapped  launches on a CUDA device read and write pinned host memory; nothing is copied
    copy    launches read and write memory of the device; one bounded asynchronous copy each way beside a launch

The rank chooses one at start-up (`choose_transport`) for the result ring and the delta ring, which know no device.
"""

from __future__ import annotations

from typing import Protocol

import torch

from areno.errors import InvalidConfig


class LaunchEvent(Protocol):
    """A mark in the device's queue."""

    def record(self) -> None:
        """Set the mark behind everything launched so far."""

    def query(self) -> bool:
        """Whether the device has passed the mark."""

    def synchronize(self) -> None:
        """Wait for it. Blocks."""


class Transport(Protocol):
    """Memory and events for what crosses; `kind` and `reason` say which way and why."""

    @property
    def kind(self) -> str: ...

    @property
    def reason(self) -> str: ...

    def host_zeros(self, *shape: int) -> torch.Tensor:
        """Return zeroed int32 memory that the host reads and writes."""

    def launch_side(self, host: torch.Tensor) -> torch.Tensor:
        """Return what launches address in place of `host`: the same memory, or zeroed memory of their own in its shape."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous words behind everything launched so far, without waiting. Mutates: `target`."""

    def event(self) -> LaunchEvent | None:
        """Return a fresh event; None where a launch has passed when its call returns."""


class HostTransport:
    """The way of the CPU."""

    kind = "host"
    reason = "the engine runs on the CPU"

    def host_zeros(self, *shape: int) -> torch.Tensor:
        """Return zeroed int32 memory."""
        return torch.zeros(shape, dtype=torch.int32)

    def launch_side(self, host: torch.Tensor) -> torch.Tensor:
        """Return `host`."""
        return host

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def event(self) -> LaunchEvent | None:
        """Return None."""
        return None


class CudaTransport:
    """The ways of a CUDA device, on its current stream."""

    __slots__ = ("_device", "_mapped", "reason")

    def __init__(self, device: torch.device, *, mapped: bool, reason: str) -> None:
        self._device, self._mapped, self.reason = device, mapped, reason

    @property
    def kind(self) -> str:
        """mapped or copy."""
        return "mapped" if self._mapped else "copy"

    def host_zeros(self, *shape: int) -> torch.Tensor:
        """Return zeroed pinned int32 memory."""
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    def launch_side(self, host: torch.Tensor) -> torch.Tensor:
        """Return `host` where it is mapped, otherwise memory of the device."""
        return host if self._mapped else torch.zeros(host.shape, dtype=host.dtype, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in stream order."""
        # A strided copy would go through memory of its own, and the host would read before it arrived.
        assert target.is_contiguous() and source.is_contiguous(), "copies between host and device are of contiguous words"
        target.copy_(source, non_blocking=True)

    def event(self) -> LaunchEvent:
        """Return an event of the device."""
        return torch.cuda.Event()


def choose_transport(wanted: str, device: torch.device) -> Transport:
    """Return the way that `result_transport` means on this device; "auto" and "mapped" probe it.

    Blocks: for the probe. Raises: InvalidConfig where the wanted way is not there, EngineFailure where the probe broke the device.
    """
    if device.type == "cpu":
        if wanted == "auto":
            return HostTransport()
        raise InvalidConfig(
            f"result_transport={wanted!r} needs a CUDA device",
            field="result_transport",
            value=wanted,
            limit="the engine runs on the CPU, where results cross nothing",
            remedy="leave result_transport at 'auto', or use device='cuda'",
        )
    if wanted == "copy":
        return CudaTransport(device, mapped=False, reason="result_transport='copy' asks for it")
    from areno.decode.mapped import CudaProbe, probe_mapped

    found = probe_mapped(CudaProbe(device))
    if wanted == "mapped" and not found.works:
        raise InvalidConfig(
            f"result_transport='mapped' does not work on {device}",
            field="result_transport",
            value=wanted,
            limit=found.reason,
            remedy="use result_transport='auto' or 'copy'",
        )
    return CudaTransport(device, mapped=found.works, reason=found.reason)
