"""How rank 0 meets the others: in a thread of its own, since a library that waits there for a rank that is gone cannot be told to stop.

`Peers` calls it once. What is lost while ranks meet is raised by the caller's own wait. No torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from areno.errors import EngineFailure

T = TypeVar("T")
_GRACE_S = 1.0
_LEAVE_S = 0.1


def meet_in_thread(connect: Callable[[threading.Event], T], wait: Callable[[Callable[[], bool]], None], limit_s: float) -> T:
    """Return what `connect` returns. `wait` returns once its argument is true, or raises what ended the ranks.

    `connect` gets an event that is set when nobody waits for it any more: a thread of Python's must not be in there when its process ends.
    Blocks: at most `limit_s`, by which `connect` is bounded itself where its library can be. Raises: what either raises, EngineFailure.
    """
    found: list[T | BaseException] = []
    given_up = threading.Event()

    def run() -> None:
        try:
            found.append(connect(given_up))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="group-connect", daemon=True)
    thread.start()
    deadline = time.monotonic() + limit_s + _GRACE_S

    def met() -> bool:
        if not found and time.monotonic() > deadline:
            raise EngineFailure(f"the ranks did not meet within {limit_s:g} s", field="tp", remedy="see their log, then start again")
        return bool(found)

    try:
        wait(met)
    except BaseException:
        given_up.set()
        thread.join(_LEAVE_S)
        raise
    (result,) = found
    if isinstance(result, BaseException):
        raise result
    return result
