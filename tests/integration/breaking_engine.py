"""A real engine that meets an error of a CUDA device when a file says so: in a launch, a score,
a slice of weights or their proof.

`load_breaking_engine` is the factory that a service's JSON config names; the engine host around it is the real one. The
file holds a word for the place (step, score, slice, proof) and one for the kind (illegal, full, odd); it is taken away when it strikes,
so that the next host works.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from areno import Engine, EngineConfig
from areno.commands import Command, DecodeLaunch, PrefillLaunch
from areno.executor import Executor

ERRORS: dict[str, RuntimeError] = {
    "illegal": RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"),
    "full": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "odd": RuntimeError("the lining of this engine is worn"),
}


class Trigger:
    """The file that says what breaks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def reach(self, place: str) -> None:
        """Raise the error that is asked for at this place, once."""
        if not self._path.exists():
            return
        wanted, kind = self._path.read_text().split()
        if wanted == place:
            self._path.unlink()
            raise ERRORS[kind]


class BreakingExecutor(Executor):
    """An executor whose launches may fail when half of their work is done."""

    __slots__ = ("_trigger",)

    def __init__(self, engine: Engine, trigger: Trigger) -> None:
        super().__init__(engine._forward, engine._store, engine._path, engine._ring, version=engine.version)
        self._trigger = trigger

    def execute(self, command: Command) -> None:
        """Run one command, or break after it."""
        super().execute(command)
        if isinstance(command, PrefillLaunch | DecodeLaunch):
            self._trigger.reach("step")


class Breaking:
    """Stands for a part of the engine and may break in some of its methods."""

    def __init__(self, part: Any, methods: tuple[str, ...], trigger: Trigger, place: str) -> None:
        self._part, self._methods, self._trigger, self._place = part, methods, trigger, place

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            self._trigger.reach(self._place)
        return getattr(self._part, name)


def load_breaking_engine(*, trigger: str, **options: Any) -> Engine:
    """Return the engine of these options; `trigger` is the file's path."""
    engine = Engine(EngineConfig(**options))
    breaks = Trigger(Path(trigger))
    engine._executor = engine._updates._executor = BreakingExecutor(engine, breaks)
    engine._forward = Breaking(engine._forward, ("score",), breaks, "score")  # type: ignore[assignment]
    updates = engine._updates
    open_update = updates._open_update
    # A slice is filled where it is staged, or handed over.
    slices = ("open_slice", "stage_slices")
    updates._open_update = lambda: Breaking(open_update(), slices, breaks, "slice")  # type: ignore[method-assign, assignment, return-value]
    updates._proof = Breaking(updates._proof, ("measure",), breaks, "proof")  # type: ignore[assignment]
    return engine
