"""What an engine host is started with, and what it takes away at its end.

The front writes the config as JSON and the host reads it; a host that outlives its front removes the files that both left.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.state import FileLock

LOCK_WAIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """The JSON file by which the front starts this process."""

    endpoint: str
    engine: str
    engine_arguments: Mapping[str, Any]
    weights_dir: str
    keep_last: str | None
    lost: Mapping[str, Any] | None
    threads: int | None
    max_message_bytes: int
    credit_bytes: int
    log_format: str
    own_files: list[str]
    service_lock: str
    service_files: list[str]


def remove_leftovers(config: HostConfig) -> None:
    """Remove this host's files, and the service's sockets unless another front holds their lock already."""
    lock = FileLock(Path(config.service_lock))
    alone = False
    # The kernel closes a dead process's files one by one: our pipe may be closed a moment before its lock.
    deadline = time.monotonic() + LOCK_WAIT_S
    with contextlib.suppress(OSError):
        while not (alone := lock.acquire()) and time.monotonic() < deadline:
            time.sleep(LOCK_WAIT_S / 40)
    for path in [*config.own_files, *(config.service_files if alone else [])]:
        with contextlib.suppress(OSError):
            os.unlink(path)
    lock.release(remove=alone)
