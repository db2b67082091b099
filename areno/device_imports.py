"""Memory and events of other processes on CUDA devices, opened by interprocess handles of the driver (package cuda-bindings).

A rank reads a trainer's weights where they are. Each allocation and each event is opened once and closed with all others. Invariant:
nothing is dereferenced on the host, and the size of an allocation is what the driver itself says.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, ClassVar, NamedTuple

import torch

_LAZY_PEER_ACCESS = 1


class DriverFailure(RuntimeError):
    """A call of the driver that failed, or a driver that cannot be called."""


class ImportedMemory(NamedTuple):
    """An allocation of another process: where it is here, how many bytes the driver says it has, and these as a uint8 tensor."""

    address: int
    size: int
    memory: torch.Tensor


class _Bytes:
    """Device memory as torch takes it in."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class DeviceImports:
    """What was opened by handle, for work on `device`. Raises: DriverFailure without cuda-bindings."""

    _closing: ClassVar[threading.Thread | None] = None

    def __init__(self, device: torch.device) -> None:
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DriverFailure(f"the package cuda-bindings cannot be imported: {error}") from None
        if DeviceImports._closing is not None:
            # The same memory is opened again only once it is closed.
            DeviceImports._closing.join()
        self._device = device
        self._memory: dict[bytes, ImportedMemory] = {}
        self._events: dict[bytes, Any] = {}

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise DriverFailure(f"{name} failed: {status!r}")
        return values[0] if len(values) == 1 else values

    def memory(self, handle: bytes) -> ImportedMemory:
        """Return an allocation. Raises: DriverFailure."""
        known = self._memory.get(handle)
        if known is None:
            raw = self._driver.CUipcMemHandle()
            raw.reserved = handle
            with torch.cuda.device(self._device):
                address = int(self._call("cuIpcOpenMemHandle", raw, _LAZY_PEER_ACCESS))
                _, size = self._call("cuMemGetAddressRange", self._driver.CUdeviceptr(address))
                known = ImportedMemory(address, int(size), torch.as_tensor(_Bytes(address, int(size)), device=self._device))
            self._memory[handle] = known
        return known

    def passed(self, handle: bytes) -> bool:
        """Tell whether another process's event has passed: what it launched before is complete. Raises: DriverFailure."""
        event = self._events.get(handle)
        if event is None:
            raw = self._driver.CUipcEventHandle()
            raw.reserved = handle
            event = self._events[handle] = self._call("cuIpcOpenEventHandle", raw)
        status = self._driver.cuEventQuery(event)[0]
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
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
                self._driver.cuIpcCloseMemHandle(self._driver.CUdeviceptr(one.address))
            for event in events:
                self._driver.cuEventDestroy(event)
