"""Ranks of a tensor-parallel engine as threads of one process: the same collectives, met at a barrier.

What holds for them holds for processes, whose collectives bring the same bits; that those do is tested over gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from areno.parallel import TPGroup
from areno.ranks.ranks import Alone

TIMEOUT_S = 60.0
T = TypeVar("T")


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.given: list[Any] = [None] * size


class ThreadGroup(TPGroup):
    """A rank's end of a group of threads."""

    __slots__ = ("_meeting",)

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size, torch.device("cpu"), None, None)
        self._meeting = meeting

    def _gather(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        meeting = self._meeting
        meeting.given[self.rank] = tensor
        meeting.barrier.wait()
        shapes = {(tuple(given.shape), given.dtype) for given in meeting.given}
        assert len(shapes) == 1, f"ranks meet in different collectives: {shapes}"
        for part, given in zip(out, meeting.given):
            part.copy_(given)
        meeting.barrier.wait()
        return out

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Replace a tensor by that of rank `source`."""
        return tensor.copy_(self.all_gather(tensor)[source])


class SideBySide(Alone):
    """Makes an engine one rank of several that are all called alike: each plans for itself, and all plan the same."""

    def __init__(self, group: TPGroup) -> None:
        super().__init__(group.device)
        self._group = group

    def meet(self) -> TPGroup:
        """Return the group."""
        return self._group


def run_ranks(size: int, function: Callable[[TPGroup], T]) -> list[T]:
    """Run a function on every rank and return what each returned; the first error of a rank is raised."""
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadGroup(rank, size, meeting))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.insert(0, error)
            else:
                errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
