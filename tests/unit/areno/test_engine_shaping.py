"""Penalties, biases and filters in the engine: by hand and by transformers' processor, on both decode paths, told honestly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from areno import InvalidRequest
from tests.engine_runs import Output, generate, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import reference_logits, reference_model, write_checkpoint

PATHS = pytest.mark.parametrize("path", ["resident", "rebuilt"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:
    return reference_model(llama)


def _shaped(logits: torch.Tensor, prompt: np.ndarray, emitted: list[int], params: dict[str, Any]) -> torch.Tensor:
    """What one token is drawn from, by hand. Shapes: [V] float64 log-probabilities."""
    scores = logits.clone()
    for token, bias in params.get("logit_bias", {}).items():
        scores[token] += bias
    penalty = params.get("repetition_penalty", 1.0)
    if penalty != 1.0:
        context = torch.tensor([[*prompt.tolist(), *emitted]])
        scores = RepetitionPenaltyLogitsProcessor(penalty)(context, scores[None])[0]
    for token in set(emitted):
        scores[token] -= params.get("presence_penalty", 0.0) + params.get("frequency_penalty", 0.0) * emitted.count(token)
    temperature = params.get("temperature", 1.0)
    scores = scores.double() / (temperature or 1.0)
    top_k = params.get("top_k", 0)
    if top_k:
        scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
    return torch.log_softmax(scores, 0)


def _check(model: Any, prompt: np.ndarray, output: Output, params: dict[str, Any]) -> int:
    """Hold every token's behaviour_logprob to the hand-made distribution; return how many differ from logprob."""
    logits = reference_logits(model, np.concatenate([prompt, output.ids]))[len(prompt) - 1 :]
    different = 0
    for place, token in enumerate(output.ids):
        expected = _shaped(logits[place], prompt, output.ids[:place], params)
        if params.get("temperature") == 0.0:
            assert expected[token] == expected.max()
        assert abs(float(expected[token]) - output.behaviour_logprobs[place]) < 2e-4
        different += abs(output.behaviour_logprobs[place] - output.logprobs[place]) > 1e-3
    assert reference_gap(model, prompt, output, params.get("temperature", 1.0)) < 1e-4
    return different


@PATHS
@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.5, "temperature": 0.7},
        {"logit_bias": {5: 4.0, 6: -3.0, 200: 2.5}, "temperature": 1.3},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.6, "temperature": 0.0},
        {
            "logit_bias": {7: 3.0},
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.2,
            "temperature": 0.9,
            "top_k": 20,
        },
    ],
)
def test_every_draw_is_from_the_distribution_made_by_hand(llama: Path, model: Any, path: str, params: dict[str, Any]) -> None:
    prompt = random_prompt(np.random.default_rng(0), 30, 31)
    output = generate(make_engine(llama, decode_tables=path), prompt, max_new_tokens=40, seed=5, ignore_eos=True, **params)
    assert _check(model, prompt, output, params) > 5


@PATHS
def test_shaped_and_plain_requests_share_a_batch_without_touching_each_other(llama: Path, path: str) -> None:
    rng = np.random.default_rng(1)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 5, "return_kept_ids": True},
        {"top_p": 0.7},
        {"min_p": 0.1, "temperature": 1.4},
        {"repetition_penalty": 1.3},
        {"logit_bias": {9: 5.0}, "forced_ids": [4, 5, 6]},
        {"temperature": 1e-6},
    ]
    prompts = [random_prompt(rng, 5, 40) for _ in kinds]
    requests = [request(n, p, max_new_tokens=25, seed=n, ignore_eos=True, **k) for n, (p, k) in enumerate(zip(prompts, kinds))]
    together = run(make_engine(llama, decode_tables=path, kept_ids=True), requests)
    for number, item in enumerate(requests):
        alone = run(make_engine(llama, decode_tables=path, kept_ids=True), [item])[number]
        assert alone.ids == together[number].ids
        assert np.allclose(alone.logprobs, together[number].logprobs, atol=1e-4)
        for values in (together[number].logprobs, together[number].raw_logprobs):
            assert np.isfinite(values).all()
    assert np.isnan(together[0].behaviour_logprobs).all() and np.isnan(together[1].behaviour_logprobs).all()
    assert together[7].ids == run(make_engine(llama), [request(7, prompts[7], max_new_tokens=25, temperature=0.0, ignore_eos=True)])[7].ids


@PATHS
def test_kept_sets_hold_the_drawn_id_and_renormalise_to_the_behaviour_logprob(llama: Path, model: Any, path: str) -> None:
    prompt = random_prompt(np.random.default_rng(2), 20, 21)
    engine = make_engine(llama, decode_tables=path, kept_ids=True)
    params = {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 1.2}
    output = generate(engine, prompt, max_new_tokens=30, seed=3, ignore_eos=True, return_kept_ids=True, **params)
    logits = reference_logits(model, np.concatenate([prompt, output.ids]))[len(prompt) - 1 :]
    sizes = set()
    for place, token in enumerate(output.ids):
        kept = output.kept[place]
        sizes.add(len(kept))
        assert token in kept and len(set(kept)) == len(kept) <= 40
        scores = logits[place].double() / 1.2
        expected = scores[token] - torch.logsumexp(scores[kept], 0)
        assert abs(float(expected) - output.behaviour_logprobs[place]) < 2e-4
        assert float(scores[kept].min()) >= float(scores.topk(len(kept)).values[-1])
    assert len(sizes) > 1
    plain = generate(engine, prompt, max_new_tokens=3, seed=3, top_k=40, request_id=1)
    assert plain.kept == [[]] * 3


def test_kept_sets_are_refused_where_the_engine_has_no_room_for_them(llama: Path) -> None:
    with pytest.raises(InvalidRequest, match="kept_ids=True"):
        generate(make_engine(llama), [5], max_new_tokens=2, top_k=5, return_kept_ids=True)
    for bad in ({"top_k": 0}, {"top_k": 65}, {"top_p": 0.9}):
        with pytest.raises(InvalidRequest, match=r"top_k to 1\.\.64"):
            request(0, [5], return_kept_ids=True, **bad)


@pytest.mark.parametrize("settings", [{}, {"max_prefill_tokens": 7}, {"prefix_cache": False}, {"page_size": 4}])
def test_prompt_logprobs_agree_with_the_reference_cold_warm_and_in_chunks(llama: Path, model: Any, settings: dict[str, Any]) -> None:
    engine = make_engine(llama, **settings)
    rng = np.random.default_rng(4)
    prompt, other = random_prompt(rng, 64, 65), random_prompt(rng, 50, 51)
    expected = {t: np.array(_prompt_reference(model, prompt, t)) for t in (1.0, 0.7)}
    for number, (temperature, first) in enumerate([(1.0, 1), (0.7, 1), (1.0, 40), (1.0, 63), (1.0, 1)]):
        output = generate(engine, prompt, max_new_tokens=3, temperature=temperature, prompt_logprobs_from=first, request_id=number)
        score = output.prompt_score
        assert score is not None and score.start == first and score.logprobs.size == prompt.size - first
        assert np.abs(score.logprobs - expected[temperature][first - 1 :]).max() < 1e-4
        assert np.abs(score.raw_logprobs - expected[1.0][first - 1 :]).max() < 1e-4
        assert output.end.cached_tokens <= first - 1
        generate(engine, other, max_new_tokens=2, prompt_logprobs_from=1, request_id=100 + number)
    assert generate(engine, prompt, max_new_tokens=2, request_id=50).prompt_score is None


def _prompt_reference(model: Any, prompt: np.ndarray, temperature: float) -> np.ndarray:
    from tests.fixtures_models import reference_logprobs

    return reference_logprobs(model, prompt, temperature)


@PATHS
@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_resumed_rollout_goes_on_as_if_it_had_never_been_cut(llama: Path, path: str, cut: int) -> None:
    prompt = random_prompt(np.random.default_rng(5), 20, 21)
    params = {
        "max_new_tokens": 20,
        "seed": 9,
        "min_new_tokens": 15,
        "stop_ids": [3, 4],
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    }
    engine = make_engine(llama, decode_tables=path)
    whole = generate(engine, prompt, **params)
    assert len(whole.ids) > 14
    resumed = run(engine, [request(1, [*prompt, *whole.ids[:cut]], prior_output_tokens=cut, **params)])[1]
    assert resumed.ids == whole.ids[cut:] and resumed.end.reason == whole.end.reason
    assert np.allclose(resumed.logprobs, whole.logprobs[cut:], atol=1e-4)
    assert np.allclose(resumed.behaviour_logprobs, whole.behaviour_logprobs[cut:], atol=1e-4, equal_nan=True)
    assert len(whole.ids[:cut]) + len(resumed.ids) <= 20


def test_a_complete_rollout_is_not_resumed_and_earlier_output_must_be_in_the_prompt() -> None:
    with pytest.raises(InvalidRequest, match="rollout is complete"):
        request(0, [5] * 30, prior_output_tokens=20, max_new_tokens=20)
    for prior in (-1, 30, True, 1.5):
        with pytest.raises(InvalidRequest) as refusal:
            request(0, [5] * 30, prior_output_tokens=prior, max_new_tokens=40)
        assert refusal.value.field == "prior_output_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", "1"),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", 1e9),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {3: 1e39}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", [(3, 1.0)]),
        ("logit_bias", {n: 1.0 for n in range(257)}),
        ("prompt_logprobs_from", 0),
        ("return_kept_ids", 1),
    ],
)
def test_shaping_parameters_out_of_their_domain_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        request(0, [5], **{field: value})
    assert refusal.value.field is not None and refusal.value.field.startswith(field) and refusal.value.remedy


@pytest.mark.parametrize("bias", [{256: 5.0}, {-1: 1.0}])
def test_biases_on_unknown_ids_are_refused_at_the_door(llama: Path, bias: dict[int, float]) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        make_engine(llama).submit(request(0, [5], logit_bias=bias))


def test_filters_that_keep_everything_are_off(llama: Path) -> None:
    for number, off in enumerate(({"top_k": 10**9}, {"top_k": -1}, {"top_k": 256})):
        output = generate(make_engine(llama), [5, 6], max_new_tokens=10, seed=1, request_id=number, **off)
        assert output.ids == generate(make_engine(llama), [5, 6], max_new_tokens=10, seed=1).ids
