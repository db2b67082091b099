"""The demo as a user starts it, with few and small steps: one JSON line, three files, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.agentic.tictactoe.options import parse_options

REPOSITORY = Path(__file__).resolve().parents[2]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.agentic.tictactoe.train", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    out = tmp_path_factory.mktemp("demo")
    short = ["--steps", "3", "--episodes", "16", "--group-size", "4", "--held-out", "45", "--seed", "3"]
    result = run_demo("--json", "--out", str(out), *short)
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = result.stdout.splitlines()
    return json.loads(line), result.stderr, out


def test_the_line_has_the_figures_and_they_are_of_a_run_that_happened(finished: tuple[dict[str, Any], str, Path]) -> None:
    facts, _, _ = finished
    assert (facts["steps"], facts["versions"], facts["held_out_games"], facts["seed"]) == (3, 4, 45, 3)
    assert 0.15 < facts["win_rate_first"] < 0.6 and 0.1 < facts["illegal_rate_first"] < 0.45
    assert 0 < facts["win_rate_last"] < 1 and facts["tokens_per_s"] > 0 and facts["seconds"] > 0
    assert 0.3 < facts["cached_share"] < 1 and 0 < facts["staleness"] <= 1 and facts["pause_ms"] > 0


def test_trainer_and_service_agree_on_every_token_of_the_trainers_version(finished: tuple[dict[str, Any], str, Path]) -> None:
    facts, _, _ = finished
    assert facts["gap_tokens"] >= 500 and 0 < facts["max_logprob_gap"] < 1e-4
    assert facts["mean_abs_log_ratio"] > 10 * facts["max_logprob_gap"]


def test_progress_table_and_files_come_with_it(finished: tuple[dict[str, Any], str, Path]) -> None:
    facts, errors, out = finished
    assert "step 3/3" in errors and "max_logprob_gap" in errors and "held-out games" in errors
    steps = json.loads((out / "steps.json").read_text())
    assert steps["summary"] == facts and [row["version"] for row in steps["steps"]] == [1, 2, 3]
    assert all(row["gap_tokens"] > 0 for row in steps["steps"])
    page = (out / "transcripts.html").read_text(encoding="utf-8")
    assert "held-out, version 0" in page and "held-out, version 3" in page and "mask 1 (sampled)" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--episodes", "30", "--group-size", "8"], "--episodes 30 must be a multiple of --group-size 8: change one of them"),
        (["--model", "/nope"], "--model /nope is no folder; it must hold a Hugging Face model: name such a folder"),
        (["--out", "/proc/x"], "--out /proc/x cannot be written to (No such file or directory); it must be a folder of yours: name"),
        (["--lr", "-1"], "--lr is -1; it must be above 0 and finite: try 0.0003"),
        (["--lr", "nan"], "--lr is nan; it must be above 0 and finite"),
        (["--seed", "-1"], "--seed is -1; it must be at least 0: raise it"),
        (["--seed", "4096"], "--seed is 4096; it must be at most 4095: lower it"),
        (["--max-staleness", "-1"], "--max-staleness is -1; it must be at least 0: raise it"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    ],
)
def test_an_impossible_option_is_refused_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and line.startswith(f"error: {said}")


@pytest.fixture
def temporary() -> Iterator[Path]:
    # A short path: the service's sockets lie below it.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("number", "after"),
    [
        (signal.SIGINT, "step 1/"),
        pytest.param(signal.SIGTERM, "step 1/", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, "starting the", marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_the_run_with_what_it_finished_and_leaves_nothing_behind(
    number: signal.Signals, after: str, temporary: Path, tmp_path: Path
) -> None:
    short = ["--steps", "60000", "--episodes", "8", "--group-size", "2", "--held-out", "5", "--out", str(tmp_path)]
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "examples.agentic.tictactoe.train", *short],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert demo.stdout is not None
        assert any(line.startswith(after) for line in demo.stdout)
        demo.send_signal(number)
        printed, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 128 + number, errors[-2000:]
    assert "Traceback" not in errors and list(temporary.glob("areno-*")) == []
    if after == "starting the":
        assert "stopped before the first step was finished" in printed and list(tmp_path.iterdir()) == []
        return
    facts = json.loads((tmp_path / "steps.json").read_text())
    num_steps = len(facts["steps"])
    assert f"stopped after {num_steps} of 60000 steps" in printed and num_steps >= 1
    assert facts["summary"]["finished"] is False and facts["summary"]["win_rate_last"] is None
    assert (tmp_path / "transcripts.html").is_file()
