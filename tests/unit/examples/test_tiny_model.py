"""The shipped model folder and the script that made it."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.agentic.tictactoe.env import Game
from examples.agentic.tictactoe.reward import Outcome, held_out_seeds
from examples.agentic.tiny_model import MODEL_DIR, make
from examples.agentic.tiny_model.vocabulary import CONTROL_IDS, CONTROL_TOKENS, NUM_BYTES, TOOL_CALL_TOKENS, VOCAB_SIZE, write_tokenizer

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " You play X.\n123\n456\n789\n"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "1O3\n4X6\n789"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"square": 1}}}]},
    {"role": "tool", "content": "taken"},
    {"role": "assistant", "content": " 3 "},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look at a square.", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


def test_the_weights_are_one_bf16_file_of_about_a_million_parameters_and_at_most_4_mb() -> None:
    (path,) = MODEL_DIR.glob("*.safetensors")
    assert path.stat().st_size <= 4_000_000
    with safe_open(path, framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 900_000 < sum(tensor.numel() for tensor in tensors) < 1_300_000


def test_the_config_allows_a_context_of_at_least_1024_and_as_many_ids_as_the_tokenizer_has() -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["max_position_embeddings"] >= 1024
    assert config["vocab_size"] == VOCAB_SIZE == Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).get_vocab_size()
    assert VOCAB_SIZE % 4 == 0


def test_a_turn_ends_with_the_same_id_in_every_file() -> None:
    end = CONTROL_IDS["<|im_end|>"]
    assert json.loads((MODEL_DIR / "config.json").read_text())["eos_token_id"] == end
    assert end in json.loads((MODEL_DIR / "generation_config.json").read_text())["eos_token_id"]
    assert PreTrainedTokenizerFast.from_pretrained(MODEL_DIR).eos_token_id == end


def test_the_shipped_tokenizer_files_are_those_that_the_script_writes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text()) == json.loads((MODEL_DIR / path.name).read_text()), path.name


def test_the_id_of_a_byte_is_its_value_and_every_text_comes_back() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    for text in ("".join(map(chr, range(0x300))), " \t\n  x  ", "日本語 🙂 e\u0301", "\x00\x7f"):
        assert tokenizer.encode(text).ids == list(text.encode())
        assert tokenizer.decode(list(text.encode()), skip_special_tokens=False) == text


@pytest.mark.parametrize(("place", "text"), list(enumerate([*CONTROL_TOKENS, *TOOL_CALL_TOKENS])))
def test_a_control_token_is_one_id_after_the_bytes(place: int, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    assert tokenizer.encode(f"a{text}b").ids == [97, NUM_BYTES + place, 98]
    assert tokenizer.decode([NUM_BYTES + place], skip_special_tokens=False) == text
    assert tokenizer.decode([NUM_BYTES + place]) == ("" if text in CONTROL_TOKENS else text)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_template_only_appends(tokenizer: PreTrainedTokenizerFast, tools: list[dict[str, Any]] | None) -> None:
    rendered = [tokenizer.apply_chat_template(TALK[: n + 1], tools=tools, tokenize=False) for n in range(1, len(TALK))]
    for shorter, longer in itertools.pairwise(rendered):
        assert longer.startswith(shorter)
        assert shorter.endswith("<|im_end|>\n")
    prompt = tokenizer.apply_chat_template(TALK[:2], tools=tools, tokenize=False, add_generation_prompt=True)
    assert rendered[1].startswith(prompt) and prompt.endswith("<|im_end|>\n<|assistant|>")


def test_the_template_keeps_every_character_of_a_message(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.apply_chat_template(TALK[:3], tokenize=False) == (
        "<|system|>Be brief. <|im_end|>\n<|user|> You play X.\n123\n456\n789\n<|im_end|>\n<|assistant|>5<|im_end|>\n"
    )


def test_tool_calls_are_written_as_json_between_their_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.apply_chat_template(TALK, tools=TOOLS, tokenize=False)
    assert (
        '<|assistant|><tool_call>\n{"name": "look", "arguments": {"square": 1}}\n</tool_call><|im_end|>\n<|tool|>taken<|im_end|>\n' in text
    )
    assert text.startswith("<|system|>Be brief. \n\n# Tools\n") and json.dumps(TOOLS[0]) in text
    assert text.count("Be brief.") == 1


def test_an_unknown_role_is_refused_and_the_known_ones_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match="unknown role poet; known: system, user, assistant, tool"):
        tokenizer.apply_chat_template([{"role": "poet", "content": "x"}], tokenize=False)


def test_only_answers_and_their_ends_are_labelled(tokenizer: PreTrainedTokenizerFast) -> None:
    game = make.random_legal_game(5)
    ids, labels = make.labelled(tokenizer, [game, make.random_legal_game(6)])
    answers = [message["content"] for message in game if message["role"] == "assistant"]
    counted = labels[0][labels[0] != make.IGNORED_LABEL].tolist()
    assert counted == [token for answer in answers for token in (ord(answer), CONTROL_IDS["<|im_end|>"])]
    assert torch.equal(ids[labels != make.IGNORED_LABEL], labels[labels != make.IGNORED_LABEL])


def test_the_warm_up_games_hold_legal_moves_alone() -> None:
    for seed in range(200):
        game, messages = Game(seed), make.random_legal_game(seed)
        for message in messages:
            if message["role"] == "assistant":
                game.answer(message["content"])
        assert game.outcome not in (None, Outcome.ILLEGAL)


def test_a_warm_up_that_does_not_get_there_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = make.Recipe(games_per_step=2, max_steps=1, check_every=1, check_games=2, illegal_share=0.0)
    with pytest.raises(RuntimeError, match="raise --max-steps"):
        make.warm_up(make.build_model(0), tokenizer, recipe)


def test_some_and_not_most_games_of_the_shipped_weights_hold_an_illegal_move(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Shipped between 15 and 30 %; 200 games know it to about 3 points, hence the wider bounds."""
    torch.manual_seed(0)
    rate = make.play(model, tokenizer, held_out_seeds())
    assert 0.12 < rate.illegal < 0.34
    assert 0.2 < rate.win < 0.5


def test_the_safetensors_header_is_all_there_is_beside_the_weights() -> None:
    data = (MODEL_DIR / "model.safetensors").read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    assert max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__") == len(data) - 8 - header_bytes
