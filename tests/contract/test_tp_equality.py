"""A model cut into ranks gives what one rank gives: the same ids, log-probabilities to 1e-4 in fp32, whatever goes on meanwhile.

Ranks run as threads here, with schedulers of their own that must come to the same log; the last tests run real processes that
follow rank 0. Fused storage, tied heads, key and value heads that ranks share, and a vocabulary that they do not divide come along.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno import Canary, Engine, EngineConfig, FinishKind
from areno.errors import CanaryMismatch, DigestMismatch, InvalidConfig, ManifestMismatch
from areno.weights.digest import digest
from areno.weights.slices import Slice
from tests.engine_runs import Output, random_prompt, reference_gap, request, run
from tests.fixtures_models import checkpoint_tensors, manifest_of, reference_logprobs, reference_model, write_checkpoint
from tests.tp_ranks import SideBySide, run_ranks

OPTIONS: dict[str, Any] = {
    "max_rows": 8,
    "seed": 1,
    "page_size": 8,
    "num_pages": 30,
    "max_prefill_tokens": 48,
    "sampling_slots": 4,
    "kept_ids": True,
    "compaction_steps": 2,
    "device": "cpu",
}
VOCAB = 250
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
NEEDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.02, "return_kept_ids": True},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {5: 3.0, 240: 4.0}, "stop_ids": [9, 200], "min_new_tokens": 3},
    {"temperature": 0.8, "forced_ids": [4, 245, 2], "prompt_logprobs_from": 1},
    {"temperature": 1.0, "top_k": 100, "min_p": 0.001},
]


class Made:
    """Checkpoints of each kind, written when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __truediv__(self, name: str) -> Path:
        folder = self._folder / name
        if not folder.exists():
            kind, age = name.rsplit("-", 1)
            family, fields = KINDS[kind]
            write_checkpoint(folder, family, seed=("old", "new").index(age), vocab_size=VOCAB, **fields)
        if name.endswith("new"):
            pushed(folder)
        return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("cut"))


@functools.cache
def pushed(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, int], Canary]:
    """Return a checkpoint's tensors, their digests, and a canary. Called before ranks run: transformers loads in one thread."""
    tensors, ids = checkpoint_tensors(folder), np.random.default_rng(3).integers(3, VOCAB, 20)
    canary = Canary(ids=ids, expected_logprobs=reference_logprobs(str(folder), ids, 0.7).astype(np.float32), temperature=0.7)
    return tensors, {name: digest(tensor) for name, tensor in tensors.items()}, canary


def history(new: Path, count: int = 16) -> tuple[list[Any], dict[int, list[Callable[[Engine], object]]]]:
    """Return requests of every kind, groups, cancels and two updates on the way, in a pool too small for all of them."""
    rng = np.random.default_rng(5)
    requests = [
        request(
            number,
            random_prompt(rng, 5, 70, VOCAB),
            max_new_tokens=int(rng.integers(4, 20)),
            seed=number,
            kv_policy="recompute" if number % 3 else "keep",
            **NEEDS[number % len(NEEDS)],
        )
        for number in range(count)
    ]
    shared = random_prompt(rng, 20, 40, VOCAB)
    requests += [request(100 + member, shared, max_new_tokens=10, seed=member, group=7) for member in range(4)]
    requests += [
        request(200 + number, random_prompt(rng, 5, 9, VOCAB), max_new_tokens=110, ignore_eos=True, seed=number) for number in range(4)
    ]
    script: dict[int, list[Callable[[Engine], object]]] = {
        6: [lambda engine: engine.cancel(3)],
        9: [lambda engine: engine.cancel(101)],
        14: [lambda engine: push(engine, new)],
        30: [lambda engine: push(engine, new, slices=97)],
    }
    return requests, script


def push(engine: Engine, folder: Path, *, slices: int = 0, wrong: float = 0.0) -> None:
    """Push a checkpoint, tensors whole or in slices of a length that fits no row; digests and a canary prove it."""
    tensors, expected, canary = pushed(folder)
    canary = replace(canary, expected_logprobs=canary.expected_logprobs - np.float32(wrong))
    engine.begin_update(manifest_of(tensors), version=engine.version + 1)
    for name, tensor in tensors.items():
        if not slices:
            engine.stage(name, tensor)
            continue
        flat, spec = tensor.reshape(-1), manifest_of(tensors)[name]
        for start in range(0, flat.numel(), slices * 31):
            engine.stage_slices([Slice(name, flat[start : start + slices * 31], start, spec)])
        engine.settle_slices()
    report = engine.commit_update(digests=expected, canaries=[canary])
    assert report.num_tensors == len(engine.manifest) and report.canary_gap is not None and report.canary_gap < 1e-3


def alone(folder: Path, **options: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), **{**OPTIONS, **options}))


def side_by_side(size: int, folder: Path, use: Callable[[Engine], Any], **options: Any) -> list[Any]:
    """Call an engine of each rank alike and return what each gave."""
    return run_ranks(size, lambda group: use(Engine(EngineConfig(model=str(folder), **{**OPTIONS, **options}), ranks=SideBySide(group))))


def assert_same(found: dict[int, Output], expected: dict[int, Output], *, tolerance: float = 1e-4) -> None:
    assert found.keys() == expected.keys()
    for number, output in found.items():
        other = expected[number]
        assert output.ids == other.ids and output.versions == other.versions and output.kept == other.kept, number
        assert output.end.reason == other.end.reason
        for name in ("logprobs", "raw_logprobs", "behaviour_logprobs"):
            pair = getattr(output, name), getattr(other, name)
            same = pair[0] == pair[1] if not tolerance and name != "behaviour_logprobs" else True
            assert same and np.allclose(*pair, atol=tolerance, rtol=0, equal_nan=True), (number, name)
        if other.prompt_score is not None:
            assert output.prompt_score is not None
            assert np.allclose(output.prompt_score.logprobs, other.prompt_score.logprobs, atol=1e-4, rtol=0, equal_nan=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("llama", 2),
        ("llama-tied", 4),
        ("qwen3", 2),
        pytest.param("qwen2", 2, marks=pytest.mark.long),
        pytest.param("qwen3", 4, marks=pytest.mark.long),
    ],
)
def test_a_cut_model_gives_the_same_ids_through_churn_and_updates(made: Made, kind: str, size: int) -> None:
    old, new = made / f"{kind}-old", made / f"{kind}-new"

    def use(engine: Engine) -> tuple[dict[int, Output], dict[str, Any]]:
        requests, script = history(new)
        outputs = run(engine, requests, script=script, check=False)
        assert engine.digests() == {name: value for name, value in pushed(new)[1].items() if name in engine.manifest}
        return outputs, engine.stats()

    expected, stats = use(alone(old))
    assert stats["preemptions"] > 0 and stats["forks"] > 0 and stats["cancelled"] == 2 and stats["updates"] == 2 and stats["recomputed"] > 0
    assert {output.end.reason.kind for output in expected.values()} == {FinishKind.STOP, FinishKind.LENGTH, FinishKind.CANCELLED}
    ranks = side_by_side(size, old, use)
    for outputs, _ in ranks[1:]:
        assert_same(outputs, ranks[0][0], tolerance=0.0)
    assert_same(ranks[0][0], expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("run_ahead", [2, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_resident_and_rebuilt_are_the_same_bits_in_lock_step_on_ranks(made: Made, size: int, run_ahead: int) -> None:
    def use(engine: Engine) -> dict[int, Output]:
        requests, script = history(made / "qwen3-new")
        return run(engine, requests, script=script, check=False)

    resident, rebuilt = (
        side_by_side(size, made / "qwen3-old", use, decode_tables=path, run_ahead=run_ahead)[0] for path in ("resident", "rebuilt")
    )
    assert_same(resident, rebuilt, tolerance=0.0)


def test_ranks_agree_with_transformers_and_score_like_it(made: Made) -> None:
    folder = made / "llama-old"
    model, prompt = reference_model(folder), random_prompt(np.random.default_rng(8), 30, 31, VOCAB)
    ids = np.random.default_rng(9).integers(3, VOCAB, 60)

    def use(engine: Engine) -> tuple[Output, Any]:
        output = run(engine, [request(1, prompt, max_new_tokens=40, ignore_eos=True, temperature=0.8, seed=3)])[1]
        return output, engine.score(ids, temperature=0.8)

    for output, score in side_by_side(2, folder, use):
        assert reference_gap(model, prompt, output, 0.8) < 1e-4
        assert np.abs(score.token_logprobs - reference_logprobs(model, ids, 0.8)).max() < 1e-4
        assert np.abs(score.raw_logprobs - reference_logprobs(model, ids)).max() < 1e-4


def test_bf16_ranks_stay_within_its_tolerance_of_the_reference(made: Made) -> None:
    folder = made / "qwen3-old"
    rng = np.random.default_rng(4)
    prompt, forced = random_prompt(rng, 40, 41, VOCAB), rng.integers(3, VOCAB, 60)
    expected = reference_logprobs(str(folder), np.concatenate([prompt, forced]))[prompt.size - 1 :]
    for output in side_by_side(
        2,
        folder,
        lambda engine: run(engine, [request(1, prompt, max_new_tokens=60, forced_ids=forced, ignore_eos=True)])[1],
        dtype="bfloat16",
    ):
        gaps = np.abs(expected - np.array(output.logprobs))
        assert gaps.max() < 0.05 and gaps.mean() < 0.01


def refusals(engine: Engine, new: Path) -> list[str]:
    """Try updates that must be refused; return what was said."""
    tensors, right, _ = pushed(new)
    told = []

    def attempt(error: type[Exception], *, change: dict[str, torch.Tensor], drop: tuple[str, ...] = (), digests: bool = True) -> None:
        sent = {name: tensor for name, tensor in {**tensors, **change}.items() if name not in drop}
        with pytest.raises(error) as refused:
            engine.begin_update(None, version=engine.version + 1)
            for name, tensor in sent.items():
                engine.stage(name, tensor)
            engine.commit_update(digests=right if digests else None)
        engine.abort_update()
        told.append(str(refused.value))

    q, o, k = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qok")
    for name, row, column in ((q, 3, 5), (q, -1, -1), (o, 2, 3), (o, 2, -2)):
        other = tensors[name].clone()
        other[row, column] += 1.0
        attempt(DigestMismatch, change={name: other})
        other[row, column] = float("nan")
        attempt(ManifestMismatch, change={name: other}, digests=False)
    swapped = {k: tensors[k.replace("k_proj", "v_proj")], k.replace("k_proj", "v_proj"): tensors[k]}
    attempt(DigestMismatch, change=swapped)
    attempt(ManifestMismatch, change={}, drop=(o,))
    attempt(ManifestMismatch, change={o: tensors[o].t().contiguous()[:8]})
    other = tensors[o].clone()
    other[0, -1] += 1.0
    attempt(ManifestMismatch, change={f"module.{o}": other}, digests=False)
    with pytest.raises(CanaryMismatch) as refused:
        push(engine, new, wrong=0.5)
    told.append(str(refused.value).split("nats")[0])
    return told


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_an_update_that_one_rank_alone_sees_to_be_wrong_is_refused_by_all_and_changes_nothing(made: Made, size: int) -> None:
    old, new = made / "llama-old", made / "llama-new"

    def use(engine: Engine) -> list[str]:
        before = engine.digests()
        told = refusals(engine, new)
        assert engine.digests() == before and engine.version == 0
        push(engine, new)
        assert engine.version == 1 and engine.digests() != before
        return told

    ranks = side_by_side(size, old, use)
    assert all(told == ranks[0] for told in ranks)
    assert len(ranks[0]) == 13 and "q_proj" in ranks[0][0]


def test_a_partial_update_leaves_the_rest_and_tied_heads_follow(made: Made) -> None:
    old, new = made / "llama-tied-old", checkpoint_tensors(made / "llama-tied-new")
    name = "model.embed_tokens.weight"

    def use(engine: Engine) -> Any:
        engine.begin_update(manifest_of({name: new[name], "lm_head.weight": new[name]}), version=1, partial=True)
        engine.stage(name, new[name])
        engine.stage("lm_head.weight", new[name])
        assert engine.commit_update(digests={name: digest(new[name])}).changed_tensors == 1
        return engine.score(np.arange(3, 40)).token_logprobs

    (expected,) = [use(alone(old))]
    for found in side_by_side(2, old, use):
        assert np.abs(found - expected).max() < 1e-4


def test_the_kv_of_a_rank_is_its_heads_and_the_pool_is_the_same(made: Made) -> None:
    whole = alone(made / "llama-old", num_pages=None)
    for engine in side_by_side(2, made / "llama-old", lambda engine: engine, num_pages=None):
        assert engine.info.num_pages == whole.info.num_pages
        assert engine._store.num_bytes * 2 == whole._store.num_bytes
        assert engine.info.num_parameters == whole.info.num_parameters and engine.manifest == whole.manifest


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_takes_one_gather_of_few_bytes_and_two_sums_a_layer(made: Made, size: int) -> None:
    def use(engine: Engine) -> list[int]:
        for number in range(4):
            engine.submit(request(number, [5, 6, 7], max_new_tokens=20, ignore_eos=True, seed=number))
        while engine.step().token_ids.size < 4:
            pass
        before = copy.copy(engine._group.counts)
        engine.step()
        after = engine._group.counts
        return [getattr(after, name) - getattr(before, name) for name in ("all_gathers", "all_gather_bytes", "all_reduces", "collectives")]

    for gathers, gathered, sums, collectives in side_by_side(size, made / "llama-old", use):
        assert gathers == 1 and gathered <= 48 * 4 * size
        assert sums == 1 + 2 * 2 and collectives == gathers + sums


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "size"), [("qwen3", 2), ("llama", 4)])
def test_processes_that_follow_rank_0_give_what_one_rank_gives(made: Made, kind: str, size: int) -> None:
    old, new = made / f"{kind}-old", made / f"{kind}-new"
    requests, script = history(new, 8)
    expected = run(alone(old), requests, script=script)
    engine = alone(old, tp=size)
    try:
        requests, script = history(new, 8)
        assert_same(run(engine, requests, script=script, check=False), expected)
        assert engine.digests() == pushed(new)[1]
        ids = np.arange(3, 60)
        assert np.abs(engine.score(ids).token_logprobs - reference_logprobs(str(new), ids)).max() < 1e-4
    finally:
        engine.close()


def test_a_number_of_ranks_that_does_not_cut_the_model_is_refused_before_anything_starts(made: Made) -> None:
    with pytest.raises(
        InvalidConfig, match="tp=3 does not cut the model evenly: 4 attention heads; what works: 1, 2, 4; set tp to one of them"
    ):
        alone(made / "llama-old", tp=3)
