"""Writes GGUF files of tiny models for the tests, with the `gguf` package and from the format's description.

A Llama file interleaves the two halves of each head's rotary pairs in its query and key rows, each with its own head count; the other
families keep transformers' order. A tied model has no output tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows of a projection in a Llama file's order."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def file_name(name: str) -> str:
    """Return the file's name of a transformers tensor."""
    *path, kind = name.split(".")
    if path[:2] == ["model", "layers"]:
        return f"blk.{path[2]}.{NAMES['.'.join(path[3:])]}.{kind}"
    return f"{NAMES['.'.join(path)]}.{kind}"


def file_tensors(model: Any) -> dict[str, np.ndarray]:
    """Return a model's tensors by the file's names and in the file's order."""
    config = model.config
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = interleaved(values, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        found[file_name(name)] = np.ascontiguousarray(values)
    return found


def file_fields(config: Any) -> dict[str, int | float]:
    """Return the fields of a model's own architecture, without the prefix."""
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }


def byte_tokens() -> list[str]:
    """Return a vocabulary of all bytes, one merge and three control tokens: 260 tokens."""
    return [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str | None = None,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    tokenizer: bool = False,
    pre: str = "smollm",
) -> Path:
    """Write a model as an F32 GGUF file; `fields` and `tensors` replace, add or, as None, leave out."""
    architecture = architecture or model.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**file_fields(model.config), **(fields or {})}.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{name}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{name}", value)
    if tokenizer:
        tokens = byte_tokens()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
        writer.add_token_merges(["Ġ Ġ"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(0)
        writer.add_add_bos_token(False)
        writer.add_chat_template(TEMPLATE)
    for name, values in {**file_tensors(model), **(tensors or {})}.items():
        if values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
