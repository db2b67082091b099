"""The newest weights in their file: whole or not at all, given up for newer ones, taken up only if they are what was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rollout.service.last_weights import LastWeights
from tests.fakes import TENSORS, FakeEngine


def engine_with(value: float, version: int) -> FakeEngine:
    engine = FakeEngine(model="")
    engine.begin_update(None, version=version)
    for name, (_, shape) in TENSORS.items():
        engine.stage(name, torch.full(shape, value))
    engine.commit_update()
    return engine


def write_all(last: LastWeights) -> int:
    last.committed()
    turns = 0
    while last.busy:
        last.advance()
        turns += 1
    return turns


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "last.safetensors"


def test_the_file_is_written_in_pieces_and_appears_whole_under_its_version(path: Path) -> None:
    engine = engine_with(2.0, version=7)
    last = LastWeights(engine, path)
    last.committed()
    last.advance()
    assert not path.exists() and last.busy
    while last.busy:
        last.advance()
    with safe_open(path, framework="np") as file:
        assert file.metadata()["version"] == "7"
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118 - no mapping
            name: np.full(shape, 2.0).tolist() for name, (_, shape) in TENSORS.items()
        }
    assert path.stat().st_mode & 0o777 == 0o600 and [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_newer_commit_gives_an_unfinished_file_up(path: Path) -> None:
    last = LastWeights(engine_with(1.0, version=1), path)
    write_all(last)
    old = path.read_bytes()
    last.committed()
    last.advance()
    last.close()
    assert path.read_bytes() == old and [one.name for one in path.parent.iterdir()] == [path.name]
    last.committed()
    last.advance()
    assert write_all(last) == len(TENSORS) + 1


def test_what_a_killed_host_left_is_removed_and_a_host_without_a_file_keeps_nothing(path: Path) -> None:
    (path.parent / ".last.safetensors.part").write_bytes(b"half")
    LastWeights(engine_with(1.0, version=1), path)
    assert list(path.parent.iterdir()) == []
    assert write_all(LastWeights(engine_with(1.0, version=1), None)) == 0


def test_a_disk_that_fails_costs_the_file_and_nothing_else(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last = LastWeights(engine_with(1.0, version=1), path.parent / "absent" / "x.safetensors")
    write_all(last)
    assert "weights of version 1 are not kept" in caplog.text


def test_lost_weights_come_back_under_their_own_version(path: Path) -> None:
    lost = engine_with(3.0, version=5)
    write_all(LastWeights(lost, path))
    fresh = FakeEngine(model="", initial_version=0)
    assert LastWeights(fresh, path).restore(5, lost.digests())
    assert fresh.version == 5 and fresh.digests() == lost.digests()


@pytest.mark.parametrize("wrong", ["no file", "an older version", "a flipped bit", "a cut file", "no weights", "other digests"])
def test_a_file_that_is_not_what_was_lost_is_left_alone_and_the_engine_serves_its_folders_weights(path: Path, wrong: str) -> None:
    lost = engine_with(3.0, version=5)
    digests: dict[str, Any] = lost.digests()
    if wrong != "no file":
        write_all(LastWeights(lost, path))
        content = path.read_bytes()
        if wrong == "a flipped bit":
            path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        elif wrong == "a cut file":
            path.write_bytes(content[:-1])
        elif wrong == "no weights":
            path.write_bytes(b"{}")
        elif wrong == "other digests":
            digests = {name: value + 1 for name, value in digests.items()}
    fresh = FakeEngine(model="")
    assert not LastWeights(fresh, path).restore(6 if wrong == "an older version" else 5, digests)
    assert fresh.version == 0
    fresh.begin_update(None, version=9)
