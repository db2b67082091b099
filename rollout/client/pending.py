"""What a client waits for: calls with one answer, and streams that grow until their terminal event.

The I/O thread writes, callers read. A stream's tokens are a record with a length; a reader has its own cursor, so a
slow one gets larger pieces.
Listeners run in the I/O thread, or are posted to an event loop, once per turn of the I/O thread for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rollout.client.columns import Columns, FlushColumns, KeptColumns, TokenLog
from rollout.client.parameters import Prepared, Wants
from rollout.client.results import Delta, FinishReason, Generation, PromptScore, Shown
from rollout.client.roster import Changes, Sink
from rollout.errors import RequestFailed, RolloutError
from rollout.wire.codec import Frame, Packet
from rollout.wire.generation_messages import Ending


class Listener(NamedTuple):
    """Someone to tell; `loop` is None for a callback that may run in the I/O thread. `each` asks for every growth, not only the end.

    `sink` is a reader in the loop that takes the tokens of a flush as they come.
    """

    wake: Callable[[], None]
    loop: asyncio.AbstractEventLoop | None
    each: bool
    sink: Sink | None = None


class Pending:
    """Base: an outcome that comes once, and listeners. `since` is when the wait for the service began."""

    __slots__ = ("done", "error", "frames", "listeners", "request_id", "since")

    def __init__(self, request_id: bytes, frames: list[Frame], since: float) -> None:
        self.request_id, self.frames, self.since = request_id, frames, since
        self.error: RolloutError | None = None
        self.done = False
        self.listeners: list[Listener] = []

    def listen(
        self, wake: Callable[[], None], loop: asyncio.AbstractEventLoop | None = None, *, each: bool = False, sink: Sink | None = None
    ) -> Listener:
        """Add a listener; it is woken at once if the outcome is there. The order (add, then look) loses no wake-up."""
        listener = Listener(wake, loop, each, sink)
        self.listeners.append(listener)
        self._changed()
        if self.done:
            wake()
        return listener

    def unlisten(self, listener: Listener) -> None:
        """Remove a listener; idempotent."""
        listeners = self.listeners
        if listener in listeners:
            listeners.remove(listener)
            self._changed()

    def _changed(self) -> None:
        """Hear that somebody began or ceased to listen."""


class Call(Pending):
    """One message with one answer. `opens` tells that the answer says what was opened, to be closed where nobody waits for it."""

    __slots__ = ("opens", "reply")

    def __init__(self, request_id: bytes, frames: list[Frame], since: float, *, opens: bool = False) -> None:
        super().__init__(request_id, frames, since)
        self.opens = opens
        self.reply: Packet | None = None

    def result(self) -> Packet:
        """Return the answer, or raise the error."""
        if self.error is not None:
            raise self.error
        assert self.reply is not None, "result comes after the answer"
        return self.reply


TakeNext = Callable[[int, FlushColumns, int, int], bool]


def _take_none(first: int, flush: FlushColumns, start: int, stop: int) -> bool:
    return False


class StreamRecord(Pending):
    """A generation under way; see the module. `group_id` names the message that began it together with others.

    An update may cut it and let it go on as another request: `wire_id` is the one that the service knows now, `frames_now` its
    message, `base` the tokens that came before it, `rebuilt_at` the numbers of ids at which its KV was rebuilt until then, the last of
    them where it was cut. `prepared` is what the caller asked for, None where nothing can go on. `listening` counts who begins and
    ceases to listen.
    """

    __slots__ = (
        "_kept",
        "_log",
        "base",
        "begun",
        "cached_tokens",
        "ending",
        "frames_now",
        "group_id",
        "listening",
        "prepared",
        "prompt_ids",
        "prompt_score",
        "rebuilt_at",
        "text",
        "wants",
        "wire_id",
    )

    def __init__(
        self,
        request_id: bytes,
        frames: list[Frame],
        since: float,
        *,
        prompt_ids: np.ndarray,
        wants: Wants,
        group_id: bytes | None = None,
        prepared: Prepared | None = None,
        listening: Changes | None = None,
    ) -> None:
        super().__init__(request_id, frames, since)
        self.listening = Changes() if listening is None else listening
        self.prepared, self.wire_id, self.frames_now, self.begun = prepared, request_id, frames, since
        self.base = self.cached_tokens = 0
        self.rebuilt_at: list[int] = []
        self.prompt_ids, self.wants, self.group_id = prompt_ids, wants, group_id
        self.ending: Ending | None = None
        self.prompt_score: PromptScore | None = None
        self.text: str | None = None
        self._log = TokenLog(stagger=request_id[0])
        self._kept = KeptColumns() if wants.kept_ids else None

    @property
    def length(self) -> int:
        """How many tokens came; whoever sees a length also sees the tokens."""
        return self._log.length

    @property
    def take_next(self) -> TakeNext:
        """Takes a part of a flush, from where in the stream on, and from where to where in the flush; False where `append` is to decide."""
        return self._log.append if self._kept is None else _take_none

    def append(self, offset: int, flush: FlushColumns, start: int, stop: int, kept: tuple[np.ndarray, np.ndarray] | None = None) -> bool:
        """Take a part of a flush whose first token is the stream's `offset`: overlap is trimmed; False for a gap, which takes nothing."""
        length = self.length
        skip = length - offset
        if skip < 0:
            return False
        if start + skip >= stop:
            return True
        if self._kept is not None:
            counts, ids = kept if kept is not None else (np.zeros(stop - start, np.int32), np.empty(0, np.int32))
            self._kept.append(counts[skip:], ids[int(counts[:skip].sum()) :])
        return self._log.append(length, flush, start + skip, stop)

    def _changed(self) -> None:
        self.listening.count()

    @property
    def takes_flushes(self) -> bool:
        """Whether the tokens of a plain flush, as they came, are all that a reader is to be given of them."""
        scored = self.prepared is not None and self.prepared.fields.get("prompt_logprobs_from") is not None
        return self.wants.logprobs and self._kept is None and not scored

    def settle(self) -> None:
        """Let go of the flushes that the tokens came with."""
        self._log.settle()

    def settle_idle(self) -> None:
        """The same, if nothing came since the last call."""
        self._log.settle_idle()

    def is_whole(self, ending: Ending) -> bool:
        """Tell whether everything that an ending speaks of is here."""
        return self.length == self.base + ending.output_tokens and (self.prompt_score is not None or not ending.prompt_scored)

    def go_on(self, ending: Ending, wire_id: bytes, frames: list[Frame]) -> None:
        """Let another request bring the rest. Mutates: the record; what came stays."""
        if not self.rebuilt_at:
            self.cached_tokens = ending.cached_tokens
        # The part that ends here may have been preempted, and rebuilt, before it was cut.
        self.rebuilt_at = sorted({*self.rebuilt_at, *ending.kv_rebuilt_at, int(self.prompt_ids.size) + self.length})
        self.base, self.wire_id, self.frames_now = self.length, wire_id, frames

    def tokens(self, start: int, stop: int) -> Columns:
        """Return read-only tokens; `stop` must come from `length`."""
        return self._log.cut(start, stop)

    def _incomplete(self, what: str) -> RolloutError:
        return RolloutError(
            f"request {self.request_id.hex()} lacks {what}",
            limit="every sampled token has one",
            remedy="report this; do not train on it",
            code="engine_failure",
        )

    def _logprobs(self, part: Columns) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        if not self.wants.logprobs:
            return None, None, None
        if self._log.plain:
            return part.logprobs, part.raw_logprobs, None
        if np.isnan(part.logprobs).any() or np.isnan(part.raw_logprobs).any():
            raise self._incomplete("log-probabilities")
        equal = np.isnan(part.behaviour_logprobs)
        behaviour = None if equal.all() else np.where(equal, part.logprobs, part.behaviour_logprobs)
        return part.logprobs, part.raw_logprobs, behaviour

    def _kept_sets(self, start: int, stop: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        if self._kept is None:
            return None, None
        counts, ids = self._kept.cut(start, stop)
        if not counts.all():
            raise self._incomplete("kept sets")
        return counts, ids

    def delta(self, start: int, stop: int, finished: Generation | None, prompt_score: PromptScore | None = None) -> Delta:
        """Return the tokens of a stretch as a value."""
        columns: Columns | Shown
        log = self._log
        columns, low, high = log.find(start, stop)
        plain = log.plain
        if not plain or not self.wants.logprobs:
            part = self._log.cut(start, stop)
            columns, low, high = Shown(part.ids, *self._logprobs(part), part.versions), 0, stop - start
        delta = Delta(start, columns, low, high, plain, finished)
        if prompt_score is not None:
            delta.prompt_logprobs = prompt_score
        if self._kept is not None:
            delta.kept_counts, delta.kept_ids = self._kept_sets(start, stop)
        return delta

    def generation(self) -> Generation:
        """Return the whole of an ended request."""
        ending = self.ending
        assert ending is not None, "a generation comes after its ending"
        part = self.tokens(0, self.length).contiguous()
        logprobs, raw, behaviour = self._logprobs(part)
        kept_counts, kept_ids = self._kept_sets(0, self.length)
        return Generation(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            ids=part.ids,
            logprobs=logprobs,
            raw_logprobs=raw,
            behaviour_logprobs=behaviour,
            versions=part.versions,
            kv_spans=tuple((span[0], span[1]) for span in ending.kv_spans),
            finish_reason=FinishReason(kind=ending.kind, stop_id=ending.stop_id, detail=ending.detail, stop_string=ending.stop_string),
            seed=ending.seed,
            cached_tokens=ending.cached_tokens,
            prompt_tokens=ending.prompt_tokens,
            kept_counts=kept_counts,
            kept_ids=kept_ids,
            prompt_logprobs=self.prompt_score,
            text=self.text,
            kv_rebuilt_at=tuple(ending.kv_rebuilt_at),
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


class DeltaCursor:
    """How far one reader of a stream has come: it has everything before token `start`."""

    __slots__ = ("_gave_score", "_record", "over", "start")

    def __init__(self, record: StreamRecord) -> None:
        self._record = record
        self.start = 0
        self._gave_score = False
        self.over = False

    def read(self) -> Delta | None:
        """Return what came since, None if nothing did; the last delta has the generation. Raises: as `StreamRecord.result`."""
        record, start = self._record, self.start
        # The end first: it comes after the last token.
        done = record.done
        stop = record.length
        if stop == start and not done:
            return None
        self.start = stop
        score = record.prompt_score
        if score is not None:
            score, self._gave_score = (None if self._gave_score else score), True
        if not done or (stop > start and record.error is None and record.ending is not None and record.ending.kind == "failed"):
            return record.delta(start, stop, None, score)
        self.over = True
        return record.delta(start, stop, record.result(), score)
