"""What wakes a reader of a stream in its event loop, and brings it the tokens of a flush that it waits for.

A reader awaits its `News`, which is future-like (`asyncio.isfuture`): the loop's task hands over how to go on, and goes on in the
very call that brings the news. A future would have every one of hundreds of readers pass through the loop's queue for each token.
Invariant: a reader that was given tokens returns with them.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Generator

from rollout.client.columns import Columns
from rollout.client.pending import DeltaCursor, Listener, StreamRecord
from rollout.client.results import Delta


class News:
    """See the module. Used in one event loop, of one thread; listens for as long as the stream lives.

    A reader that waits when its tokens come gets them from here; one that does not looks at its stream once it asks again
    (`missed`). Apart from the stream that reads, which its record must not keep alive: a stream that nobody holds is abandoned.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_callback",
        "_cancelled",
        "_context",
        "_cursor",
        "_delta",
        "_listener",
        "_takes",
        "loop",
        "missed",
        "thread",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, cursor: DeltaCursor) -> None:
        self._asyncio_future_blocking = False
        self.loop, self._cursor, self.thread = loop, cursor, threading.get_ident()
        # The waiting task's, and the context to go on in; none while no reader waits.
        self._callback: Callable[[News], None] | None = None
        self._context: contextvars.Context | None = None
        self._delta: Delta | None = None
        self._cancelled = self._takes = self.missed = False
        self._listener: Listener | None = None

    def join(self, record: StreamRecord) -> None:
        """Begin to listen."""
        self._takes = record.takes_flushes
        self._listener = record.listen(self.look, self.loop, each=True, sink=self)

    def leave(self, record: StreamRecord) -> None:
        """Listen no more; idempotent."""
        if self._listener is not None:
            record.unlisten(self._listener)
            self._listener = None

    # The loop, when there are news

    def look(self) -> None:
        """Let the reader look at its stream."""
        if self._callback is None:
            self.missed = True
        else:
            self._go_on()

    def take(self, first: int, columns: Columns, start: int, stop: int) -> None:
        """Take the stream's tokens from number `first` on; what does not follow on those before is looked for."""
        cursor, callback, context = self._cursor, self._callback, self._context
        if callback is None:
            self.missed = True
        elif first == cursor.start and stop > start and self._takes and context is not None:
            self._callback = None
            cursor.start = first + stop - start
            self._delta = Delta(first, columns, start, stop, True, None)
            context.run(callback, self)
        else:
            self._go_on()

    def _go_on(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None and self._context is not None:
            self._context.run(callback, self)

    # The reader

    def __await__(self) -> Generator[News, None, Delta | None]:
        """Wait for news; returns the tokens that came, None if the reader is to look. Raises: RuntimeError for a second reader."""
        if self._callback is not None:
            raise RuntimeError("a stream has one reader at a time; open a stream for each")
        self._asyncio_future_blocking = True
        try:
            yield self
        except BaseException:
            # This reader does not come back with anything; whoever reads on looks for it.
            self._callback, self._cancelled, self.missed = None, False, True
            delta, self._delta = self._delta, None
            if delta is not None:
                self._cursor.start = delta.offset
            raise
        delta, self._delta = self._delta, None
        return delta

    # Its task, to which this is a future

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop."""
        return self.loop

    def add_done_callback(self, callback: Callable[[News], None], *, context: contextvars.Context | None = None) -> None:
        """Take how to go on."""
        self._callback = callback
        self._context = contextvars.copy_context() if context is None else context

    def cancel(self, msg: object = None) -> bool:
        """Let the reader go on with CancelledError; False if none waits."""
        callback, self._callback = self._callback, None
        if callback is None:
            return False
        self._cancelled = True
        self.loop.call_soon(callback, self, context=self._context)
        return True

    def result(self) -> None:
        """Return what a task looks at before it goes on. Raises: CancelledError."""
        if self._cancelled:
            self._cancelled = False
            raise asyncio.CancelledError
