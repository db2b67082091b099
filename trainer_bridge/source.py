"""Groups of finished episodes for a trainer that asks "the next n, please".

    prompts -> [again, next] -> in flight (asyncio tasks in this source's own thread) -> ready -> next(n) -> trainer

`RolloutSource` runs `run_group` for up to `max_ahead` prompts at once in an event loop of its own thread, so that a plain
synchronous trainer can use it and an optimizer step does not stop the episodes. Everything mutable belongs to that thread;
the public methods send it small coroutines. Invariant: every prompt drawn is in flight, ready, waiting to run again, or
delivered; none is lost and none is delivered twice, also across `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trainer_bridge.errors import InvalidOption, InvalidState, RolloutShortfall, SourceClosed, VersionBehind
from trainer_bridge.groups import GroupTask, P, RolloutGroup, derive_seed
from trainer_bridge.prompts import PromptQueue
from trainer_bridge.samples import TrainingSample, oldest_version

T = TypeVar("T")
STATE_FORMAT = 1
VERSION_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStats:
    """Counters since the source was made (`in_flight`, `ready` and `waiting` are of now)."""

    delivered: int
    dropped_stale: int
    in_flight: int
    ready: int
    waiting: int
    failures: dict[str, int]
    failed_members: dict[str, int]


def _root(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _cause(error: BaseException) -> str:
    root = _root(error)
    return str(getattr(root, "code", None) or type(root).__name__)


class RolloutSource(Generic[P]):
    """Yield groups of samples for training steps while further groups are played.

    `prompts`: a sequence (read `epochs` times, None = for ever) or an iterator (read once; after `load_state_dict` it must
    start again from its beginning). `run_group(task)` plays one group; make it from an episode function with `each_member`.
    `version()` returns the trainer's current weight version without blocking, for example `lambda: push.version`.
    `max_staleness`: a group whose oldest sampled token is more than that many versions old when it is taken is dropped,
    counted, and its prompt runs again; with 0 nothing runs unless a `next` waits. `max_ahead`: groups in flight or ready.
    `min_valid_members`: a group with fewer trainable members counts as failed (default: 2, or 1 for groups of one).
    A prompt that failed `max_attempts` times makes `next` raise; it stays queued. `safe_point`, if given, is called in the
    caller's thread when `next` starts and every `poll_s` seconds while it waits: the place for weights that are asked for.
    Raises: InvalidOption.
    """

    def __init__(
        self,
        prompts: Iterable[P],
        run_group: Callable[[GroupTask[P]], Awaitable[Sequence[TrainingSample]]],
        *,
        group_size: int,
        version: Callable[[], int],
        max_staleness: int = 1,
        max_ahead: int = 8,
        min_valid_members: int | None = None,
        max_attempts: int = 3,
        epochs: int | None = 1,
        seed: int = 0,
        safe_point: Callable[[], None] | None = None,
        poll_s: float = 0.25,
    ):
        smallest = {
            "group_size": (group_size, 1),
            "max_staleness": (max_staleness, 0),
            "max_ahead": (max_ahead, 1),
            "max_attempts": (max_attempts, 1),
        }
        smallest |= {} if epochs is None else {"epochs": (epochs, 1)}
        min_valid = min(2, group_size) if min_valid_members is None else min_valid_members
        smallest |= {"min_valid_members": (min_valid, 1)}
        for name, (value, least) in smallest.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidOption(
                    f"{name}={value!r}", field=name, value=value, limit=f"an integer of at least {least}", remedy=f"raise {name}"
                )
        if min_valid > group_size:
            raise InvalidOption(
                f"min_valid_members={min_valid}",
                field="min_valid_members",
                value=min_valid,
                limit=f"at most group_size={group_size}",
                remedy="lower it",
            )
        self._prompts: PromptQueue[P] = PromptQueue(prompts, epochs)
        self._run_group, self._version = run_group, version
        self._group_size, self._max_staleness, self._max_ahead = group_size, max_staleness, max_ahead
        self._min_valid, self._max_attempts, self._seed = min_valid, max_attempts, seed
        self._safe_point, self._poll_s = safe_point, poll_s
        self._again: deque[GroupTask[P]] = deque()
        self._in_flight: dict[int, tuple[GroupTask[P], asyncio.Task[None]]] = {}
        self._ready: dict[int, tuple[GroupTask[P], tuple[TrainingSample, ...]]] = {}
        self._tries: Counter[int] = Counter()
        self._failures: Counter[str] = Counter()
        self._failed_members: Counter[str] = Counter()
        self._given_up: BaseException | None = None
        self._delivered = self._dropped_stale = self._waiting_for = 0
        self._closed = False
        self._changed = asyncio.Event()
        self._take_lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()

    # The caller's side.

    def start(self) -> None:
        """Start playing before the first `next` (which does so by itself). Does nothing when called again."""
        self._ask(self._fill_soon())

    def next(self, n_groups: int = 1, *, timeout_s: float | None = None) -> list[RolloutGroup[P]]:
        """Return the next `n_groups` groups, lowest prompt number first.

        Blocks: until they are there, at most `timeout_s`. An interrupted or timed-out call takes nothing.
        Raises: RolloutShortfall (prompts at their end, a prompt that keeps failing, time over), SourceClosed, InvalidOption.
        """
        self._check_count(n_groups)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._reach_safe_point()
        taken = self._begin_take(n_groups)
        try:
            while True:
                left = self._poll_s if deadline is None else min(self._poll_s, max(0.0, deadline - time.monotonic()))
                if concurrent.futures.wait([taken], timeout=left).done:
                    return taken.result()
                if deadline is not None and time.monotonic() >= deadline:
                    raise self._shortfall(n_groups, f"timeout_s={timeout_s} is over", "wait longer, or look at the failures and at stats()")
                self._reach_safe_point()
        except BaseException:
            self._withdraw(taken)
            raise

    async def next_async(self, n_groups: int = 1) -> list[RolloutGroup[P]]:
        """Await the next groups from any event loop. Raises: as `next`."""
        self._check_count(n_groups)
        self._reach_safe_point()
        taken = self._begin_take(n_groups)
        try:
            return await asyncio.wrap_future(taken)
        except BaseException:
            self._withdraw(taken)
            raise

    def stats(self) -> SourceStats:
        """Return the counters."""
        return self._ask(self._read_stats())

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers from which `load_state_dict` goes on; groups not yet taken are played again there."""
        return self._ask(self._save())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved run stood. Call it on a fresh source, before `next` and `start`. Raises: InvalidState."""
        self._ask(self._load(state))

    def close(self) -> None:
        """Cancel everything in flight and end the thread. Does nothing when called again."""
        with self._start_lock:
            if self._closed:
                return
            self._closed = True
            thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def __enter__(self) -> RolloutSource[P]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_count(self, n_groups: int) -> None:
        if isinstance(n_groups, bool) or not isinstance(n_groups, int) or not 1 <= n_groups <= self._max_ahead:
            raise InvalidOption(
                f"n_groups={n_groups!r}",
                field="n_groups",
                value=n_groups,
                limit=f"1 to max_ahead={self._max_ahead}: no more groups are ever in flight or ready",
                remedy="raise max_ahead",
            )

    def _reach_safe_point(self) -> None:
        if self._safe_point is not None:
            self._safe_point()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._start_lock:
            if self._closed:
                work.close()
                raise SourceClosed("the source is closed", remedy="make a new one; load_state_dict goes on where this one stood")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-source", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        return self._submit(work).result()

    def _begin_take(self, n_groups: int) -> concurrent.futures.Future[list[RolloutGroup[P]]]:
        taken: concurrent.futures.Future[list[RolloutGroup[P]]] = concurrent.futures.Future()
        self._submit(self._take(n_groups, taken))
        return taken

    def _withdraw(self, taken: concurrent.futures.Future[list[RolloutGroup[P]]]) -> None:
        """Give up a take. Once the loop thread has begun to hand groups over it is too late to cancel: they go back."""
        if taken.cancel():
            with contextlib.suppress(SourceClosed):
                self._ask(self._wake())
        elif taken.exception() is None:
            with contextlib.suppress(SourceClosed):
                self._ask(self._put_back(taken.result()))

    # The loop thread's side: everything below runs there.

    async def _take(self, n_groups: int, taken: concurrent.futures.Future[list[RolloutGroup[P]]]) -> None:
        """Settle `taken` with groups or an error; a taker that cancelled it in time loses no group."""
        outcome: int | BaseException
        try:
            async with self._take_lock:
                self._waiting_for = n_groups
                outcome = await self._until_ready(n_groups, taken)
        except asyncio.CancelledError:
            outcome = SourceClosed("the source was closed while next() waited", remedy="close it after the last next()")
        except Exception as error:  # Handed to the caller of next(), in the caller's thread.
            outcome = error
        self._waiting_for = 0
        # From here on a cancel comes too late, and no await stands between this and the groups leaving `_ready`.
        if not taken.set_running_or_notify_cancel():
            return
        if isinstance(outcome, BaseException):
            taken.set_exception(outcome)
        else:
            taken.set_result(self._deliver(n_groups, outcome))

    async def _until_ready(self, n_groups: int, taken: concurrent.futures.Future[list[RolloutGroup[P]]]) -> int:
        """Wait until enough fresh groups are ready (or the taker went away); return the version they were checked against."""
        while True:
            self._changed.clear()
            current = await self._current_version()
            self._drop_stale(current)
            if len(self._ready) >= n_groups or taken.cancelled():
                return current
            if self._given_up is not None:
                error, self._given_up = self._given_up, None
                self._tries.clear()
                limit = f"a prompt failed {self._max_attempts} times, last with {_root(error)!r}"
                raise self._shortfall(n_groups, limit, "see __cause__; call next again to go on") from error
            self._fill()
            if not self._in_flight:
                raise self._shortfall(
                    n_groups, f"the prompts are used up with {len(self._ready)} groups ready", "ask for fewer, or raise epochs"
                )
            await self._changed.wait()

    async def _current_version(self) -> int:
        """Return `version()`; a push in another thread may publish a version a moment before the trainer knows it."""
        deadline = time.monotonic() + VERSION_GRACE_S
        while True:
            current = self._version()
            newest = max(
                (version for _, samples in self._ready.values() if (version := oldest_version(samples)) is not None), default=current
            )
            if newest <= current:
                return current
            if time.monotonic() > deadline:
                raise VersionBehind(
                    f"a ready group was sampled under version {newest}",
                    field="version",
                    value=newest,
                    limit=f"version() says {current} for {VERSION_GRACE_S} s",
                    remedy="return the version of the last committed push from version()",
                )
            await asyncio.sleep(0.02)

    def _deliver(self, n_groups: int, current: int) -> list[RolloutGroup[P]]:
        groups = []
        for index in sorted(self._ready)[:n_groups]:
            task, samples = self._ready.pop(index)
            oldest = oldest_version(samples)
            staleness = 0 if oldest is None else current - oldest
            groups.append(RolloutGroup(index=index, prompt=task.prompt, samples=samples, staleness=staleness, attempt=task.attempt))
            self._tries.pop(index, None)
        self._delivered += len(groups)
        self._waiting_for = 0
        self._fill()
        return groups

    def _drop_stale(self, current: int) -> None:
        for index in sorted(self._ready):
            task, samples = self._ready[index]
            oldest = oldest_version(samples)
            if oldest is None or current - oldest <= self._max_staleness:
                continue
            del self._ready[index]
            self._dropped_stale += 1
            self._again.append(self._retry_of(task))

    def _retry_of(self, task: GroupTask[P]) -> GroupTask[P]:
        return self._task(task.index, task.prompt, task.attempt + 1)

    def _task(self, index: int, prompt: P, attempt: int) -> GroupTask[P]:
        seed = derive_seed(self._seed, index, attempt)
        return GroupTask(index=index, prompt=prompt, group_size=self._group_size, seed=seed, attempt=attempt)

    async def _fill_soon(self) -> None:
        self._fill()

    def _fill(self) -> None:
        """Start groups up to the limit, prompts that run again first."""
        if self._closed or self._given_up is not None:
            return
        # Under staleness 0 a group that starts while the trainer works is stale by the time it is taken.
        limit = min(self._max_ahead, self._waiting_for) if self._max_staleness == 0 else self._max_ahead
        while len(self._in_flight) + len(self._ready) < limit:
            if self._again:
                task = self._again.popleft()
            else:
                drawn = self._prompts.draw()
                if drawn is None:
                    return
                task = self._task(*drawn, 0)
            self._in_flight[task.index] = (task, asyncio.get_running_loop().create_task(self._play(task)))

    async def _play(self, task: GroupTask[P]) -> None:
        try:
            samples = tuple(await self._run_group(task))
            failed = Counter(str(sample.info.get("cause", sample.status)) for sample in samples if not sample.is_trainable)
            self._failed_members.update(failed)
            valid = len({sample.member for sample in samples if sample.is_trainable})
            if valid < self._min_valid:
                raise RolloutShortfall(
                    f"group {task.index} has {valid} trainable members",
                    failures=failed,
                    limit=f"min_valid_members={self._min_valid}",
                    remedy="look at why members fail",
                )
        except asyncio.CancelledError:
            raise
        except Exception as error:  # The one place where a failed group becomes data: counted, queued again.
            del self._in_flight[task.index]
            self._failures[_cause(error)] += 1
            self._tries[task.index] += 1
            self._again.append(self._retry_of(task))
            if self._tries[task.index] >= self._max_attempts:
                self._given_up = error
        else:
            del self._in_flight[task.index]
            self._ready[task.index] = (task, samples)
        self._fill()
        self._changed.set()

    async def _put_back(self, groups: list[RolloutGroup[P]]) -> None:
        for group in groups:
            self._ready[group.index] = (self._task(group.index, group.prompt, group.attempt), group.samples)
        self._delivered -= len(groups)
        self._changed.set()

    async def _wake(self) -> None:
        self._changed.set()

    def _shortfall(self, n_groups: int, limit: str, remedy: str) -> RolloutShortfall:
        return RolloutShortfall(f"{n_groups} groups were asked for and cannot be had", failures=self._failures, limit=limit, remedy=remedy)

    async def _read_stats(self) -> SourceStats:
        return SourceStats(
            delivered=self._delivered,
            dropped_stale=self._dropped_stale,
            in_flight=len(self._in_flight),
            ready=len(self._ready),
            waiting=len(self._again),
            failures=dict(self._failures),
            failed_members=dict(self._failed_members),
        )

    async def _save(self) -> dict[str, Any]:
        tasks = [task for task, _ in self._in_flight.values()] + [task for task, _ in self._ready.values()] + list(self._again)
        pending = sorted([task.index, task.attempt] for task in tasks)
        return {
            "format": STATE_FORMAT,
            "seed": self._seed,
            "cursor": self._prompts.cursor,
            "pending": pending,
            "delivered": self._delivered,
        }

    async def _load(self, state: dict[str, Any]) -> None:
        if self._prompts.cursor or self._in_flight or self._ready:
            raise InvalidState(
                "the source has already started", field="cursor", value=self._prompts.cursor, remedy="load into a fresh source"
            )
        if state.get("format") != STATE_FORMAT or set(state) != {"format", "seed", "cursor", "pending", "delivered"}:
            raise InvalidState(
                f"a state of format {state.get('format')!r} with the keys {sorted(state)}",
                field="format",
                value=state.get("format"),
                limit=f"format {STATE_FORMAT}",
                remedy="load what state_dict() returned",
            )
        wanted = [index for index, _ in state["pending"]]
        found = self._prompts.restore(state["cursor"], wanted)
        self._seed, self._delivered = state["seed"], state["delivered"]
        # An attempt of its own: the groups that the saved run had begun are played anew, with new draws.
        self._again.extend(self._task(index, found[index], attempt + 1) for index, attempt in state["pending"])

    async def _shut_down(self) -> None:
        running = [running for _, running in self._in_flight.values()]
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in {*running, *others}:
            task.cancel()
        await asyncio.gather(*running, *others, return_exceptions=True)
        self._in_flight.clear()
        await asyncio.get_running_loop().shutdown_asyncgens()
