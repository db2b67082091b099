"""The streams that a flush speaks of, looked up once for as long as flushes speak of the same ones, and who is told of them.

The I/O thread keeps the last one: while the same streams go on, a flush costs no look-up. Streams come and go, and readers of any
thread begin and cease to listen; whoever changes either counts it (`Changes`). A reader that began to listen after the audience
was made has looked at its stream since, or is found by the next look at the count: so the audience is asked for once the tokens
are there to be seen.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rollout.client.columns import Columns, FlushColumns

if TYPE_CHECKING:
    from rollout.client.flush import Flush
    from rollout.client.pending import StreamRecord, TakeNext


class Changes:
    """Counts changes; `number` is never twice the same for two states. Any thread may count."""

    __slots__ = ("_numbers", "number")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.number = 0

    def count(self) -> None:
        """Count a change that was made."""
        self.number = next(self._numbers)


class Sink(Protocol):
    """A reader in an event loop; called there."""

    def look(self) -> None:
        """Let the reader look at its stream."""

    def take(self, first: int, columns: Columns, start: int, stop: int) -> None:
        """Take the stream's tokens from number `first` on, which are from `start` to `stop` in these columns."""


class FlushNews(NamedTuple):
    """What a flush brought the readers of one event loop. `columns` is None where each has to look at its stream."""

    sinks: Sequence[Sink]
    firsts: Sequence[int]
    starts: Sequence[int]
    stops: Sequence[int]
    columns: Columns | None


class Audience(NamedTuple):
    """Who listens to each growth: callbacks of the I/O thread, and by event loop the places of streams in the flush and their sinks."""

    wakes: list[Callable[[], None]]
    loops: dict[asyncio.AbstractEventLoop, tuple[list[int], list[Sink]]]


def _take_nothing(first: int, flush: FlushColumns, start: int, stop: int) -> bool:
    return True


class Roster:
    """See the module. `records` has None for streams that nobody waits for."""

    __slots__ = ("_audience", "_bases", "_coming", "_heard", "_known", "_listening", "_takers", "ids", "records")

    def __init__(self, coming: Changes, listening: Changes) -> None:
        """`coming` counts the streams that come and go, `listening` the readers."""
        self._coming, self._listening = coming, listening
        self._known = self._heard = -1
        self.ids = b""
        self.records: list[StreamRecord | None] = []
        self._takers: list[TakeNext] = []
        self._bases: list[int] | None = None
        self._audience = Audience([], {})

    def look_up(self, ids: bytes, find: Callable[[bytes], StreamRecord | None]) -> None:
        """Make this the roster of a flush. `ids`: 16 bytes for each stream; `find` gives the stream of one."""
        number = self._coming.number
        if ids == self.ids and number == self._known:
            return
        self.records = [find(ids[place : place + 16]) for place in range(0, len(ids), 16)]
        self._takers = [_take_nothing if record is None else record.take_next for record in self.records]
        bases = [0 if record is None else record.base for record in self.records]
        self.ids, self._known, self._heard = ids, number, -1
        self._bases = bases if any(bases) else None

    def take(self, flush: Flush) -> tuple[list[int], list[StreamRecord]]:
        """Add the tokens of this roster's flush to the streams; return the numbers of their first ones, and the streams with a gap."""
        offsets, columns = flush.offsets, flush.columns
        firsts = offsets if self._bases is None else [base + offset for base, offset in zip(self._bases, offsets)]
        gaps: list[StreamRecord] = []
        for index, (take_next, first, start, end) in enumerate(zip(self._takers, firsts, flush.starts, flush.ends)):
            if take_next(first, columns, start, end):
                continue
            record = self.records[index]
            if record is not None and not record.append(first, columns, start, end, flush.extras.kept(start, end)):
                gaps.append(record)
        return firsts, gaps

    def let_go(self) -> None:
        """Forget the streams if any came or went since: those that ended must not be kept until the next flush."""
        if self._known != self._coming.number:
            self.look_up(b"", lambda _: None)
            self._audience, self._known = Audience([], {}), -1

    def audience(self) -> Audience:
        """Return who is to be told of the streams; asked for when there is something to be seen."""
        number = self._listening.number
        if self._heard != number:
            wakes: list[Callable[[], None]] = []
            loops: dict[asyncio.AbstractEventLoop, tuple[list[int], list[Sink]]] = {}
            for place, record in enumerate(self.records):
                for listener in () if record is None else tuple(record.listeners):
                    if not listener.each:
                        continue
                    if listener.sink is None or listener.loop is None:
                        assert listener.loop is None, "a reader in a loop has a sink"
                        wakes.append(listener.wake)
                    else:
                        places, sinks = loops.setdefault(listener.loop, ([], []))
                        places.append(place)
                        sinks.append(listener.sink)
            self._audience, self._heard = Audience(wakes, loops), number
        return self._audience
