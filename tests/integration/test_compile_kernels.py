"""All kernels compile for a card, also where there is none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("triton")


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.compile_kernels", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_form_that_the_unit_tests_come_to_compiles() -> None:
    done = compiled()
    assert done.returncode == 0, done.stdout[-3000:]
    found = re.search(r"compiled for sm_90: (\d+) forms of (\d+) kernels", done.stdout)
    assert found is not None and int(found[1]) > 200 and int(found[2]) > 20, done.stdout[-3000:]


@pytest.mark.timeout(120)
def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(
        "import torch, triton, triton.language as tl\n\n\n"
        "@triton.jit\ndef broken_kernel(x):\n    tl.store(x, tl.nothing_of_that_name(1))\n\n\n"
        "@triton.jit\ndef sound_kernel(x):\n    tl.store(x, 1)\n\n\n"
        "def test_launches():\n    sound_kernel[(1,)](torch.zeros(16))\n    broken_kernel[(1,)](torch.zeros(16))\n"
    )
    done = compiled(str(tmp_path / "test_broken.py"))
    assert done.returncode == 1 and re.search(r"failed: broken_kernel: .*nothing_of_that_name", done.stdout, re.DOTALL), done.stdout[-2000:]
    assert "  sound_kernel 1" in done.stdout
