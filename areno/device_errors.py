"""What an error of a CUDA device means to the engine's callers.

Two kinds. Memory that runs out leaves the device as it was: a score or a staged tensor is refused with a remedy, but a step
that was half done is not to be mended. Every other error stays with the process, in which nothing can use the device any
more. The engine runs its work on the device below `device_errors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from areno.errors import ArenoError, EngineFailure

STEP = "in the middle of a step"
LESS_MEMORY = "restart with a lower gpu_memory_fraction, fewer max_rows or fewer max_prefill_tokens"
NEW_PROCESS = "restart the engine: after such an error the process cannot use the device; check the driver's log if it comes again"


def device_failure(error: RuntimeError, doing: str = STEP) -> EngineFailure | None:
    """Return what a failure of a CUDA device means to callers; None for errors that the device did not cause."""
    if isinstance(error, ArenoError):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        remedy = LESS_MEMORY
    elif "CUDA" in str(error):
        remedy = NEW_PROCESS
    else:
        return None
    return EngineFailure(f"the device failed {doing}: {str(error).splitlines()[0]}", field="device", remedy=remedy)


@contextmanager
def device_errors(doing: str, *, out_of_memory: ArenoError | None = None) -> Iterator[None]:
    """Give the device's errors inside the block their types.

    Raises: EngineFailure; `out_of_memory` in its place where memory ran out and the engine is whole without the work.
    """
    try:
        yield
    except RuntimeError as error:
        if out_of_memory is not None and isinstance(error, torch.OutOfMemoryError):
            raise out_of_memory from error
        failure = device_failure(error, doing)
        if failure is None:
            raise
        raise failure from error
