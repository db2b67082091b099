"""Starts an audited service as a child process and ends it; gives its address, its control address, its findings and its log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import ServiceConfig
from tests.fuzz.audit import VARIABLE

ENGINE = "tests.fuzz.audited_service:AuditedEngine"


@dataclass(frozen=True, slots=True)
class AuditedService:
    """A running one."""

    address: str
    pid: int
    folder: Path
    metrics: str | None = None

    @property
    def findings(self) -> str:
        """What its processes did that they must not."""
        path = self.folder / "findings"
        return path.read_text() if path.exists() else ""

    @property
    def log(self) -> str:
        """What it wrote."""
        return (self.folder / "log").read_text()


@contextmanager
def audited_service(folder: Path, **options: Any) -> Iterator[AuditedService]:
    """Run one for the length of the block; `folder` is its model folder as well."""
    config = ServiceConfig.from_fields(
        {"model": str(folder), "state_dir": str(folder / "state"), "engine": ENGINE, **options, "watch_parent": True}
    )
    (folder / "config.json").write_text(config.to_json())
    environment = {**os.environ, VARIABLE: str(folder / "findings")}
    command = [sys.executable, "-m", "tests.fuzz.audited_service", "--config", str(folder / "config.json")]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["event"] == "ready", ready
            yield AuditedService(ready["address"], process.pid, folder, ready.get("metrics"))
        finally:
            process.terminate()
            process.communicate(timeout=15)
