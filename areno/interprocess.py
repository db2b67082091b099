"""Device memory and events that processes share, by interprocess handles of the CUDA driver (package cuda-bindings).

A rank reads a trainer's weights, or another rank's memory, where they are. What is imported is opened once and closed with all else
that was. Invariant: nothing is dereferenced on the host, and the size of an allocation is what the driver itself says.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, ClassVar, NamedTuple

import torch

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class DriverFailure(RuntimeError):
    """A call of the driver that failed, or a driver that cannot be called."""


class ImportedMemory(NamedTuple):
    """An allocation of another process: where it is here, how many bytes the driver says it has, and these as a uint8 tensor."""

    address: int
    size: int
    memory: torch.Tensor


class ExportedMemory(NamedTuple):
    """The allocation that a tensor of this process lies in: where it is, these bytes as a uint8 tensor, and its handle for others.

    The tensor itself is to be kept alive.
    """

    address: int
    memory: torch.Tensor
    handle: bytes


class _Bytes:
    """Device memory as torch takes it in."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Driver:
    """Calls of the CUDA driver. Raises: DriverFailure without cuda-bindings."""

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DriverFailure(f"the package cuda-bindings cannot be imported: {error}") from None

    def call(self, name: str, *arguments: Any) -> Any:
        """Return a call's one value, or a list of them. Raises: DriverFailure."""
        status, *values = getattr(self.api, name)(*arguments)
        if int(status) != 0:
            raise DriverFailure(f"{name} failed: {status!r}")
        return values[0] if len(values) == 1 else values

    def allocation(self, address: int) -> tuple[int, int]:
        """Return base and size of the allocation that an address lies in. Raises: DriverFailure."""
        base, size = self.call("cuMemGetAddressRange", self.api.CUdeviceptr(address))
        return int(base), int(size)


def export_memory(tensor: torch.Tensor) -> ExportedMemory:
    """Return the allocation of a CUDA tensor, for other processes to open. Raises: DriverFailure where they cannot."""
    driver = _Driver()
    with torch.cuda.device(tensor.device):
        base, size = driver.allocation(tensor.data_ptr())
        handle = bytes(driver.call("cuIpcGetMemHandle", driver.api.CUdeviceptr(base)).reserved)[:HANDLE_BYTES]
        return ExportedMemory(base, torch.as_tensor(_Bytes(base, size), device=tensor.device), handle)


class DeviceImports:
    """What was opened by handle, for work on `device`. Raises: DriverFailure without cuda-bindings."""

    _closing: ClassVar[threading.Thread | None] = None

    def __init__(self, device: torch.device) -> None:
        self._driver = _Driver()
        if DeviceImports._closing is not None:
            # The same memory is opened again only once it is closed.
            DeviceImports._closing.join()
        self._device = device
        self._memory: dict[bytes, ImportedMemory] = {}
        self._events: dict[bytes, Any] = {}

    def memory(self, handle: bytes) -> ImportedMemory:
        """Return an allocation. Raises: DriverFailure."""
        known = self._memory.get(handle)
        if known is None:
            raw = self._driver.api.CUipcMemHandle()
            raw.reserved = handle
            with torch.cuda.device(self._device):
                address = int(self._driver.call("cuIpcOpenMemHandle", raw, _LAZY_PEER_ACCESS))
                _, size = self._driver.allocation(address)
                known = ImportedMemory(address, size, torch.as_tensor(_Bytes(address, size), device=self._device))
            self._memory[handle] = known
        return known

    def passed(self, handle: bytes) -> bool:
        """Tell whether another process's event has passed: what it launched before is complete. Raises: DriverFailure."""
        event = self._events.get(handle)
        if event is None:
            raw = self._driver.api.CUipcEventHandle()
            raw.reserved = handle
            event = self._events[handle] = self._driver.call("cuIpcOpenEventHandle", raw)
        status = self._driver.api.cuEventQuery(event)[0]
        if status == self._driver.api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(status) != 0:
            raise DriverFailure(f"cuEventQuery failed: {status!r}")
        return True

    def close(self) -> None:
        """Close everything on a thread of its own, for it takes as long as a decode step. Nothing may still be copied from it."""
        memory, events = list(self._memory.values()), list(self._events.values())
        self._memory.clear()
        self._events.clear()
        if memory or events:
            DeviceImports._closing = threading.Thread(target=self._close, args=(memory, events), name="close-imports", daemon=True)
            DeviceImports._closing.start()

    def _close(self, memory: list[ImportedMemory], events: list[Any]) -> None:
        with torch.cuda.device(self._device):
            for one in memory:
                self._driver.api.cuIpcCloseMemHandle(self._driver.api.CUdeviceptr(one.address))
            for event in events:
                self._driver.api.cuEventDestroy(event)
