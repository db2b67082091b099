"""The equality contract: same command log, same bits; other company, order, chunks, run-ahead: same ids and 1e-4 in fp32.

One seeded history of 1,000 admissions with cancels, refills, tiny budgets, stop ids and forced ids runs on both decode
paths and at every run-ahead, with integrity checked after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from areno import Engine, FinishKind, Request
from tests.engine_runs import Output, generate, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import FAMILIES, reference_logprobs, reference_model, write_checkpoint

ADMISSIONS = 1000
Event = Callable[[Engine], object]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def _history(seed: int, admissions: int) -> tuple[dict[int, Request], dict[int, list[Event]], set[int]]:
    """Return the requests, what happens before which step, and which requests may be cancelled."""
    rng = np.random.default_rng(seed)
    prefixes = [random_prompt(rng, 20, 60) for _ in range(4)]
    requests: dict[int, Request] = {}
    script: dict[int, list[Event]] = {}
    cancelled: set[int] = set()
    step = 0
    for number in range(admissions):
        step += int(rng.integers(0, 2))
        prompt = random_prompt(rng, 1, 40)
        if rng.random() < 0.3:
            prompt = np.concatenate([prefixes[int(rng.integers(4))], prompt])
        budget = int(rng.integers(1, 24))
        sampling: dict[str, object] = {
            "max_new_tokens": budget,
            "temperature": float(rng.choice([0.0, 0.6, 1.0, 1.7])),
            "seed": int(rng.integers(2**63)),
            "stop_ids": rng.integers(3, 256, size=int(rng.integers(0, 17 - 1))).tolist(),
            "min_new_tokens": int(rng.integers(0, budget + 1)) if rng.random() < 0.3 else 0,
        }
        if rng.random() < 0.2:
            sampling["forced_ids"] = rng.integers(3, 256, size=int(rng.integers(0, budget + 1))).tolist()
        requests[number] = request(number, prompt, **sampling)
        script.setdefault(step, []).append(lambda engine, item=requests[number]: engine.submit(item))
        if rng.random() < 0.2:
            cancelled.add(number)
            script.setdefault(step + int(rng.integers(0, 30)), []).append(lambda engine, name=number: engine.cancel(name))
    return requests, script, cancelled


def _settings(path: str, run_ahead: int) -> dict[str, object]:
    return {
        "decode_tables": path,
        "run_ahead": run_ahead,
        "max_rows": 16,
        "num_pages": 52,
        "max_prefill_tokens": 48,
        "sampling_slots": 3,
        "compaction_steps": 2,
    }


@pytest.fixture(scope="module")
def churned(llama: Path) -> dict[tuple[str, int], dict[int, Output]]:
    """Outputs of the whole history: the resident path at every run-ahead, the rebuilt one at the longest."""
    return {key: _churn(llama, *key) for key in [*(("resident", run_ahead) for run_ahead in range(4)), ("rebuilt", 3)]}


def _churn(llama: Path, path: str, run_ahead: int) -> dict[int, Output]:
    _, script, _ = _history(0, ADMISSIONS)
    engine = make_engine(llama, **_settings(path, run_ahead))
    outputs = run(engine, script=script)
    stats = engine.stats()
    # The history is worth running only if it reaches what it is about.
    assert stats["cached_tokens"] > 500 and stats["moves"] > 20 and stats["cancelled"] > 50 and stats["cached_pages"] > 0
    return outputs


@pytest.mark.timeout(600)
def test_every_request_of_a_churned_history_ends_once_on_both_paths_and_at_every_run_ahead(
    churned: dict[tuple[str, int], dict[int, Output]],
) -> None:
    for outputs in churned.values():
        assert len(outputs) == ADMISSIONS
        assert all(output.finished is not None for output in outputs.values())
        kinds = {output.end.reason.kind for output in outputs.values()}
        assert kinds == {FinishKind.STOP, FinishKind.LENGTH, FinishKind.CANCELLED}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("run_ahead", [3, *(pytest.param(depth, marks=pytest.mark.long) for depth in range(3))])
def test_resident_and_rebuilt_give_the_same_bits_for_the_same_history(
    churned: dict[tuple[str, int], dict[int, Output]], run_ahead: int, llama: Path
) -> None:
    resident = churned["resident", run_ahead]
    rebuilt = churned.get(("rebuilt", run_ahead)) or _churn(llama, "rebuilt", run_ahead)
    for number, output in resident.items():
        other = rebuilt[number]
        assert output.ids == other.ids and output.end == other.end
        for name in ("logprobs", "raw_logprobs", "behaviour_logprobs"):
            assert np.array_equal(getattr(output, name), getattr(other, name), equal_nan=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_late_news_changes_no_token_and_cancels_keep_what_was_sampled(
    churned: dict[tuple[str, int], dict[int, Output]], run_ahead: int
) -> None:
    _, _, cancelled = _history(0, ADMISSIONS)
    base, late = churned["resident", 0], churned["resident", run_ahead]
    for number, output in base.items():
        other = late[number]
        common = min(len(output.ids), len(other.ids))
        assert output.ids[:common] == other.ids[:common]
        assert np.allclose(output.logprobs[:common], other.logprobs[:common], atol=1e-4, rtol=0)
        if number not in cancelled:
            assert len(output.ids) == len(other.ids) and output.end.reason == other.end.reason


@pytest.mark.timeout(600)
def test_a_churned_history_agrees_with_the_reference_and_with_running_alone(
    churned: dict[tuple[str, int], dict[int, Output]], llama: Path
) -> None:
    model = reference_model(llama)
    requests, _, cancelled = _history(0, ADMISSIONS)
    alone = make_engine(llama, max_rows=4)
    for number in range(0, ADMISSIONS, 13):
        item, output = requests[number], churned["resident", 2][number]
        temperature = item.sampling.temperature
        assert reference_gap(model, np.asarray(item.prompt_ids), output, temperature) < 1e-4
        if number in cancelled:
            continue
        single = run(alone, [item])[number]
        assert single.ids == output.ids and single.end.reason == output.end.reason
        assert np.allclose(single.logprobs, output.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("path", ["resident", "rebuilt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_64_decoded_tokens_agree_with_transformers(family: str, path: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / family, family)
    model = reference_model(folder)
    engine = make_engine(folder, decode_tables=path)
    rng = np.random.default_rng(3)
    for number, temperature in enumerate((0.0, 0.6, 1.0, 1.7)):
        prompt = random_prompt(rng, 1, 90)
        output = generate(engine, prompt, max_new_tokens=64, temperature=temperature, ignore_eos=True, request_id=number)
        assert len(output.ids) == 64
        assert reference_gap(model, prompt, output, temperature) < 1e-4
        raw = Output(ids=output.ids, logprobs=output.raw_logprobs)
        assert reference_gap(model, prompt, raw) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bf16_stays_within_its_tolerance_of_an_fp32_reference(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / family, family)
    model = reference_model(folder)
    engine = make_engine(folder, dtype="bfloat16")
    prompt = random_prompt(np.random.default_rng(4), 40, 41)
    forced = np.random.default_rng(5).integers(3, 256, size=64)
    output = generate(engine, prompt, max_new_tokens=64, forced_ids=forced, ignore_eos=True)
    assert output.ids == forced.tolist()
    ids = np.concatenate([prompt, forced])
    gaps = np.abs(reference_logprobs(model, ids)[prompt.size - 1 :] - np.array(output.logprobs))
    assert gaps.max() < 0.05 and gaps.mean() < 0.01


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 64])
def test_chunked_prefill_equals_the_whole_prompt(llama: Path, chunk: int) -> None:
    prompt = random_prompt(np.random.default_rng(6), 64, 65)
    whole = generate(make_engine(llama, max_prefill_tokens=512), prompt, max_new_tokens=20, seed=9)
    chunked = generate(make_engine(llama, max_prefill_tokens=chunk), prompt, max_new_tokens=20, seed=9)
    assert chunked.ids == whole.ids
    assert np.allclose(chunked.logprobs, whole.logprobs, atol=1e-4, rtol=0)


def test_a_row_has_the_same_bits_in_any_lane_with_any_neighbours_and_in_any_bucket(llama: Path) -> None:
    rng = np.random.default_rng(7)
    subject = request(99, random_prompt(rng, 30, 31), max_new_tokens=24, seed=5, ignore_eos=True)
    seen = []
    for before, after in ((0, 0), (3, 0), (0, 5), (6, 1), (2, 20)):
        others = [
            request(number, random_prompt(rng, 1, 90), max_new_tokens=40, seed=number, ignore_eos=True, temperature=1.0)
            for number in range(before + after)
        ]
        engine = make_engine(llama, max_rows=32, prefix_cache=False, max_prefill_tokens=4096)
        # The neighbours' prompts are prefilled in launches of their own, so only the decode company differs.
        script = {0: [lambda e, o=others[:before]: [e.submit(item) for item in o]]}
        script[2] = [lambda e: e.submit(subject)]
        script[4] = [lambda e, o=others[before:]: [e.submit(item) for item in o]]
        seen.append(run(engine, script=script)[99])
    for output in seen[1:]:
        assert output.ids == seen[0].ids and output.logprobs == seen[0].logprobs and output.raw_logprobs == seen[0].raw_logprobs


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_page_size_changes_no_token(llama: Path, page_size: int) -> None:
    prompt = random_prompt(np.random.default_rng(8), 50, 51)
    base = generate(make_engine(llama), prompt, max_new_tokens=30, seed=3)
    other = generate(make_engine(llama, page_size=page_size), prompt, max_new_tokens=30, seed=3)
    assert other.ids == base.ids
    assert np.allclose(other.logprobs, base.logprobs, atol=1e-4, rtol=0)
