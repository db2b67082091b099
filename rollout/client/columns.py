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
    def of(packed: np.ndarray) -> Columns:
        """Return the columns of packed tokens, read-only; shares memory."""
        return Columns(*(packed[name] for name in Columns._fields)).read_only()

    def contiguous(self) -> Columns:
        """Return these columns, each in a piece of memory of its own, read-only."""
        return Columns(*(np.array(column) for column in self)).read_only()

    def read_only(self) -> Columns:
        """Return these columns, none of which may be written through them."""
        for column in self:
            column.flags.writeable = False
        return self


_PACKED = np.dtype([(name, dtype) for name, dtype in zip(Columns._fields, (np.int32, np.float32, np.float32, np.float32, np.int64))])
_SIZE = _PACKED.itemsize


class FlushColumns:
    """The columns of a whole flush. `plain`: no log-probability is missing, and those of the behaviour are equal to them.

    `weight` is what a log that keeps the flush counts for it, of `MAX_SHARED_TOKENS`.
    """

    __slots__ = ("columns", "packed", "plain", "weight")

    def __init__(self, columns: Columns) -> None:
        num_tokens = len(columns.ids)
        self.columns, self.weight = columns.read_only(), max(num_tokens, MAX_SHARED_TOKENS // MAX_PARTS)
        # One sum sees every NaN.
        missing = bool(np.isnan(columns.logprobs.sum() + columns.raw_logprobs.sum()))
        self.plain = not missing and bool(np.isnan(columns.behaviour_logprobs).all())
        # The same once more, token by token: a log that copies many small parts cuts each of them once.
        packed = np.empty(num_tokens, _PACKED)
        for name, column in zip(Columns._fields, columns):
            packed[name] = column
        self.packed = packed.tobytes()


# Number of the part's first token in the stream, and its place in a flush.
_Part = tuple[int, FlushColumns, int, int]


def _joined(pieces: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(pieces), _PACKED)


class _State(NamedTuple):
    """What a reader takes in one go: own columns (not to be written), how many of them count, and the parts behind."""

    columns: Columns
    settled: int
    parts: list[_Part]


class TokenLog:
    """See the module. `length` counts its tokens; `plain` says of all of them what it says of a flush. One thread appends, any may read."""

    __slots__ = ("_columns", "_looked", "_own", "_parts", "_room", "_state", "length", "plain")

    def __init__(self, stagger: int) -> None:
        self.plain = True
        self._own = np.empty(0, _PACKED)
        self._columns = Columns.of(self._own)
        self.length = self._looked = 0
        # The state's, at hand for who appends.
        self._parts: list[_Part] = []
        self._state = _State(self._columns, 0, self._parts)
        # Streams that begin together must not all copy in the same turn.
        self._room = (1 + stagger % MAX_PARTS) * (MAX_SHARED_TOKENS // MAX_PARTS)

    def append(self, first: int, flush: FlushColumns, start: int, stop: int) -> bool:
        """Take a part of a flush that begins with the log's token `first`; False, and nothing taken, if that is not the next one."""
        if first != self.length or start >= stop:
            return False
        self._parts.append((first, flush, start, stop))
        if not flush.plain:
            self.plain = False
        # After the part, so that a reader that sees the length also sees the tokens.
        self.length = first + stop - start
        self._room = room = self._room - flush.weight
        if room <= 0:
            self.settle()
        return True

    def settle(self) -> None:
        """Copy what is shared with flushes, so that they need not be kept for it."""
        parts, settled = self._parts, self._state.settled
        self._room = MAX_SHARED_TOKENS
        if not parts:
            return
        if self.length > self._own.size:
            wider = np.empty(max(self.length, 2 * self._own.size, FIRST_ROOM), _PACKED)
            wider[:settled] = self._own[:settled]
            self._own, self._columns = wider, Columns.of(wider)
        self._own[settled : self.length] = _joined([flush.packed[_SIZE * start : _SIZE * stop] for _, flush, start, stop in parts])
        self._parts = []
        self._state = _State(self._columns, self.length, self._parts)

    def settle_idle(self) -> None:
        """Settle if nothing came since the last call: a stream that waits must not keep what others have long read."""
        if self._looked == self.length:
            self.settle()
        self._looked = self.length

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
        pieces: list[bytes] = []
        # A part that comes meanwhile lies behind `stop`.
        for first, flush, begin, end in reversed(parts):
            low, high = max(start - first, 0), min(stop - first, end - begin)
            if low < high:
                pieces.append(flush.packed[_SIZE * (begin + low) : _SIZE * (begin + high)])
            if first <= start:
                break
        if not pieces:
            return columns, settled, settled
        if start < settled:
            pieces.append(self._own[start:settled].tobytes())
        pieces.reverse()
        return Columns.of(_joined(pieces)), 0, stop - start

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
