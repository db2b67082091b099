"""Memory that every rank of a group reads directly: parts of sums of few rows, added up by the kernel that needs the sum.

A collective of a library is a launch of its own between two kernels, and for some kilobytes a row its start takes longer than its
bytes. Here the parts stay where they were computed, and `kernels.peer_sum` reads them through the link between the devices. Each
rank opens the others' memory by interprocess handles (package cuda-bindings); where that cannot be, sums are collectives.

Invariant: sums come in pairs, turn 0 then turn 1, in the same order on every rank; see `kernels.peer_sum` for why two buffers suffice.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass

import torch

from areno.interprocess import HANDLE_BYTES, DeviceImports, DriverFailure, export_memory
from areno.kernels.peer_sum import peer_add_rms_norm
from areno.parallel import TPGroup

TURNS = 2
MAX_ROWS = 512
"""Sums of more rows go through the group's own collective, whose bytes are then worth its start."""
SHARED_ROWS, SHARED_RANKS = 128, 3
"""From this many rows and ranks on each row is added by one rank: half the bytes of four ranks, for a second signal of some 3 us."""

_WORD = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A contiguous tensor in another rank's memory: as much of one as a kernel's launch asks for."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address under which this rank reads it."""
        return self.address


class PeerSums:
    """One rank's parts and those of all others. Shapes: parts [2, rows, hidden], signals int32 [2, rows, ranks], by rank."""

    def __init__(self, group: TPGroup, parts: list[torch.Tensor | PeerMemory], signals: list[torch.Tensor | PeerMemory]) -> None:
        own = parts[group.rank]
        assert isinstance(own, torch.Tensor), "a rank's own part is a tensor"
        self._group, self._parts, self._signals, self._own = group, parts, signals, own
        self.rows = own.shape[1]

    @staticmethod
    def connect(group: TPGroup, *, rows: int, hidden: int, dtype: torch.dtype) -> PeerSums | None:
        """Return the memory of all ranks, or None where one of them cannot read another's; all ranks get the same answer.

        Blocks: for the other ranks, which must ask too. Raises: EngineFailure.
        """
        rows = min(rows, MAX_ROWS)
        memory = _Memory(group, rows, hidden, dtype)
        handles = group.gather_words(memory.export())
        memory.open(handles)
        # Also the point at which every rank's signals are zero.
        if not all(words[0] for words in group.gather_words([int(not memory.reason)])):
            _log.warning("sums of rank %d are collectives: %s", group.rank, memory.reason or "another rank cannot read this one's memory")
            memory.close()
            return None
        sums = PeerSums(group, memory.views(0, (TURNS, rows, hidden), dtype), memory.views(memory.part_bytes, memory.places, torch.int32))
        weakref.finalize(sums, memory.close).atexit = False
        return sums

    def part(self, turn: int, tokens: int) -> torch.Tensor:
        """Return where this rank's part of a sum is written. Shapes: [tokens, hidden]."""
        return self._own[turn, :tokens]

    def add_rms_norm(self, turn: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, pdl: bool) -> None:
        """Add the sum of all parts of `turn` to `x` and norm it into `out`. Shapes: [tokens, hidden]. Mutates: `x`, `out`."""
        self._group.counts.all_reduces += 1
        self._group.counts.all_reduce_bytes += x.nbytes
        rank, stop = self._group.rank, self._group.stop_word
        shared = x.shape[0] >= SHARED_ROWS and self._group.size >= SHARED_RANKS
        peer_add_rms_norm(x, self._parts, self._signals, turn, weight, eps, out, rank=rank, stop=stop, shared=shared, pdl=pdl)


class _Memory:
    """One allocation of each rank, parts before signals. `reason` says why it cannot be read by all, and is empty where it can."""

    def __init__(self, group: TPGroup, rows: int, hidden: int, dtype: torch.dtype) -> None:
        self._group, self.reason = group, ""
        self.places = (TURNS, rows, group.size)
        self.part_bytes = -(-TURNS * rows * hidden * dtype.itemsize // 256) * 256
        self._own = torch.zeros(self.part_bytes + 4 * TURNS * rows * group.size, dtype=torch.uint8, device=group.device)
        torch.cuda.synchronize(group.device)
        assert not group.stop_word.item(), "made here, since pinned memory cannot be had while a step is captured"
        self._addresses: dict[int, int] = {}
        self._imports: DeviceImports | None = None

    def export(self) -> list[int]:
        """Return the handle of this rank's allocation and where in it the memory starts, as words; zeros where there is none."""
        try:
            exported = export_memory(self._own)
        except DriverFailure as error:
            self.reason = str(error)
            return [0] * (HANDLE_BYTES // _WORD + 1)
        words = [int.from_bytes(exported.handle[at : at + _WORD], "little", signed=True) for at in range(0, HANDLE_BYTES, _WORD)]
        return [*words, self._own.data_ptr() - exported.address]

    def open(self, handles: list[list[int]]) -> None:
        """Open what the other ranks have exported."""
        for rank, (*words, offset) in enumerate(handles):
            if rank == self._group.rank:
                self._addresses[rank] = self._own.data_ptr()
                continue
            if self.reason or not any(words):
                self.reason = self.reason or f"rank {rank} cannot export its memory"
                continue
            handle = b"".join(word.to_bytes(_WORD, "little", signed=True) for word in words)
            try:
                self._imports = self._imports or DeviceImports(self._group.device)
                self._addresses[rank] = self._imports.memory(handle).address + offset
            except DriverFailure as error:
                self.reason = str(error)

    def views(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor | PeerMemory]:
        """Return the same tensor of every rank, `start` bytes into its memory."""
        size = torch.Size(shape).numel() * dtype.itemsize
        own = self._own[start : start + size].view(dtype).view(shape)
        mine = self._group.rank
        return [own if rank == mine else PeerMemory(self._addresses[rank] + start, shape, dtype) for rank in range(self._group.size)]

    def close(self) -> None:
        """Close what was opened. Repeatable."""
        if self._imports is not None:
            self._imports.close()
