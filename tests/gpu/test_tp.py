"""Ranks on several cards against one card and against the CPU: the same ids, the same bits for the same log, and a device's own engine.

Rank 0 lies in this process, the others are processes of their own that follow it; collectives go through NCCL, in captured steps too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from areno import Engine, EngineConfig, EngineFailure, Request, SamplingParams
from areno.weights.canary import Canary
from areno.weights.digest import digest
from areno.weights.names import TensorSpec, dtype_name
from areno.weights.slices import Slice
from tests.bench.decode_runs import compare, lock_step, run_plan
from tests.gpu.test_engine import Told, prompts, requests_of, run
from tests.gpu.test_engine_rebuilt import churn

SIZES = [size for size in (2, 4) if size <= max(torch.cuda.device_count(), 2)]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"), pytest.mark.timeout(300)]
Maker = Callable[..., Path]
OPTIONS: dict[str, Any] = {"max_rows": 16, "seed": 1, "num_pages": 52, "sampling_slots": 6, "kept_ids": True, "compaction_steps": 2}
# Ten times as long is how long ranks may hang before they write their stacks and end: sooner than a test's own time-out.
OPTIONS["rank_timeout_s"] = 15.0
CLOSE_S = 15.0


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[Engine]:
    """Yield an engine on cards from the first one on, whose ranks end with the block."""
    engine = Engine(EngineConfig(**{"model": str(folder), "device": "cuda:0", **OPTIONS, **options}))
    try:
        yield engine
    finally:
        started = time.monotonic()
        engine.close()
        assert time.monotonic() - started < CLOSE_S, "a group waits for captured steps that name it"


def told_by(folder: Path, asked: list[Request], **options: Any) -> dict[int, Told]:
    with engine_of(folder, **options) as engine:
        return run(engine, asked, check=False)


def assert_near(found: dict[int, Told], wanted: dict[int, Told]) -> None:
    for number, want in wanted.items():
        assert found[number].ids == want.ids, f"request {number}"
        assert np.abs(np.array(found[number].logprobs) - want.logprobs).max() < 1e-4
        assert np.abs(np.array(found[number].raw) - want.raw).max() < 1e-4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
@pytest.mark.parametrize("shape", ["llama", "qwen3", "wide"])
def test_fp32_ranks_equal_one_cpu(checkpoint: Maker, shape: str, graphs: bool, size: int) -> None:
    asked = requests_of(24, temperature=0.8)
    wanted = told_by(checkpoint(shape), asked, device="cpu")
    assert_near(told_by(checkpoint(shape), asked, dtype="float32", tp=size, graphs=graphs), wanted)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 0.7},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"logit_bias": {5: 4.0, 400: -3.0}},
        {"min_new_tokens": 10, "stop_ids": list(range(3, 18))},
        {"forced_ids": [7, 500, 300, 2]},
    ],
    ids=lambda value: "-".join(value),
)
def test_shaped_draws_of_ranks_equal_the_cpus(checkpoint: Maker, sampling: dict[str, Any]) -> None:
    asked = requests_of(10, **sampling)
    assert_near(told_by(checkpoint("llama"), asked, dtype="float32", tp=2), told_by(checkpoint("llama"), asked, device="cpu"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", ["llama", "wide"])
def test_bf16_ranks_stay_near_fp32_with_forced_ids(checkpoint: Maker, shape: str, size: int) -> None:
    forced = np.random.default_rng(1).integers(3, 512, size=48)
    asked = [
        Request(request_id=n, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=48, forced_ids=forced.tolist(), ignore_eos=True))
        for n, prompt in enumerate(prompts(6, 3))
    ]
    # As many rows as go through the fused products of few rows, and more.
    for rows in (6, 24):
        many = [Request(request_id=n, prompt_ids=asked[n % 6].prompt_ids, sampling=asked[n % 6].sampling) for n in range(rows)]
        options = {"max_rows": 32, "sampling_slots": 32, "num_pages": 128}
        wanted = told_by(checkpoint(shape), many, device="cpu", **options)
        found = told_by(checkpoint(shape), many, tp=size, **options)
        gaps = np.concatenate([np.abs(np.array(found[n].logprobs) - wanted[n].logprobs) for n in wanted])
        assert all(found[n].ids == forced.tolist() for n in wanted)
        assert gaps.max() <= 0.05 and gaps.mean() <= 0.01, f"{rows} rows: max {gaps.max():.4f}, mean {gaps.mean():.4f}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graphs_launches_and_rebuilt_rows_give_the_same_bits_in_lock_step(checkpoint: Maker, dtype: str, size: int) -> None:
    plan, runs = churn(7), {}
    ways = {"graphs": {}, "launches": {"graphs": False}, "rebuilt": {"decode_tables": "rebuilt"}}
    for name, way in ways.items():
        with engine_of(checkpoint("wide"), dtype=dtype, tp=size, prefix_cache=False, **way) as engine, lock_step(engine, 2):
            runs[name] = run_plan(engine, plan)
            engine.check_integrity()
    for name in ("launches", "rebuilt"):
        gap = compare(runs["graphs"], runs[name], plan, lock_step=True)
        assert gap.is_zero, f"{name}: {gap}"


def test_a_step_gathers_once_36_bytes_a_row_and_rank(checkpoint: Maker) -> None:
    with engine_of(checkpoint("wide"), tp=2, graphs=False, run_ahead=0) as engine:
        for item in requests_of(4, tokens=40, ignore_eos=True):
            engine.submit(item)
        while engine.step().token_ids.size < 4:
            pass
        engine.step()
        before = engine._group.counts.all_gathers, engine._group.counts.all_gather_bytes, engine._group.counts.all_reduces
        engine.step()
        after = engine._group.counts.all_gathers, engine._group.counts.all_gather_bytes, engine._group.counts.all_reduces
        gathers, gathered, sums = (late - early for late, early in zip(after, before))
        assert (gathers, gathered) == (1, 36 * 4 * 2)
        assert sums == 1 + 2 * 2, "the embedding, and attention and MLP of two layers"
        for number in range(4):
            engine.cancel(number)
        while engine.has_work:
            engine.step()


def test_few_rows_are_added_up_in_the_ranks_own_memory(checkpoint: Maker) -> None:
    with engine_of(checkpoint("wide"), tp=2) as engine:
        peers = engine._rank.fused._peers
        assert peers is not None and peers.rows >= 16, "these devices reach each other's memory"


def test_an_update_reaches_all_ranks_and_is_proven(checkpoint: Maker, tmp_path: Path) -> None:
    folder = checkpoint("wide")
    tensors = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    manifest = {name: TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    ids = np.random.default_rng(4).integers(3, 512, size=40)

    def push(engine: Engine, canaries: list[Canary]) -> np.ndarray:
        engine.begin_update(manifest, version=1)
        for name, tensor in tensors.items():
            engine.stage(name, tensor)
        report = engine.commit_update(digests={name: digest(tensor) for name, tensor in tensors.items()}, canaries=canaries)
        assert report.changed_tensors == len(tensors)
        return engine.score(ids).token_logprobs

    with engine_of(folder, device="cpu") as engine:
        wanted = push(engine, [])
    with engine_of(folder, dtype="float32", tp=2) as engine:
        submitted = requests_of(8, tokens=60, ignore_eos=True)
        for item in submitted:
            engine.submit(item)
        for _ in range(10):
            engine.step()
        found = push(engine, [Canary(ids=ids, expected_logprobs=wanted)])
        assert np.abs(found - wanted).max() < 1e-4
        assert engine.digests() == {name: digest(tensor) for name, tensor in tensors.items()}
        while engine.has_work:
            engine.step()
        engine.check_integrity()


def test_slices_on_a_device_are_read_when_they_have_come_and_not_after_they_may_change(checkpoint: Maker) -> None:
    folder = checkpoint("wide")
    tensors = {name: tensor + 1.0 for name, tensor in load_file(folder / "model.safetensors").items()}
    manifest = {name: TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    with engine_of(folder, dtype="float32", tp=2) as engine, torch.cuda.device(0):
        trainer = torch.cuda.Stream()
        engine.begin_update(manifest, version=1)
        for name, tensor in tensors.items():
            values = tensor.reshape(-1).cuda()
            torch.cuda.synchronize()
            # The other ranks are told of what comes only when this is over.
            torch.cuda._sleep(5_000_000)
            engine.stage_slices([Slice(name, values, 0, manifest[name])])
            launched = engine.launch_slices()
            while launched is not None and not engine.slices_copied(launched):
                pass
            with torch.cuda.stream(trainer):
                values.fill_(torch.nan)
            trainer.synchronize()
        assert engine.commit_update(digests={name: digest(tensor) for name, tensor in tensors.items()}).changed_tensors == len(tensors)


def test_ranks_sleep_and_wake(checkpoint: Maker) -> None:
    asked = requests_of(6, tokens=20)
    with engine_of(checkpoint("wide"), dtype="float32", tp=2) as engine:
        before = run(engine, asked, check=False)
        engine.sleep("weights")
        engine.wake()
        assert_near(run(engine, asked, check=False), before)


def test_a_rank_that_is_killed_ends_the_engine_in_time(checkpoint: Maker) -> None:
    with engine_of(checkpoint("wide"), tp=2, rank_timeout_s=20.0) as engine:
        for item in requests_of(4, tokens=400, ignore_eos=True):
            engine.submit(item)
        for _ in range(10):
            engine.step()
        pids = engine._ranks.pids  # type: ignore[attr-defined]
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        with pytest.raises(EngineFailure):
            for _ in range(2000):
                engine.step()
    with engine_of(checkpoint("wide"), tp=2) as engine:
        assert len(run(engine, requests_of(2, tokens=5), check=False)) == 2


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_on_the_second_card_leaves_the_first_one_current(checkpoint: Maker, graphs: bool) -> None:
    asked = requests_of(12, temperature=0.8)
    torch.cuda.set_device(0)
    wanted = told_by(checkpoint("wide"), asked, dtype="float32", graphs=graphs)
    used = torch.cuda.memory_allocated(0)
    with engine_of(checkpoint("wide"), dtype="float32", graphs=graphs, device="cuda:1") as engine:
        found = run(engine, asked)
        assert torch.cuda.current_device() == 0 and engine.device.index == 1
        assert torch.cuda.memory_allocated(0) <= used, "nothing of it lies on the first card"
    assert_near(found, wanted)
