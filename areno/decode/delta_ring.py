"""Row operations on their way to a device: slots of a pinned ring, each with an event, and the kernel that applies them.

Where launches read pinned memory the kernel reads the slot itself, otherwise the slot's used words are copied first, in the
launches' order. A slot is never written again before its event has passed. The resident path on a CUDA device owns one.
"""

from __future__ import annotations

import torch

from areno.decode.deltas import DeltaSlot
from areno.decode.row_state import RowState
from areno.decode.transport import Transport
from areno.kernels import rows as row_kernels

DELTA_SLOTS = 8
DELTA_WORDS = 1 << 16


class DeltaRing:
    """`slots` places of `words` int32 each at first; a larger delta makes its place larger."""

    __slots__ = ("_events", "_hosts", "_sides", "_taken", "_transport")

    def __init__(self, transport: Transport, *, slots: int = DELTA_SLOTS, words: int = DELTA_WORDS) -> None:
        self._transport = transport
        self._hosts = [transport.host_zeros(words) for _ in range(slots)]
        self._sides = [transport.launch_side(host) for host in self._hosts]
        self._events = [transport.event() for _ in range(slots)]
        self._taken = 0

    def apply(self, slot: DeltaSlot, state: RowState[torch.Tensor]) -> None:
        """Launch the operations of one delta slot. Blocks: while all places wait for the device. Mutates: the rows it names."""
        place = self._taken % len(self._hosts)
        event = self._events[place]
        if event is not None and self._taken >= len(self._hosts):
            event.synchronize()
        self._taken += 1
        words = row_kernels.slot_words(slot.rows.size, slot.pages.size)
        if words > self._hosts[place].numel():
            self._hosts[place] = self._transport.host_zeros(words)
            self._sides[place] = self._transport.launch_side(self._hosts[place])
        host, side = self._hosts[place], self._sides[place]
        counts = row_kernels.pack_slot(slot, host.numpy())
        if side is not host:
            used = row_kernels.slot_words(*counts)
            self._transport.copy(side[:used], host[:used])
        row_kernels.apply_deltas(side, *counts, state)
        if event is not None:
            event.record()
