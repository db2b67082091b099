"""A real error of the device between two steps reaches the caller as a typed failure that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
Maker = Callable[..., Path]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("how", "words"), [("illegal", "illegal memory access"), ("assert", "device-side assert")])
def test_a_broken_device_is_a_failure_with_a_remedy(checkpoint: Maker, how: str, words: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.break_device", str(checkpoint("qwen3")), how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=REPOSITORY)
    assert run.returncode == 0, run.stderr[-2000:]
    met = json.loads(run.stdout.splitlines()[-1])
    assert words in met["what"] and "in the middle of a step" in met["what"], met
    assert (met["field"], met["code"], met["score"]) == ("device", "engine_failure", "engine_failure")
    assert "restart the engine" in met["remedy"]
