"""Both decode paths of a card over one model and one K/V memory: in lock step they give the same bits, whatever happens to rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno import Engine, EngineConfig, FinishKind, Request, SamplingParams
from areno.weights.canary import Canary
from tests.bench import decode_metadata, decode_trace
from tests.bench.decode_runs import Run, compare, lock_step, recorded, run_plan
from tests.bench.decode_scenarios import SCENARIOS, Plan

pytestmark = pytest.mark.gpu
Maker = Callable[..., Path]
SHAPED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 7, "return_kept_ids": True},
    {"top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"logit_bias": {5: 4.0, 9: -3.0}, "temperature": 1.4},
    {"min_new_tokens": 6, "stop_ids": list(range(3, 15))},
    {"forced_ids": [7, 8, 9, 10, 11, 12], "stop_ids": [11]},
)


def owner_of(folder: Path, **options: Any) -> Engine:
    fixed = {"model": str(folder), "device": "cuda", "max_rows": 16, "seed": 1, "num_pages": 52, "prefix_cache": False}
    return Engine(EngineConfig(**{**fixed, "kept_ids": True, "sampling_slots": 6, "compaction_steps": 2, **options}))


def twins_of(folder: Path, **options: Any) -> dict[str, Engine]:
    owner = owner_of(folder, **options)
    return {path: owner.twin(decode_tables=path) for path in ("resident", "rebuilt")}


def churn(seed: int, count: int = 48) -> Plan:
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        # Every fifth outgrows the pages it is admitted with, so that some rows are left at the end, spread over the rows.
        budget = 130 if number % 5 == 0 else int(rng.integers(6, 60))
        params = {"max_new_tokens": budget, "seed": number, "ignore_eos": number % 5 == 0, **SHAPED[number % len(SHAPED)]}
        prompt = rng.integers(3, 512, size=int(rng.integers(1, 120)))
        requests.append(Request(request_id=number, prompt_ids=prompt, sampling=SamplingParams(**params)))
    return Plan(requests=tuple(requests), at_once=30, cancel_after={number: 1 + number % 7 for number in range(0, count, 6)})


def locked_run(engine: Engine, plan: Plan, lag: int) -> Run:
    with lock_step(engine, lag):
        run = run_plan(engine, plan)
    engine.check_integrity()
    return run


def assert_same_outputs(found: Run, wanted: Run) -> None:
    assert len(found.journal.outputs) == len(wanted.journal.outputs)
    for mine, theirs in zip(found.journal.outputs, wanted.journal.outputs):
        for name in ("request_ids", "token_ids", "logprobs", "raw_logprobs", "behaviour_logprobs", "versions"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name), equal_nan=name.endswith("logprobs")), name
        assert (mine.kept_ids is None) == (theirs.kept_ids is None)
        if mine.kept_ids is not None and theirs.kept_ids is not None:
            assert np.array_equal(mine.kept_ids, theirs.kept_ids) and np.array_equal(mine.kept_counts, theirs.kept_counts)


@pytest.mark.parametrize("graphs", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_churn_with_filters_slots_stops_and_cancels_gives_the_same_bits_on_both_paths(
    checkpoint: Maker, graphs: bool, lag: int, dtype: str
) -> None:
    twins = twins_of(checkpoint("wide"), graphs=graphs, dtype=dtype)
    plan = churn(0)
    # The first time a kind of step runs launch by launch, the second time it is captured and replayed, then only replayed.
    for _ in range(3):
        runs = {path: locked_run(engine, plan, lag) for path, engine in twins.items()}
        gap = compare(runs["resident"], runs["rebuilt"], plan, lock_step=True)
        assert gap.is_zero, gap
        assert_same_outputs(runs["rebuilt"], runs["resident"])
    ends = runs["rebuilt"].journal.finished
    assert {end.reason.kind for end in ends.values()} == {FinishKind.STOP, FinishKind.LENGTH, FinishKind.CANCELLED}
    stats = twins["rebuilt"].stats()
    assert min(stats[name] for name in ("moves", "grown_pages", "cancelled")) > 0
    assert sum(output.kept_ids is not None for output in runs["rebuilt"].journal.outputs) > 10


@pytest.mark.parametrize("shape", ["llama", "qwen2", "qwen3"])
def test_every_family_gives_the_same_bits_on_both_paths(checkpoint: Maker, shape: str) -> None:
    twins, plan = twins_of(checkpoint(shape)), churn(7, count=24)
    runs = {path: locked_run(engine, plan, 2) for path, engine in twins.items()}
    assert compare(runs["resident"], runs["rebuilt"], plan, lock_step=True).is_zero


@pytest.mark.parametrize("path", ["resident", "rebuilt"])
def test_a_batch_that_shrinks_to_one_row_runs_every_smaller_bucket(checkpoint: Maker, path: str) -> None:
    rng = np.random.default_rng(5)
    budgets = [90 if n == 15 else 75 if n == 9 else 60 if n % 5 == 0 and n else 40 if n % 3 == 1 else 20 for n in range(16)]
    asked = tuple(
        Request(
            request_id=n,
            prompt_ids=rng.integers(3, 512, size=20),
            sampling=SamplingParams(max_new_tokens=budget, seed=n, ignore_eos=True),
        )
        for n, budget in enumerate(budgets)
    )
    engine = twins_of(checkpoint("wide"), compaction_steps=1, dtype="float32")[path]
    plan = Plan(requests=asked, at_once=16)
    with recorded(engine) as launches:
        shrunk = run_plan(engine, plan)
    buckets = [launch.bucket for launch in launches]
    assert list(dict.fromkeys(buckets)) == [16, 8, 4, 2, 1] and buckets == sorted(buckets, reverse=True)
    alone = owner_of(checkpoint("wide"), dtype="float32")
    for item in asked[::5]:
        single = run_plan(alone, Plan(requests=(item,), at_once=1)).journal.by_request()[item.request_id]
        assert single[:, 0].tolist() == shrunk.journal.by_request()[item.request_id][:, 0].tolist()


def test_prompt_scores_of_a_rebuilt_engine_have_come_when_they_are_read(checkpoint: Maker) -> None:
    prompt = np.random.default_rng(11).integers(3, 512, size=700)
    told = []
    for engine in twins_of(checkpoint("qwen3"), max_prefill_tokens=128).values():
        sampling = SamplingParams(max_new_tokens=1, prompt_logprobs_from=1, seed=1)
        engine.submit(Request(request_id=1, prompt_ids=prompt, sampling=sampling))
        scores = []
        while engine.has_work:
            scores.extend(engine.step().prompt_scores)
        assert len(scores) == 1 and np.isfinite(scores[0].raw_logprobs).all()
        told.append(scores[0])
    assert np.array_equal(told[0].logprobs, told[1].logprobs, equal_nan=True)
    assert np.array_equal(told[0].raw_logprobs, told[1].raw_logprobs, equal_nan=True)


def test_an_update_is_proven_through_the_rebuilt_path(checkpoint: Maker) -> None:
    engine = owner_of(checkpoint("wide"), decode_tables="rebuilt", dtype="float32")
    ids = np.random.default_rng(3).integers(3, 512, size=40)
    engine.begin_update(None, version=1, partial=True)
    name = next(name for name in engine.manifest if "norm" not in name)
    changed = engine._table.views[name].clone() * 1.5
    engine.stage(name, changed)
    twin = owner_of(checkpoint("wide"), dtype="float32")
    twin._table.views[name].copy_(changed)
    twin._table.rebuild_derived()
    expected = twin.score(ids).token_logprobs
    report = engine.commit_update(canaries=[Canary(ids=ids, expected_logprobs=expected)])
    assert report.decode_canary_gap is not None and report.decode_canary_gap < 1e-3 and engine.version == 1


@pytest.mark.parametrize("choice", [[], ["--greedy"]], ids=["scripted", "greedy"])
def test_the_harness_finds_no_difference_and_names_the_captured_step(checkpoint: Maker, choice: list[str]) -> None:
    given = ["--model", str(checkpoint("wide")), "--batches", "1", "4", "--tokens", "16", "--repeats", "2", "--json", *choice]
    options = decode_metadata.parse(given)
    decode_metadata.settle(options)
    rows = decode_metadata.measure(options)["rows"]
    assert len(rows) == 2 * 2 * len(SCENARIOS)
    for row in rows:
        assert not any(value for name, value in row.items() if name.startswith("lock_step")), row
        assert row["resident_step"] == row["rebuilt_step"]
        assert row["resident_step"].startswith("graph" if row["mode"] == "graph" else "single launches")
        assert row["resident_peak_mib"] - row["rebuilt_peak_mib"] < 4
    assert all(row["graph_ms"] > 0 for row in rows if row["mode"] == "graph" and row["scenario"] == "steady")


@pytest.mark.parametrize("path", ["resident", "rebuilt"])
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_steady_window_copies_and_waits_as_often_as_its_path_promises(checkpoint: Maker, tmp_path: Path, path: str, mode: str) -> None:
    trace = tmp_path / "trace.json.gz"
    given = ["--record", str(trace), "--model", str(checkpoint("wide")), "--variant", path, "--mode", mode, "--batch", "8", "--json"]
    row = decode_trace.main([*given, "--check"])["rows"][0]
    assert row["steps"] == 63 and row["step_ms"] > 0
    if path == "rebuilt":
        assert row["dtoh_copies"] == row["event_syncs"] == 63 and row["htod_copies"] >= 63
