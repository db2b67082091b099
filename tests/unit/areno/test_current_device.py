"""Work of an engine runs with the engine's own device as the current one, whatever device the caller's thread has."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from areno import Engine
from areno.current_device import current_device, on_device


class Recorded:
    """Stands where `torch.cuda.device` does, and knows what is current."""

    current: list[Any] = [0]

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self.current.append(self._device.index)

    def __exit__(self, *error: object) -> None:
        self.current.pop()


class Worker:
    def __init__(self, name: str) -> None:
        self.device = torch.device(name)

    @on_device
    def work(self, other: Worker | None = None) -> list[int]:
        """Return what is current here, and there."""
        return [Recorded.current[-1], *(other.work() if other else [])]

    @on_device
    def fail(self) -> None:
        raise RuntimeError("the device failed")


def test_a_device_is_current_while_its_owner_works_and_the_callers_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", Recorded)
    second, third = Worker("cuda:1"), Worker("cuda:2")
    assert second.work() == [1] and second.work(third) == [1, 2]
    with pytest.raises(RuntimeError, match="the device failed"):
        third.fail()
    assert Recorded.current == [0]
    assert Worker("cpu").work() == [0], "on the CPU nothing is asked of CUDA"
    with current_device(torch.device("cpu")), current_device(torch.device("cuda", 3)):
        assert Recorded.current[-1] == 3


def test_every_method_of_the_engine_that_reaches_the_device_is_guarded() -> None:
    guarded = {name for name, method in inspect.getmembers(Engine, inspect.isfunction) if hasattr(method, "__wrapped__")}
    assert guarded == {
        "begin_update",
        "close_slice",
        "check_integrity",
        "collect",
        "commit_update",
        "digests",
        "inspect_update",
        "launch_slices",
        "open_slice",
        "score",
        "settle_slices",
        "sleep",
        "slices_copied",
        "stage",
        "stage_slices",
        "step",
        "wake",
        "whole_tensor",
    }
