"""The tensor-parallel group over gloo: sums and gathers between real processes, and what the loss of a rank says."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from areno.errors import EngineFailure, InvalidConfig
from areno.parallel import _NCCL_DEFAULTS, TPGroup, _defaults_in_environment

RANK = """
import os, sys, torch
from areno.parallel import TPGroup
rank, size, store, then = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
group = TPGroup.connect(rank=rank, size=size, init_method="file://" + store, backend="gloo", timeout_s=20)
if then == "die" and rank == size - 1:
    os._exit(3)
mine = torch.tensor([0.1 * (rank + 1), 1e8 * (-1) ** rank, 1e-3])
total = group.all_reduce_(mine.clone())
parts = group.all_gather(mine)
expected = parts[0]
for part in parts[1:]:
    expected = expected + part
assert torch.equal(total, expected), "sums are added in the order of the ranks"
assert parts.shape == (size, 3)
assert group.broadcast_(torch.full((2,), rank), source=1).tolist() == [1, 1]
half = group.all_reduce_(torch.ones(4, dtype=torch.bfloat16))
assert half.tolist() == [size] * 4
assert group.gather_words([rank, -1]) == [[other, -1] for other in range(size)]
counts = group.counts
assert (counts.all_reduces, counts.all_gathers, counts.broadcasts) == (2, 2, 1)
assert counts.all_gather_bytes == size * 12 + size * 16 and counts.all_reduce_bytes == 12 + 8
print("bits", total.view(torch.int32).tolist())
group.close()
"""


def run_ranks(folder: Path, size: int, then: str = "end") -> list[subprocess.CompletedProcess[str]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size), str(folder / "store"), then],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [subprocess.CompletedProcess(one.args, one.wait(40), *one.communicate()) for one in started]
    finally:
        for one in started:
            one.kill()


@pytest.mark.timeout(60)
def test_sums_have_the_same_bits_on_every_rank(tmp_path):
    ended = run_ranks(tmp_path, 3)
    assert [one.returncode for one in ended] == [0, 0, 0], ended
    assert len({one.stdout for one in ended}) == 1


@pytest.mark.timeout(60)
def test_a_collective_with_a_dead_rank_raises_a_typed_error(tmp_path):
    ended = run_ranks(tmp_path, 2, "die")
    assert ended[1].returncode == 3
    assert ended[0].returncode == 1
    assert "EngineFailure: a gather of rank 0 of 2 failed" in ended[0].stderr and "start the engine again" in ended[0].stderr


def test_a_rank_that_nobody_meets_gives_up_in_time(tmp_path):
    with pytest.raises(EngineFailure, match="rank 0 of 2 did not meet the others"):
        TPGroup.connect(rank=0, size=2, init_method=f"file://{tmp_path}/store", backend="gloo", timeout_s=0.5)


def test_an_unknown_backend_and_an_unknown_store_are_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="known: gloo, nccl"):
        TPGroup.connect(rank=0, size=2, init_method=f"file://{tmp_path}/store", backend="mpi")
    with pytest.raises(InvalidConfig, match="use file:///folder"):
        TPGroup.connect(rank=0, size=2, init_method="somewhere", backend="gloo")


def test_one_rank_alone_does_nothing():
    group = TPGroup.single()
    tensor = torch.arange(3.0)
    assert group.all_reduce_(tensor) is tensor and group.broadcast_(tensor) is tensor
    assert group.all_gather(tensor).shape == (1, 3)
    assert group.counts.collectives == 0


class EndlessBackend:
    """A backend whose abort waits, as NCCL's does while a captured graph names its communicator."""

    def __init__(self):
        self.aborts, self.released = 0, threading.Event()

    def abort(self):
        self.aborts += 1
        self.released.wait(30.0)


def test_a_group_that_does_not_end_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr("areno.parallel._CLOSE_S", 0.2)
    backend = EndlessBackend()
    group = TPGroup(0, 2, torch.device("cpu"), backend, None)
    started = time.monotonic()
    group.abort()
    assert time.monotonic() - started < 0.15, "whoever ends a group may hold the steps that it waits for"
    group.close()
    group.close()
    assert time.monotonic() - started < 2.0 and backend.aborts == 1
    backend.released.set()


def test_options_of_nccl_are_set_for_its_group_alone_and_never_over_a_users(monkeypatch):
    name, other = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"
    monkeypatch.setenv(name, "1")
    monkeypatch.delenv(other, raising=False)
    with _defaults_in_environment(_NCCL_DEFAULTS):
        assert os.environ[name] == "1" and os.environ[other] == "0"
    assert os.environ[name] == "1" and other not in os.environ
