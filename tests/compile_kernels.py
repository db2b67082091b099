"""Compile every kernel for a card, on a machine that has none, in all forms that the kernels' unit tests come to.

The tests run with a driver that says it is a card and launches nothing: their values are garbage and their verdicts without meaning;
what Triton's compiler and ptxas say is what counts. Sizes that only the interpreter takes are told apart.

    python -m tests.compile_kernels [FILE ...]          (default: tests/unit/areno/kernels)
"""

from __future__ import annotations

import collections
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

CAPABILITY = 90
KERNELS = Path(__file__).parent / "unit" / "areno" / "kernels"
# What a product of tiles says of sizes below those of a card's units.
TOO_SMALL = "Input shapes should have"
PROPERTIES = {"multiprocessor_count": 132, "max_shared_mem": 232_448, "warpSize": 32, "max_num_regs": 65_536}


class _Card:
    """A driver as Triton asks it, of a card that is not there."""

    class utils:
        """What is known of the device."""

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            """Return an H100's or H200's."""
            return PROPERTIES

    def get_current_target(self) -> Any:
        """Return what is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        """Return the only one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the default one."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return where the tests' tensors are."""
        return torch.device("cpu")


class Compiling:
    """A plugin of pytest under which launches compile and nothing runs. `compiled` counts forms by kernel, `failed` says what did not."""

    def __init__(self) -> None:
        self.compiled: collections.Counter[str] = collections.Counter()
        self.failed: dict[str, str] = {}
        self.too_small: set[str] = set()
        self._seen: set[tuple[str, str]] = set()

    def pytest_configure(self, config: pytest.Config) -> None:
        """Take the interpreter's place, after the tests' own configuration chose it and before any kernel is defined."""
        os.environ["TRITON_INTERPRET"] = "0"
        from triton.runtime import driver, jit

        driver.set_active(_Card())
        compile_or_launch = jit.JITFunction.run

        def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            name = kernel.fn.__name__
            try:
                made = compile_or_launch(kernel, *arguments, grid=grid, warmup=True, **options)
            except Exception as error:
                self._failed(name, error)
                raise
            if made is not None and (name, made.hash) not in self._seen:
                self._seen.add((name, made.hash))
                self.compiled[name] += 1
            return made

        jit.JITFunction.run = run

    def _failed(self, name: str, error: BaseException) -> None:
        while error.__cause__ is not None:
            error = error.__cause__
        if TOO_SMALL in str(error):
            self.too_small.add(name)
        else:
            self.failed.setdefault(name, f"{type(error).__name__}: {str(error)[-400:]}")


def main(arguments: list[str]) -> int:
    """Compile, tell what was compiled, and return 1 where something failed."""
    compiling = Compiling()
    quiet = ["-q", "-s", "--tb=no", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-p", "no:randomly"]
    pytest.main([*quiet, *(arguments or [str(KERNELS)])], plugins=[compiling])
    print(f"\ncompiled for sm_{CAPABILITY}: {sum(compiling.compiled.values())} forms of {len(compiling.compiled)} kernels")
    for name, count in sorted(compiling.compiled.items()):
        print(f"  {name} {count}" + (", and smaller ones than a card takes" if name in compiling.too_small else ""))
    for name, why in compiling.failed.items():
        print(f"failed: {name}: {why}")
    return int(bool(compiling.failed) or not compiling.compiled)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
