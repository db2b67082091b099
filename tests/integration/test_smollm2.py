"""A real model end to end: SmolLM2-135M-Instruct from its packaged GGUF file, against transformers in fp32.

The conversion is the example's own, in the cache of the user (or of ARENO_CACHE_DIR), so that it costs half a minute only once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import rollout
from examples.agentic.calculator.env import tool_call
from examples.agentic.calculator.train import Classroom, Figures, Options
from examples.agentic.smollm2 import prepare
from rollout.agent import ChatFormat, EpisodeResult
from rollout.agent.template_check import template_findings
from tests.engine_runs import Recorder, make_engine, request
from tests.fixtures_models import reference_logprobs, reference_model

QUESTION = [{"role": "user", "content": "Explain in a few sentences why the sky is blue."}]
NEW_TOKENS = 40
TEMPERATURE = 0.3


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare().folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    torch.set_num_threads(1)
    return reference_model(folder)


@pytest.fixture(scope="module")
def prompt(folder: Path) -> np.ndarray:
    return ChatFormat.from_folder(folder).prompt_ids(QUESTION)


@pytest.fixture(scope="module")
def greedy_ids(reference: Any, prompt: np.ndarray) -> list[int]:
    """What transformers answers: prompt and 40 tokens."""
    ids = torch.as_tensor(prompt.astype(np.int64))[None]
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert out.shape[1] == len(prompt) + NEW_TOKENS
    return [int(number) for number in out[0]]


def test_the_folder_is_a_tied_llama_with_a_whole_vocabulary_and_its_template(folder: Path, prompt: np.ndarray) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"], config["vocab_size"]) == ("llama", True, 49_152)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["num_hidden_layers"]) == (9, 3, 30)
    assert "quantization_config" not in config and config["rope_parameters"]["rope_theta"] == 100_000.0
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.decode(prompt)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM") and text.endswith("<|im_start|>assistant\n")
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_its_template_only_appends_with_its_own_tokenizer(folder: Path) -> None:
    append_only, findings = template_findings(folder)
    assert append_only and "chatml" in findings[0].value, findings


@pytest.mark.parametrize("decode_tables", ["resident", pytest.param("rebuilt", marks=pytest.mark.long)])
def test_the_greedy_answer_is_transformers_own_and_so_are_its_logprobs(
    decode_tables: str, folder: Path, reference: Any, prompt: np.ndarray, greedy_ids: list[int]
) -> None:
    engine = make_engine(folder, dtype="float32", max_rows=2, max_model_len=256, decode_tables=decode_tables)
    try:
        recorder = Recorder()
        engine.submit(request(1, prompt, max_new_tokens=NEW_TOKENS, temperature=0.0))
        while engine.has_work:
            recorder.add(engine.step())
        output = recorder.outputs[1]
        assert output.ids == greedy_ids[len(prompt) :]
        wanted = reference_logprobs(reference, greedy_ids)
        assert np.abs(engine.score(greedy_ids).token_logprobs - wanted).max() < 1e-4
        assert np.abs(np.array(output.logprobs) - wanted[len(prompt) - 1 :]).max() < 1e-4
        engine.check_integrity()
    finally:
        engine.close()


def test_the_answer_makes_sense(folder: Path, greedy_ids: list[int], prompt: np.ndarray) -> None:
    answer = ChatFormat.from_folder(folder).decode(greedy_ids[len(prompt) :])
    assert "sky" in answer and "light" in answer


@pytest.fixture(scope="module")
def played(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[EpisodeResult], int]]:
    """An episode of one question over the real service, and the length of its opening."""
    options = Options(episodes=1, questions=1)
    with rollout.local(str(folder), dtype="float32", threads=1, max_rows=4, state_dir=str(tmp_path_factory.mktemp("state"))) as client:
        classroom = Classroom(client, options)
        yield classroom.play(classroom.tasks(), temperature=TEMPERATURE), classroom.environment().num_opening


def test_episodes_call_the_tool_in_the_form_they_were_shown(played: tuple[list[EpisodeResult], int]) -> None:
    results, num_opening = played
    assert all(result.status == "done" and result.reward is not None and 0 <= result.reward <= 1 for result in results)
    assert sum(result.good_calls for result in results) >= 1
    said = [message["content"] for result in results for message in result.messages[num_opening:] if message["role"] == "assistant"]
    assert any(text.startswith(tool_call("")[:-24]) for text in said)
    figures = Figures.of(results, 1.0)
    assert figures.turns == len(said) >= 2 and figures.tokens == figures.tokens_per_s
    assert figures.cached_share > 0.5


def test_what_episodes_sampled_has_the_references_logprobs(played: tuple[list[EpisodeResult], int], reference: Any) -> None:
    (row,) = played[0][0].rows
    assert row.logprobs is not None and row.num_sampled > 20
    first = int(row.mask.argmax())
    with torch.no_grad():  # the logits from the place before the first sampled token on, of one forward over the whole row
        logits = reference(torch.as_tensor(row.ids[None].astype(np.int64)), use_cache=False, logits_to_keep=len(row) - first + 1).logits[
            0, :-1
        ]
    logprobs = torch.log_softmax(logits.double() / TEMPERATURE, dim=-1)
    wanted = logprobs.gather(1, torch.as_tensor(row.ids[first:].astype(np.int64))[:, None])[:, 0].numpy()
    sampled = row.mask[first:]
    assert np.abs(row.logprobs[first:][sampled] - wanted[sampled]).max() < 1e-4
