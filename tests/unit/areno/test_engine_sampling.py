"""What a request gets: stop ids with their own logprobs, budgets, minimum lengths, forced ids, exact prompts, isolation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno import Engine, FinishKind, InvalidRequest, RequestTooLong
from areno.errors import DuplicateRequest
from tests.engine_runs import assert_idle, generate, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import reference_logprobs, reference_model, write_checkpoint

EOS = 2
PATHS = pytest.mark.parametrize("path", ["resident", "rebuilt"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:
    return reference_model(llama)


@PATHS
@pytest.mark.parametrize(
    ("forced", "budget", "kind"), [([EOS], 8, "stop"), ([5, 6, 7, 8, EOS], 8, "stop"), ([5, 6, 7], 3, "length"), ([5, 9], 8, "stop")]
)
def test_every_token_has_one_logprob_the_stop_id_its_own(
    llama: Path, model: Any, path: str, forced: list[int], budget: int, kind: str
) -> None:
    prompt = random_prompt(np.random.default_rng(0), 20, 21)
    output = generate(make_engine(llama, decode_tables=path), prompt, max_new_tokens=budget, forced_ids=forced, stop_ids=[9])
    assert output.ids == forced and output.end.reason.kind == kind
    assert output.end.reason.stop_id == (forced[-1] if kind == "stop" else None)
    assert len(output.logprobs) == len(output.versions) == len(forced)
    assert reference_gap(model, prompt, output) < 1e-4 and all(value < 0 for value in output.logprobs)


@PATHS
def test_prompts_that_finish_prefill_in_one_step_keep_their_own_first_logprob(llama: Path, model: Any, path: str) -> None:
    rng = np.random.default_rng(1)
    prompts = [random_prompt(rng, low, low + 1) for low in (3, 17, 40, 5, 64)]
    outputs = run(
        make_engine(llama, decode_tables=path), [request(n, prompt, max_new_tokens=1, seed=n) for n, prompt in enumerate(prompts)]
    )
    for number, prompt in enumerate(prompts):
        assert len(outputs[number].ids) == 1 and reference_gap(model, prompt, outputs[number]) < 1e-4


def _with_ends(folder: Path, config_eos: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config_eos}))
    return folder


@PATHS
@pytest.mark.parametrize("end", [2, 7, 9])
def test_every_end_id_of_the_model_stops_and_is_named(tmp_path: Path, path: str, end: int) -> None:
    folder = _with_ends(write_checkpoint(tmp_path / "m", "llama"), [7, 9])
    engine = make_engine(folder, decode_tables=path)
    assert engine.info.eos_ids == (2, 7, 9)
    output = generate(engine, [5, 6], forced_ids=[10, 11, end, 12, 13], max_new_tokens=5)
    assert output.ids == [10, 11, end] and output.end.reason.stop_id == end
    ignoring = generate(engine, [5, 6], forced_ids=[10, 11, end, 12, 13], max_new_tokens=5, ignore_eos=True)
    assert ignoring.ids == [10, 11, end, 12, 13] and ignoring.end.reason.kind is FinishKind.LENGTH


@PATHS
def test_no_stop_id_is_drawn_before_min_new_tokens_and_the_masked_draw_is_told(llama: Path, model: Any, path: str) -> None:
    engine = make_engine(llama, decode_tables=path)
    stops = np.random.default_rng(3).choice(np.arange(3, 256), size=15, replace=False)
    prompt = [5, 6, 7]
    early = 0
    for seed in range(40):
        output = generate(engine, prompt, seed=seed, max_new_tokens=12, min_new_tokens=5, stop_ids=stops, request_id=seed, temperature=1.7)
        assert not set(output.ids[:5]) & {EOS, *stops.tolist()}
        assert reference_gap(model, prompt, output, 1.7) < 1e-4
        assert not np.isnan(output.behaviour_logprobs[: min(5, len(output.ids))]).any()
        assert np.isnan(output.behaviour_logprobs[5:]).all()
        allowed = np.array(output.behaviour_logprobs[:5]) - np.array(output.logprobs[:5])
        assert (allowed >= -1e-5).all() and allowed.max() > 1e-4
        early += output.end.reason.kind is FinishKind.STOP
    assert early > 0


@PATHS
def test_a_prompt_given_as_ids_is_never_re_encoded(llama: Path, path: str) -> None:
    """Five one-letter ids stay five ids in every way in: alone, in company, with a hit, in chunks."""
    spelled = [ord(letter) for letter in "hello"]
    engine = make_engine(llama, decode_tables=path, page_size=4, max_prefill_tokens=3)
    for number in range(3):
        output = generate(engine, spelled, max_new_tokens=3, request_id=number)
        assert output.end.prompt_tokens == 5
    assert output.end.cached_tokens == 4


@pytest.mark.parametrize("size", [15, 16, 17, 31, 32, 33])
@PATHS
def test_lengths_around_a_page_hit_without_losing_the_last_token(llama: Path, model: Any, path: str, size: int) -> None:
    prompt = random_prompt(np.random.default_rng(size), size, size + 1)
    engine = make_engine(llama, decode_tables=path)
    budget = 48 - size
    cold = generate(engine, prompt, max_new_tokens=budget, seed=1, ignore_eos=True)
    warm = generate(engine, prompt, max_new_tokens=budget, seed=1, ignore_eos=True)
    longer = np.append(prompt, 77)
    extended = generate(engine, longer, max_new_tokens=5, seed=1, ignore_eos=True)
    assert warm.ids == cold.ids and np.allclose(warm.logprobs, cold.logprobs, atol=1e-4)
    assert cold.end.cached_tokens == 0 and warm.end.cached_tokens == (size - 1) // 16 * 16
    assert reference_gap(model, prompt, warm) < 1e-4 and reference_gap(model, longer, extended) < 1e-4


@PATHS
def test_a_continued_conversation_hits_its_own_generated_pages(llama: Path, model: Any, path: str) -> None:
    engine = make_engine(llama, decode_tables=path)
    prompt = random_prompt(np.random.default_rng(5), 20, 21)
    first = generate(engine, prompt, max_new_tokens=40, seed=1, ignore_eos=True)
    second = np.concatenate([prompt, first.ids, [7, 8, 9]])
    output = generate(engine, second, max_new_tokens=10, seed=2, ignore_eos=True)
    assert output.end.cached_tokens == 20 + 40 - 1
    assert reference_gap(model, second, output) < 1e-4


@PATHS
def test_prompts_submitted_together_share_their_prefix(llama: Path, model: Any, path: str) -> None:
    rng = np.random.default_rng(6)
    prefix = random_prompt(rng, 50, 51)
    prompts = [np.concatenate([prefix, random_prompt(rng, 1, 9)]) for _ in range(6)]
    engine = make_engine(llama, decode_tables=path)
    outputs = run(engine, [request(n, prompt, max_new_tokens=8, seed=n, ignore_eos=True) for n, prompt in enumerate(prompts)])
    assert [outputs[n].end.cached_tokens for n in range(6)] == [0] + [48] * 5
    for number, prompt in enumerate(prompts):
        assert reference_gap(model, prompt, outputs[number]) < 1e-4


def test_a_seedless_request_reports_the_seed_that_repeats_it(llama: Path) -> None:
    engine = make_engine(llama)
    drawn = generate(engine, [5, 6], max_new_tokens=20, ignore_eos=True)
    again = generate(engine, [5, 6], max_new_tokens=20, ignore_eos=True, seed=drawn.end.seed)
    other = generate(engine, [5, 6], max_new_tokens=20, ignore_eos=True)
    assert again.ids == drawn.ids and other.ids != drawn.ids


def test_without_logprobs_the_numbers_are_absent_and_the_ids_the_same(llama: Path) -> None:
    engine = make_engine(llama)
    told = generate(engine, [5, 6], max_new_tokens=12, seed=1)
    silent = generate(engine, [5, 6], max_new_tokens=12, seed=1, logprobs=False)
    assert silent.ids == told.ids and np.isnan(silent.logprobs).all() and np.isnan(silent.raw_logprobs).all()


@PATHS
@pytest.mark.parametrize(
    "bad", [{"prompt": [-1]}, {"prompt": [256]}, {"prompt": [2**31]}, {"stop_ids": [256]}, {"stop_ids": [-1]}, {"forced_ids": [999]}]
)
def test_one_requests_bad_ids_leave_its_neighbour_bit_equal_to_running_alone(llama: Path, path: str, bad: dict[str, Any]) -> None:
    prompt = random_prompt(np.random.default_rng(8), 20, 21)
    alone = generate(make_engine(llama, decode_tables=path), prompt, max_new_tokens=24, seed=3, ignore_eos=True)

    def offend(engine: Engine) -> None:
        fields = dict(bad)
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            engine.submit(request(66, fields.pop("prompt", [5]), max_new_tokens=4, **fields))

    engine = make_engine(llama, decode_tables=path)
    script = {step: [offend] for step in range(0, 20, 3)}
    outputs = run(engine, [request(0, prompt, max_new_tokens=24, seed=3, ignore_eos=True)], script=script)
    assert outputs[0].ids == alone.ids and outputs[0].logprobs == alone.logprobs
    assert engine.stats()["accepted"] == 1


def test_what_never_fits_and_what_is_live_already_is_refused_at_the_door(llama: Path) -> None:
    engine = make_engine(llama, num_pages=4)
    with pytest.raises(RequestTooLong, match="KV pool holds 65"):
        engine.submit(request(0, [5] * 40, max_new_tokens=30))
    engine.submit(request(0, [5] * 40, max_new_tokens=20))
    with pytest.raises(DuplicateRequest, match="use a new request_id"):
        engine.submit(request(0, [6], max_new_tokens=1))
    outputs = run(engine)
    assert outputs[0].end.output_tokens == 20


def test_a_request_as_large_as_the_pool_runs_while_others_wait_their_turn(llama: Path, model: Any) -> None:
    engine = make_engine(llama, num_pages=4)
    rng = np.random.default_rng(9)
    prompts = {n: random_prompt(rng, 30, 45) for n in range(6)}
    outputs = run(engine, [request(n, prompt, max_new_tokens=65 - prompt.size, seed=n, ignore_eos=True) for n, prompt in prompts.items()])
    for number, prompt in prompts.items():
        assert len(outputs[number].ids) == 65 - prompt.size and reference_gap(model, prompt, outputs[number]) < 1e-4


def test_requests_without_a_free_sampling_slot_wait_for_one(llama: Path) -> None:
    engine = make_engine(llama, sampling_slots=1)
    outputs = run(engine, [request(n, [5, 6], max_new_tokens=6, forced_ids=[20 + n] * 6) for n in range(5)])
    assert [outputs[n].ids for n in range(5)] == [[20 + n] * 6 for n in range(5)]
    none = make_engine(llama, sampling_slots=0)
    with pytest.raises(InvalidRequest, match="sampling_slots >= 1"):
        none.submit(request(0, [5], max_new_tokens=2, forced_ids=[1]))
    assert_idle(none)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_score_agrees_with_the_reference_and_with_generation(llama: Path, model: Any, temperature: float) -> None:
    engine = make_engine(llama)
    prompt = random_prompt(np.random.default_rng(10), 30, 31)
    output = generate(engine, prompt, max_new_tokens=30, seed=1, temperature=temperature, ignore_eos=True)
    ids = np.concatenate([prompt, output.ids])
    score = engine.score(ids, temperature=temperature)
    assert np.abs(score.token_logprobs - reference_logprobs(model, ids, temperature or 1.0)).max() < 1e-4
    assert np.abs(score.raw_logprobs - reference_logprobs(model, ids)).max() < 1e-4
    assert np.allclose(score.token_logprobs[prompt.size - 1 :], output.logprobs, atol=1e-4)


@pytest.mark.parametrize("ids", [[5], [], [5, 256], [5, -1], [5, True], [5.0, 6.0], [5] * 600])
def test_score_refuses_what_it_cannot_score(llama: Path, ids: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        make_engine(llama).score(ids)
    assert refusal.value.field == "ids" and refusal.value.remedy


def chi_square_excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return how many deviations a chi-square statistic lies above its mean (Wilson and Hilferty 1931). Shapes: [bins] each."""
    freedom = counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_four_thousand_seeds_follow_the_models_distribution_rare_ids_included(llama: Path, temperature: float) -> None:
    draws = 4000
    engine = make_engine(llama, max_rows=64, max_prefill_tokens=2048)
    prompt = np.arange(3, 20)
    asked = [request(seed, prompt, max_new_tokens=1, ignore_eos=True, temperature=temperature, seed=seed) for seed in range(draws)]
    outputs = run(engine, asked, check=False)
    tokens = np.array([outputs[seed].ids[0] for seed in range(draws)])
    vocab = engine.info.vocab_size
    scored = np.array([engine.score(np.append(prompt, token), temperature=temperature).token_logprobs[-1] for token in range(vocab)])
    probabilities = np.exp(scored.astype(np.float64))
    assert abs(probabilities.sum() - 1) < 1e-4
    order = np.argsort(probabilities)
    # Ids are pooled from the rarest on until a bin expects ten draws, so that the tail counts as a whole.
    bins = np.searchsorted(np.arange(10, draws, 10), np.cumsum(probabilities[order]) * draws)
    _, places = np.unique(bins, return_inverse=True)
    counts, expected = (np.zeros(places.max() + 1) for _ in range(2))
    np.add.at(counts, places, np.bincount(tokens, minlength=vocab)[order])
    np.add.at(expected, places, probabilities[order] * draws)
    keep = expected >= 5
    assert keep.sum() >= 8 and expected[0] < 40
    assert chi_square_excess(counts[keep], expected[keep]) < 4
    assert abs(counts[0] - expected[0]) < 5 * math.sqrt(expected[0]), "the rarest ids come too often or too rarely"
