"""Two cards, two processes, NCCL: weights go over, sleep gives memory back on both, and a lost rank is named in time.

Skips with fewer than two devices. That two ranks compute what one computes: `test_tp.py`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from areno import EngineFailure
from areno.errors import DigestMismatch
from areno.weights.digest import digest
from tests.gpu.test_engine import engine_of, requests_of, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


@pytest.mark.parametrize("graphs", [True, False])
def test_weights_go_over_and_sleep_gives_memory_back_on_both_devices(checkpoint: Callable[..., Path], graphs: bool) -> None:
    engine = engine_of(checkpoint("qwen3"), dtype="float32", graphs=graphs, tp=2, num_pages=20_000)
    alone = engine_of(checkpoint("qwen3"), dtype="float32", graphs=graphs)
    generator = torch.Generator().manual_seed(9)
    tensors = {
        name: tensor.cpu() + 0.01 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in alone.tensors().items()
    }
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    for number, on in enumerate(("cpu", "cuda"), 1):
        for one in (alone, engine):
            one.begin_update(None, version=number)
            for name, tensor in tensors.items():
                one.stage(name, tensor.to(on))
            if one is engine and on == "cpu":
                with pytest.raises(DigestMismatch):
                    one.commit_update(digests={name: value ^ 1 for name, value in digests.items()})
                one.begin_update(None, version=number)
                for name, tensor in tensors.items():
                    one.stage(name, tensor.to(on))
            one.commit_update(digests=digests)
        expected = run(alone, requests_of(12, tokens=40, temperature=0.8))
        outputs = run(engine, requests_of(12, tokens=40, temperature=0.8))
        assert all(outputs[number].ids == told.ids for number, told in expected.items())
    before = [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]
    engine.sleep("weights")
    freed = [torch.cuda.mem_get_info(device)[0] - held for device, held in zip((0, 1), before)]
    assert all(one > 0.5 * engine._store.num_bytes for one in freed), freed
    engine.wake()
    outputs = run(engine, requests_of(12, tokens=40, temperature=0.8))
    assert all(outputs[number].ids == told.ids for number, told in expected.items())
    engine.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize("graphs", [True, False])
def test_a_rank_that_is_lost_in_decode_ends_the_engine_by_name(checkpoint: Callable[..., Path], graphs: bool, how: signal.Signals) -> None:
    engine = engine_of(checkpoint("qwen3"), graphs=graphs, tp=2, rank_timeout_s=TIMEOUT_S)
    pid = engine._ranks.pids[1]  # type: ignore[attr-defined]
    rounds = iter(range(10**6))
    for item in requests_of(4, tokens=64):
        engine.submit(item)
    for _ in range(20):
        engine.step()
    threading.Timer(0.2, os.kill, (pid, how)).start()
    started = time.monotonic()
    with pytest.raises(EngineFailure, match=rf"rank 1 \(pid {pid}\)"):
        while True:
            if not engine.has_work:
                for item in requests_of(4, seed=next(rounds), tokens=64):
                    engine.submit(item)
            engine.step()
    assert time.monotonic() - started < TIMEOUT_S + 15.0
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    again = engine_of(checkpoint("qwen3"), graphs=graphs, tp=2)
    assert all(told.end is not None for told in run(again, requests_of(4)).values()), "a new engine is a clean start"
    again.close()
