"""The folders of local services whose owner was killed are removed by the next one; all others stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import rollout
from rollout.client.local import OWNER_FILE, sweep_folders


def folder(parent: Path, name: str, pid: int, started: float) -> Path:
    made = parent / name
    made.mkdir()
    (made / OWNER_FILE).write_text(json.dumps({"pid": pid, "started": started}))
    return made


def test_only_folders_of_dead_owners_are_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    mine = psutil.Process().create_time()
    dead = folder(tmp_path, "areno-dead", ended.pid, mine)
    reused = folder(tmp_path, "areno-reused", os.getpid(), mine - 1000.0)
    alive = folder(tmp_path, "areno-alive", os.getpid(), mine)
    other = folder(tmp_path, "other", ended.pid, mine)
    nameless = tmp_path / "areno-nameless"
    nameless.mkdir()
    link = tmp_path / "areno-link"
    link.symlink_to(other)
    sweep_folders(tmp_path)
    assert [one.exists() for one in (dead, reused)] == [False, False]
    assert all(one.exists() for one in (alive, other, nameless, link))


def test_a_service_that_is_taken_for_its_client_says_where_the_client_is() -> None:
    service = rollout.local("no/model")
    with pytest.raises(AttributeError, match=r"no attribute 'generate'; the client has it: `with rollout.local\(\.\.\.\) as client:`"):
        service.generate([1])
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        service.nothing  # noqa: B018
