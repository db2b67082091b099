"""A stream's tokens as the client keeps them: parallel columns that only grow, and the kept sets beside them.

The I/O thread appends, callers read below the length that the stream has published. A flush carries a few tokens of many
streams: its arrays are shared by their logs, which copy their own parts out later, many at once, so that a token costs little
however small the flushes are. Arrays are replaced, never changed below the published length, so slices stay valid.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FIRST_ROOM = 64
# A log copies its parts out when it has so many, or when the flushes that it keeps alive hold so many tokens.
MAX_PARTS = 64
MAX_SHARED_TOKENS = 2**16


class Columns(NamedTuple):
    """Parallel columns of sampled tokens."""

    ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray

    def cut(self, start: int, stop: int) -> Columns:
        """Return a part; shares memory."""
        ids, logprobs, raw_logprobs, behaviour_logprobs, versions = self
        return Columns(
            ids[start:stop], logprobs[start:stop], raw_logprobs[start:stop], behaviour_logprobs[start:stop], versions[start:stop]
        )

    @staticmethod
    def room_for(count: int) -> Columns:
        """Return columns of this length."""
        return Columns(
            np.empty(count, np.int32),
            np.empty(count, np.float32),
            np.empty(count, np.float32),
            np.empty(count, np.float32),
            np.empty(count, np.int64),
        )

    @staticmethod
    def joined(pieces: list[Columns]) -> Columns:
        """Return pieces one after the other."""
        return Columns(*(np.concatenate(column) for column in zip(*pieces)))

    def read_only(self) -> Columns:
        """Return these columns, none of which may be written through them."""
        for column in self:
            column.flags.writeable = False
        return self


_PACKED = np.dtype([(name, dtype) for name, dtype in zip(Columns._fields, (np.int32, np.float32, np.float32, np.float32, np.int64))])


class FlushColumns:
    """The columns of a whole flush. `plain`: no log-probability is missing, and those of the behaviour are equal to them."""

    __slots__ = ("columns", "num_tokens", "packed", "plain")

    def __init__(self, columns: Columns) -> None:
        self.columns, self.num_tokens = columns.read_only(), len(columns.ids)
        # One sum sees every NaN.
        missing = bool(np.isnan(columns.logprobs.sum() + columns.raw_logprobs.sum()))
        self.plain = not missing and bool(np.isnan(columns.behaviour_logprobs).all())
        # The same once more, token by token: a log that copies many small parts cuts each of them once.
        packed = np.empty(self.num_tokens, _PACKED)
        for name, column in zip(Columns._fields, columns):
            packed[name] = column
        self.packed = packed.view(np.uint8).reshape(self.num_tokens, _PACKED.itemsize)


# Number of the part's first token in the stream, and its place in a flush.
_Part = tuple[int, FlushColumns, int, int]


class _State(NamedTuple):
    """What a reader takes in one go: own columns (not to be written), how many of them count, and the parts behind."""

    columns: Columns
    settled: int
    parts: list[_Part]


class TokenLog:
    """See the module. `plain` says of all tokens what it says of a flush. One thread appends, any may read."""

    __slots__ = ("_length", "_looked", "_max_parts", "_own", "_shared", "_state", "plain")

    def __init__(self, stagger: int) -> None:
        self.plain = True
        self._own = Columns.room_for(0)
        self._state = _State(self._own.read_only(), 0, [])
        self._length = self._shared = self._looked = 0
        # Streams that begin together must not all copy in the same turn.
        self._max_parts = 1 + stagger % MAX_PARTS

    def append(self, flush: FlushColumns, start: int, stop: int) -> None:
        """Take a part of a flush."""
        parts = self._state.parts
        parts.append((self._length, flush, start, stop))
        self._length += stop - start
        self._shared += flush.num_tokens
        if not flush.plain:
            self.plain = False
        if len(parts) >= self._max_parts or self._shared >= MAX_SHARED_TOKENS:
            self.settle()

    def settle(self) -> None:
        """Copy what is shared with flushes, so that they need not be kept for it."""
        _, settled, parts = self._state
        self._max_parts, self._shared = MAX_PARTS, 0
        if not parts:
            return
        if self._length > self._own.ids.size:
            room = Columns.room_for(max(self._length, 2 * self._own.ids.size, FIRST_ROOM))
            for own, before in zip(room, self._own):
                own[:settled] = before[:settled]
            self._own = room
        packed = np.concatenate([flush.packed[start:stop] for _, flush, start, stop in parts]).view(_PACKED)[:, 0]
        for name, own in zip(Columns._fields, self._own):
            own[settled : self._length] = packed[name]
        self._state = _State(Columns(*(column.view() for column in self._own)).read_only(), self._length, [])

    def settle_idle(self) -> None:
        """Settle if nothing came since the last call: a stream that waits must not keep what others have long read."""
        if self._looked == self._length:
            self.settle()
        self._looked = self._length

    def find(self, start: int, stop: int) -> tuple[Columns, int, int]:
        """Return columns, not to be written, and where in them the tokens are; `stop` must come from a published length."""
        columns, settled, parts = self._state
        if parts:
            # Who keeps up reads the newest part.
            first, flush, begin, end = parts[-1]
            if first <= start and stop - first <= end - begin:
                return flush.columns, begin + start - first, begin + stop - first
        if stop <= settled:
            return columns, start, stop
        pieces: list[np.ndarray] = []
        # A part that comes meanwhile lies behind `stop`.
        for first, flush, begin, end in reversed(parts):
            low, high = max(start - first, 0), min(stop - first, end - begin)
            if low < high:
                pieces.append(flush.packed[begin + low : begin + high])
            if first <= start:
                break
        if not pieces:
            return columns, settled, settled
        pieces.reverse()
        packed = np.concatenate(pieces).view(_PACKED)[:, 0]
        behind = Columns(packed["ids"], packed["logprobs"], packed["raw_logprobs"], packed["behaviour_logprobs"], packed["versions"])
        if start < settled:
            behind = Columns.joined([columns.cut(start, settled), behind])
        return behind.read_only(), 0, stop - start

    def cut(self, start: int, stop: int) -> Columns:
        """Return read-only tokens; `stop` must come from a published length."""
        columns, low, high = self.find(start, stop)
        return columns.cut(low, high)


class KeptColumns:
    """Kept sets of a growing stream: where each token's set ends, and the ids of all of them."""

    __slots__ = ("_ends", "_ids", "_length")

    def __init__(self) -> None:
        self._ends = np.zeros(FIRST_ROOM + 1, np.int64)
        self._ids = np.empty(FIRST_ROOM, np.int32)
        self._length = 0

    def append(self, counts: np.ndarray, ids: np.ndarray) -> None:
        """Take the sets of the next tokens."""
        start, after = int(self._ends[self._length]), self._length + counts.size
        if after >= self._ends.size:
            self._ends = _wider(self._ends, self._length + 1, max(after + 1, 2 * self._ends.size))
        if start + ids.size > self._ids.size:
            self._ids = _wider(self._ids, start, max(start + ids.size, 2 * self._ids.size))
        self._ids[start : start + ids.size] = ids
        self._ends[self._length + 1 : after + 1] = start + np.cumsum(counts, dtype=np.int64)
        self._length = after

    def cut(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return counts and ids of a stretch of tokens, read-only."""
        ends = self._ends[start : stop + 1]
        counts, ids = np.diff(ends).astype(np.int32), self._ids[ends[0] : ends[-1]]
        counts.flags.writeable = ids.flags.writeable = False
        return counts, ids


def _wider(array: np.ndarray, used: int, size: int) -> np.ndarray:
    wider = np.empty(size, array.dtype)
    wider[:used] = array[:used]
    return wider
