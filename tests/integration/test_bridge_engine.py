"""The bridge on a real engine: the trainer's own log-probabilities are the rollout's, before and after a push."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno.errors import CanaryMismatch, ManifestMismatch
from areno.weights.digest import digest
from tests.engine_runs import Output, generate, random_prompt
from tests.fixtures_models import reference_logprobs, reference_model, write_checkpoint
from tests.integration.bridge_engine import EngineWeights, sample_of
from trainer_bridge import TrainingSample, WeightPush, WeightsUnchanged, collate, logprob_gap, policy_loss, token_logprobs
from trainer_bridge.errors import PushWarning

torch.set_num_threads(1)

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tie_word_embeddings=True)


@pytest.fixture
def service(folder: Path, tmp_path: Path) -> Iterator[EngineWeights]:
    service = EngineWeights(folder, tmp_path)
    yield service
    service.engine.check_integrity()
    service.engine.close()


@pytest.fixture
def model(folder: Path) -> Any:
    return reference_model(folder).train().requires_grad_(True)


def trainer_logprobs(model: Any, samples: list[TrainingSample], version: int, **options: Any) -> Any:
    batch = collate(samples, np.ones(len(samples)), version=version, **options)
    logits = model(input_ids=batch.ids_ST, attention_mask=batch.attention_mask_ST, position_ids=batch.positions_ST, use_cache=False).logits
    return token_logprobs(logits, batch), batch


def play(engine: Any, count: int, temperature: float = 1.0, seed: int = 0, **sampling: Any) -> list[TrainingSample]:
    draws = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        prompt = random_prompt(draws, 4, 40)
        output = generate(engine, prompt, temperature=temperature, seed=number, max_new_tokens=12, ignore_eos=True, **sampling)
        samples.append(sample_of([(prompt, output, temperature)], member=number))
    return samples


def learn(model: Any, samples: list[TrainingSample], lr: float = 0.05) -> None:
    """Make one real optimizer step on the samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    new, batch = trainer_logprobs(model, samples, 0)
    policy_loss(new, batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("pad_side", ["left", "right"])
def test_an_unchanged_policy_has_ratio_one_at_every_temperature(
    service: EngineWeights, model: Any, temperature: float, pad_side: str
) -> None:
    samples = play(service.engine, 4, temperature)
    new, batch = trainer_logprobs(model, samples, 0, pad_side=pad_side)
    ratio = (new - batch.behaviour_logprobs_ST)[batch.loss_mask_ST].exp()
    assert batch.num_loss_tokens == 48
    assert (ratio - 1).abs().max() < TOLERANCE
    gap = logprob_gap(new, batch)
    assert gap.num_exact == 48 and gap.num_other == 0 and gap.max_exact < TOLERANCE


def test_after_a_push_the_engine_speaks_with_the_trainers_new_weights(service: EngineWeights, model: Any) -> None:
    push = WeightPush(service, model)
    before = play(service.engine, 3)
    learn(model, before)
    report = push.push()
    assert push.version == report.version == service.engine.version == 1
    assert report.canary_gap is not None and report.canary_gap < TOLERANCE and report.num_tensors == report.changed_tensors
    after = play(service.engine, 3)
    new, batch = trainer_logprobs(model, after, 1)
    assert logprob_gap(new, batch).num_exact == 36 and logprob_gap(new, batch).max_exact < TOLERANCE
    stale, stale_batch = trainer_logprobs(model, before, 1)
    gap = logprob_gap(stale, stale_batch)
    assert gap.num_exact == 0 and gap.num_other == 36 and gap.mean_other > 10 * TOLERANCE


def test_every_live_tensor_is_the_trainers_bit_for_bit(service: EngineWeights, model: Any) -> None:
    learn(model, play(service.engine, 2))
    WeightPush(service, model, bucket_bytes=40_000).push()
    live = service.engine.digests()
    assert live == {name: digest(parameter.detach()) for name, parameter in model.named_parameters()}
    assert "lm_head.weight" not in live and list(service.weights_dir.iterdir()) == []


def test_a_service_in_bfloat16_gets_the_cast_tensors(folder: Path, model: Any, tmp_path: Path) -> None:
    service = EngineWeights(folder, tmp_path, dtype="bfloat16")
    learn(model, play(service.engine, 2))
    report = WeightPush(service, model).push()
    live = service.engine.digests()
    assert live == {name: digest(parameter.detach().to(torch.bfloat16)) for name, parameter in model.named_parameters()}
    assert report.num_bytes == sum(2 * parameter.numel() for parameter in model.parameters())


def test_a_prompt_cached_under_old_weights_is_computed_anew(service: EngineWeights, model: Any) -> None:
    prompt = random_prompt(np.random.default_rng(4), 64, 65)
    assert generate(service.engine, prompt, max_new_tokens=4).end.cached_tokens == 0
    assert generate(service.engine, prompt, max_new_tokens=4).end.cached_tokens >= 48
    learn(model, play(service.engine, 2))
    push = WeightPush(service, model)
    push.push()
    output = generate(service.engine, prompt, max_new_tokens=4, seed=1, ignore_eos=True)
    assert output.end.cached_tokens == 0
    new, batch = trainer_logprobs(model, [sample_of([(prompt, output, 1.0)])], push.version)
    assert logprob_gap(new, batch).num_exact == 4 and logprob_gap(new, batch).max_exact < TOLERANCE


def test_an_episode_that_keeps_its_cache_across_a_push_is_told_from_the_trainers_own_tokens(service: EngineWeights, model: Any) -> None:
    prompt = random_prompt(np.random.default_rng(5), 40, 41)
    options = {"max_new_tokens": 9, "ignore_eos": True, "lineage": "episode"}
    first = generate(service.engine, prompt, seed=1, **options)
    push = WeightPush(service, model)
    learn(model, play(service.engine, 2))
    push.push()
    tool = [7, 8, 9]
    second = generate(service.engine, [*prompt, *first.ids, *tool], seed=2, request_id=1, **options)
    assert second.end.cached_tokens > 0 and len(second.end.kv_spans) == 2
    sample = sample_of([(prompt, first, 1.0), (tool, second, 1.0)])
    new, batch = trainer_logprobs(model, [sample], push.version)
    gap = logprob_gap(new, batch)
    assert sample.oldest_version == 0 and gap.num_exact == 0 and gap.num_other == 18
    assert gap.mean_other > TOLERANCE


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_rollout_cut_by_an_update_is_one_row_with_both_versions(service: EngineWeights, model: Any, cut: int) -> None:
    """Cut at 7 of 20: seven tokens of the old version keep their numbers, at most thirteen of the new one follow."""
    prompt = random_prompt(np.random.default_rng(8), 20, 21)
    first = generate(service.engine, prompt, seed=1, max_new_tokens=cut, ignore_eos=True)
    old = sample_of([(prompt, first, 1.0)])
    learn(model, play(service.engine, 2))
    push = WeightPush(service, model)
    push.push()
    rest = generate(service.engine, [*prompt, *first.ids], seed=1, request_id=1, max_new_tokens=20 - cut, ignore_eos=True)
    sample = sample_of([(prompt, first, 1.0), ([], rest, 1.0)])
    assert sample.num_sampled == 20 and sample.versions[sample.mask].tolist() == [0] * cut + [1] * (20 - cut)
    assert np.array_equal(sample.logprobs[20 : 20 + cut], old.logprobs[20:])
    new, batch = trainer_logprobs(model, [sample], push.version)
    gap = logprob_gap(new, batch)
    assert (gap.num_exact, gap.num_other) == (20 - cut, cut) and gap.max_exact < TOLERANCE


def test_a_reply_that_is_only_the_end_token_keeps_that_tokens_true_log_probability(service: EngineWeights, model: Any) -> None:
    prompt = random_prompt(np.random.default_rng(6), 10, 11)
    output: Output = generate(service.engine, prompt, forced_ids=[2], max_new_tokens=5)
    sample = sample_of([(prompt, output, 1.0)])
    assert output.ids == [2] and output.end.reason.kind == "stop" and sample.num_sampled == 1
    expected = reference_logprobs(model.eval().requires_grad_(False), [*prompt, 2])[-1]
    assert sample.logprobs[-1] == pytest.approx(expected, abs=TOLERANCE) and sample.logprobs[-1] < -0.1


def test_canaries_of_another_model_are_refused_and_the_old_weights_serve_on(service: EngineWeights, model: Any) -> None:
    push = WeightPush(service, model)
    before = service.engine.digests()
    learn(model, play(service.engine, 2))
    with pytest.raises(CanaryMismatch):
        push.push(list(model.named_parameters()), canary=lambda ids: np.full(len(ids) - 1, -5.0))
    assert service.engine.digests() == before and push.version == service.engine.version == 0
    assert push.push().version == 1


@pytest.mark.parametrize("fault", ["missing", "misspelt", "reshaped"])
def test_an_update_that_is_not_the_whole_model_is_refused_by_name(service: EngineWeights, model: Any, fault: str) -> None:
    learn(model, play(service.engine, 2))
    named = dict(model.named_parameters())
    victim = "model.layers.1.mlp.down_proj.weight"
    tensor = named.pop(victim)
    named |= {"misspelt": {victim.replace("down", "dawn"): tensor}, "reshaped": {victim: tensor.T}, "missing": {}}[fault]
    push = WeightPush(service, model)
    before = service.engine.digests()
    for offered in (list(named.items()), iter(named.items())):
        with pytest.raises(ManifestMismatch, match="down_proj" if fault != "misspelt" else "dawn_proj"):
            push.push(offered)
    assert service.engine.digests() == before and service.engine.version == 0
    assert push.push().version == 1


def test_a_wrapped_model_is_pushed_under_plain_names(service: EngineWeights, model: Any) -> None:
    learn(model, play(service.engine, 2))
    wrapped = [("module." + name.replace("layers.0.", "layers.0._orig_mod."), tensor) for name, tensor in model.named_parameters()]
    assert WeightPush(service, model).push(wrapped).changed_tensors == len(wrapped)


def test_an_adapter_left_out_of_the_push_is_noticed(service: EngineWeights, model: Any) -> None:
    """The optimizer moves an adapter, the frozen base is pushed: nothing ever changes on the service's side."""
    push = WeightPush(service, model.requires_grad_(False))
    for _ in range(2):
        with pytest.warns(PushWarning, match="was the optimizer step made, and on these parameters"):
            push.push()
    with pytest.raises(WeightsUnchanged, match="adapters merged"):
        push.push()
    assert service.engine.version == 2


def test_many_unchanged_pushes_leave_log_probabilities_bit_identical(service: EngineWeights, model: Any) -> None:
    push = WeightPush(service, model, allow_unchanged=True)
    first = play(service.engine, 1)[0]
    for _ in range(10):
        push.push()
    again = play(service.engine, 1)[0]
    assert np.array_equal(first.ids, again.ids) and np.array_equal(first.logprobs[first.mask], again.logprobs[again.mask])
