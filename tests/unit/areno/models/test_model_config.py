"""config.json as transformers reads it, and refusals of what the decoder does not compute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from areno.errors import CheckpointError, UnsupportedModel
from areno.layers.rope import Rope
from areno.models.model_config import ModelConfig, read_model_config

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_config(folder: Path, family: str = "llama", *, without: tuple[str, ...] = (), **keys: Any) -> Path:
    raw = {key: value for key, value in {"model_type": family, **SIZES, **keys}.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def read(folder: Path, family: str = "llama", **keys: Any) -> ModelConfig:
    return read_model_config(write_config(folder, family, **keys))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 1e6, "type": "default"}, "rope_theta": 1e6},
        {"rope_scaling": {"type": "default"}, "rope_theta": 7e4},
        {"rope_scaling": {"type": "default", "rope_theta": 7e4}},
        {"rope_parameters": {}},
        {"head_dim": 32},
        {"head_dim": 16},
        {"num_key_value_heads": None},
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 777, "tie_word_embeddings": True},
        {"without": ("num_key_value_heads",), "num_attention_heads": 32},
    ],
)
def test_every_style_of_config_means_what_it_means_to_transformers(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    ours = read(tmp_path, family, **keys)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.rope == Rope(theta=theirs.rope_parameters["rope_theta"])
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


def test_qwen3_without_head_dim_means_128_and_the_others_divide(tmp_path: Path) -> None:
    assert read(tmp_path, "qwen3").head_dim == 128
    assert read(tmp_path, "llama").head_dim == 16
    assert read(tmp_path, "qwen2").head_dim == 16
    assert read(tmp_path, "llama", head_dim=None).head_dim == 16


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_null_head_dim_is_refused_outside_llama(tmp_path: Path, family: str) -> None:
    with pytest.raises(CheckpointError, match=r"head_dim=None.*correct head_dim in config.json"):
        read(tmp_path, family, head_dim=None)


def test_biases_and_qk_norm_follow_the_family(tmp_path: Path) -> None:
    def features(config: ModelConfig) -> tuple[bool, ...]:
        return config.attention_bias, config.output_bias, config.mlp_bias, config.qk_norm

    assert features(read(tmp_path, "llama")) == (False, False, False, False)
    assert features(read(tmp_path, "llama", attention_bias=True, mlp_bias=True)) == (True, True, True, False)
    assert features(read(tmp_path, "qwen2")) == (True, False, False, False)
    assert features(read(tmp_path, "qwen2", attention_bias=False, mlp_bias=True)) == (True, False, False, False)
    assert features(read(tmp_path, "qwen3")) == (False, False, False, True)
    assert features(read(tmp_path, "qwen3", attention_bias=True)) == (True, True, False, True)


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("mistral", {}, "model_type='mistral'.*llama, qwen2, qwen3"),
        ("qwen3_moe", {}, "model_type='qwen3_moe'.*llama, qwen2, qwen3"),
        ("llama", {"without": ("model_type",)}, "model_type=None.*llama, qwen2, qwen3"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types='sliding_attention'.*known: full_attention"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types='chunked_attention'.*full_attention, sliding"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'.*known: silu"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config='gptq'.*dequantize"),
        ("qwen2", {"num_experts": 4}, "num_experts=4.*dense"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(tmp_path: Path, family: str, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(tmp_path, family, **keys)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"without": ("vocab_size",)}, "no vocab_size.*add vocab_size"),
        ({"without": ("num_hidden_layers",)}, "no num_hidden_layers"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads=3.*must divide"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size=64.*multiple of num_attention_heads"),
        ({"head_dim": 15}, "head_dim=15.*even"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0.*positive"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"eos_token_id": 256}, "end-of-sequence id 256.*0 to 255"),
        ({"eos_token_id": [2, -1]}, "end-of-sequence id -1"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(tmp_path, **keys)


def test_a_missing_folder_or_config_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist.*pass the folder"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config.json"):
        read_model_config(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a file.*pass the folder"):
        read_model_config(file)
    for text in ("{", "[1]", "\xff"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"config.json"):
            read_model_config(tmp_path)


def test_end_ids_are_the_union_of_all_files_that_name_one(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=[7, 5])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    tokenizer = {
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"id": 200, "content": "<|im_end|>"}, {"id": 201, "content": "<pad>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    config = read_model_config(tmp_path)
    assert config.eos_ids == (5, 7, 9, 200)
    assert config.num_valid_ids == 202
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))
    assert read_model_config(tmp_path).eos_ids == (1, 5, 7, 9)


def test_without_a_tokenizer_every_id_is_valid_and_no_end_id_is_invented(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.num_valid_ids == 256
    assert config.eos_ids == ()


def test_a_tokenizer_larger_than_the_model_is_cut_at_the_models_vocabulary(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": [["a", -1.0]] * 3}, "added_tokens": [{"id": 300, "content": "x"}]})
    )
    assert read_model_config(tmp_path).num_valid_ids == 256
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(CheckpointError, match=r"no readable vocabulary"):
        read_model_config(tmp_path)


def test_reading_a_config_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write_config(tmp_path)
    code = (
        "import sys; from areno.models.model_config import read_model_config; read_model_config(sys.argv[1]);"
        "loaded = sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


HOSTILE: list[Any] = [
    None, True, 0, -1, 1.5, 2**31, 2**64, 10**400, 1e308, float("nan"), float("inf"), "", "x", "\ud800", [], [1], [None], [[1]], {},
    {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    "key",
    [*SIZES, "model_type", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types",
     "max_position_embeddings", "tie_word_embeddings", "attention_bias", "hidden_act", "eos_token_id", "quantization_config"],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_key_is_read_or_refused_by_name_whatever_stands_there(tmp_path: Path, family: str, key: str) -> None:
    for value in HOSTILE:
        try:
            read(tmp_path, family, **{key: value})
        except (CheckpointError, UnsupportedModel) as error:
            assert error.field and error.remedy and len(str(error)) < 1000, (key, value)


@pytest.mark.parametrize("key", SIZES)
def test_a_size_without_end_is_refused_before_anything_is_made_of_it(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{key}=.*a positive integer of at most"):
        read(tmp_path, **{key: 10**400})
