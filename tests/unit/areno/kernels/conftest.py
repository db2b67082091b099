"""What Triton's interpreter needs beside the choice of it, which the tests' first conftest makes."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def loop_bounds_of_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a loop run to a loaded bound: the interpreter holds scalars as arrays of one element, which numpy >= 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_also(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_also)
