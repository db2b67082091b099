"""What a checkpoint folder says about its model: sizes, rope, biases, end ids. No torch here.

Reads the folder's JSON files itself, without transformers. Both styles of rope keys are understood: `rope_theta`
beside `rope_scaling`, and `rope_parameters` that holds everything. Whatever the decoder does not do is refused by
name: an ignored key of a config is a model that answers fluently and wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError, UnsupportedModel
from areno.models.config_file import ConfigReader, read_json
from areno.models.vocabulary import read_vocabulary

# What a config that lacks the key means, as Hugging Face's own config classes have it.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
MODEL_TYPES: tuple[str, ...] = tuple(_DEFAULTS)
DEFAULT_ROPE_THETA = 10_000.0
_SILU_NAMES = ("silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder's shape. `attention_bias` is for q, k and v, `output_bias` for o; `eos_ids` is sorted.

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
    rope_theta: float
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
    _refuse_unknown_features(reader, model_type)
    num_heads = reader.count("num_attention_heads")
    num_kv_heads = reader.count("num_key_value_heads", _DEFAULTS[model_type].get("num_key_value_heads", num_heads), null=num_heads)
    if num_heads % num_kv_heads:
        raise reader.wrong("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
    vocab_size = reader.count("vocab_size")
    attention_bias = True if model_type == "qwen2" else reader.flag("attention_bias")
    vocabulary = read_vocabulary(folder, raw, vocab_size)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=reader.count("hidden_size"),
        intermediate_size=reader.count("intermediate_size"),
        num_layers=reader.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_read_head_dim(reader, model_type, num_heads),
        rms_norm_eps=reader.positive("rms_norm_eps", 1e-6),
        rope_theta=_read_rope_theta(reader),
        max_position_embeddings=reader.count("max_position_embeddings", _DEFAULTS[model_type]["max_position_embeddings"]),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        attention_bias=attention_bias,
        output_bias=attention_bias and model_type != "qwen2",
        mlp_bias=reader.flag("mlp_bias") if model_type == "llama" else False,
        qk_norm=model_type == "qwen3",
        eos_ids=vocabulary.eos_ids,
        num_valid_ids=vocabulary.num_valid_ids,
    )


def _unsupported(key: str, value: object, known: str, remedy: str) -> UnsupportedModel:
    return UnsupportedModel(f"{key}={value!r} is not supported", field=key, value=value, limit=f"known: {known}", remedy=remedy)


def _read_model_type(raw: Mapping[str, Any]) -> str:
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise _unsupported("model_type", model_type, ", ".join(MODEL_TYPES), "serve a checkpoint of one of these families")
    return str(model_type)


def _refuse_unknown_features(reader: ConfigReader, model_type: str) -> None:
    """Raise UnsupportedModel for what the dense decoder does not compute."""
    raw = reader.raw
    activation = raw.get("hidden_act", "silu")
    if activation not in _SILU_NAMES:
        raise _unsupported("hidden_act", activation, ", ".join(_SILU_NAMES), "serve a model with a SiLU MLP")
    if raw.get("quantization_config") is not None:
        method = (
            raw["quantization_config"].get("quant_method") if isinstance(raw["quantization_config"], dict) else raw["quantization_config"]
        )
        raise _unsupported(
            "quantization_config", method, "none (weights in float32, bfloat16 or float16)", "dequantize the checkpoint and save it again"
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise _unsupported(key, raw[key], "dense models without experts", "serve a dense checkpoint")
    kinds = raw.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - {"full_attention"}) if isinstance(kinds, list) else []
    if others:
        raise _unsupported("layer_types", ", ".join(others), "full_attention", "serve a model with full attention in every layer")
    # Llama has no windows whatever its config says; in Qwen the switch, the width and the first windowed layer decide together.
    windowed = model_type != "llama" and kinds is None and reader.flag("use_sliding_window") and raw.get("sliding_window", 4096) is not None
    first_windowed = raw.get("max_window_layers", 28)
    if windowed and (type(first_windowed) is not int or first_windowed < reader.count("num_hidden_layers")):
        raise _unsupported("use_sliding_window", True, "full attention", "serve a model with use_sliding_window false")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise _unsupported("partial_rotary_factor", raw["partial_rotary_factor"], "1.0", "serve a model that rotates whole heads")


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


def _read_rope_theta(reader: ConfigReader) -> float:
    """Return the rope base from whichever style the config uses; refuse other rope types and styles that disagree."""
    thetas: dict[str, float] = {}
    if reader.raw.get("rope_theta") is not None:
        thetas["rope_theta"] = reader.finite("rope_theta", reader.raw["rope_theta"])
    for key in ("rope_scaling", "rope_parameters"):
        rope = reader.raw.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise reader.wrong(key, rope, "an object is needed")
        _refuse_rope_features(key, rope)
        if rope.get("rope_theta") is not None:
            thetas[f"{key}.rope_theta"] = reader.finite(f"{key}.rope_theta", rope["rope_theta"])
    if len(set(thetas.values())) > 1:
        told = " and ".join(f"{name}={value:g}" for name, value in thetas.items())
        raise CheckpointError(
            f"config.json contradicts itself: {told}",
            field="rope_theta",
            value=thetas,
            limit="the rope base is one number",
            remedy="keep the value that the model was trained with in rope_parameters.rope_theta and delete the other",
        )
    return next(iter(thetas.values()), DEFAULT_ROPE_THETA)


def _refuse_rope_features(key: str, rope: Mapping[str, Any]) -> None:
    remedy = "serve a model with plain rotary positions"
    for name in ("rope_type", "type"):
        if rope.get(name) not in (None, "default"):
            raise _unsupported(f"{key}.{name}", rope[name], "default", remedy)
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise _unsupported(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0", remedy)
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise _unsupported(f"{key}.{nested[0]}", rope[nested[0]], "one set of rope parameters for all layers", remedy)
