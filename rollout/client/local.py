"""A service of one's own for the length of a `with` block.

Starts the front as a child process in a private folder, waits until the engine is loaded, and ends both with the block.
If this process dies in between, the front notices it by its standard input and ends itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import psutil

from rollout.child_python import child_command, child_environment
from rollout.client.blocking import Client, connect
from rollout.client.loading_line import loading_line
from rollout.config import ServiceConfig
from rollout.errors import HostFailed, InvalidConfig, error_from_fields
from rollout.keys import LOCAL, KeyFolder
from rollout.option_names import OTHER_OPTIONS, checks_names
from rollout.state import StateFolder

STOP_WAIT_S = 10.0
LOG_TAIL_BYTES = 2000
FOLDER_PREFIX = "areno-"
OWNER_FILE = "owner.json"


def sweep_folders(parent: Path) -> None:
    """Remove the folders of local services whose owner was killed; one without an owner's name, or of another user, stays."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            owner = json.loads((folder / OWNER_FILE).read_text())
            if not _is_alive(int(owner["pid"]), float(owner["started"])) and not StateFolder(folder).running():
                shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int, started: float) -> bool:
    """Whether this process still runs; the start tells it from a later one with the same number."""
    try:
        return abs(psutil.Process(pid).create_time() - started) < 1.0
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


class LocalService:
    """The context manager of `rollout.local`. Inside the block: `client`, `address`, and with a `metrics_port` the URL `metrics`."""

    def __init__(self, model: str, *, start_timeout_s: float, timeout_s: float, options: dict[str, Any]) -> None:
        self._options = {"model": str(model), **options}
        self._start_timeout_s, self._timeout_s = start_timeout_s, timeout_s
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.client: Client | None = None
        self.address: str | None = None
        self.metrics: str | None = None

    @property
    def folder(self) -> Path:
        """The private folder with the service's log, while it runs."""
        assert self._folder is not None, "the service is not running"
        return self._folder

    @property
    def pid(self) -> int | None:
        """The front's process id."""
        return self._process.pid if self._process is not None else None

    def start(self) -> Client:
        """Start the service and connect. Blocks: until the engine is loaded. Raises: what the service refuses, HostFailed."""
        sweep_folders(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        (self._folder / OWNER_FILE).write_text(json.dumps({"pid": os.getpid(), "started": psutil.Process().create_time()}))
        try:
            config = ServiceConfig.from_fields({"state_dir": str(self._folder), "drain_s": 0.0, **self._options, "watch_parent": True})
            path = self._folder / "config.json"
            path.write_text(config.to_json())
            with open(self._folder / "service.log", "wb") as log:
                self._process = subprocess.Popen(
                    child_command("rollout.service.front", "--config", str(path)),
                    env=child_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            with loading_line(config.model, sys.stderr):
                ready = self._ready()
            self.address, self.metrics = str(ready["address"]), ready.get("metrics")
            self.client = connect(self.address, timeout_s=self._timeout_s, key=self._key(config))
        except BaseException:
            self.stop()
            raise
        return self.client

    def _key(self, config: ServiceConfig) -> Path | None:
        """Return the file by which its own client reaches an encrypted service."""
        encrypted = str(self.address).startswith("tcp:") and not config.insecure
        return KeyFolder(config.state.keys).path(LOCAL) if encrypted else None

    def _ready(self) -> dict[str, Any]:
        """Return the front's first line. Raises: the error that it names."""
        assert self._process is not None and self._process.stdout is not None
        line = _first_line(self._process.stdout, time.monotonic() + self._start_timeout_s)
        if line is None:
            raise HostFailed(
                f"the service was not ready within {self._start_timeout_s:g} s",
                limit=self._log_tail(),
                remedy="pass a larger start_timeout_s, or run `python -m rollout serve` to see its log",
            )
        try:
            event = json.loads(line)
        except ValueError:
            raise HostFailed(
                "the service ended before it was ready", limit=self._log_tail(), remedy="run `python -m rollout check`"
            ) from None
        if event.get("event") != "ready":
            raise error_from_fields(event["error"])
        return dict(event)

    def _log_tail(self) -> str:
        assert self._folder is not None
        with contextlib.suppress(OSError):
            return (self._folder / "service.log").read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return ""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            what = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hasattr(Client, name):
                what += f"; the client has it: `with rollout.local(...) as client:`, or `client = service.start()`, then `client.{name}`"
            raise AttributeError(what)

    def stop(self) -> None:
        """End the service; idempotent. Blocks: until its processes are gone."""
        if self.client is not None:
            self.client.close()
            self.client = None
        process, self._process = self._process, None
        if process is not None:
            if not _ended(process):
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Client:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Ask a process to end; return whether it did in time. Blocks: at most `STOP_WAIT_S`."""
    if process.poll() is None:
        # Woken by the end itself: `Popen.wait` with a time-out looks every 50 ms.
        exit_fd = os.pidfd_open(process.pid)
        try:
            process.terminate()
            select.select([exit_fd], [], [], STOP_WAIT_S)
        finally:
            os.close(exit_fd)
    return process.poll() is not None


def _first_line(pipe: IO[bytes], deadline: float) -> bytes | None:
    """Return the first line, what came before the end of the pipe, or None at the deadline."""
    data, fd = b"", pipe.fileno()
    while b"\n" not in data:
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return None
        piece = os.read(fd, 65536)
        if not piece:
            return data
        data += piece
    return data.split(b"\n", 1)[0]


@checks_names(InvalidConfig, OTHER_OPTIONS)
def local(model: str, *, start_timeout_s: float = 120.0, timeout_s: float = 10.0, **options: Any) -> LocalService:
    """Return a service for a `with` block: `with rollout.local(path, max_rows=32) as client: ...`.

    `options` are those of `ServiceConfig`. Loading takes seconds, which a terminal or a notebook is told. Raises at the start of the
    block: InvalidConfig, CheckpointError, UnsupportedModel, HostFailed.
    """
    unknown = [name for name in options if name in ("engine", "engine_options", "watch_parent")]
    if unknown:
        raise InvalidConfig(
            f"option {unknown[0]!r} is only for JSON configs",
            field=unknown[0],
            value=options[unknown[0]],
            limit="a service of one's own sets it by itself",
            remedy="leave it out",
        )
    return LocalService(model, start_timeout_s=start_timeout_s, timeout_s=timeout_s, options=options)
