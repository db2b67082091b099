"""What the agent side's README prints as complete runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_environment_in_the_readme_runs_as_printed(tmp_path: Path) -> None:
    readme = (REPOSITORY / "rollout" / "agent" / "README.md").read_text(encoding="utf-8")
    _, section = readme.split("## An environment, complete\n")
    code = re.search(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert code is not None
    script = tmp_path / "environment.py"
    script.write_text(code[1])
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    printed = result.stdout.splitlines()
    assert len(printed) == 8
    assert all(re.match(r"(done (1\.0|0\.5|0\.3+) None|truncated 0\.0 .+) \['Guess a digit\.', ", line) for line in printed), printed
