"""Kernels run in Triton's interpreter here, which must be chosen before a kernel is defined."""

import os

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
os.environ.setdefault("TRITON_INTERPRET", "1")
