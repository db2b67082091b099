"""Changes to the decode tables, packed into slots: SET row, GROW pages, KILL, MOVE.

The scheduler appends operations in order, `DeltaPacker` cuts them into slots. Within a slot the operations commute:
at most one per target row, and none that reads a row which another one writes, so that a device may apply a slot in
any order. KILL and MOVE name the generation they mean and do nothing on a mismatch. Host only, no torch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from areno.request import MAX_STOP_IDS
from areno.sampling.slot_content import SlotContent


class DeltaKind(enum.IntEnum):
    """The operations on rows."""

    SET = 1
    GROW = 2
    KILL = 3
    MOVE = 4


ROW_OP = np.dtype(
    [
        ("kind", np.int32),
        ("row", np.int32),
        ("source", np.int32),
        ("generation", np.int32),
        ("last_token", np.int32),
        ("length", np.int32),
        ("remaining", np.int32),
        ("stop_wait", np.int32),
        ("sampling_slot", np.int32),
        ("recurrent_slot", np.int32),
        ("top_k", np.int32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.int64),
        ("stop_ids", np.int32, MAX_STOP_IDS),
    ]
)
"""One operation; fields beyond kind, row, source and generation belong to SET alone, whose source is its number of pages."""

_UNSET: dict[str, object] = {name: np.zeros((), ROW_OP)[name].tolist() for name in ROW_OP.names or ()}
_NOTHING_SET = tuple(_UNSET.values())[4:]

PAGE_OP = np.dtype([("row", np.int32), ("index", np.int32), ("page", np.int32)])
"""One page-table entry of a SET or a GROW: page `page` holds positions index * G and on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSlot:
    """Operations that commute. `rows` has dtype ROW_OP, `pages` PAGE_OP; `contents` fill sampling slots."""

    rows: np.ndarray
    pages: np.ndarray
    contents: tuple[tuple[int, SlotContent], ...] = ()


@dataclass(slots=True)
class _OpenSlot:
    # In the order of ROW_OP's fields: one array of all of them is made much faster than one of each.
    rows: list[tuple[object, ...]] = field(default_factory=list)
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    contents: list[tuple[int, SlotContent]] = field(default_factory=list)
    writes: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)


class DeltaPacker:
    """Collects operations and cuts them into slots of at most `capacity` operations."""

    __slots__ = ("_capacity", "_closed", "_open")

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._open = _OpenSlot()
        self._closed: list[DeltaSlot] = []

    def set_row(self, values: dict[str, object], pages: np.ndarray, content: SlotContent | None = None) -> None:
        """SET a row from named ROW_OP fields and its whole page list; `content` fills its sampling slot."""
        row = int(values["row"])  # type: ignore[call-overload]
        slot = self._place(writes={row}, reads=set())
        given = values | {"kind": int(DeltaKind.SET), "source": len(pages)}
        slot.rows.append(tuple(given.get(name, unset) for name, unset in _UNSET.items()))
        slot.pages.extend((row, index, page) for index, page in enumerate(pages.tolist()))
        if content is not None:
            slot.contents.append((int(values["sampling_slot"]), content))  # type: ignore[call-overload]

    def grow(self, row: int, generation: int, index: int, pages: np.ndarray) -> None:
        """Append pages to a row's table from entry `index` on."""
        slot = self._place(writes={row}, reads=set())
        slot.rows.append(self._plain(DeltaKind.GROW, row, generation))
        slot.pages.extend((row, index + offset, page) for offset, page in enumerate(pages.tolist()))

    def kill(self, row: int, generation: int) -> None:
        """End a row if it still is of this generation."""
        self._place(writes={row}, reads=set()).rows.append(self._plain(DeltaKind.KILL, row, generation))

    def move(self, source: int, row: int, generation: int) -> None:
        """Copy a row's state and page table to `row` and end the source."""
        self._place(writes={row, source}, reads={source}).rows.append(self._plain(DeltaKind.MOVE, row, generation, source))

    def take(self) -> list[DeltaSlot]:
        """Return the slots collected so far, in order, and start anew."""
        self._close()
        slots, self._closed = self._closed, []
        return slots

    @staticmethod
    def _plain(kind: DeltaKind, row: int, generation: int, source: int = -1) -> tuple[object, ...]:
        return (int(kind), row, source, generation, *_NOTHING_SET)

    def _place(self, *, writes: set[int], reads: set[int]) -> _OpenSlot:
        slot = self._open
        if slot.writes & (writes | reads) or slot.reads & writes or len(slot.rows) >= self._capacity:
            self._close()
            slot = self._open
        slot.writes |= writes
        slot.reads |= reads
        return slot

    def _close(self) -> None:
        slot = self._open
        if slot.rows:
            rows = np.array(slot.rows, dtype=ROW_OP)
            self._closed.append(DeltaSlot(rows=rows, pages=np.array(slot.pages, dtype=PAGE_OP), contents=tuple(slot.contents)))
            self._open = _OpenSlot()
