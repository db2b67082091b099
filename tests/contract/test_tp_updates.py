"""Weight updates of a cut model, with fused projections, biases and a tied head: no stale prefix, no half update, no wrong tensor.

Faults seen in the field, proved absent on 2 and 4 ranks, where a key and value head is held twice and the vocabulary is not divided evenly.
The right values are those of transformers over whole checkpoints. Ranks are threads that are asked alike and must say the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno import Engine, EngineConfig
from areno.errors import DigestMismatch, ManifestMismatch, UpdateBusy, WeightUpdateError
from areno.weights.digest import digest
from areno.weights.slices import Slice
from tests.engine_runs import Output, Recorder, generate, random_prompt, reference_gap, request, run
from tests.fixtures_models import checkpoint_tensors, manifest_of, reference_logprobs, reference_model, write_checkpoint
from tests.tp_ranks import SideBySide, run_ranks

VOCAB = 250
OPTIONS: dict[str, Any] = {"max_rows": 8, "seed": 1, "page_size": 8, "num_pages": 120, "max_prefill_tokens": 64, "device": "cpu"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("qwen3", {}),
    "tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
}
ON_RANKS = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
pytestmark = pytest.mark.timeout(120)


class Versions:
    """Two checkpoints of one model. Loaded before ranks run: transformers loads in one thread."""

    def __init__(self, folder: Path, model: str) -> None:
        family, fields = MODELS[model]
        self.folders = [write_checkpoint(folder / f"{model}-{seed}", family, seed=seed, vocab_size=VOCAB, **fields) for seed in (0, 1)]
        self.tensors = [checkpoint_tensors(one) for one in self.folders]
        self.digests = [{name: digest(tensor) for name, tensor in tensors.items()} for tensors in self.tensors]
        self.models = [reference_model(one) for one in self.folders]


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tmp_path_factory.mktemp("versions"), request.param)


def on_ranks(size: int, made: Versions, use: Callable[[Engine], Any]) -> Any:
    """Use an engine of each rank alike; return what all of them gave."""
    config = EngineConfig(model=str(made.folders[0]), **OPTIONS)
    found = run_ranks(size, lambda group: use(Engine(config, ranks=SideBySide(group))))
    # As text: some numbers are NaN, which no NaN equals.
    assert len({repr(one) for one in found}) == 1, "ranks differ"
    return found[0]


def push(engine: Engine, made: Versions, weights: int) -> None:
    tensors = made.tensors[weights]
    engine.begin_update(manifest_of(tensors), version=engine.version + 1)
    for name, tensor in tensors.items():
        engine.stage(name, tensor)
    engine.commit_update(digests=made.digests[weights])


@ON_RANKS
def test_no_prefix_of_old_weights_is_hit_after_an_update(made: Versions, size: int) -> None:
    rng = np.random.default_rng(0)
    prompt, shared = random_prompt(rng, 40, 41, VOCAB), random_prompt(rng, 30, 31, VOCAB)

    def use(engine: Engine) -> tuple[list[Output], dict[int, Output]]:
        told = [generate(engine, prompt, max_new_tokens=8, seed=1) for _ in range(2)]
        # A request of before and the rest of its group live across the update, and a new one comes right after it.
        members = [request(10 + n, shared, max_new_tokens=12, seed=n, ignore_eos=True, group=1, kv_policy="recompute") for n in range(10)]
        late = request(30, shared, max_new_tokens=6, seed=3)
        across = run(engine, members, script={5: [lambda engine: push(engine, made, 1), lambda engine: engine.submit(late)]}, check=False)
        told.append(generate(engine, prompt, max_new_tokens=8, seed=1))
        push(engine, made, 0)
        told.append(generate(engine, prompt, max_new_tokens=8, seed=1))
        return told, across

    (cold, warm, new, back), across = on_ranks(size, made, use)
    assert [one.end.cached_tokens for one in (cold, warm, new, back)] == [0, 32, 0, 0]
    assert set(new.versions) == {1} and reference_gap(made.models[1], prompt, new) < 1e-4
    assert set(back.versions) == {2} and back.ids == cold.ids and reference_gap(made.models[0], prompt, back) < 1e-4
    versions = [output.versions for output in across.values()]
    assert any(len(set(one)) == 2 for one in versions) and sum(set(one) == {1} for one in versions) >= 3
    for output in across.values():
        check_tags(made, shared, output)


def check_tags(made: Versions, prompt: np.ndarray, output: Output) -> None:
    """Assert that each token's log-probability is that of a full forward with the weights of its tag, and of no other."""
    ids = np.concatenate([prompt, output.ids])
    by_version = [reference_logprobs(model, ids)[prompt.size - 1 :] for model in made.models]
    expected = np.choose(output.versions, by_version)
    assert np.abs(expected - output.logprobs).max() < 1e-4
    other = np.choose(1 - np.array(output.versions), by_version)
    assert np.abs(other - output.logprobs).max() > 1e-2, "the test could not tell the weights apart"


@ON_RANKS
def test_no_token_is_computed_by_half_an_update(made: Versions, size: int) -> None:
    rng = np.random.default_rng(1)
    prompts = {number: random_prompt(rng, 10, 40, VOCAB) for number in range(14)}

    def use(engine: Engine) -> dict[int, Output]:
        recorder, numbers = Recorder(), iter(prompts)

        def arrive(count: int) -> None:
            for _ in range(count):
                number = next(numbers, None)
                if number is not None:
                    params: dict[str, Any] = {"max_new_tokens": 40, "seed": number, "ignore_eos": True, "kv_policy": "recompute"}
                    engine.submit(request(number, prompts[number], **params))
            recorder.add(engine.step())

        arrive(6)
        before, tensors = engine.digests(), made.tensors[1]
        # A trainer that dies after its third tensor.
        engine.begin_update(manifest_of(tensors), version=1)
        for name in list(tensors)[:3]:
            engine.stage(name, tensors[name])
            arrive(1)
        with pytest.raises(UpdateBusy):
            engine.begin_update(manifest_of(tensors), version=2)
        engine.abort_update()
        assert engine.version == 0 and engine.digests() == before
        arrive(1)
        # Tensor by tensor, backwards, some of them twice and one in slices that end within rows, with a step between any two.
        engine.begin_update(manifest_of(tensors), version=1)
        for place, name in enumerate(reversed(tensors)):
            for _ in range(1 + (place % 5 == 0)):
                engine.stage(name, tensors[name])
            if "down_proj.weight" in name:
                flat = tensors[name].reshape(-1)
                for start in range(0, flat.numel(), 1001):
                    engine.stage_slices([Slice(name, flat[start : start + 1001], start, manifest_of(tensors)[name])])
                engine.settle_slices()
            arrive(place % 3 == 0)
        assert engine.version == 0
        engine.commit_update(digests=made.digests[1])
        assert engine.digests().items() >= {name: made.digests[1][name] for name in engine.manifest}.items()
        while engine.has_work:
            arrive(1)
        return dict(recorder.outputs)

    outputs = on_ranks(size, made, use)
    assert outputs.keys() == prompts.keys()
    assert {version for output in outputs.values() for version in output.versions} == {0, 1}
    for number, output in outputs.items():
        check_tags(made, prompts[number], output)


def square(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose first square is transposed."""
    changed, side = tensor.clone(), min(tensor.shape)
    changed[:side, :side] = tensor[:side, :side].t()
    return changed


def wrong_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[type[WeightUpdateError], dict[str, torch.Tensor | None]]]:
    """Return what is wrong with an update, by name: the error, and what is sent in place of a tensor; None for nothing."""
    layer = "model.layers.0."
    q, k, v, o = (f"{layer}self_attn.{part}_proj.weight" for part in "qkvo")
    gate, norm, embed = f"{layer}mlp.gate_proj.weight", f"{layer}input_layernorm.weight", "model.embed_tokens.weight"
    spoilt = {name: tensors[name].clone() for name in (q, o, gate, embed)}
    # In the last rows and columns, which the last rank alone holds.
    for tensor in spoilt.values():
        tensor[-1, -1] = float("nan")
    flipped = tensors[embed].clone()
    flipped.view(torch.int32)[-1, -1] ^= 1
    found: dict[str, tuple[type[WeightUpdateError], dict[str, torch.Tensor | None]]] = {
        "one missing of a fused three": (ManifestMismatch, {k: None}),
        "a misspelt name": (ManifestMismatch, {k: None, k.replace("k_proj", "key_proj"): tensors[k]}),
        "a vector for a matrix": (ManifestMismatch, {o: tensors[o][0]}),
        "another shape of as many elements": (ManifestMismatch, {q: tensors[q].reshape(2 * tensors[q].shape[0], -1)}),
        "a transposed square": (DigestMismatch, {v: square(tensors[v])}),
        "one element": (ManifestMismatch, {norm: torch.ones(1)}),
        "integers": (ManifestMismatch, {norm: torch.ones(tensors[norm].shape, dtype=torch.int64)}),
        "keys and values exchanged": (DigestMismatch, {k: tensors[v], v: tensors[k]}),
        "a flipped bit in the last id": (DigestMismatch, {embed: flipped}),
        **{f"not finite: {name}": (ManifestMismatch, {name: tensor}) for name, tensor in spoilt.items()},
    }
    if "lm_head.weight" not in tensors:
        other = tensors[embed].clone()
        other[-1, 0] += 1.0
        found["a head that is not the embedding it is tied to"] = (ManifestMismatch, {"lm_head.weight": other})
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_missing_misnamed_misshaped_or_damaged_is_refused_by_all_and_a_right_update_follows(made: Versions, size: int) -> None:
    tensors, prompt = made.tensors[1], random_prompt(np.random.default_rng(2), 20, 21, VOCAB)

    def attempt(engine: Engine, error: type[WeightUpdateError], change: dict[str, torch.Tensor | None]) -> str:
        with pytest.raises(error) as refused:
            engine.begin_update(None, version=engine.version + 1)
            for name, tensor in {**tensors, **change}.items():
                if tensor is not None:
                    engine.stage(name, tensor)
            engine.commit_update(digests={**made.digests[1], **({"lm_head.weight": 1} if "lm_head.weight" in change else {})})
        engine.abort_update()
        assert refused.value.field is not None
        return str(refused.value)

    def use(engine: Engine) -> tuple[dict[str, str], Output, Output]:
        before = engine.digests()
        told = {what: attempt(engine, error, change) for what, (error, change) in wrong_tensors(tensors).items()}
        assert engine.digests() == before and engine.version == 0
        old = generate(engine, prompt, max_new_tokens=8, seed=1)
        push(engine, made, 1)
        assert engine.digests().items() >= {name: made.digests[1][name] for name in engine.manifest}.items()
        return told, old, generate(engine, prompt, max_new_tokens=8, seed=1)

    told, old, new = on_ranks(size, made, use)
    for what, (_, change) in wrong_tensors(tensors).items():
        assert any(name in told[what] for name in change), f"{what}: {told[what]}"
    assert set(old.versions) == {0} and reference_gap(made.models[0], prompt, old) < 1e-4
    assert set(new.versions) == {1} and reference_gap(made.models[1], prompt, new) < 1e-4
