"""Small pools of numbered places beside the rows: sampling slots now, recurrent slots with the models that need them.

The scheduler owns the pools; a request that needs a slot and finds none waits in admission like one without pages.
"""

from __future__ import annotations


class SlotPool:
    """Numbers 0..size-1, handed out lowest first."""

    __slots__ = ("_free", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = list(range(size - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a slot; there must be one."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back."""
        assert 0 <= slot < self._size and slot not in self._free, f"slot {slot} is not in use"
        self._free.append(slot)

    def check_integrity(self, used: set[int]) -> None:
        """Check that `used` and the free slots are all of them, each once."""
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert not used & set(self._free) and len(used) + len(self._free) == self._size, f"slots are lost: used {used}, free {self._free}"
