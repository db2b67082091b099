"""Calling code that was written by others: sync or async, for a bounded time.

Coroutine functions run in the event loop and are cancelled when their time is up. Everything else runs in a daemon thread of
its own; a thread cannot be stopped, so a call that hangs is left behind and holds up neither the loop nor the interpreter's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from rollout.agent.errors import PhaseTimeout

# What a cancelled call may still take to clean up (an episode cancels its request then).
CANCEL_GRACE_S = 3.0


async def call_within(timeout_s: float | None, what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, awaited if it is awaitable; None seconds set no bound.

    Raises: PhaseTimeout naming `what`; what the call raises. A call that ends by cancelling itself or by leaving the interpreter
    raises RuntimeError: only the caller's own task may do so.
    """
    task = asyncio.ensure_future(_resolve(what, function, args, kwargs))
    task.add_done_callback(_retrieve)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await _stop(task)
        raise
    if not done:
        await _stop(task)
        raise PhaseTimeout(
            f"{what} took longer than {timeout_s:g} s",
            field="timeout_s",
            value=timeout_s,
            limit=f"{timeout_s:g} s",
            remedy="raise its time-out or make it faster",
        )
    if task.cancelled():
        raise RuntimeError(f"{what} cancelled itself")
    return task.result()


async def _stop(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Read the outcome of a task that nobody waits for any more, so that the loop does not report it."""
    if not task.cancelled():
        task.exception()


async def _resolve(what: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        value = await (function(*args, **kwargs) if _is_async(function) else _in_thread(function, args, kwargs))
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:
        raise RuntimeError(f"{what} called for the interpreter's end ({error})") from error


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _in_thread(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = function(*args, **kwargs)
        except StopIteration as error:  # a future cannot carry it
            failure = RuntimeError(f"StopIteration: {error}")
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, name="bounded-call", daemon=True).start()
    return future
