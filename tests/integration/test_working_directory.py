"""What lies in the working directory is not imported by the processes that a service or an engine starts, unless the caller imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """
import rollout
with rollout.local({model!r}, tp=2, device="cpu", threads=1, max_rows=4) as client:
    print(client.info().engine.tp, len(client.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True).ids))
"""


@pytest.mark.timeout(120)
def test_folders_that_bear_the_packages_names_in_the_working_directory_disturb_no_process(tmp_path: Path) -> None:
    elsewhere, script = tmp_path / "elsewhere", tmp_path / "script.py"
    for package in ("areno", "rollout", "torch", "zmq"):
        (elsewhere / package).mkdir(parents=True)
        (elsewhere / package / "__init__.py").write_text(f"raise RuntimeError('another {package}')")
    script.write_text(SCRIPT.format(model=str(REPOSITORY / "examples/agentic/tiny_model")))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, str(script)], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["2", "3"]
