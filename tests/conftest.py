"""One thread for each test and each process that a test starts, interrupts that are heard, and no file that silently collects nothing.

CUDA devices are hidden from all tests but those of tests/gpu, which run by themselves (`make test-gpu`); kernels run in Triton's
interpreter elsewhere, which must be chosen before the first of them is defined, by whatever test that is.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator

import pytest

# Set before anything imports torch or numpy; child processes inherit it.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
# Workers of pytest-xdist have other arguments, and inherit this.
ON_DEVICE = "ARENO_TESTS_ON_DEVICE"
if ON_DEVICE not in os.environ:
    if any("tests/gpu" in argument for argument in sys.argv):
        os.environ[ON_DEVICE] = "1"
    else:
        os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


# A shell that starts the tests in the background has them ignore interrupts, and all that they start with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a test module without tests into a collection error."""
    report = yield
    if isinstance(collector, pytest.Module) and report.passed and not report.result:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: collects no test; rename the file if it holds none"
    return report
