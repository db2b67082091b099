"""Whether a kind of work may be captured as a graph: memory has room for one, on every rank of the engine alike.

Both kinds of captures ask here (decode steps, prompts). Every rank runs the same work in the same order, so that all ask at the same
points, and a collective is a safe way to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from areno.parallel import TPGroup

CAPTURE_BYTES = 256 << 20
"""Free memory below which no further graph is captured."""


class CapturePermit:
    """Asked before each capture. With several ranks a kind that was refused stays so until `forget`, since asking waits for the device."""

    __slots__ = ("_enabled", "_free_bytes", "_group", "_refused", "_stream")

    def __init__(self, group: TPGroup, *, enabled: bool, free_bytes: Callable[[], int] | None = None) -> None:
        self._group, self._enabled = group, enabled
        self._free_bytes = free_bytes or (lambda: torch.cuda.mem_get_info(group.device)[0])
        self._refused: set[Hashable] = set()
        self._stream: torch.cuda.Stream | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything is captured at all."""
        return self._enabled

    def capture(self, graph: torch.cuda.CUDAGraph, pool: Any) -> AbstractContextManager[None]:
        """Return a context whose launches are captured, on a stream of the group's own device."""
        if self._stream is None:
            # The library's own stream for captures is that of whatever device captured first.
            self._stream = torch.cuda.Stream(self._group.device)
        # With several ranks, threads that watch over collectives ask for events meanwhile.
        mode: Literal["global", "thread_local"] = "global" if self._group.size == 1 else "thread_local"
        return torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode=mode)

    def allows(self, kind: Hashable) -> bool:
        """Return whether this kind may be captured now: the same on every rank. Blocks: for the other ranks."""
        if not self._enabled or kind in self._refused:
            return False
        has_room = self._free_bytes() >= CAPTURE_BYTES
        if self._group.size == 1:
            return has_room
        agreed = all(words[0] for words in self._group.gather_words([int(has_room)]))
        if not agreed:
            self._refused.add(kind)
        return agreed

    def forget(self) -> None:
        """Ask anew from here on: memory has changed."""
        self._refused.clear()
