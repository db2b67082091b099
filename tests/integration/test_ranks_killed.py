"""kill -9 and SIGSTOP of real ranks where an engine starts, loads, commits, idles and closes: an error in time, nothing left, a new start.

Every case goes through the life of a whole engine, which is the clean start after the one that was lost before. Followers are the real ones
over gloo; what is lost in prefill and decode is in `test_ranks_cut.py`, and without an engine in `test_rank_losses.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from areno import Engine, EngineConfig, EngineFailure
from tests.fixtures_models import write_checkpoint
from tests.integration.engine_phases import OPTIONS, PHASES, START_S, TIMEOUT_S, PhasePeers, generated, live

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
SLACK_S = 8.0
pytestmark = pytest.mark.timeout(90)


def cases(usual: set[tuple[signal.Signals, str]], size: int, ranks: tuple[int, ...]) -> list[object]:
    """Return a case for each signal, phase and rank; those that are not usual are long."""
    return [
        pytest.param(
            how, phase, rank, size, id=f"{how.name}-{phase}-{rank}-of-{size}", marks=() if (how, phase) in usual else pytest.mark.long
        )
        for how in (KILL, STOP)
        for phase in PHASES
        for rank in ranks
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3", seed=0, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return generated(Engine(EngineConfig(model=str(folder), **OPTIONS)))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, empty."""
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    monkeypatch.setenv("TMPDIR", str(made))
    return made


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def bound_s(how: signal.Signals, phase: str) -> float:
    """Return within how many seconds a loss must be told."""
    silent_s = START_S if phase in ("start-up", "meeting") else TIMEOUT_S
    return SLACK_S + (0.0 if how == KILL else silent_s)


USUAL = {(KILL, phase) for phase in ("start-up", "meeting", "loading", "swap", "close")} | {(STOP, "loading")}


@pytest.mark.parametrize(("how", "phase", "rank", "size"), [*cases(USUAL, 2, (1,)), *cases(set(), 4, (1, 3))])
def test_a_rank_that_is_lost_in_any_phase_is_named_in_time_and_leaves_nothing(
    folder: Path, expected: list[int], temporary: Path, how: signal.Signals, phase: str, rank: int, size: int
) -> None:
    moments: list[float] = []

    def lose() -> None:
        os.kill(pids[rank], how)
        moments.append(time.monotonic())

    peers = PhasePeers(folder, size, phase, lose)
    pids = peers.pids
    if phase == "close":
        # All was said and done: what is lost now is no error, only ended.
        assert live(folder, peers) == expected
    else:
        with pytest.raises(EngineFailure, match=rf"rank {rank} \(pid {pids[rank]}\) (was killed by SIGKILL|has shown no sign of life)"):
            live(folder, peers)
    assert time.monotonic() - moments[0] < bound_s(how, phase)
    assert not any(psutil.pid_exists(pid) for pid in pids.values()), "all are reaped"
    assert not list(temporary.iterdir())


USUAL_OF_ZERO = {(KILL, "loading")}


@pytest.mark.parametrize(("how", "phase", "rank", "size"), [*cases(USUAL_OF_ZERO, 2, (0,)), *cases(set(), 4, (0,))])
def test_a_rank_0_that_is_lost_in_any_phase_leaves_no_process_and_no_file(
    folder: Path, temporary: Path, how: signal.Signals, phase: str, rank: int, size: int
) -> None:
    command = [sys.executable, "-m", "tests.integration.engine_phases", str(folder), str(size), phase, str(int(how))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as zero:
        assert zero.stdout is not None
        pids = [int(pid) for pid in json.loads(zero.stdout.readline()).values()]
        process = psutil.Process(zero.pid)
        while how == STOP and process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.02)
        if how == KILL:
            zero.wait(60.0)
        deadline = time.monotonic() + SLACK_S + (TIMEOUT_S if how == STOP else 0.0)
        while not all(map(ended, pids)):
            assert time.monotonic() < deadline, "a rank outlives rank 0"
            time.sleep(0.02)
        said = zero.communicate(timeout=10.0)[1]
    assert zero.returncode == -KILL, said[-2000:]
    assert not list(temporary.iterdir()), said[-2000:]
