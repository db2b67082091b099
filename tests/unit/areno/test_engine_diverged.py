"""Weights that overflow: requests fail by name, and nothing of them is left when good weights are back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno import Canary, Engine, FinishKind
from areno.config import SINK_PAGE
from areno.errors import CanaryMismatch
from tests.crossed import every_value
from tests.engine_runs import Recorder, assert_idle, generate, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import checkpoint_tensors, reference_logprobs, reference_model, write_checkpoint


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def _push(engine: Engine, tensors: dict[str, torch.Tensor], version: int, **commit: Any) -> Any:
    engine.begin_update(None, version=version)
    for name, tensor in tensors.items():
        engine.stage(name, tensor)
    return engine.commit_update(**commit)


def _diverged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Finite in fp32, but the first product overflows."""
    return {name: torch.full_like(tensor, 3e38) if "input_layernorm" in name else tensor for name, tensor in tensors.items()}


@every_value(path=["resident", "rebuilt"], run_ahead=[0, 2])
def test_diverged_weights_fail_requests_and_leave_no_nan_behind(llama: Path, path: str, run_ahead: int) -> None:
    good = checkpoint_tensors(llama)
    model = reference_model(llama)
    engine = make_engine(llama, decode_tables=path, run_ahead=run_ahead, num_pages=24)
    rng = np.random.default_rng(0)
    running = random_prompt(rng, 20, 21)
    # One row lives across the commit, others begin after it, with their own options.
    requests = [request(0, running, max_new_tokens=60, seed=1, ignore_eos=True, lineage="a")]
    after = [
        request(1, random_prompt(rng, 30, 31), max_new_tokens=40, seed=1),
        request(2, random_prompt(rng, 5, 6), max_new_tokens=40, seed=1, logprobs=False, top_k=5),
        request(3, random_prompt(rng, 40, 41), max_new_tokens=4, prompt_logprobs_from=1),
    ]
    script = {5: [lambda e: _push(e, _diverged(good), 1)], 6: [lambda e: [e.submit(item) for item in after]]}
    outputs = run(engine, requests, script=script)
    for number in range(4):
        end = outputs[number].end
        assert end.reason.kind is FinishKind.FAILED and end.reason.detail is not None and "not finite" in end.reason.detail
        assert np.isfinite(outputs[number].raw_logprobs).all() or number == 2
        assert end.output_tokens == len(outputs[number].ids)
    assert outputs[0].ids and not outputs[1].ids
    _push(engine, good, 2)
    for number in range(10, 20):
        prompt = random_prompt(rng, 1, 100)
        output = generate(engine, prompt, max_new_tokens=20, seed=number, ignore_eos=True, request_id=number)
        assert reference_gap(model, prompt, output) < 1e-4
    again = generate(engine, np.append(running, outputs[0].ids), max_new_tokens=9, ignore_eos=True, lineage="a", request_id=30)
    assert reference_gap(model, np.append(running, outputs[0].ids), again) < 1e-4
    assert_idle(engine)


@every_value(chunk=[7, 16, 32], run_ahead=[0, 2], policy=["keep", "recompute"])
def test_a_prompt_that_is_given_up_under_diverged_weights_leaves_its_lineage_nothing_of_them(
    llama: Path, chunk: int, run_ahead: int, policy: str
) -> None:
    good, prompt = checkpoint_tensors(llama), random_prompt(np.random.default_rng(5), 60, 61)
    engine = make_engine(llama, max_prefill_tokens=chunk, run_ahead=run_ahead)
    asked: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True, "lineage": "a", "kv_policy": policy}
    generate(engine, prompt[:20], **asked)
    _push(engine, _diverged(good), 1)
    engine.submit(request(1, prompt, **asked))
    engine.step()
    assert engine.cancel(1) and engine.step().finished[0].reason.kind is FinishKind.CANCELLED
    _push(engine, good, 2)
    output = generate(engine, prompt, request_id=2, **asked)
    assert len(output.ids) == 5 and reference_gap(reference_model(llama), prompt, output) < 1e-4
    assert output.end.cached_tokens == (20 if policy == "keep" else 0)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_prompt_whose_first_chunk_cannot_be_scored_fails_at_once(llama: Path, run_ahead: int) -> None:
    engine = make_engine(llama, max_prefill_tokens=8, run_ahead=run_ahead)
    _push(engine, _diverged(checkpoint_tensors(llama)), 1)
    item = request(0, random_prompt(np.random.default_rng(1), 60, 61), max_new_tokens=5, prompt_logprobs_from=1)
    output = run(engine, [item])[0]
    assert output.end.reason.kind is FinishKind.FAILED and output.ids == [] and output.prompt_score is None


def _poison(engine: Engine) -> None:
    """Fill every page that nobody holds, and the sink page, with NaN."""
    pages = torch.tensor([SINK_PAGE, *engine._scheduler._residency.pool.free_pages])
    for store in (engine._store.keys, engine._store.values):
        store.index_fill_(1, pages, float("nan"))


@every_value(path=["resident", "rebuilt"], run_ahead=[0, 2])
def test_pages_of_nan_never_reach_an_output(llama: Path, path: str, run_ahead: int) -> None:
    rng = np.random.default_rng(3)
    # A common beginning, so that prefixes are hit and tails copied; rows are preempted where pages are few.
    shared = random_prompt(rng, 37, 38)
    asked = [request(n, np.append(shared, random_prompt(rng, 1, 30)), max_new_tokens=110, seed=n, ignore_eos=True) for n in range(10)]
    asked += [request(20 + n, shared, max_new_tokens=12, seed=n, group=1) for n in range(4)]
    settings = {"decode_tables": path, "run_ahead": run_ahead, "num_pages": 24, "max_prefill_tokens": 48}
    clean = run(make_engine(llama, **settings), asked)
    engine = make_engine(llama, **settings)
    recorder = Recorder()
    for item in asked:
        engine.submit(item)
    while engine.has_work:
        _poison(engine)
        recorder.add(engine.step())
        engine.check_integrity()
    stats = engine.stats()
    assert stats["forks"] and stats["cached_tokens"] and stats["preemptions"], "the pool was not stirred"
    assert torch.isnan(engine._store.keys).any(), "nothing was poisoned"
    for number, output in clean.items():
        found = recorder.outputs[number]
        assert found.ids == output.ids and np.allclose(found.logprobs, output.logprobs, atol=1e-4), f"request {number}"


def test_a_proof_that_failed_on_nan_does_not_spoil_the_next_one(llama: Path) -> None:
    good = checkpoint_tensors(llama)
    engine = make_engine(llama)
    ids = np.arange(5, 45)
    canary = Canary(ids=ids, expected_logprobs=reference_logprobs(reference_model(llama), ids).astype(np.float32))
    with pytest.raises(CanaryMismatch):
        _push(engine, _diverged(good), 1, canaries=[canary])
    report = _push(engine, good, 2, canaries=[canary])
    assert report.decode_canary_gap < 1e-4 and report.canary_gap < 1e-4
