"""The command line names its own flags, refuses before a process is started, and cuts no path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout.cli import _arguments_to_connect, _shown, app
from rollout.config import ServiceConfig, default_threads

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "fp16"], "--dtype='fp16' is not allowed; known: float32, bfloat16; leave --dtype out"),
        (["--device", "tpu"], "--device='tpu' is not allowed; known: auto, cpu, cuda, cuda:N"),
        (["--max-rows", "0"], "--max-rows=0 is not allowed; an integer from 1 to 4096; set --max-rows within it"),
        (["--seed", "-1"], "--seed=-1 is not allowed"),
        (["--lease-s", "-1"], "--lease-s=-1.0 is refused"),
        (["--weights-dir", "/proc/nothing"], "folder /proc/nothing cannot be made"),
        (["--state-dir", "/dev/null/below"], "folder /dev/null/below cannot be made"),
    ],
)
def test_a_wrong_option_is_one_line_with_its_flag(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", str(tmp_path), "--state-dir", str(tmp_path / "state"), *arguments])
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert words in result.output


def test_a_name_of_a_model_is_told_to_be_a_folder_and_how_to_get_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", "owner/name", "--state-dir", str(tmp_path / "state")])
    assert "is not a folder" in result.output and "--local-dir" in result.output


def test_the_printed_snippet_connects_as_the_address_needs(tmp_path: Path) -> None:
    def said(address: str, *, insecure: bool = False, named: bool = True, keyless: bool = True) -> str:
        config = ServiceConfig(model=str(tmp_path), address=address, state_dir=str(tmp_path), insecure=insecure)
        return _arguments_to_connect(config, address, named=named, keyless=keyless)

    assert said("ipc:///x/service", named=False) == ""
    assert said("ipc:///x/service", keyless=False) == '"ipc:///x/service"'
    assert said("tcp://10.0.0.1:5000") == '"tcp://10.0.0.1:5000"'
    assert said("tcp://10.0.0.1:5000", keyless=False).endswith('keys/local.key"')
    assert said("tcp://10.0.0.1:5000", insecure=True, keyless=False) == '"tcp://10.0.0.1:5000", insecure=True'
    assert said("tcp://0.0.0.0:5000", insecure=True) == '"tcp://0.0.0.0:5000"'


def test_help_shows_the_defaults_that_apply() -> None:
    text = " ".join(CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300"}).output.split())
    assert f"half of the usable cores: {default_threads()} here" in text
    assert "Requests that decode at the same time. [default: (64 on the CPU, 256 on CUDA)]" in text


def test_check_cuts_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / ("long" * 30)
    monkeypatch.setenv("ARENO_STATE_DIR", str(state))
    assert str(state) in CliRunner().invoke(app, ["check"], env={"COLUMNS": "80"}).output


def test_check_says_one_remedy_for_a_state_folder_that_others_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("ARENO_STATE_DIR", str(tmp_path))
    result = CliRunner().invoke(app, ["check"])
    (line,) = [line for line in result.output.splitlines() if "state folder" in line]
    assert result.exit_code == 1
    assert f"{tmp_path} may be entered by others (mode 755)" in line
    assert f"remedy: chmod 700 {tmp_path} if it is nobody else's, or set ARENO_STATE_DIR to a folder of its own" in line
    assert "writable" not in line and "InvalidConfig" not in line


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), ((), "-"), ("", "-"), ((256, 257), "256, 257"), (10.562517712, "10.5625"), (0, "0"), (False, "False")]
)
def test_values_are_shown_as_people_read_them(value: object, shown: str) -> None:
    assert _shown(value) == shown


def test_an_interpreter_without_the_packages_is_told_which_one_has_them() -> None:
    # -S leaves the installed packages out, as the system's interpreter does.
    result = subprocess.run(
        [sys.executable, "-S", "-m", "rollout", "check"], cwd=REPOSITORY, env={}, capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 1
    assert "has no package 'typer'" in result.stderr and "use .venv/bin/python (`make setup` makes it)" in result.stderr
    assert "Traceback" not in result.stderr
