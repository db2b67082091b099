"""Foreign code is called for a bounded time, and whatever it does comes back as a value or an exception."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

import pytest

from rollout.agent.deadline import call_within
from rollout.agent.errors import PhaseTimeout


def run(function: Any, *arguments: Any, timeout_s: float | None = 1.0) -> Any:
    return asyncio.run(call_within(timeout_s, "it", function, *arguments))


async def _double(value: int) -> int:
    return 2 * value


class _Callable:
    async def __call__(self, value: int) -> int:
        return 3 * value


@pytest.mark.parametrize("function", [_double, functools.partial(_double, 4), lambda value=4: 8, lambda value=4: _double(4)])
def test_values_come_back_from_any_kind_of_function(function: Any) -> None:
    assert run(function, *(() if isinstance(function, functools.partial) else (4,))) == 8
    assert run(_Callable(), 3, timeout_s=None) == 9


def _raise(error: BaseException) -> None:
    raise error


async def _raise_async(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("function", [_raise, _raise_async])
@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), StopIteration(1), asyncio.CancelledError()])
def test_errors_come_back_and_only_ordinary_ones(function: Any, error: BaseException) -> None:
    with pytest.raises(ValueError if isinstance(error, ValueError) else RuntimeError):
        run(function, error)


def test_a_hanging_coroutine_is_cancelled_and_a_hanging_thread_is_left() -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("cancelled")

    started = time.perf_counter()
    for function in (hang, lambda: time.sleep(1.0)):
        with pytest.raises(PhaseTimeout, match=r"it took longer than 0\.05 s.*raise its time-out"):
            run(function, timeout_s=0.05)
    assert ended == ["cancelled"]
    assert time.perf_counter() - started < 1


def test_cancelling_the_caller_cancels_the_call_and_waits_for_its_end() -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.02)
            ended.append("cleaned up")

    async def cancel() -> None:
        task = asyncio.create_task(call_within(30, "it", hang))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["cleaned up"]

    asyncio.run(cancel())
