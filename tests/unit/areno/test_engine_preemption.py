"""A pool too small for everybody: preempted requests end with the tokens, numbers and reasons of a large pool's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno import FinishKind
from areno.kv.prefix import expand_spans
from tests.crossed import every_pair, every_value
from tests.engine_runs import Output, assert_idle, generate, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import checkpoint_tensors, reference_keep_logprobs, reference_logprobs, reference_model, write_checkpoint

PATHS = pytest.mark.parametrize("path", ["resident", "rebuilt"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def _requests(count: int, budget: int, **params: Any) -> list[Any]:
    rng = np.random.default_rng(1)
    return [request(n, random_prompt(rng, 14, 18), max_new_tokens=budget, seed=n, ignore_eos=True, **params) for n in range(count)]


def _assert_same(found: dict[int, Output], expected: dict[int, Output]) -> None:
    for number, output in expected.items():
        other = found[number]
        assert other.ids == output.ids and other.end.reason == output.end.reason
        assert other.end.output_tokens == output.end.output_tokens and other.end.prompt_tokens == output.end.prompt_tokens
        for name in ("logprobs", "raw_logprobs", "behaviour_logprobs"):
            assert np.allclose(getattr(other, name), getattr(output, name), atol=1e-4, equal_nan=True)


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "minimum and top-k": {"min_new_tokens": 150, "stop_ids": [5, 6, 7, 8], "top_k": 30},
}


@pytest.fixture(scope="module")
def ample(llama: Path) -> dict[str, dict[int, Output]]:
    """What the requests say where nobody is preempted."""
    return {name: run(make_engine(llama, num_pages=200), _requests(4, 160, **params)) for name, params in PARAMS.items()}


@every_pair(name=list(PARAMS), path=["resident", "rebuilt"], run_ahead=[0, 2], prefix_cache=[True, False])
def test_preemption_changes_no_token_number_or_reason(
    llama: Path, ample: dict[str, dict[int, Output]], path: str, run_ahead: int, prefix_cache: bool, name: str
) -> None:
    engine = make_engine(llama, num_pages=24, decode_tables=path, run_ahead=run_ahead, prefix_cache=prefix_cache)
    tight = run(engine, _requests(4, 160, **PARAMS[name]))
    stats = engine.stats()
    assert stats["preemptions"] >= 2 and stats["grown_pages"] > 0
    _assert_same(tight, ample[name])
    rebuilt = [output.end.kv_rebuilt_at for output in tight.values()]
    assert any(rebuilt) and all(16 <= at < 180 for places in rebuilt for at in places)


def test_long_budgets_do_not_reserve_what_they_may_never_use(llama: Path) -> None:
    engine = make_engine(llama, num_pages=64, max_rows=8)
    requests = _requests(8, 450)
    for item in requests:
        engine.submit(item)
    for _ in range(10):
        engine.step()
    assert engine.stats()["running"] == 8


@PATHS
def test_a_preempted_request_that_is_cancelled_keeps_the_tokens_it_had(llama: Path, path: str) -> None:
    engine = make_engine(llama, num_pages=14, decode_tables=path, run_ahead=1)
    script: dict[int, list[Any]] = {}
    cancelled = False

    def cancel_waiting(e: Any) -> None:
        nonlocal cancelled
        waiting = [live for live in e._scheduler._waiting if live.rebuilt_at]
        if waiting and not cancelled:
            cancelled = e.cancel(waiting[0].request.request_id)

    for step in range(1, 400):
        script[step] = [cancel_waiting]
    outputs = run(engine, _requests(4, 150), script=script)
    assert cancelled and engine.stats()["preemptions"] > 0
    ended = [output for output in outputs.values() if output.end.reason.kind is FinishKind.CANCELLED]
    assert len(ended) == 1 and len(ended[0].ids) > 10
    assert_idle(engine)


def test_the_oldest_long_request_is_never_starved_by_later_short_ones(llama: Path) -> None:
    engine = make_engine(llama, num_pages=20, max_rows=8)
    rng = np.random.default_rng(2)
    ends: list[int] = []
    engine.submit(request(0, random_prompt(rng, 250, 251), max_new_tokens=30, ignore_eos=True, seed=0))
    for number in range(1, 40):
        engine.submit(request(number, random_prompt(rng, 10, 30), max_new_tokens=8, ignore_eos=True, seed=number))
    while engine.has_work:
        ends.extend(finished.request_id for finished in engine.step().finished)
        engine.check_integrity()
    assert ends.index(0) < 20


def test_prompt_logprobs_survive_a_restarted_prefill(llama: Path) -> None:
    engine = make_engine(llama, num_pages=16, max_prefill_tokens=16)
    rng = np.random.default_rng(3)
    scored = random_prompt(rng, 100, 101)
    requests = [*_requests(3, 140), request(9, scored, max_new_tokens=3, prompt_logprobs_from=1)]
    score = run(engine, requests)[9].prompt_score
    assert score is not None
    assert np.abs(score.raw_logprobs - reference_logprobs(reference_model(llama), scored)).max() < 1e-4


@every_pair(size=[16, 21, 48], path=["resident", "rebuilt"], run_ahead=[0, 2])
def test_a_group_is_prefilled_once_and_each_member_equals_running_alone(llama: Path, path: str, size: int, run_ahead: int) -> None:
    model = reference_model(llama)
    prompt = random_prompt(np.random.default_rng(size), size, size + 1)
    engine = make_engine(llama, decode_tables=path, run_ahead=run_ahead)
    members = [
        request(n, prompt, max_new_tokens=20, seed=100 + n, ignore_eos=True, group=5, repetition_penalty=1.1 if n == 3 else 1.0)
        for n in range(6)
    ]
    outputs = run(engine, members, script={4: [lambda e: e.cancel(2)]})
    stats = engine.stats()
    assert stats["prefill_tokens"] == size and stats["forks"] == 5
    assert len({tuple(outputs[n].ids) for n in range(6)}) == 6
    for number, member in enumerate(members):
        alone = run(make_engine(llama, decode_tables=path), [member])[number]
        if number == 2:
            assert outputs[2].end.reason.kind is FinishKind.CANCELLED and outputs[2].ids == alone.ids[: len(outputs[2].ids)]
            continue
        assert outputs[number].ids == alone.ids
        assert np.allclose(outputs[number].logprobs, alone.logprobs, atol=1e-4)
        assert reference_gap(model, prompt, outputs[number]) < 1e-4


def test_group_members_without_a_row_are_ordinary_prefix_hits_later(llama: Path) -> None:
    prompt = random_prompt(np.random.default_rng(7), 40, 41)
    engine = make_engine(llama, max_rows=3)
    outputs = run(engine, [request(n, prompt, max_new_tokens=6, seed=n, ignore_eos=True, group=1) for n in range(8)])
    assert all(len(output.ids) == 6 for output in outputs.values())
    assert engine.stats()["forks"] >= 2 and engine.stats()["prefill_tokens"] < 8 * 40 // 2


@PATHS
def test_a_member_that_computes_the_prompt_itself_in_the_same_launch_starts_nobody_twice(llama: Path, path: str) -> None:
    prompt = random_prompt(np.random.default_rng(9), 20, 21)
    engine = make_engine(llama, decode_tables=path)
    own = [{}, {}, {"prompt_logprobs_from": 1}, {"temperature": 0.0}]
    outputs = run(engine, [request(n, prompt, max_new_tokens=6, seed=n, ignore_eos=True, group=1, **own[n]) for n in range(4)])
    assert all(len(output.ids) == 6 for output in outputs.values())
    assert engine.stats()["forks"] == 2 and outputs[2].prompt_score is not None


def test_a_group_across_a_weight_update_never_shares_old_pages(llama: Path, tmp_path: Path) -> None:
    newer = write_checkpoint(tmp_path / "newer", "llama", seed=1)
    prompt = random_prompt(np.random.default_rng(8), 40, 41)
    engine = make_engine(llama, max_rows=2)

    def push(e: Any) -> None:
        e.begin_update(None, version=1)
        for name, tensor in checkpoint_tensors(newer).items():
            e.stage(name, tensor)
        e.commit_update()

    members = [request(n, prompt, max_new_tokens=6, seed=n, ignore_eos=True, group=1) for n in range(6)]
    outputs = run(engine, members, script={3: [push]})
    models = {0: reference_model(llama), 1: reference_model(newer)}
    pure = [n for n, output in outputs.items() if output.end.kv_spans == ((0, 1),)]
    assert len(pure) >= 3
    for number in pure:
        assert set(outputs[number].versions) == {1} and reference_gap(models[1], prompt, outputs[number]) < 1e-4


OWN: dict[str, dict[str, Any]] = {
    "no lineage": {},
    "another lineage": {"lineage": "b"},
    "no lag": {"lineage": "a", "max_kv_lag": 0},
    "recompute": {"lineage": "a", "kv_policy": "recompute"},
    "the same": {"lineage": "a"},
}


@every_value(own=list(OWN), path=["resident", "rebuilt"])
def test_a_group_shares_older_pages_with_those_alone_who_may_use_them(llama: Path, tmp_path: Path, own: str, path: str) -> None:
    newer = write_checkpoint(tmp_path / "newer", "llama", seed=1)
    engine = make_engine(llama, decode_tables=path)
    before = random_prompt(np.random.default_rng(10), 40, 41)
    asked: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    first = run(engine, [request(0, before, seed=0, lineage="a", **asked)])[0]
    engine.begin_update(None, version=1)
    for name, tensor in checkpoint_tensors(newer).items():
        engine.stage(name, tensor)
    engine.commit_update()
    prompt = np.concatenate([before, first.ids, [5, 6, 7]])
    members = [request(1, prompt, seed=1, lineage="a", group=1, **asked), request(2, prompt, seed=2, group=1, **asked, **OWN[own])]
    outputs = run(engine, members)
    models = {0: reference_model(llama), 1: reference_model(newer)}
    for number, output in outputs.items():
        shares = number == 1 or own == "the same"
        assert output.end.kv_spans == (((0, 0), (47, 1)) if shares else ((0, 1),))
        ids = np.concatenate([prompt, output.ids])
        expected = reference_keep_logprobs(models, ids, expand_spans(output.end.kv_spans, ids.size - 1))[prompt.size - 1 :]
        assert np.abs(expected - np.array(output.logprobs)).max() < 1e-4
    assert engine.stats()["forks"] == (own == "the same")


@every_pair(beginning=["scored", "of a lineage"], path=["resident", "rebuilt"], run_ahead=[0, 2])
def test_a_request_alone_gets_the_whole_pool_whatever_of_its_prompt_is_cached_twice(
    llama: Path, beginning: str, path: str, run_ahead: int
) -> None:
    engine = make_engine(llama, page_size=4, num_pages=40, max_rows=2, decode_tables=path, run_ahead=run_ahead)
    prompt = np.arange(5, 33)
    generate(engine, prompt[:20], max_new_tokens=1, ignore_eos=True)
    # A scored prompt reuses no page: its own follow in the index on those of the first request, which nobody uses.
    asked: dict[str, Any] = {"max_new_tokens": 132, "ignore_eos": True, "seed": 1}
    if beginning == "scored":
        asked["prompt_logprobs_from"] = 1
    else:
        generate(engine, prompt, max_new_tokens=1, ignore_eos=True, prompt_logprobs_from=1, lineage="a")
    outputs = run(engine, [request(1, prompt, **asked), request(2, prompt[:3], max_new_tokens=5, ignore_eos=True)])
    assert len(outputs[1].ids) == 132 and len(outputs[2].ids) == 5
    assert reference_gap(reference_model(llama), prompt, outputs[1]) < 1e-4


@PATHS
def test_a_request_alone_is_never_kept_out_by_the_pages_its_own_prefix_matches(llama: Path, path: str) -> None:
    engine = make_engine(llama, page_size=2, num_pages=6, max_model_len=32, max_rows=2, decode_tables=path)
    first = [request(1, [5], forced_ids=[6, 7], max_new_tokens=2, ignore_eos=True)]
    first.append(request(2, [5], forced_ids=[6, 7, 8, 9, 10], max_new_tokens=5, ignore_eos=True, lineage="a"))
    run(engine, first)
    outputs = run(engine, [request(3, [5, 6, 7, 8, 9], max_new_tokens=8, ignore_eos=True, lineage="a", seed=1)])
    assert reference_gap(reference_model(llama), [5, 6, 7, 8, 9], outputs[3]) < 1e-4 and len(outputs[3].ids) == 8


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 6))])
def test_small_pools_and_odd_pages_never_stand_still(llama: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 2, 3, 5]))
    pages = int(rng.integers(6, 14))
    engine = make_engine(
        llama, page_size=page_size, num_pages=pages, max_rows=int(rng.integers(1, 4)), run_ahead=int(rng.integers(4)), max_prefill_tokens=4
    )
    model = reference_model(llama)
    prompts, requests = {}, []
    for number in range(40):
        total = int(rng.integers(2, pages * page_size + 2))
        size = int(rng.integers(1, total))
        prompts[number] = np.resize(np.array([5, 6, 7, 8, 9]) + int(rng.integers(2)), size)
        lineage = f"l{rng.integers(3)}" if rng.random() < 0.6 else None
        requests.append(request(number, prompts[number], max_new_tokens=total - size, ignore_eos=True, seed=number, lineage=lineage))
    outputs = run(engine, requests)
    for number, prompt in prompts.items():
        assert reference_gap(model, prompt, outputs[number]) < 1e-4
