"""Sliding windows through the whole engine against transformers: prefill in chunks, decode, prefix hits, scores, mixed layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crossed import every_value
from tests.engine_runs import generate, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import reference_logprobs, reference_model, tiny_model, write_checkpoint

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 16
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "from_the_second_layer_on": ("qwen2", {"max_window_layers": 1}),
    "everywhere": ("qwen3", {"max_window_layers": 0}),
    "mixed": ("qwen3", {"layer_types": [SLIDING, FULL, FULL, SLIDING], "num_hidden_layers": 4}),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, keys = MODELS[request.param]
    return write_checkpoint(tmp_path_factory.mktemp("windowed"), family, use_sliding_window=True, sliding_window=WINDOW, **keys)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return reference_model(folder)


def unwindowed_gap(folder: Path, prompt: np.ndarray, output: Any) -> float:
    """Return the distance from the same weights with full attention everywhere."""
    keys = json.loads((folder / "config.json").read_text())
    return reference_gap(tiny_model(keys["model_type"], num_hidden_layers=keys["num_hidden_layers"]), prompt, output)


@every_value(chunk=[7, 64, 512], path=["resident", "rebuilt"])
def test_prompts_and_decode_beyond_the_window_give_transformers_logprobs(folder: Path, model: Any, path: str, chunk: int) -> None:
    rng = np.random.default_rng(chunk)
    prompts = [random_prompt(rng, low, high) for low, high in ((60, 80), (100, 140), (180, 200), (3, WINDOW))]
    requests = [request(n, prompt, max_new_tokens=64, seed=n, ignore_eos=True) for n, prompt in enumerate(prompts)]
    outputs = run(make_engine(folder, decode_tables=path, max_prefill_tokens=chunk), requests)
    for number, prompt in enumerate(prompts):
        assert len(outputs[number].ids) == 64
        assert reference_gap(model, prompt, outputs[number]) < 1e-4
    assert unwindowed_gap(folder, prompts[0], outputs[0]) > 0.3, "the window must matter, or this test proves nothing"


@every_value(size=[60, 64, 65, 160], path=["resident", "rebuilt"])
def test_a_prefix_hit_continues_inside_the_window(folder: Path, model: Any, path: str, size: int) -> None:
    prompt = random_prompt(np.random.default_rng(size), size, size + 1)
    engine = make_engine(folder, decode_tables=path)
    cold = generate(engine, prompt, max_new_tokens=24, seed=1, ignore_eos=True)
    warm = generate(engine, prompt, max_new_tokens=24, seed=1, ignore_eos=True)
    turn = np.concatenate([prompt, cold.ids, [5, 6, 7]])
    next_turn = generate(engine, turn, max_new_tokens=24, seed=2, ignore_eos=True)
    assert cold.end.cached_tokens == 0 and warm.end.cached_tokens == (size - 1) // 16 * 16
    assert next_turn.end.cached_tokens >= size // 16 * 16
    assert warm.ids == cold.ids and np.allclose(warm.logprobs, cold.logprobs, atol=1e-4)
    assert max(reference_gap(model, prompt, warm), reference_gap(model, turn, next_turn)) < 1e-4


def test_scores_of_given_ids_follow_the_windows(folder: Path, model: Any) -> None:
    engine = make_engine(folder)
    for size in (2, WINDOW, WINDOW + 1, 200, 511):
        ids = random_prompt(np.random.default_rng(size), size, size + 1)
        np.testing.assert_allclose(engine.score(ids).token_logprobs, reference_logprobs(model, ids), atol=1e-4, rtol=0)


def test_both_paths_give_the_same_bits_whatever_the_company(folder: Path) -> None:
    rng = np.random.default_rng(5)
    prompts = [random_prompt(rng, 20, 120) for _ in range(6)]

    def outputs(path: str) -> dict[int, Any]:
        engine = make_engine(folder, decode_tables=path, max_rows=4, page_size=4)
        return run(engine, [request(n, prompt, max_new_tokens=10 * (n + 1), seed=n) for n, prompt in enumerate(prompts)])

    resident, rebuilt = outputs("resident"), outputs("rebuilt")
    for number in range(len(prompts)):
        assert resident[number].ids == rebuilt[number].ids and resident[number].logprobs == rebuilt[number].logprobs


def test_a_window_longer_than_every_sequence_gives_the_bits_of_full_attention(tmp_path: Path) -> None:
    on = {"use_sliding_window": True, "max_window_layers": 0}
    full = make_engine(write_checkpoint(tmp_path / "full", "qwen2"))
    wide = [make_engine(write_checkpoint(tmp_path / str(width), "qwen2", sliding_window=width, **on)) for width in (200, 512, 10_000)]
    prompt = random_prompt(np.random.default_rng(3), 100, 101)
    expected = generate(full, prompt, max_new_tokens=64, seed=1, ignore_eos=True)
    for engine in wide:
        output = generate(engine, prompt, max_new_tokens=64, seed=1, ignore_eos=True)
        assert output.ids == expected.ids and output.logprobs == expected.logprobs
        assert np.array_equal(engine.score(prompt).token_logprobs, full.score(prompt).token_logprobs)


def test_windows_and_stretched_positions_go_together(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    keys = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}
    folder = write_checkpoint(tmp_path, "qwen3", rope_parameters=rope, **keys)
    prompt = random_prompt(np.random.default_rng(4), 420, 421)
    output = generate(make_engine(folder, max_prefill_tokens=64), prompt, max_new_tokens=64, seed=1, ignore_eos=True)
    assert reference_gap(reference_model(folder), prompt, output) < 1e-4
