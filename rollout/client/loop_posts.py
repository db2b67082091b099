"""Who is told of what happened in the I/O thread: threads at once, event loops by one call for all that came until they took it.

    I/O thread: tell, tell_flush -> one inbox for each loop -> send: call_soon_threadsafe, unless a call is under way
    event loop: open -> endings first, then the tokens of one flush, handed to their readers; of several, each reader looks itself

A loop that keeps up gets its readers' tokens with the call, and they need not look for them; one that lags gets one call for
everything, and its readers larger pieces. Invariant: an inbox holds no more than one flush and one entry for each listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from rollout.client.columns import Columns
from rollout.client.flush import Flush
from rollout.client.pending import Pending
from rollout.client.roster import FlushNews, Roster, Sink


class _Inbox:
    """What one event loop has not taken yet. The I/O thread puts, the loop opens."""

    __slots__ = ("_late", "_lock", "_loop", "_news", "_wakes", "under_way")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, threading.Lock()
        self._news: FlushNews | None = None
        # Dictionaries for their order; several news of one reader are one entry.
        self._late: dict[Sink, None] = {}
        self._wakes: dict[Callable[[], None], None] = {}
        self.under_way = False

    @property
    def is_idle(self) -> bool:
        """Whether the loop has taken everything."""
        return not (self.under_way or self._wakes or self._late or self._news)

    def wake(self, wake: Callable[[], None]) -> None:
        """Add a callback."""
        with self._lock:
            self._wakes[wake] = None

    def put(self, news: FlushNews) -> None:
        """Add a flush's tokens."""
        with self._lock:
            if self._news is None and not self._late:
                self._news = news
                return
            late: Iterable[Sink] = news.sinks if self._news is None else [*self._news.sinks, *news.sinks]
            self._news = None
            self._late.update(dict.fromkeys(late))

    def open(self) -> None:
        """Hand out everything; in the loop."""
        with self._lock:
            self.under_way = False
            news, self._news = self._news, None
            late, self._late = self._late, {}
            wakes, self._wakes = self._wakes, {}
        # Endings first: their readers find the last tokens together with the end.
        sinks: list[Sink] = [*late]
        if news is None:
            _hand_out(self._loop, iter(wakes), iter(sinks), None, iter(()))
        elif news.columns is None:
            _hand_out(self._loop, iter(wakes), iter([*sinks, *news.sinks]), None, iter(()))
        else:
            tokens = zip(news.sinks, news.firsts, news.starts, news.stops)
            _hand_out(self._loop, iter(wakes), iter(sinks), news.columns, tokens)


def _hand_out(
    loop: asyncio.AbstractEventLoop,
    wakes: Iterator[Callable[[], None]],
    sinks: Iterator[Sink],
    columns: Columns | None,
    tokens: Iterator[tuple[Sink, int, int, int]],
) -> None:
    """Call everybody once; readers go on in these calls."""
    try:
        for wake in wakes:
            wake()
        for sink in sinks:
            sink.look()
        if columns is not None:
            for sink, first, start, stop in tokens:
                sink.take(first, columns, start, stop)
    except BaseException:
        # A reader was interrupted (KeyboardInterrupt, SystemExit), which ends the loop's turn; the others are still to be called.
        loop.call_soon(_hand_out, loop, wakes, sinks, columns, tokens)
        raise


class LoopPosts:
    """The inboxes of the loops that have something to take; see the module. Called by the I/O thread."""

    __slots__ = ("_inboxes",)

    def __init__(self) -> None:
        self._inboxes: dict[asyncio.AbstractEventLoop, _Inbox] = {}

    def _inbox(self, loop: asyncio.AbstractEventLoop) -> _Inbox:
        inbox = self._inboxes.get(loop)
        if inbox is None:
            inbox = self._inboxes[loop] = _Inbox(loop)
        return inbox

    def tell(self, pending: Pending) -> None:
        """Tell who listens to an outcome or, where it is not done, to each growth."""
        for listener in tuple(pending.listeners):
            if not (pending.done or listener.each):
                continue
            if listener.loop is None:
                listener.wake()
            else:
                self._inbox(listener.loop).wake(listener.wake)

    def tell_flush(self, roster: Roster, flush: Flush, firsts: list[int]) -> None:
        """Tell who listens to the streams of a flush, whose tokens, from `firsts` on, are in their records already."""
        wakes, loops = roster.audience()
        for wake in wakes:
            wake()
        columns = flush.columns.columns if flush.columns.plain else None
        for loop, (places, sinks) in loops.items():
            if len(places) == len(firsts):
                news = FlushNews(sinks, firsts, flush.starts, flush.ends, columns)
            else:
                news = FlushNews(
                    sinks,
                    [firsts[place] for place in places],
                    [flush.starts[place] for place in places],
                    [flush.ends[place] for place in places],
                    columns,
                )
            self._inbox(loop).put(news)

    def send(self) -> None:
        """Let each loop take what it has not taken yet."""
        for loop, inbox in list(self._inboxes.items()):
            if inbox.is_idle or loop.is_closed():
                # A closed loop has nobody left to tell.
                del self._inboxes[loop]
            elif not inbox.under_way:
                inbox.under_way = True
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(inbox.open)
