"""What the agent side's README prints as complete runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_printed(code: str, folder: Path) -> list[str]:
    """Run a program of the README and return the lines that it prints."""
    script = folder / "printed.py"
    script.write_text(code)
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()


def printed_programs() -> list[str]:
    readme = (REPOSITORY / "rollout" / "agent" / "README.md").read_text(encoding="utf-8")
    return [code for code in re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL) if "rollout.local" in code]


def test_the_episode_in_the_readme_runs_as_printed(tmp_path: Path) -> None:
    episode, _ = printed_programs()
    printed = " ".join(run_printed(episode, tmp_path))
    said = re.match(r"(\d+) tokens, of which the policy sampled (\d+) with log-probabilities \[ ?-", printed)
    assert said is not None and 0 < int(said[2]) < int(said[1]), printed


def test_the_environment_in_the_readme_runs_as_printed(tmp_path: Path) -> None:
    _, environment = printed_programs()
    printed = run_printed(environment, tmp_path)
    assert len(printed) == 8
    assert all(re.match(r"(done (1\.0|0\.5|0\.3+) None|truncated 0\.0 .+) \['Guess a digit\.', ", line) for line in printed), printed
