"""Tests on a CUDA device: tiny checkpoints made with areno alone, and the fp32 engine on the CPU as their reference.

Everything here skips where no CUDA device is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from areno.models.model_config import read_model_config
from areno.models.registry import build_model

REASON = "needs a CUDA device"
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "wide": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a device where there is none."""
    for item in items:
        if "tests/gpu/" in item.path.as_posix() and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a maker of tiny checkpoints with initializer_range 0.1, by shape name."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_checkpoint(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


def write_checkpoint(folder: Path, name: str) -> Path:
    """Write a random checkpoint of a named shape."""
    (folder / "config.json").write_text(json.dumps({**BASE, **SHAPES[name]}))
    model = build_model(read_model_config(folder), dtype=torch.float32, device=torch.device("cpu"), num_positions=8)
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for tensor, spec in model.table.manifest().items():
        noise = torch.randn(spec.shape, generator=generator) * 0.1
        tensors[tensor] = noise + 1.0 if "norm" in tensor else noise
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
