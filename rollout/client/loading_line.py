"""Says that a service is being started, which takes seconds in which nothing else is heard of it.

Everywhere as log lines of level info; to who watches, a terminal or a notebook, also as one line on standard error. Pipes and files
get nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TextIO

log = logging.getLogger("rollout.client")


def _is_watched(stream: TextIO | None) -> bool:
    try:
        # A notebook's stream is no terminal, and shows what is written to it all the same.
        return stream is not None and (stream.isatty() or type(stream).__module__.startswith("ipykernel."))
    except (OSError, ValueError):
        return False


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()


@contextlib.contextmanager
def loading_line(model: str, stream: TextIO | None) -> Iterator[None]:
    """Say while the block runs that `model` is being loaded, and then how long that took; `stream` is standard error, None where closed."""
    # A line that fits a terminal, and text that any encoding has.
    shown = ascii(model)[1:-1] if len(model) <= 100 else "..." + ascii(model[-97:])[1:-1]
    watcher = stream if stream is not None and _is_watched(stream) else None
    began = time.monotonic()
    log.info("starting a service that loads %s", model)
    if watcher is not None:
        _write(watcher, f"rollout: loading {shown} ... ")
    said = "failed"
    try:
        yield
        said = f"ready after {time.monotonic() - began:.1f} s"
        log.info("the service for %s is %s", model, said)
    finally:
        if watcher is not None:
            _write(watcher, f"{said}\n")
