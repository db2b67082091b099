"""Weight updates while requests run: every token agrees with the weights of its tag, refused updates leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno import Canary, Engine, FinishKind, RequestTooLong, TensorSpec, WeightUpdateError
from areno.errors import CanaryMismatch, DigestMismatch, ManifestMismatch, NoUpdate, UpdateBusy
from areno.kv.prefix import expand_spans
from areno.weights.digest import digest
from tests.engine_runs import Output, Recorder, assert_idle, generate, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import checkpoint_tensors, reference_keep_logprobs, reference_logprobs, reference_model, write_checkpoint

PATHS = pytest.mark.parametrize("path", ["resident", "rebuilt"])
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("versions")
    return [write_checkpoint(root / str(seed), "llama", seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> dict[int, Any]:
    return {version: reference_model(folder) for version, folder in enumerate(folders)}


@pytest.fixture(scope="module")
def tensors(folders: list[Path]) -> list[Tensors]:
    return [checkpoint_tensors(folder) for folder in folders]


def _push(engine: Engine, tensors: Tensors, version: int, **commit: Any) -> Any:
    engine.begin_update({name: TensorSpec("float32", tuple(t.shape)) for name, t in tensors.items()}, version=version)
    for name, tensor in tensors.items():
        engine.stage(name, tensor)
    return engine.commit_update(**commit)


def _canaries(model: Any) -> list[Canary]:
    rng = np.random.default_rng(1)
    made = []
    for size, temperature in ((24, 1.0), (50, 0.7), (5, 1.0)):
        ids = rng.integers(3, 256, size=size)
        made.append(
            Canary(ids=ids, expected_logprobs=reference_logprobs(model, ids, temperature).astype(np.float32), temperature=temperature)
        )
    return made


def _keep_gap(models: dict[int, Any], prompt: np.ndarray, output: Output, temperature: float = 1.0) -> float:
    """Distance from one cache in which each position ran with the weights its KV span names."""
    ids = np.concatenate([prompt, output.ids])
    positions = expand_spans(output.end.kv_spans, ids.size - 1)
    assert positions[prompt.size :].tolist() == output.versions[1:]
    expected = reference_keep_logprobs(models, ids, positions, temperature)[prompt.size - 1 :]
    return float(np.abs(expected - np.array(output.logprobs)).max())


@PATHS
def test_a_proven_update_serves_the_new_weights_and_hits_no_old_page(
    folders: list[Path], models: dict[int, Any], tensors: list[Tensors], path: str
) -> None:
    engine = make_engine(folders[0], decode_tables=path)
    prompt = random_prompt(np.random.default_rng(0), 64, 65)
    generate(engine, prompt, max_new_tokens=10, seed=1)
    warm = generate(engine, prompt, max_new_tokens=10, seed=1)
    assert warm.end.cached_tokens == 48
    sums = {name: digest(tensor) for name, tensor in tensors[1].items()}
    report = _push(engine, tensors[1], 1, digests=sums, canaries=_canaries(models[1]))
    assert report.version == engine.version == 1 and report.changed_tensors == report.num_tensors == len(tensors[1])
    assert max(report.canary_gap, report.canary_mean_gap, report.decode_canary_gap) < 1e-4
    assert engine.digests() == sums
    after = generate(engine, prompt, max_new_tokens=10, seed=1)
    assert after.end.cached_tokens == 0 and set(after.versions) == {1} and after.end.kv_spans == ((0, 1),)
    assert reference_gap(models[1], prompt, after) < 1e-4
    # Back to the first weights under a new version: equal numbers again, but never the old pages.
    _push(engine, tensors[0], 2)
    back = generate(engine, prompt, max_new_tokens=10, seed=1)
    assert back.end.cached_tokens == 0 and set(back.versions) == {2} and back.ids == warm.ids
    assert np.allclose(back.logprobs, warm.logprobs, atol=1e-4)
    assert_idle(engine)


@PATHS
@pytest.mark.parametrize("run_ahead", [0, 3])
def test_rows_that_live_across_commits_are_tagged_by_the_forward_that_made_each_token(
    folders: list[Path], models: dict[int, Any], tensors: list[Tensors], path: str, run_ahead: int
) -> None:
    engine = make_engine(folders[0], decode_tables=path, run_ahead=run_ahead, max_prefill_tokens=32)
    rng = np.random.default_rng(2)
    prompts = {n: random_prompt(rng, 10, 80) for n in range(12)}
    script: dict[int, list[Callable[[Engine], object]]] = {
        4 * n: [lambda e, n=n: e.submit(request(n, prompts[n], max_new_tokens=30, seed=n, ignore_eos=True, temperature=0.8))]
        for n in range(12)
    }
    for version, step in ((1, 9), (2, 22), (3, 37)):
        script.setdefault(step, []).append(lambda e, v=version: _push(e, tensors[v], v, canaries=_canaries(models[v])))
    outputs = run(engine, script=script)
    mixed = 0
    for number, prompt in prompts.items():
        output = outputs[number]
        assert output.versions == sorted(output.versions)
        assert _keep_gap(models, prompt, output, 0.8) < 1e-4
        versions = set(output.versions)
        mixed += len(versions) > 1
        if len(versions) == 1 and output.end.kv_spans == ((0, output.versions[0]),):
            assert reference_gap(models[output.versions[0]], prompt, output, 0.8) < 1e-4
        if len(versions) > 1:
            # The test can tell assignments apart: pretending one version for all is far off.
            assert reference_gap(models[output.versions[-1]], prompt, output, 0.8) > 1e-2
    assert mixed >= 3
    assert engine.stats()["updates"] == 3


def test_a_prompt_in_prefill_starts_again_under_the_new_weights(
    folders: list[Path], models: dict[int, Any], tensors: list[Tensors]
) -> None:
    engine = make_engine(folders[0], max_prefill_tokens=16)
    prompt = random_prompt(np.random.default_rng(3), 70, 71)
    script = {2: [lambda e: _push(e, tensors[1], 1)]}
    output = run(engine, [request(0, prompt, max_new_tokens=8, seed=1, ignore_eos=True)], script=script)[0]
    assert engine.stats()["prefills_restarted"] == 1
    assert output.end.kv_spans == ((0, 1),) and reference_gap(models[1], prompt, output) < 1e-4


@PATHS
def test_a_lineage_reuses_its_own_pages_across_an_update_and_says_which_weights_built_them(
    folders: list[Path], models: dict[int, Any], tensors: list[Tensors], path: str
) -> None:
    engine = make_engine(folders[0], decode_tables=path)
    prompt = random_prompt(np.random.default_rng(4), 40, 41)
    first = generate(engine, prompt, max_new_tokens=30, seed=1, ignore_eos=True, lineage="a")
    _push(engine, tensors[1], 1)
    second = np.concatenate([prompt, first.ids, [9, 8, 7]])
    own = generate(engine, second, max_new_tokens=12, seed=2, ignore_eos=True, lineage="a")
    assert own.end.cached_tokens == 69 and own.end.kv_spans == ((0, 0), (69, 1))
    assert _keep_gap(models, second, own) < 1e-4
    for others in ({"lineage": "b"}, {}, {"lineage": "a", "max_kv_lag": 0}, {"lineage": "a", "cache_salt": "x"}):
        other = generate(engine, second, max_new_tokens=12, seed=2, ignore_eos=True, request_id=7, **others)
        assert other.end.kv_spans == ((0, 1),) and reference_gap(models[1], second, other) < 1e-4
    _push(engine, tensors[2], 2)
    third = np.concatenate([second, own.ids, [5]])
    newest = generate(engine, third, max_new_tokens=5, seed=3, ignore_eos=True, lineage="a", max_kv_lag=2)
    assert _keep_gap(models, third, newest) < 1e-4
    assert_idle(engine)


def test_an_aborted_update_leaves_old_weights_and_version_and_the_next_one_works(
    folders: list[Path], models: dict[int, Any], tensors: list[Tensors]
) -> None:
    engine = make_engine(folders[0])
    prompt = random_prompt(np.random.default_rng(5), 20, 21)
    recorder = Recorder()
    engine.submit(request(0, prompt, max_new_tokens=30, seed=1, ignore_eos=True))
    engine.begin_update(None, version=1)
    for number, (name, tensor) in enumerate(tensors[1].items()):
        engine.stage(name, tensor)
        recorder.add(engine.step())
        if number == 3:
            with pytest.raises(UpdateBusy, match="commit or abort it first"):
                engine.begin_update(None, version=2)
            break
    engine.abort_update()
    engine.abort_update()
    while engine.has_work:
        recorder.add(engine.step())
    output = recorder.outputs[0]
    assert set(output.versions) == {0} and reference_gap(models[0], prompt, output) < 1e-4
    with pytest.raises(NoUpdate):
        engine.commit_update()
    _push(engine, tensors[1], 1)
    assert reference_gap(models[1], prompt, generate(engine, prompt, max_new_tokens=10, request_id=1)) < 1e-4


def _half(tensors: Tensors) -> Tensors:
    return {name: tensor for number, (name, tensor) in enumerate(tensors.items()) if number % 2}


def _swapped(tensors: Tensors) -> Tensors:
    k, v = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    return {**tensors, k: tensors[v], v: tensors[k]}


def test_an_update_that_fails_its_proof_restores_every_bit_of_the_old_weights(
    folders: list[Path], models: dict[int, Any], tensors: list[Tensors]
) -> None:
    engine = make_engine(folders[0])
    before = engine.digests()
    prompt = random_prompt(np.random.default_rng(6), 64, 65)
    generate(engine, prompt, max_new_tokens=5)
    sums = {name: digest(tensor) for name, tensor in tensors[1].items()}
    with pytest.raises(ManifestMismatch, match="missing"):
        _push(engine, _half(tensors[1]), 1)
    with pytest.raises(ManifestMismatch, match="never came"):
        engine.begin_update(None, version=1)
        engine.stage(*next(iter(tensors[1].items())))
        engine.commit_update()
    with pytest.raises(DigestMismatch, match=r"k_proj.*v_proj"):
        _push(engine, _swapped(tensors[1]), 1, digests=sums)
    with pytest.raises(CanaryMismatch, match="old weights serve on") as refusal:
        _push(engine, _swapped(tensors[1]), 1, canaries=_canaries(models[1]))
    assert "canary" in str(refusal.value) and refusal.value.code == "canary_mismatch" and "partial" not in str(refusal.value)
    engine.begin_update(None, version=1, partial=True)
    engine.stage("model.norm.weight", tensors[1]["model.norm.weight"])
    with pytest.raises(CanaryMismatch, match=r"send all tensors \(partial=False\), since those that were not sent may differ"):
        engine.commit_update(canaries=_canaries(models[1]))
    flipped = {name: tensor.clone() for name, tensor in tensors[1].items()}
    flipped["lm_head.weight"].view(torch.int32)[3, 5] ^= 1
    with pytest.raises(DigestMismatch, match="lm_head"):
        _push(engine, flipped, 1, digests=sums)
    assert engine.version == 0 and engine.digests() == before
    output = generate(engine, prompt, max_new_tokens=5, request_id=1)
    assert output.end.cached_tokens == 48 and reference_gap(models[0], prompt, output) < 1e-4


def test_versions_only_grow(folders: list[Path], tensors: list[Tensors]) -> None:
    engine = make_engine(folders[0], initial_version=5)
    assert engine.version == 5
    with pytest.raises(WeightUpdateError, match="use a larger version"):
        engine.begin_update(None, version=5)
    _push(engine, tensors[1], 9)
    assert engine.version == 9


def test_a_push_that_changes_nothing_says_so_and_leaves_the_numbers_bit_identical(folders: list[Path], tensors: list[Tensors]) -> None:
    engine = make_engine(folders[0])
    prompt = random_prompt(np.random.default_rng(7), 40, 41)
    first = generate(engine, prompt, max_new_tokens=20, seed=1)
    for version in range(1, 21):
        report = _push(engine, tensors[0], version)
        assert report.changed_tensors == 0 and report.warning is not None
    again = generate(engine, prompt, max_new_tokens=20, seed=1)
    assert again.logprobs == first.logprobs and set(again.versions) == {20}


def test_cancels_and_updates_at_random_moments_keep_every_promise(
    folders: list[Path], models: dict[int, Any], tensors: list[Tensors]
) -> None:
    rng = np.random.default_rng(8)
    engine = make_engine(folders[0], run_ahead=2, max_rows=6, num_pages=60, max_prefill_tokens=24)
    prompts = {n: random_prompt(rng, 1, 60) for n in range(60)}
    script: dict[int, list[Callable[[Engine], object]]] = {}
    step = 0
    for number, prompt in prompts.items():
        step += int(rng.integers(0, 4))
        script.setdefault(step, []).append(
            lambda e, n=number, p=prompt: e.submit(request(n, p, max_new_tokens=20, seed=n, ignore_eos=True, lineage=f"l{n % 5}"))
        )
        if rng.random() < 0.3:
            script.setdefault(step + int(rng.integers(1, 12)), []).append(lambda e, n=number: e.cancel(n))
    for version, when in enumerate(sorted(rng.choice(step, size=3, replace=False).tolist()), start=1):
        script.setdefault(when, []).append(lambda e, v=version: _push(e, tensors[v], v))
    outputs = run(engine, script=script)
    assert engine.version == 3
    for number, prompt in prompts.items():
        output = outputs[number]
        if output.ids:
            assert _keep_gap(models, prompt, output) < 1e-4
        else:
            assert output.end.reason.kind is FinishKind.CANCELLED


def _tagged_gap(models: dict[int, Any], prompt: np.ndarray, output: Output) -> float:
    """Distance of each token from one whole forward with the weights of its tag."""
    ids, versions = np.concatenate([prompt, output.ids]), np.array(output.versions)
    gap = 0.0
    for version in np.unique(versions):
        expected = reference_logprobs(models[int(version)], ids)[prompt.size - 1 :]
        gap = max(gap, float(np.abs(expected - np.array(output.logprobs))[versions == version].max()))
    return gap


@PATHS
@pytest.mark.parametrize("run_ahead", [0, 3])
def test_with_recompute_each_token_is_that_of_a_whole_forward_with_its_tags_weights(
    folders: list[Path], models: dict[int, Any], tensors: list[Tensors], path: str, run_ahead: int
) -> None:
    rng = np.random.default_rng(11)
    engine = make_engine(folders[0], decode_tables=path, run_ahead=run_ahead, max_prefill_tokens=24, max_rows=6, num_pages=70)
    prompts = {n: random_prompt(rng, 5, 60) for n in range(16)}
    policies = {n: "keep" if n % 4 == 3 else "recompute" for n in prompts}
    script: dict[int, list[Callable[[Engine], object]]] = {}
    for n, prompt in prompts.items():
        options = {"max_new_tokens": 24, "seed": n, "ignore_eos": True, "kv_policy": policies[n], "lineage": f"l{n % 5}"}
        script.setdefault(3 * n, []).append(lambda e, n=n, p=prompt, o=options: e.submit(request(n, p, **o)))
    for version, when in enumerate(sorted(rng.choice(np.arange(5, 50), size=3, replace=False).tolist()), start=1):
        script.setdefault(when, []).append(lambda e, v=version: _push(e, tensors[v], v))
    outputs = run(engine, script=script)
    mixed = 0
    for number, prompt in prompts.items():
        output = outputs[number]
        assert len(output.ids) == 24 and output.versions == sorted(output.versions)
        if policies[number] == "keep":
            assert _keep_gap(models, prompt, output) < 1e-4
            continue
        assert _tagged_gap(models, prompt, output) < 1e-4
        if len(set(output.versions)) > 1:
            mixed += 1
            assert output.end.kv_spans == ((0, output.versions[-1]),) and output.end.kv_rebuilt_at
            assert all(prompt.size < at <= prompt.size + 24 for at in output.end.kv_rebuilt_at)
    stats = engine.stats()
    assert mixed >= 3 and stats["recomputed"] >= 3
    assert_idle(engine)


def test_recompute_asks_for_no_more_tokens_at_once_than_a_prefill_may_have(folders: list[Path], tensors: list[Tensors]) -> None:
    engine = make_engine(folders[0], max_prefill_tokens=16)
    prompts = [random_prompt(np.random.default_rng(n), 50, 51) for n in range(3)]
    recorder = Recorder()
    for number, prompt in enumerate(prompts):
        engine.submit(request(number, prompt, max_new_tokens=20, seed=number, ignore_eos=True, kv_policy="recompute"))
    while engine.stats()["rows_used"] < 3 or min(len(recorder.outputs[n].ids) for n in range(3)) < 2:
        recorder.add(engine.step())
    _push(engine, tensors[1], 1)
    last = engine.stats()["prefill_tokens"]
    while engine.has_work:
        recorder.add(engine.step())
        now = engine.stats()["prefill_tokens"]
        assert int(now) - int(last) <= 16
        last = now
    assert engine.stats()["recomputed"] == 3 and engine.stats()["preemptions"] == 0


def test_a_recomputing_lineage_never_reuses_pages_of_older_weights(
    folders: list[Path], models: dict[int, Any], tensors: list[Tensors]
) -> None:
    engine = make_engine(folders[0])
    prompt = random_prompt(np.random.default_rng(12), 40, 41)
    first = generate(engine, prompt, max_new_tokens=30, seed=1, ignore_eos=True, lineage="a", kv_policy="recompute")
    second = np.concatenate([prompt, first.ids, [9, 8, 7]])
    warm = generate(engine, second, max_new_tokens=3, seed=2, ignore_eos=True, lineage="a", kv_policy="recompute")
    assert warm.end.cached_tokens > 0
    _push(engine, tensors[1], 1)
    own = generate(engine, second, max_new_tokens=12, seed=2, ignore_eos=True, lineage="a", kv_policy="recompute")
    assert own.end.cached_tokens == 0 and own.end.kv_spans == ((0, 1),) and reference_gap(models[1], second, own) < 1e-4


def test_a_canary_that_cannot_be_scored_is_refused_before_anything_is_swapped(folders: list[Path], tensors: list[Tensors]) -> None:
    engine = make_engine(folders[0], max_model_len=32)
    before = engine.digests()
    long = Canary(ids=np.arange(3, 53), expected_logprobs=np.full(49, -1.0, dtype=np.float32))
    with pytest.raises(RequestTooLong, match="context holds 32"):
        _push(engine, tensors[1], 1, canaries=[long])
    assert engine.version == 0 and engine.digests() == before
    _push(engine, tensors[1], 1)
    assert engine.version == 1
