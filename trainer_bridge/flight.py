"""The groups under way: which prompts run, which groups are ready, what is taken, dropped, repeated.

    prompts -> [again, next] -> in flight (asyncio tasks) -> ready -> taken
                  ^------------- failed, or stale when taken ----'

A group that the service failed by being away is no failure of its prompt: everything is held for a moment and tried again.

`source.RolloutSource` owns one and calls it in its event loop's thread only; nothing here is locked. Invariant: every prompt
drawn is in flight, ready, waiting to run again, or delivered.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic

from trainer_bridge.errors import GroupShortfall, InvalidState, RolloutShortfall, ServiceOutage, SourceClosed, VersionBehind
from trainer_bridge.groups import GroupTask, P, RolloutGroup, check_members, derive_seed, played_samples
from trainer_bridge.options import SourceOptions, SourceStats
from trainer_bridge.outage import OUTAGE_CODES, OutageWatch, outage_code
from trainer_bridge.prompts import PromptQueue
from trainer_bridge.samples import TrainingSample, oldest_version
from trainer_bridge.state import STATE_FORMAT, check_state

VERSION_GRACE_S = 5.0


def _root(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _cause(error: BaseException) -> str:
    root = _root(error)
    if isinstance(root, GroupShortfall):
        return root.cause
    return str(getattr(root, "code", None) or type(root).__name__)


class GroupFlight(Generic[P]):
    """The state of a source and its transitions. All methods run in one event loop."""

    def __init__(
        self,
        prompts: Iterable[P],
        run_group: Callable[[GroupTask[P]], Awaitable[Sequence[TrainingSample]]],
        *,
        version: Callable[[], int],
        owns: Callable[[int], bool],
        options: SourceOptions,
        seed: int,
    ):
        self._prompts: PromptQueue[P] = PromptQueue(prompts, options.epochs)
        self._run_group, self._version, self._owns, self._options, self._seed = run_group, version, owns, options, seed
        self._again: deque[GroupTask[P]] = deque()
        self._in_flight: dict[int, tuple[GroupTask[P], asyncio.Task[None]]] = {}
        self._ready: dict[int, tuple[GroupTask[P], tuple[TrainingSample, ...]]] = {}
        self._tries: Counter[int] = Counter()
        self._failures: Counter[str] = Counter()
        self._failed_members: Counter[str] = Counter()
        self._last_errors: dict[str, str] = {}
        self._given_up: tuple[str, BaseException] | None = None
        self._outage = OutageWatch(limit_s=options.outage_s)
        self._hold: asyncio.TimerHandle | None = None
        self._delivered = self._dropped_stale = self._waiting_for = 0
        self._closed = False
        self._changed = asyncio.Event()
        self._take_lock = asyncio.Lock()

    async def take(self, n_groups: int, taken: concurrent.futures.Future[list[RolloutGroup[P]]]) -> None:
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
        waiting_since = time.monotonic()
        while True:
            self._changed.clear()
            current = await self._current_version()
            self._drop_stale(current)
            if len(self._ready) >= n_groups or taken.cancelled():
                return current
            if self._given_up is not None:
                (limit, error), self._given_up = self._given_up, None
                self._tries.clear()
                raise self.shortfall(n_groups, limit, "mend that (__cause__ has more); call next again to go on") from error
            if self._outage.is_too_long(waiting_since=waiting_since, in_flight=len(self._in_flight)):
                raise self._outage_error(n_groups) from self._outage.error
            self._fill()
            if not self._in_flight and self._hold is None:
                raise self.shortfall(
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
                    remedy="return the version of the last committed push from version(); if the service was started again, "
                    "push once more, as a source that was made with push=push does",
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
            if not self._is_stale(samples, current):
                continue
            del self._ready[index]
            self._dropped_stale += 1
            self._again.append(self._retry_of(task))

    def _is_stale(self, samples: Sequence[TrainingSample], current: int) -> bool:
        oldest = oldest_version(samples)
        if oldest is None:
            return False
        too_old = current - oldest > self._options.max_staleness
        # A version that is not the trainer's is of any age, however near its number.
        return too_old or not all(self._owns(version) for sample in samples for version in sample.sampled_versions)

    def _retry_of(self, task: GroupTask[P]) -> GroupTask[P]:
        return self._task(task.index, task.prompt, task.attempt + 1)

    def _task(self, index: int, prompt: P, attempt: int) -> GroupTask[P]:
        seed = derive_seed(self._seed, index, attempt)
        return GroupTask(index=index, prompt=prompt, group_size=self._options.group_size, seed=seed, attempt=attempt)

    async def start(self) -> None:
        """Start groups without waiting for a taker."""
        self._fill()

    def _fill(self) -> None:
        """Start groups up to the limit, prompts that run again first."""
        if self._closed or self._given_up is not None or self._hold is not None:
            return
        limit = self._options.max_ahead
        if self._options.max_staleness == 0:
            # A group that starts while the trainer works is stale by the time it is taken.
            limit = min(limit, self._waiting_for)
        elif not self._waiting_for:
            limit -= self._options.fresh_groups
        while len(self._in_flight) + len(self._ready) < limit:
            if self._again:
                task = self._again.popleft()
            else:
                try:
                    drawn = self._prompts.draw()
                except Exception as error:  # The user's iterator broke; the next take tells.
                    self._given_up = (f"the prompts raised {error!r}", error)
                    return
                if drawn is None:
                    return
                task = self._task(*drawn, 0)
            self._in_flight[task.index] = (task, asyncio.get_running_loop().create_task(self._play(task)))

    async def _play(self, task: GroupTask[P]) -> None:
        try:
            samples = tuple(await played_samples("run_group", self._run_group(task)))
            self._check_group(task, samples)
        except asyncio.CancelledError as error:
            if self._closed:
                raise
            self._fail(task, error)  # Something inside the group was cancelled, and not by us.
        except Exception as error:  # The one place where a failed group becomes data: counted, queued again.
            self._fail(task, error)
        else:
            del self._in_flight[task.index]
            self._ready[task.index] = (task, samples)
            self._outage.end()
        self._fill()
        self._changed.set()

    def _check_group(self, task: GroupTask[P], samples: tuple[TrainingSample, ...]) -> None:
        check_members(task, samples)
        causes = {sample.member: str(sample.info.get("cause", sample.status)) for sample in samples if not sample.is_trainable}
        failed = Counter(causes.values())
        self._failed_members.update(failed)
        said = (sample for sample in samples if not sample.is_trainable and "error" in sample.info)
        self._last_errors.update((causes[sample.member], str(sample.info["error"])) for sample in said)
        valid = len({sample.member for sample in samples if sample.is_trainable})
        if valid < self._options.min_valid_members:
            codes = {sample.member: str(sample.info.get("code")) for sample in samples if not sample.is_trainable}
            away = [code for code in codes.values() if code in OUTAGE_CODES]
            cause, times = failed.most_common(1)[0] if failed else ("no_samples", self._options.group_size)
            raise GroupShortfall(
                f"{times} of the {self._options.group_size} members of group {task.index} failed with {self._told(cause)}",
                cause=cause,
                failures=failed,
                outage=away[0] if valid + len(away) >= self._options.min_valid_members else None,
                limit=f"{valid} can be trained on and min_valid_members={self._options.min_valid_members}",
                remedy="mend what fails there, or lower min_valid_members",
            )

    def _told(self, cause: str) -> str:
        """Return a cause with what was last said of it."""
        return f"{cause} ({self._last_errors[cause]})" if cause in self._last_errors else cause

    def _fail(self, task: GroupTask[P], error: BaseException) -> None:
        del self._in_flight[task.index]
        cause, root = _cause(error), _root(error)
        self._failures[cause] += 1
        if not isinstance(root, GroupShortfall):
            self._last_errors[cause] = repr(root)
        if (code := outage_code(error)) is not None:
            self._hold_for(task, code, error)
            return
        self._tries[task.index] += 1
        self._again.append(self._retry_of(task))
        if self._tries[task.index] >= self._options.max_attempts:
            said = root.what if isinstance(root, GroupShortfall) else repr(root)
            self._given_up = (f"a prompt failed {self._options.max_attempts} times, last with: {said}", error)

    def _hold_for(self, task: GroupTask[P], code: str, error: BaseException) -> None:
        """Queue a prompt again as it was, and start nothing for a moment."""
        self._again.append(task)
        self._outage.fail(code, error, time.monotonic())
        if self._hold is None and not self._closed:
            self._hold = asyncio.get_running_loop().call_later(self._outage.next_delay(), self._release)

    def _release(self) -> None:
        self._hold = None
        self._fill()
        self._changed.set()

    def _outage_error(self, n_groups: int) -> ServiceOutage:
        code, error = self._outage.code, self._outage.error
        assert code is not None and error is not None, "an outage has a cause"
        root = _root(error)
        said = root.what if isinstance(root, GroupShortfall) else repr(root)
        return ServiceOutage(
            f"{n_groups} groups were asked for and the service has been away with {code}",
            cause=code,
            failures=self._failures,
            limit=f"outage_s={self._options.outage_s} is over; last: {said}",
            remedy="bring the service back, or push the weights it waits for (safe_point is the place); call next again to go on",
        )

    async def put_back(self, groups: list[RolloutGroup[P]]) -> None:
        """Take groups back that their taker gave up."""
        for group in groups:
            self._ready[group.index] = (self._task(group.index, group.prompt, group.attempt), group.samples)
        self._delivered -= len(groups)
        self._changed.set()

    async def wake(self) -> None:
        """Let a waiting take look whether its taker is still there."""
        self._changed.set()

    def shortfall(self, n_groups: int, limit: str, remedy: str) -> RolloutShortfall:
        """Return the error for a take that cannot be had; it names the most frequent failure so far unless `limit` does."""
        cause, times = next(iter(self._failures.most_common(1)), ("", 0))
        if times and (told := self._told(cause)) not in limit:
            limit += f"; most frequent of {self._failures.total()} failures so far: {told}, {times} times"
        return RolloutShortfall(f"{n_groups} groups were asked for and cannot be had", failures=self._failures, limit=limit, remedy=remedy)

    async def stats(self) -> SourceStats:
        """Return the counters."""
        return SourceStats(
            delivered=self._delivered,
            dropped_stale=self._dropped_stale,
            in_flight=len(self._in_flight),
            ready=len(self._ready),
            waiting=len(self._again),
            failures=dict(self._failures),
            failed_members=dict(self._failed_members),
            last_errors=dict(self._last_errors),
        )

    async def save(self) -> dict[str, Any]:
        """Return the state; what is in flight or ready counts as not delivered."""
        tasks = [task for task, _ in self._in_flight.values()] + [task for task, _ in self._ready.values()] + list(self._again)
        pending = sorted([task.index, task.attempt] for task in tasks)
        return {
            "format": STATE_FORMAT,
            "seed": self._seed,
            "cursor": self._prompts.cursor,
            "prompts": self._prompts.fingerprint(),
            "pending": pending,
            "delivered": self._delivered,
        }

    async def load(self, state: dict[str, Any]) -> None:
        """Take over a saved state. Raises: InvalidState."""
        if self._prompts.cursor or self._in_flight or self._ready:
            raise InvalidState(
                "the source has already started", field="cursor", value=self._prompts.cursor, remedy="load into a fresh source"
            )
        check_state(state)
        wanted = {index for index, _ in state["pending"]}
        found = self._prompts.restore(state["cursor"], wanted, state["prompts"])
        self._seed, self._delivered = state["seed"], state["delivered"]
        # An attempt of its own: the groups that the saved run had begun are played anew, with new draws.
        self._again.extend(self._task(index, found[index], attempt + 1) for index, attempt in state["pending"])

    async def shut_down(self) -> None:
        """Cancel every group and every waiting take."""
        self._closed = True
        if self._hold is not None:
            self._hold.cancel()
        running = [running for _, running in self._in_flight.values()]
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in {*running, *others}:
            task.cancel()
        await asyncio.gather(*running, *others, return_exceptions=True)
        self._in_flight.clear()
        await asyncio.get_running_loop().shutdown_asyncgens()
