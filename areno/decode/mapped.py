"""The start-up probe: whether kernels of a CUDA device read and write pinned host memory as the rings need it.

A kernel reads seeded words from one pinned buffer and writes them, changed by a mask, to another that was poisoned; after
its event the host compares. Twice over the same buffers, so that words left in a cache on either side show. `choose_transport`
asks when a rank is built; `python -m areno.decode.mapped` prints one JSON line, for `rollout check`, in a process of its own
because a device error stays with the process that met it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import torch

from areno.errors import EngineFailure

WORDS = 4096
ROUNDS = 2
POISON = -0x21524111
MASK = 0x5A5A_A5A5
WORKS = "a kernel read and wrote pinned memory, and every word was right"


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedMemory:
    """What the probe found, and why."""

    works: bool
    reason: str


class Probe(Protocol):
    """A device as the probe uses it."""

    def pinned(self, words: int) -> torch.Tensor:
        """Return int32 host memory of the kind that the rings lie in."""

    def echo(self, source: torch.Tensor, target: torch.Tensor, mask: int) -> None:
        """Let a kernel store source ^ mask in target, and wait for its event. Blocks."""

    def check(self) -> None:
        """Raise what the device raises once an error stays with it. Blocks."""


class CudaProbe:
    """A CUDA device."""

    __slots__ = ("_device",)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned(self, words: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def echo(self, source: torch.Tensor, target: torch.Tensor, mask: int) -> None:
        """Launch the kernel and wait for its event."""
        from areno.kernels.echo import echo

        with torch.cuda.device(self._device):
            echo(source, target, mask)
            event = torch.cuda.Event()
            event.record()
            event.synchronize()

    def check(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


def probe_mapped(device: Probe, *, seed: int = 0) -> MappedMemory:
    """Tell whether mapped memory works. Blocks: for two tiny launches, the first of which may compile.

    Raises: EngineFailure if an error stays with the device, which nothing in this process can use then.
    """
    rng = np.random.default_rng(seed)
    wrong = 0
    try:
        source, target = device.pinned(WORDS), device.pinned(WORDS)
        for _ in range(ROUNDS):
            words = rng.integers(-(2**31), 2**31, size=WORDS, dtype=np.int64).astype(np.int32)
            source.numpy()[:] = words
            target.fill_(POISON)
            device.echo(source, target, MASK)
            wrong += int((target.numpy() != words ^ np.int32(MASK)).sum())
    # Triton refuses a pointer that the device cannot reach with ValueError, the driver speaks through RuntimeError.
    except (RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a message'}"
        _check_device(device, reason)
        return MappedMemory(works=False, reason=reason)
    if wrong:
        return MappedMemory(works=False, reason=f"{wrong:,} of {ROUNDS * WORDS:,} words that a kernel wrote to pinned memory were wrong")
    return MappedMemory(works=True, reason=WORKS)


def _check_device(device: Probe, reason: str) -> None:
    try:
        device.check()
    except RuntimeError as error:
        raise EngineFailure(
            f"the device failed while pinned memory was tried: {reason}",
            field="result_transport",
            limit="such an error stays with the process",
            remedy="start again with result_transport='copy', which does not try",
        ) from error


def main(arguments: list[str] | None = None) -> int:
    """Probe a device and print one JSON line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m areno.decode.mapped", description="Try mapped memory on a CUDA device.")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    device = torch.device(parser.parse_args(arguments).device)
    found = MappedMemory(works=False, reason="there is no CUDA device")
    if torch.cuda.is_available():
        found = probe_mapped(CudaProbe(device))
    print(json.dumps(asdict(found)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
