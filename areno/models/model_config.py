"""What a checkpoint folder says about its model: sizes, rope, windows, biases, end ids. No torch here.

Reads the folder's JSON files itself, without transformers; the rope keys, the windows and the vocabulary have modules of
their own. Whatever the decoder does not do is refused by name: an ignored key of a config is a model that answers
fluently and wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError
from areno.layers.rope import Rope
from areno.models.config_file import MAX_LAYERS, ConfigReader, read_json, unsupported
from areno.models.rope_config import read_rope
from areno.models.vocabulary import read_vocabulary
from areno.models.window_config import read_windows

# What a config that lacks the key means, as Hugging Face's own config classes have it.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
MODEL_TYPES: tuple[str, ...] = tuple(_DEFAULTS)
_SILU_NAMES = ("silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder's shape. `attention_bias` is for q, k and v, `output_bias` for o; `eos_ids` is sorted.

    `windows` has an entry per layer: how many tokens, its own included, a token attends to there; None for all.
    Ids from `num_valid_ids` on have no token in the tokenizer and are never sampled.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    num_valid_ids: int


def read_model_config(folder: str | Path) -> ModelConfig:
    """Read the model's config from `folder`.

    Raises: CheckpointError (missing, unreadable or contradictory), UnsupportedModel (names what and what is known).
    """
    folder = Path(folder)
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"model={str(folder)!r} {state}",
            field="model",
            value=str(folder),
            limit="a checkpoint is a folder",
            remedy="pass the folder that holds config.json",
        )
    raw = read_json(folder / "config.json")
    if raw is None:
        raise CheckpointError(
            f"{folder} has no config.json",
            field="model",
            value=str(folder),
            limit="it names the model's type and sizes",
            remedy="pass a folder written by save_pretrained",
        )
    reader = ConfigReader(raw)
    model_type = _read_model_type(raw)
    _refuse_unknown_features(raw)
    num_heads = reader.count("num_attention_heads")
    num_kv_heads = reader.count("num_key_value_heads", _DEFAULTS[model_type].get("num_key_value_heads", num_heads), null=num_heads)
    if num_heads % num_kv_heads:
        raise reader.wrong("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
    vocab_size = reader.count("vocab_size")
    attention_bias = True if model_type == "qwen2" else reader.flag("attention_bias")
    vocabulary = read_vocabulary(folder, raw, vocab_size)
    num_layers = reader.count("num_hidden_layers", most=MAX_LAYERS)
    num_positions = reader.count("max_position_embeddings", _DEFAULTS[model_type]["max_position_embeddings"])
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=reader.count("hidden_size"),
        intermediate_size=reader.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_read_head_dim(reader, model_type, num_heads),
        rms_norm_eps=reader.positive("rms_norm_eps", 1e-6),
        rope=read_rope(reader, num_positions),
        windows=read_windows(reader, num_layers, num_positions, may_slide=model_type != "llama"),
        max_position_embeddings=num_positions,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        attention_bias=attention_bias,
        output_bias=attention_bias and model_type != "qwen2",
        mlp_bias=reader.flag("mlp_bias") if model_type == "llama" else False,
        qk_norm=model_type == "qwen3",
        eos_ids=vocabulary.eos_ids,
        num_valid_ids=vocabulary.num_valid_ids,
    )


def _read_model_type(raw: Mapping[str, Any]) -> str:
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise unsupported("model_type", model_type, ", ".join(MODEL_TYPES), "serve a checkpoint of one of these families")
    return str(model_type)


def _refuse_unknown_features(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for what the dense decoder does not compute."""
    activation = raw.get("hidden_act", "silu")
    if activation not in _SILU_NAMES:
        raise unsupported("hidden_act", activation, ", ".join(_SILU_NAMES), "serve a model with a SiLU MLP")
    if raw.get("quantization_config") is not None:
        method = (
            raw["quantization_config"].get("quant_method") if isinstance(raw["quantization_config"], dict) else raw["quantization_config"]
        )
        raise unsupported(
            "quantization_config", method, "none (weights in float32, bfloat16 or float16)", "dequantize the checkpoint and save it again"
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise unsupported(key, raw[key], "dense models without experts", "serve a dense checkpoint")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise unsupported("partial_rotary_factor", raw["partial_rotary_factor"], "1.0", "serve a model that rotates whole heads")


def _read_head_dim(reader: ConfigReader, model_type: str, num_heads: int) -> int:
    """Return head_dim: the config's value wins; what absence and null mean depends on the family."""
    derived = reader.count("hidden_size") // num_heads
    head_dim = reader.count("head_dim", _DEFAULTS[model_type].get("head_dim", derived), null=derived if model_type == "llama" else None)
    if "head_dim" not in _DEFAULTS[model_type] and reader.raw.get("head_dim") is None and reader.count("hidden_size") % num_heads:
        raise reader.wrong(
            "hidden_size", reader.raw["hidden_size"], f"without head_dim it must be a multiple of num_attention_heads ({num_heads})"
        )
    if head_dim % 2:
        raise reader.wrong("head_dim", head_dim, "rotary positions need an even number")
    return head_dim
