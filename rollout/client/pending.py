"""What a client waits for: calls with one answer, and streams that grow until their terminal event.

The I/O thread writes, callers read. A stream's tokens are a record with a length; a reader has its own cursor, so a
slow one gets larger pieces. Arrays are replaced, never changed below the published length, so slices stay valid.
Listeners run in the I/O thread, or are posted to an event loop, once per turn of the I/O thread for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rollout.client.results import Delta, FinishReason, Generation
from rollout.errors import RequestFailed, RolloutError
from rollout.wire.codec import Frame, Packet
from rollout.wire.messages import Ending

FIRST_ROOM = 64


class Listener(NamedTuple):
    """Someone to tell; `loop` is None for a callback that may run in the I/O thread. `each` asks for every growth, not only the end."""

    wake: Callable[[], None]
    loop: asyncio.AbstractEventLoop | None
    each: bool


class Pending:
    """Base: an outcome that comes once, and listeners. `since` is when the wait for the service began."""

    __slots__ = ("done", "error", "frames", "listeners", "request_id", "since")

    def __init__(self, request_id: bytes, frames: list[Frame], since: float) -> None:
        self.request_id, self.frames, self.since = request_id, frames, since
        self.error: RolloutError | None = None
        self.done = False
        self.listeners: list[Listener] = []

    def listen(self, wake: Callable[[], None], loop: asyncio.AbstractEventLoop | None = None, *, each: bool = False) -> Listener:
        """Add a listener; it is woken at once if the outcome is there. The order (add, then look) loses no wake-up."""
        listener = Listener(wake, loop, each)
        self.listeners.append(listener)
        if self.done:
            wake()
        return listener

    def unlisten(self, listener: Listener) -> None:
        """Remove a listener; idempotent."""
        if listener in self.listeners:
            self.listeners.remove(listener)


class Call(Pending):
    """One message with one answer."""

    __slots__ = ("reply",)

    def __init__(self, request_id: bytes, frames: list[Frame], since: float) -> None:
        super().__init__(request_id, frames, since)
        self.reply: Packet | None = None

    def result(self) -> Packet:
        """Return the answer, or raise the error."""
        if self.error is not None:
            raise self.error
        assert self.reply is not None, "result comes after the answer"
        return self.reply


class Columns(NamedTuple):
    """Parallel columns of sampled tokens."""

    ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray

    def cut(self, start: int, stop: int) -> Columns:
        """Return a part; shares memory."""
        return Columns(*(column[start:stop] for column in self))

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


class StreamRecord(Pending):
    """A generation under way; see the module."""

    __slots__ = ("_columns", "ending", "length", "prompt_ids", "wants_logprobs")

    def __init__(self, request_id: bytes, frames: list[Frame], since: float, *, prompt_ids: np.ndarray, wants_logprobs: bool) -> None:
        super().__init__(request_id, frames, since)
        self.prompt_ids, self.wants_logprobs = prompt_ids, wants_logprobs
        self.length = 0
        self.ending: Ending | None = None
        self._columns = Columns.room_for(FIRST_ROOM)

    def append(self, offset: int, tokens: Columns) -> bool:
        """Take tokens that start at `offset`: overlap is trimmed; False for a gap, which takes nothing."""
        if offset > self.length:
            return False
        skip = self.length - offset
        count = len(tokens.ids) - skip
        if count <= 0:
            return True
        after = self.length + count
        if after > self._columns.ids.size:
            wider = Columns.room_for(max(after, 2 * self._columns.ids.size))
            for old, new in zip(self._columns, wider):
                new[: self.length] = old[: self.length]
            self._columns = wider
        for column, news in zip(self._columns, tokens):
            column[self.length : after] = news[skip:]
        # Last, so that a reader that sees the length also sees the tokens.
        self.length = after
        return True

    def tokens(self, start: int, stop: int) -> Columns:
        """Return read-only tokens; `stop` must come from `length`."""
        part = self._columns.cut(start, stop)
        for column in part:
            column.flags.writeable = False
        return part

    def _logprobs(self, part: Columns) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        if not self.wants_logprobs:
            return None, None, None
        if np.isnan(part.logprobs).any() or np.isnan(part.raw_logprobs).any():
            raise RolloutError(
                f"request {self.request_id.hex()} lacks log-probabilities",
                limit="every sampled token has one",
                remedy="report this; do not train on it",
                code="engine_failure",
            )
        equal = np.isnan(part.behaviour_logprobs)
        behaviour = None if equal.all() else np.where(equal, part.logprobs, part.behaviour_logprobs)
        return part.logprobs, part.raw_logprobs, behaviour

    def delta(self, start: int, stop: int, finished: Generation | None) -> Delta:
        """Return the tokens of a stretch as a value."""
        part = self.tokens(start, stop)
        logprobs, raw, behaviour = self._logprobs(part)
        return Delta(
            offset=start,
            ids=part.ids,
            logprobs=logprobs,
            raw_logprobs=raw,
            behaviour_logprobs=behaviour,
            versions=part.versions,
            finished=finished,
        )

    def generation(self) -> Generation:
        """Return the whole of an ended request."""
        ending = self.ending
        assert ending is not None, "a generation comes after its ending"
        part = self.tokens(0, self.length)
        logprobs, raw, behaviour = self._logprobs(part)
        return Generation(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            ids=part.ids,
            logprobs=logprobs,
            raw_logprobs=raw,
            behaviour_logprobs=behaviour,
            versions=part.versions,
            kv_spans=tuple((span[0], span[1]) for span in ending.kv_spans),
            finish_reason=FinishReason(kind=ending.kind, stop_id=ending.stop_id, detail=ending.detail),
            seed=ending.seed,
            cached_tokens=ending.cached_tokens,
            prompt_tokens=ending.prompt_tokens,
        )

    def result(self) -> Generation:
        """Return the generation. Raises: the refusal, or RequestFailed with what was sampled."""
        if self.error is not None:
            raise self.error
        generation = self.generation()
        ending = self.ending
        assert ending is not None
        if ending.kind == "failed":
            cause = ending.error
            failed = RequestFailed(
                f"request {self.request_id.hex()} failed after {self.length} tokens" + (f": {cause.what}" if cause else ""),
                limit=cause.limit if cause else None,
                remedy=(cause.remedy if cause else None) or "submit it again",
            )
            failed.generation, failed.reason_code = generation, cause.code if cause else None
            raise failed
        return generation
