"""Pinned segments of trainers, kept from one update to the next; the calls that pin are counted in place of a device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from rollout.service.weight_intake.segments import PinnedSegments
from rollout.wire.weight_handles import SEGMENT_HEAD_BYTES

SIZE = 4096


class Cudart:
    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.calls = 0
        self.refuses = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert size == SEGMENT_HEAD_BYTES + SIZE and not flags
        self.calls += 1
        if not self.refuses:
            self.pinned.add(address)
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


@pytest.fixture
def files() -> Iterator[list[int]]:
    made = [os.memfd_create(f"segment-{number}") for number in range(3)]
    for number, descriptor in enumerate(made):
        os.truncate(descriptor, SEGMENT_HEAD_BYTES + SIZE)
        os.pwrite(descriptor, bytes([number + 1]) * SIZE, SEGMENT_HEAD_BYTES)
    yield made
    for descriptor in made:
        os.close(descriptor)


def ask(segments: PinnedSegments, descriptor: int, process: int, size: int = SIZE) -> torch.Tensor | None:
    found = os.fstat(descriptor)
    return segments.memory((found.st_dev, found.st_ino), descriptor, size, process)


def test_a_segment_is_pinned_once_for_many_updates_and_goes_when_one_does_without_it(cudart: Cudart, files: list[int]) -> None:
    segments = PinnedSegments()
    for _ in range(3):
        for number in (0, 1):
            memory = ask(segments, files[number], os.getpid())
            assert memory is not None and memory.numel() == SIZE and memory[0] == number + 1
        segments.rest()
    assert cudart.calls == len(cudart.pinned) == 2
    assert ask(segments, files[0], os.getpid()) is not None
    segments.rest()
    assert len(cudart.pinned) == 1 and segments.tidy()
    segments.close()
    assert not cudart.pinned and not segments.tidy()


def test_what_a_dead_trainer_left_is_unpinned_and_what_an_open_update_uses_is_not(cudart: Cudart, files: list[int]) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    segments = PinnedSegments()
    for descriptor, process in zip(files, (ended.pid, os.getpid(), 9_999_999_999)):
        assert ask(segments, descriptor, process) is not None
    assert segments.tidy() and len(cudart.pinned) == 3
    segments.rest()
    assert segments.tidy() and len(cudart.pinned) == 1
    segments.close()


def test_memory_that_cannot_be_pinned_is_asked_for_again_in_the_next_update(cudart: Cudart, files: list[int]) -> None:
    segments, cudart.refuses = PinnedSegments(), True
    assert ask(segments, files[0], os.getpid()) is None and ask(segments, files[0], os.getpid()) is None
    assert cudart.calls == 1
    segments.rest()
    cudart.refuses = False
    assert ask(segments, files[0], os.getpid()) is not None
    assert ask(segments, files[0], os.getpid(), SIZE + 1) is None, "a bucket that is larger than its segment is read"
    segments.close()
