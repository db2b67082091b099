"""Kernels run in Triton's interpreter here, which must be chosen before a kernel is defined."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
