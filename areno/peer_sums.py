"""Memory that every rank of a group reads directly: parts of sums of few rows, added up by the kernel that needs the sum.

A collective of a library is a launch of its own between two kernels, and for some kilobytes a row its start takes longer than its
bytes. Here the parts stay where they were computed, and `kernels.peer_sum` reads them through the link between the devices.

Invariant: sums come in pairs, turn 0 then turn 1, in the same order on every rank; see `kernels.peer_sum` for why two buffers suffice.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch

from areno.kernels.peer_sum import peer_add_rms_norm
from areno.parallel import TPGroup

TURNS = 2
MAX_ROWS = 512
"""Sums of more rows go through the group's own collective, whose bytes are then worth its start."""

_log = logging.getLogger(__name__)
_numbers = itertools.count()


class PeerSums:
    """One rank's parts and those of all others. Shapes: parts [2, rows, hidden], signals int32 [2, rows, ranks], by rank."""

    def __init__(self, group: TPGroup, parts: list[torch.Tensor], signals: list[torch.Tensor], handle: Any) -> None:
        self._group, self._parts, self._signals = group, parts, signals
        # The mappings of the others' memory end with it.
        self._handle = handle
        self.rows = parts[0].shape[1]

    @staticmethod
    def connect(group: TPGroup, *, rows: int, hidden: int, dtype: torch.dtype) -> PeerSums | None:
        """Return the memory of all ranks, or None where a device cannot read another's; all ranks get the same answer.

        Blocks: for the other ranks, which must ask too. Raises: EngineFailure.
        """
        rows = min(rows, MAX_ROWS)
        made, reason = None, ""
        try:
            made = _share(group, rows, hidden, dtype)
        except (RuntimeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
        if not all(words[0] for words in group.gather_words([int(made is not None)])):
            _log.warning("rank %d cannot read the others' memory, or one of them cannot: sums are collectives (%s)", group.rank, reason)
            return None
        return made

    def part(self, turn: int, tokens: int) -> torch.Tensor:
        """Return where this rank's part of a sum is written. Shapes: [tokens, hidden]."""
        return self._parts[self._group.rank][turn, :tokens]

    def add_rms_norm(self, turn: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, pdl: bool) -> None:
        """Add the sum of all parts of `turn` to `x` and norm it into `out`. Shapes: [tokens, hidden]. Mutates: `x`, `out`."""
        self._group.counts.all_reduces += 1
        self._group.counts.all_reduce_bytes += x.nbytes
        rank, stop = self._group.rank, self._group.stop_word
        peer_add_rms_norm(x, self._parts, self._signals, turn, weight, eps, out, rank=rank, stop=stop, pdl=pdl)


def _share(group: TPGroup, rows: int, hidden: int, dtype: torch.dtype) -> PeerSums:
    """Allocate memory that the others can map, and map theirs. Blocks: for the other ranks."""
    from torch._C._distributed_c10d import _SymmetricMemory

    name = f"areno-peer-sums-{next(_numbers)}"
    _SymmetricMemory.set_group_info(name, group.rank, group.size, group.store)
    shape, places = (TURNS, rows, hidden), (TURNS, rows, group.size)
    # Whole 16-byte words of parts, so that the signals behind them are aligned.
    part_words = -(-TURNS * rows * hidden * dtype.itemsize // 16) * 4
    words = part_words + TURNS * rows * group.size
    memory = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int32, group.device, name)
    memory.zero_()
    torch.cuda.synchronize(group.device)
    assert not group.stop_word.item(), "made here, since pinned memory cannot be had while a step is captured"
    handle = _SymmetricMemory.rendezvous(memory)
    parts = [handle.get_buffer(rank, shape, dtype, 0) for rank in range(group.size)]
    signals = [handle.get_buffer(rank, places, torch.int32, part_words) for rank in range(group.size)]
    return PeerSums(group, parts, signals, (memory, handle))
