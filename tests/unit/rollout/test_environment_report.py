"""The environment report: what the probe of mapped memory says becomes a finding with a remedy."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from rollout.environment_report import _mapped_finding, environment_report


def _run(status: int = 0, out: str = "", err: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(args=[], returncode=status, stdout=out, stderr=err)


def test_every_probe_is_a_finding_and_none_breaks(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARENO_STATE_DIR", str(tmp_path))
    findings = {finding.name: finding for finding in environment_report()}
    assert all(finding.remedy for finding in findings.values() if finding.ok is False)
    if not torch.cuda.is_available():
        assert findings["mapped memory"].ok is None and "without a CUDA device" in findings["mapped memory"].value


@pytest.mark.parametrize(("works", "ok", "words"), [(True, True, "all right"), (False, None, "the engine copies results: all right")])
def test_memory_that_does_not_map_is_told_and_no_fault(works: bool, ok: bool | None, words: str) -> None:
    finding = _mapped_finding(_run(out=json.dumps({"works": works, "reason": "all right"})))
    assert finding.ok is ok and words in finding.value


def test_a_probe_that_breaks_the_device_is_a_fault_with_the_option_that_avoids_it() -> None:
    finding = _mapped_finding(_run(1, err="Traceback\nareno.errors.EngineFailure: the device failed\n"))
    assert finding.ok is False and "EngineFailure: the device failed" in finding.value
    assert finding.remedy is not None and "--result-transport copy" in finding.remedy
