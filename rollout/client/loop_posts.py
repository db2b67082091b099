"""Who is told of what happened in the I/O thread: threads at once, event loops by one call for all that a turn brought them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from rollout.client.pending import Pending, StreamRecord


class LoopPosts:
    """Wake-ups that wait for the end of the turn, by event loop."""

    __slots__ = ("_posts",)

    def __init__(self) -> None:
        self._posts: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}

    def tell(self, pending: Pending) -> None:
        """Tell who listens to an outcome or, where it is not done, to each growth."""
        for listener in tuple(pending.listeners):
            if not (pending.done or listener.each):
                continue
            if listener.loop is None:
                listener.wake()
            else:
                self._posts.setdefault(listener.loop, []).append(listener.wake)

    def tell_growth(self, grown: Iterable[StreamRecord]) -> None:
        """Tell who listens to each growth of these streams."""
        posts = self._posts
        for record in grown:
            for wake, loop, each in tuple(record.listeners):
                if not each:
                    continue
                if loop is None:
                    wake()
                elif loop in posts:
                    posts[loop].append(wake)
                else:
                    posts[loop] = [wake]

    def send(self) -> None:
        """Hand each loop what it has to do."""
        posts, self._posts = self._posts, {}
        for loop, wakes in posts.items():
            # A closed loop has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake_all, wakes)


def _wake_all(wakes: list[Callable[[], None]]) -> None:
    for wake in wakes:
        wake()
