"""The decode-path harness at small sizes on a CPU, and that it sees what it is for: differences, missed promises, bad options."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno import Engine, InvalidConfig
from areno.step_output import Finished, FinishKind, FinishReason, StepOutput
from tests.bench import decode_metadata, paired
from tests.bench.decode_report import problems
from tests.bench.decode_runs import CONTRACT, Journal, Run, compare, lock_step, run_plan
from tests.bench.decode_scenarios import SCENARIOS, Load, Plan, make_plan
from tests.engine_runs import make_engine
from tests.fixtures_models import write_checkpoint

SIZES: dict[str, Any] = {"prompts": (5, 6), "tokens": 6, "vocab": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.mark.parametrize("choice", [[], pytest.param(["--greedy"], marks=pytest.mark.long)], ids=["scripted", "greedy"])
def test_both_paths_agree_in_every_scenario_and_the_figures_are_there(folder: Path, tmp_path: Path, choice: list[str]) -> None:
    output = tmp_path / "matrix.json"
    given = ["--model", str(folder), "--device", "cpu", "--batches", "4", "--tokens", "5", "--repeats", "6", "--json"]
    result = decode_metadata.main([*given, "--output", str(output), *choice])
    assert json.loads(output.read_text())["rows"] == result["rows"]
    assert [row["scenario"] for row in result["rows"]] == list(SCENARIOS)
    for row in result["rows"]:
        exact = [name for name in row if "differ" in name or name == "lock_step_max_logprob_diff"]
        assert len(exact) == 6 and not any(row[name] for name in exact), row
        assert row["free_max_logprob_diff"] < 1e-4
        assert 0 < row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["mode"] == "eager" and row["resident_step"] == row["rebuilt_step"] and "4 rows" in row["resident_step"]
        for name in ("resident", "rebuilt"):
            figures = [row[f"{name}_{figure}"] for figure in ("step_ms", "tokens_per_s", "host_ms", "launch_ms", "steps")]
            assert min(figures) > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_ranks_agree_too(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "ranks.json"
    given = ["--model", str(folder), "--device", "cpu", "--batches", "4", "--tokens", "5", "--repeats", "1", "--tp", "2", "--json"]
    result = decode_metadata.main([*given, "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert rows == result["rows"] and result["config"]["tp"] == 2
    assert [row["scenario"] for row in rows] == list(SCENARIOS)
    for row in rows:
        exact = [name for name in row if "differ" in name or name == "lock_step_max_logprob_diff"]
        assert len(exact) == 6 and not any(row[name] for name in exact), row
        assert row["free_max_logprob_diff"] < 1e-4 and row["speedup"] > 0


def _engine(folder: Path, batch: int) -> Engine:
    return make_engine(folder, max_rows=batch, sampling_slots=batch, prefix_cache=False)


@pytest.mark.parametrize("batch", [1, 4])
def test_scripted_scenarios_do_what_their_names_say(folder: Path, batch: int) -> None:
    engine = _engine(folder, batch)
    load = Load(batch=batch, greedy=False, **SIZES)
    runs = {scenario: run_plan(engine, make_plan(scenario, load)) for scenario in SCENARIOS}
    kinds = {scenario: {number: end.reason.kind for number, end in run.journal.finished.items()} for scenario, run in runs.items()}
    assert set(kinds["steady"].values()) == {FinishKind.LENGTH} and len(kinds["steady"]) == batch
    assert runs["steady"].tokens == batch * load.tokens
    assert set(kinds["tail_refill"].values()) == {FinishKind.STOP} and len(kinds["tail_refill"]) == 2 * batch
    assert {number for number, kind in kinds["cancel_refill"].items() if kind is FinishKind.CANCELLED} == set(range(0, 3 * batch, 2))
    assert batch * load.tokens <= runs["continuous_refill"].tokens < batch * load.tokens + batch
    queue = [end for end in runs["continuous_refill"].journal.finished.values() if end.output_tokens == 0]
    assert len(queue) >= batch, "the queue ran empty before the end"


def test_a_plan_is_the_same_for_every_engine_and_another_for_another_seed() -> None:
    load = Load(batch=3, greedy=False, **SIZES)
    first, again, other = (make_plan("tail_refill", load, seed=seed) for seed in (0, 0, 1))
    prompts = [np.concatenate([np.asarray(item.prompt_ids) for item in plan.requests]) for plan in (first, again, other)]
    assert np.array_equal(prompts[0], prompts[1]) and not np.array_equal(prompts[0], prompts[2])


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_lock_step_holds_results_back_for_as_many_launches(folder: Path, run_ahead: int) -> None:
    engine = _engine(folder, 4)
    plan = make_plan("steady", Load(batch=4, greedy=False, **SIZES))
    with lock_step(engine, run_ahead):
        for request in plan.requests:
            engine.submit(request)
        silent = [engine.step().token_ids.size for _ in range(4)].count(0)
        # The first step makes two launches, of the prompts and of a token.
        assert silent == max(run_ahead - 1, 0)
        while engine.has_work:
            engine.step()
    assert engine._ring.run_ahead == 0 and not engine._ring.lock_step


def _run(tokens: list[int], logprobs: list[float], kind: FinishKind = FinishKind.LENGTH, steps: int = 3) -> Run:
    ones = np.zeros(len(tokens), dtype=np.int64)
    values = np.array(logprobs, dtype=np.float32)
    journal = Journal()
    end = Finished(
        request_id=0,
        reason=FinishReason(kind=kind),
        prompt_tokens=1,
        output_tokens=len(tokens),
        cached_tokens=0,
        seed=0,
        kv_spans=(),
        kv_rebuilt_at=(),
    )
    journal.add(
        StepOutput(
            request_ids=ones,
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=values,
            raw_logprobs=values,
            behaviour_logprobs=np.full_like(values, np.nan),
            versions=ones,
            finished=(end,),
        )
    )
    return Run(
        journal=journal, wall_s=1.0, steps_s=np.ones(steps), tokens=len(tokens), host_s=0.1, launch_s=0.1, waited_s=0.0, peak_bytes=0
    )


PLAN = Plan(requests=(), at_once=0)


def test_every_kind_of_difference_is_seen() -> None:
    base = _run([5, 6, 7], [-1.0, -2.0, -3.0])
    assert compare(base, base, PLAN, lock_step=True).is_zero
    tiny = np.float32(-2.0) + np.spacing(np.float32(2.0))
    assert compare(base, _run([5, 6, 7], [-1.0, float(tiny), -3.0]), PLAN, lock_step=True).largest > 0
    assert compare(base, _run([5, 9, 7], [-1.0, -2.0, -3.0]), PLAN, lock_step=True).ids == 1
    assert compare(base, _run([5, 6], [-1.0, -2.0]), PLAN, lock_step=True).ids == 1
    assert compare(base, _run([5, 6, 7], [-1.0, -2.0, -3.0], FinishKind.STOP), PLAN, lock_step=True).reasons == 1
    assert compare(base, _run([5, 6, 7], [-1.0, -2.0, -3.0], steps=4), PLAN, lock_step=True).steps == 1
    assert compare(base, _run([5, 6, 7], [-1.0, math.nan, -3.0]), PLAN, lock_step=True).largest == math.inf
    assert not compare(base, Run(**{**_fields(base), "journal": Journal()}), PLAN, lock_step=True).is_zero


def _fields(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in Run.__dataclass_fields__}


def test_in_a_free_run_only_a_cancelled_request_may_have_got_more() -> None:
    longer = [5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0]
    shorter = [5, 6], [-1.0, -2.0]
    cancelled = [_run(*given, FinishKind.CANCELLED) for given in (longer, shorter)]
    assert compare(*cancelled, PLAN, lock_step=False).is_zero
    assert compare(*cancelled, PLAN, lock_step=True).ids == 1
    assert compare(_run(*longer), _run(*shorter), PLAN, lock_step=False).ids == 1


def test_an_interval_leaves_single_pairs_without_weight_and_narrows_with_more() -> None:
    ratios = [1.20, 1.21, 1.19, 1.22, 1.18, 1.20, 1.21]
    middle, low, high = paired.interval(ratios)
    assert middle == pytest.approx(1.201, abs=2e-3) and low is not None and high is not None and 1.18 < low < middle < high < 1.22
    disturbed, _, _ = paired.interval([0.3, *ratios[1:]])
    assert disturbed == pytest.approx(middle, abs=0.01)
    many, narrow, wide = paired.interval(ratios * 4)
    assert narrow is not None and wide is not None and many == pytest.approx(middle, abs=2e-3) and wide - narrow < high - low


@pytest.mark.parametrize(("pairs", "left_out"), [(6, 0), (7, 2), (8, 3), (10, 8), (20, 52), (25, 89)])
def test_an_interval_leaves_out_as_many_averages_as_the_tables_of_signed_ranks_say(pairs: int, left_out: int) -> None:
    logs = np.random.default_rng(pairs).normal(size=pairs)
    averages = sorted((logs[i] + logs[j]) / 2 for i in range(pairs) for j in range(i, pairs))
    _, low, high = paired.interval(np.exp(logs).tolist())
    assert low == pytest.approx(math.exp(averages[left_out])) and high == pytest.approx(math.exp(averages[-1 - left_out]))


def test_fewer_than_six_pairs_have_no_interval() -> None:
    assert paired.interval([1.5]) == (pytest.approx(1.5), None, None)
    assert paired.interval([1.0, 4.0, 2.0, 2.0, 2.0]) == (pytest.approx(2.0), None, None)


GOOD: dict[str, Any] = {
    "batch": 64,
    "mode": "graph",
    "scenario": "steady",
    "choice": "scripted",
    "lock_step_ids_differ": 0,
    "lock_step_reasons_differ": 0,
    "lock_step_steps_differ": 0,
    "lock_step_max_logprob_diff": 0.0,
    "free_ids_differ": 0,
    "free_reasons_differ": 0,
    "free_max_logprob_diff": 0.0,
    "free_mean_logprob_diff": 0.0,
    "speedup": 1.3,
    "speedup_high": 1.31,
    "rebuilt_delay_ms": 0.15,
    "resident_peak_mib": 103.0,
    "rebuilt_peak_mib": 100.0,
}


@pytest.mark.parametrize(
    ("change", "said", "only_promised"),
    [
        ({"lock_step_max_logprob_diff": 1e-9}, "lock step", False),
        ({"lock_step_steps_differ": 1}, "lock step", False),
        ({"free_ids_differ": 1}, "free runs", False),
        ({"free_mean_logprob_diff": 0.02}, "above 0.01", False),
        ({"speedup": 1.19}, "promised 1.2", True),
        ({"speedup": 0.97, "scenario": "cancel_refill", "mode": "eager"}, "below 0.98", True),
        ({"speedup": 0.99, "speedup_high": 0.995, "scenario": "cancel_refill"}, "wholly below 1", True),
        ({"rebuilt_delay_ms": 0.21}, "more than 0.2", True),
        ({"resident_peak_mib": 104.5}, "more than 4", True),
    ],
)
def test_what_is_wrong_with_a_figure_is_said(change: dict[str, Any], said: str, only_promised: bool) -> None:
    assert problems([GOOD], CONTRACT["bfloat16"], promises=True) == []
    row = {**GOOD, **change}
    assert any(said in line for line in problems([row], CONTRACT["bfloat16"], promises=True))
    assert bool(problems([row], CONTRACT["bfloat16"], promises=False)) is not only_promised


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (["--tp", "9"], "tp"),
        (["--modes", "graph"], "modes"),
        (["--repeats", "0"], "repeats"),
        (["--batches", "0"], "batches"),
        (["--profile", "resident"], "profile"),
    ],
)
def test_what_cannot_be_measured_here_is_refused_by_name(given: list[str], field: str) -> None:
    with pytest.raises(InvalidConfig, match=field) as refusal:
        decode_metadata.main(["--tiny", "--device", "cpu", *given])
    assert refusal.value.field == field and refusal.value.remedy


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (["--batches", "4", "0"], "batches"),
        (["--tokens", "-1"], "tokens"),
        (["--repeats", "0"], "repeats"),
        (["--budget-s", "nan"], "budget_s"),
        (["--budget-s", "-1"], "budget_s"),
        (["--budget-s", "inf"], "budget_s"),
        (["--prompts", "5", "0"], "prompts"),
        (["--tp", "99"], "tp"),
        (["--modes", "graph"], "modes"),
        (["--profile", "resident"], "profile"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name_before_anything_runs(given: list[str], field: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        decode_metadata.main(["--tiny", "--device", "cpu", *given])
    assert refused.value.field == field and refused.value.remedy


@pytest.mark.parametrize("output", ["/nonexistent/matrix.json", "/tmp"])
def test_a_result_that_could_not_be_written_is_refused_before_anything_runs(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode_metadata.main(["--tiny", "--output", output])
    assert "a folder that exists" in capsys.readouterr().err
