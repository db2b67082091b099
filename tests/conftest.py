"""One thread for every test and every process that a test starts, and no test file that silently collects nothing."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

# Set before anything imports torch or numpy; child processes inherit it.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a test module without tests into a collection error."""
    report = yield
    if isinstance(collector, pytest.Module) and report.passed and not report.result:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: collects no test; rename the file if it holds none"
    return report
