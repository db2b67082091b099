"""Groups of finished episodes for a trainer that asks "the next n, please".

    trainer's thread: next(n) --> take --.        .--> run_group(task): the user's episodes
                                          flight                                            (the source's own thread)

`RolloutSource` runs `run_group` for up to `max_ahead` prompts at once in an event loop of its own thread, so that a plain
synchronous trainer can use it and an optimizer step does not stop the episodes. It owns the thread; `flight.GroupFlight` owns
the groups. Invariant: no prompt is lost and none is delivered twice, also across `state_dict` and `load_state_dict`, and
whenever a `next` is interrupted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from trainer_bridge.errors import InvalidOption, SourceClosed, shown
from trainer_bridge.flight import GroupFlight
from trainer_bridge.groups import GroupTask, P, RolloutGroup
from trainer_bridge.option_names import OTHER_OPTIONS, checks_names
from trainer_bridge.options import SourceOptions, SourceStats
from trainer_bridge.samples import TrainingSample
from trainer_bridge.turns import is_finite

T = TypeVar("T")


def _min_valid(group_size: object) -> int:
    return min(2, group_size) if isinstance(group_size, int) and group_size >= 1 else 1


def _check_arguments(prompts: object, run_group: object, version: object, safe_point: object, seed: object, poll_s: object) -> None:
    """Check what `SourceOptions` does not hold. Raises: InvalidOption."""
    try:
        iterable = iter(prompts) is not None  # type: ignore[call-overload]
    except TypeError:
        iterable = False
    checks = (
        ("prompts", prompts, iterable, "a sequence or an iterator of prompts", "pass [prompt] for a single one"),
        ("run_group", run_group, callable(run_group), "an async function of a GroupTask", "make it with each_member(play)"),
        ("version", version, callable(version), "a function without arguments", "pass push=push, or version=lambda: ..."),
        ("safe_point", safe_point, safe_point is None or callable(safe_point), "a function without arguments", "pass push.push_if_needed"),
        ("seed", seed, isinstance(seed, int) and not isinstance(seed, bool), "an integer", "pass an int"),
        ("poll_s", poll_s, is_finite(poll_s) and 0 < poll_s <= 3600, "seconds above 0, at most 3600", "leave poll_s at 0.25"),  # type: ignore[operator]
    )
    for name, value, ok, limit, remedy in checks:
        if not ok:
            raise InvalidOption(f"{name}={shown(value)}", field=name, value=value, limit=limit, remedy=remedy)


class Publisher(Protocol):
    """What a source needs of a `WeightPush`."""

    @property
    def version(self) -> int: ...

    def owns(self, version: int) -> bool: ...

    def push_if_needed(self) -> object: ...


def _any_version(version: int) -> bool:
    return True


def _check_push(push: object) -> None:
    if not all(hasattr(push, name) for name in ("version", "owns", "push_if_needed")):
        raise InvalidOption(
            f"push={shown(push)}",
            field="push",
            value=push,
            limit="a WeightPush",
            remedy="pass the WeightPush itself, or version=lambda: ...",
        )


@checks_names(InvalidOption, OTHER_OPTIONS)
class RolloutSource(Generic[P]):
    """Yield groups of samples for training steps while further groups are played.

    `prompts`: a sequence (read `epochs` times, None = for ever) or an iterator (read once; after `load_state_dict` it must
    start again from its beginning). `run_group(task)` plays one group; make it from an episode function with `each_member`.
    `push`: the `WeightPush` whose weights the groups are played with; it tells the current version and which versions are the trainer's,
    and pushes again to a service that lost them, while `next` waits (`push_if_needed`). Where something else publishes the weights,
    `version()` returns the trainer's current version without blocking, in place of `push`.
    `max_staleness`: a group whose oldest sampled token is more than that many versions old when it is taken is dropped,
    counted, and its prompt runs again; with 0 nothing runs unless a `next` waits. So is one of a version that `push` has not published,
    whatever its distance: a service that was started again serves its folder's weights under one. `max_ahead`: groups in flight or ready.
    `fresh_groups`: of these, how many start only when a `next` waits, so that each step has tokens of the newest weights.
    `min_valid_members`: a group with fewer trainable members counts as failed (default: 2, or 1 for groups of one).
    A prompt that failed `max_attempts` times makes `next` raise; it stays queued. `safe_point`, if given, is called in the
    caller's thread when `next` starts and every `poll_s` seconds while it waits: the place for weights that are asked for
    (by default `push.push_if_needed`).
    A service that is away (host died, waits for weights, busy, unreachable) costs no attempt: prompts are held and tried again,
    less and less often, and only failures that go on for `outage_s` seconds of a waiting `next` make it raise ServiceOutage.
    Raises: InvalidOption.
    """

    def __init__(
        self,
        prompts: Iterable[P],
        run_group: Callable[[GroupTask[P]], Awaitable[Sequence[TrainingSample]]],
        *,
        group_size: int,
        push: Publisher | None = None,
        version: Callable[[], int] | None = None,
        max_staleness: int = 1,
        max_ahead: int = 8,
        fresh_groups: int = 0,
        min_valid_members: int | None = None,
        max_attempts: int = 3,
        epochs: int | None = 1,
        seed: int = 0,
        safe_point: Callable[[], object] | None = None,
        poll_s: float = 0.25,
        outage_s: float = 60.0,
    ):
        if (push is None) == (version is None):
            raise InvalidOption(
                "a source is made with push or with version" if push is None else "a source was given push and version",
                field="push",
                limit="one of them",
                remedy="pass push=push, a WeightPush; or version=lambda: ... where something else publishes the weights",
            )
        owns: Callable[[int], bool] = _any_version
        if push is not None:
            _check_push(push)
            version, safe_point, owns = lambda: push.version, safe_point or push.push_if_needed, push.owns
        _check_arguments(prompts, run_group, version, safe_point, seed, poll_s)
        assert version is not None, "it is one of the two"
        options = SourceOptions(
            group_size=group_size,
            max_staleness=max_staleness,
            max_ahead=max_ahead,
            fresh_groups=fresh_groups,
            min_valid_members=_min_valid(group_size) if min_valid_members is None else min_valid_members,
            max_attempts=max_attempts,
            epochs=epochs,
            outage_s=outage_s,
        )
        self._flight: GroupFlight[P] = GroupFlight(prompts, run_group, version=version, owns=owns, options=options, seed=seed)
        self._max_ahead = max_ahead
        self._safe_point, self._poll_s = safe_point, poll_s
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()

    def start(self) -> None:
        """Start playing before the first `next` (which does so by itself). Does nothing when called again."""
        self._ask(self._flight.start())

    @checks_names(InvalidOption, OTHER_OPTIONS)
    def next(self, n_groups: int = 1, *, timeout_s: float | None = None) -> list[RolloutGroup[P]]:
        """Return the next `n_groups` groups, lowest prompt number first.

        Blocks: until they are there, at most `timeout_s`. An interrupted or timed-out call takes nothing.
        Raises: RolloutShortfall (prompts at their end, a prompt that keeps failing, time over), ServiceOutage, SourceClosed,
        InvalidOption.
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
                    raise self._flight.shortfall(
                        n_groups, f"timeout_s={timeout_s} is over", "wait longer, or look at the failures and at stats()"
                    )
                self._reach_safe_point()
        except BaseException:
            self._withdraw(taken)
            raise

    @checks_names(InvalidOption, OTHER_OPTIONS)
    async def next_async(self, n_groups: int = 1) -> list[RolloutGroup[P]]:
        """Await the next groups from any event loop. Raises: as `next`."""
        self._check_count(n_groups)
        self._reach_safe_point()
        taken = self._begin_take(n_groups)
        waited = asyncio.wrap_future(taken)
        try:
            while not (await asyncio.wait([waited], timeout=self._poll_s))[0]:
                self._reach_safe_point()
            return waited.result()
        except BaseException:
            self._withdraw(taken)
            waited.cancel()
            raise

    def stats(self) -> SourceStats:
        """Return the counters."""
        return self._ask(self._flight.stats())

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers from which `load_state_dict` goes on; groups not yet taken are played again there."""
        return self._ask(self._flight.save())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved run stood. Call it on a fresh source, before `next` and `start`. Raises: InvalidState."""
        self._ask(self._flight.load(state))

    def close(self) -> None:
        """Cancel everything in flight and end the thread. Does nothing when called again."""
        with self._start_lock:
            if self._closed:
                return
            self._closed = True
            thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._flight.shut_down(), loop).result()
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
                f"n_groups={shown(n_groups)}",
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
        self._submit(self._flight.take(n_groups, taken))
        return taken

    def _withdraw(self, taken: concurrent.futures.Future[list[RolloutGroup[P]]]) -> None:
        """Give up a take. Once the loop thread has begun to hand groups over it is too late to cancel: they go back."""
        if taken.cancel():
            with contextlib.suppress(SourceClosed):
                self._ask(self._flight.wake())
        elif taken.exception() is None:
            with contextlib.suppress(SourceClosed):
                self._ask(self._flight.put_back(taken.result()))
