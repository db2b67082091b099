"""The exchange of live and staged tensors: their contents change places, their addresses stay.

An update makes one when it is verified, so that whatever room a swap takes is taken before the pause. On a device where both lie it is
one pass, otherwise it goes through a small scratch buffer. Invariant: a second run restores the old bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from areno.kernels.weights import Exchange

SCRATCH_BYTES = 16 << 20
# On the host it stays in the cache, so that a swap reads and writes live and staged memory once each.
HOST_SCRATCH_BYTES = 1 << 19


class Swap:
    """Pairs of live and staged tensors, ready to change places. Shapes: both of a pair alike, contiguous, one dtype in all."""

    __slots__ = ("_exchange", "_pairs", "_scratch")

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        live, staged = pairs[0]
        self._pairs = pairs
        self._exchange: Exchange | None = None
        self._scratch: torch.Tensor | None = None
        if staged.is_cuda:
            from areno.kernels.weights import Exchange

            self._exchange = Exchange(pairs)
            return
        num_bytes = HOST_SCRATCH_BYTES if live.device.type == "cpu" else SCRATCH_BYTES
        elements = min(num_bytes // live.dtype.itemsize, max(one.numel() for one, _ in pairs))
        with torch.inference_mode(False):
            self._scratch = torch.empty(elements, dtype=live.dtype, device=live.device)

    def run(self) -> None:
        """Exchange the contents. Mutates: live and staged tensors. On a device nothing is waited for."""
        if self._exchange is not None:
            self._exchange.run()
            return
        assert self._scratch is not None, "without an exchange on the device there is a scratch buffer"
        size = self._scratch.numel()
        for whole_live, whole_staged in self._pairs:
            live, staged = whole_live.view(-1), whole_staged.view(-1)
            for start in range(0, live.numel(), size):
                live_part, staged_part = live[start : start + size], staged[start : start + size]
                kept = self._scratch[: live_part.numel()].copy_(live_part)
                live_part.copy_(staged_part, non_blocking=True)
                staged_part.copy_(kept, non_blocking=True)
