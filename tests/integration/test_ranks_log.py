"""Ranks that each hold a whole model and follow one log: what the log carries is all that a rank needs, bit for bit.

Real processes over the real ring; the rows of every rank are compared after every step (`check_integrity` does).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno import Canary, Engine, EngineConfig, EngineFailure
from areno.config import MAX_RUN_AHEAD
from areno.errors import ManifestMismatch
from areno.ranks.peers import Peers, PeersPlan
from areno.ranks.segment import SegmentSizes
from areno.weights.digest import digest
from areno.weights.slices import Slice
from tests.engine_runs import Recorder, generate, random_prompt, request, run
from tests.fixtures_models import checkpoint_tensors, manifest_of, reference_logprobs, write_checkpoint

OPTIONS: dict[str, Any] = {
    "max_rows": 8,
    "seed": 1,
    "num_pages": 24,
    "page_size": 8,
    "max_prefill_tokens": 64,
    "sampling_slots": 4,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3", seed=0)


def replicated(folder: Path, size: int, **options: Any) -> Engine:
    """Return an engine whose log `size - 1` more processes follow, each with the whole model."""
    plan = PeersPlan(
        model=folder,
        devices=("cpu",) * size,
        backend="none",
        launches_ahead=MAX_RUN_AHEAD + 1,
        rank_timeout_s=20.0,
        stall_s=60.0,
        threads=1,
        # Small, so that prompts and tensors take many records and pieces.
        sizes=SegmentSizes(world=size, num_records=8, bulk_bytes=4096),
    )
    return Engine(EngineConfig(model=str(folder), **{**OPTIONS, **options}), ranks=Peers(plan))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = replicated(folder, 3, run_ahead=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return Engine(EngineConfig(model=str(folder), **OPTIONS))


def churn(seed: int) -> tuple[list[Any], dict[int, Any]]:
    """Return requests with every sampling need, groups and prompts of many pages, and cancels on the way."""
    rng = np.random.default_rng(seed)
    needs: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": {5: 3.0, 9: -2.0}},
        {"temperature": 1.0, "forced_ids": [4, 5, 6], "min_new_tokens": 4},
        {"temperature": 1.0, "prompt_logprobs_from": 1},
    ]
    requests = [
        request(number, random_prompt(rng, 5, 90), max_new_tokens=int(rng.integers(4, 24)), seed=number, **needs[number % len(needs)])
        for number in range(18)
    ]
    shared = random_prompt(rng, 20, 40)
    requests += [request(100 + member, shared, max_new_tokens=10, seed=member, group=7) for member in range(4)]
    requests += [request(200 + number, random_prompt(rng, 5, 9), max_new_tokens=100, ignore_eos=True, seed=number) for number in range(3)]
    return requests, {6: [lambda engine: engine.cancel(3)], 9: [lambda engine: engine.cancel(101)]}


@pytest.mark.timeout(120)
def test_ranks_that_follow_the_log_have_the_rows_of_rank_0_after_every_step(engine: Engine, alone: Engine) -> None:
    requests, script = churn(0)
    outputs = run(engine, requests, script=script)
    ranks = engine._ranks
    ranks.catch_up()
    assert isinstance(ranks, Peers) and ranks.executed(ranks._writer.entries), "nobody is behind"
    stats = engine.stats()
    assert stats["tp"] == 3 and stats["preemptions"] > 0 and stats["forks"] > 0 and stats["cancelled"] == 2
    expected = run(alone, churn(0)[0], script=churn(0)[1])
    uncut = outputs.keys() - {3, 101}
    assert all(outputs[number].ids == expected[number].ids for number in uncut), "the log changes nothing of what rank 0 samples"


@pytest.mark.timeout(120)
def test_scores_updates_and_sleep_go_through_the_log(engine: Engine, folder: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", "qwen3", seed=1)
    tensors = checkpoint_tensors(other)
    prompt = [5, 9, 11, 40, 7]
    before = generate(engine, prompt, max_new_tokens=8, temperature=0.0).ids
    old_scores = engine.score(np.arange(3, 30)).token_logprobs
    canary = Canary(ids=np.arange(3, 20), expected_logprobs=reference_logprobs(str(other), np.arange(3, 20)).astype(np.float32))
    engine.begin_update(manifest_of(tensors), version=1)
    for name, tensor in tensors.items():
        if "embed" in name:
            flat, spec = tensor.reshape(-1), manifest_of(tensors)[name]
            for start in range(0, flat.numel(), 3000):
                engine.stage_slices([Slice(name, flat[start : start + 3000], start, spec)])
            engine.settle_slices()
        else:
            engine.stage(name, tensor)
    report = engine.commit_update(digests={name: digest(tensor) for name, tensor in tensors.items()}, canaries=[canary])
    assert report.version == engine.version == 1 and report.canary_gap is not None and report.canary_gap < 1e-4
    after = run(engine, [request(1, prompt, max_new_tokens=8, temperature=0.0)])[1].ids
    assert after == generate(Engine(EngineConfig(model=str(other), **OPTIONS)), prompt, max_new_tokens=8, temperature=0.0).ids != before
    assert not np.allclose(engine.score(np.arange(3, 30)).token_logprobs, old_scores, atol=0.01)
    engine.submit(request(2, prompt, max_new_tokens=30, temperature=0.0, ignore_eos=True))
    recorder = Recorder()
    for _ in range(5):
        recorder.add(engine.step())
    recorder.add(engine.sleep("weights"))
    engine.wake()
    while engine.has_work:
        recorder.add(engine.step())
        engine.check_integrity()
    assert recorder.outputs[2].ids[:8] == after
    engine.begin_update(None, version=2)
    engine.stage("model.norm.weight", tensors["model.norm.weight"])
    engine.abort_update()
    engine.begin_update(manifest_of(tensors), version=2, partial=False)
    with pytest.raises(ManifestMismatch, match="is not in the model"):
        engine.stage("model.nothing.weight", tensors["model.norm.weight"])
    with pytest.raises(ManifestMismatch, match="tensors never came"):
        engine.commit_update()
    assert run(engine, [request(3, prompt, max_new_tokens=8, temperature=0.0)])[3].ids == after


@pytest.mark.timeout(60)
def test_a_rank_whose_rows_differ_is_found_and_the_difference_told(folder: Path) -> None:
    engine = replicated(folder, 2)
    pids = engine._ranks.pids  # type: ignore[attr-defined]
    engine.submit(request(1, [5, 6, 7], max_new_tokens=40, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.check_integrity()
    last_token = engine._path.tables.field("last_token")  # type: ignore[attr-defined]
    right = int(last_token[0])
    last_token[0] = right ^ 1
    with pytest.raises(
        EngineFailure,
        match=f"gone different ways: rank 1 has another last_token in 1 rows .row 0: {right ^ 1} on rank 0, {right} on rank 1",
    ):
        engine.check_integrity()
    with pytest.raises(EngineFailure, match="gone different ways"):
        engine.step()
    engine.close()
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.timeout(60)
def test_rows_are_compared_by_themselves_every_few_hundred_launches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.engine.CHECK_LAUNCHES", 8)
    engine = replicated(folder, 2)
    engine.submit(request(1, [5, 6, 7], max_new_tokens=150, ignore_eos=True))
    for _ in range(30):
        engine.step()
    with torch.inference_mode():
        engine._path.tables.field("length")[0] -= 1  # type: ignore[attr-defined]
    with pytest.raises(EngineFailure, match="rank 1 has another length in 1 rows"):
        for _ in range(60):
            engine.step()
    engine.close()
