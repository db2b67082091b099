"""The kernels' checks on a card as tests; each of their modules also runs by itself, and then times what it has checked."""

from __future__ import annotations

import importlib

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["check_attention", "check_linear", "check_peer_sum", "check_prefill_attention", "check_rows"])
def test_kernels_are_right_on_the_card(name: str) -> None:
    # Here, so that collecting needs no card and defines no kernel: in a run with others the interpreter may be chosen later.
    module = importlib.import_module(f"tests.gpu.{name}")
    assert module.check()
