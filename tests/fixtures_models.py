"""Tiny random checkpoints of the supported families and what transformers says about them.

Every test that needs a model or a right value takes it from here. The reference is one full forward in fp32 with
eager attention, no cache, batch 1; log-probabilities are taken in float64. Weights have standard deviation 0.1: at the
usual 0.02 a lost projection moves a log-probability less than bf16 rounding does. Norm weights and biases are random
too, so that one that is skipped, or applied twice, shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from areno.models.dense import DenseDecoder
from areno.models.model_config import read_model_config
from areno.models.registry import build_model
from areno.weights.load import load_checkpoint
from areno.weights.names import TensorSpec, dtype_name

FAMILIES = ("llama", "qwen2", "qwen3")
_CONFIGS = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
_MODELS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """Return a transformers model of `family` with random fp32 weights drawn from `seed`.

    `overrides` are config fields. Qwen3 gets head_dim 32, so that heads x head_dim (128) is not the hidden size (64).
    """
    sizes = {**_SIZES, **({"head_dim": 32} if family == "qwen3" else {}), **overrides}
    config = getattr(transformers, _CONFIGS[family])(**sizes)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, _MODELS[family])(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.normal_(1.0, 0.1)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
    return model.requires_grad_(False)


def write_checkpoint(
    folder: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a tiny checkpoint (config.json, generation_config.json, safetensors) and return its folder."""
    folder = Path(folder)
    tiny_model(family, seed=seed, **overrides).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def checkpoint_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint by its name, whatever the shards."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Return the manifest that announces `tensors`."""
    return {name: TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def reference_model(folder: str | Path) -> Any:
    """Load a checkpoint with transformers, in fp32 with eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval().requires_grad_(False)


def _model_of(folder_or_model: Any) -> Any:
    return reference_model(folder_or_model) if isinstance(folder_or_model, (str, Path)) else folder_or_model


def reference_logits(folder_or_model: Any, ids: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Return the logits after every position. Shapes: [n, V], float32."""
    model = _model_of(folder_or_model)
    with torch.no_grad():
        return model(input_ids=torch.as_tensor(np.asarray(ids, dtype=np.int64))[None], use_cache=False).logits[0].float()


def _chosen_logprobs(logits_TV: torch.Tensor, ids: np.ndarray, temperature: float) -> np.ndarray:
    logprobs_TV = torch.log_softmax(logits_TV[: len(ids) - 1].double() / temperature, dim=-1)
    return logprobs_TV.gather(1, torch.as_tensor(ids[1:])[:, None])[:, 0].numpy()


def reference_logprobs(folder_or_model: Any, ids: Sequence[int] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the log-probability of ids[1:], each given all ids before it. Shapes: float64 [n - 1]."""
    ids = np.asarray(ids, dtype=np.int64)
    return _chosen_logprobs(reference_logits(folder_or_model, ids), ids, temperature)


def reference_keep_logprobs(
    models: Mapping[int, Any], ids: Sequence[int] | np.ndarray, position_versions: Sequence[int] | np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Return the log-probability of ids[1:] when position i ran, on one shared cache, with the weights of `position_versions[i]`.

    `models` maps a version to a transformers model; the token at i + 1 belongs to the version of position i.
    Shapes: float64 [n - 1]; `position_versions` has n - 1 or n entries.
    """
    ids = np.asarray(ids, dtype=np.int64)
    versions = [int(version) for version in position_versions][: len(ids) - 1]
    cache, rows, start = transformers.DynamicCache(), [], 0
    with torch.no_grad():
        while start < len(versions):
            end = start
            while end < len(versions) and versions[end] == versions[start]:
                end += 1
            output = models[versions[start]](input_ids=torch.as_tensor(ids[None, start:end]), cache=cache, use_cache=True)
            rows.append(output.logits[0].float())
            start = end
    return _chosen_logprobs(torch.cat(rows), ids, temperature)


class DenseCache:
    """Attention over one sequence that keeps all keys and values: the plain form of what paged attention computes.

    Successive forwards continue the sequence, so whole prompts, chunks and single tokens all work.
    """

    def __init__(self) -> None:
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        """Append the new keys and values and attend causally, with fp32 scores."""
        if layer in self._keys:
            k_TKD, v_TKD = torch.cat((self._keys[layer], k_TKD)), torch.cat((self._values[layer], v_TKD))
        self._keys[layer], self._values[layer] = k_TKD, v_TKD
        num_queries, num_heads, head_dim = q_THD.shape
        num_keys, repeats = k_TKD.shape[0], num_heads // k_TKD.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q_THD, k_TKD.repeat_interleave(repeats, 1)).float() / math.sqrt(head_dim)
        later = torch.arange(num_keys) > torch.arange(num_keys - num_queries, num_keys)[:, None]
        weights = scores.masked_fill(later, -math.inf).softmax(-1).to(q_THD.dtype)
        return torch.einsum("hqk,khd->qhd", weights, v_TKD.repeat_interleave(repeats, 1))


def load_decoder(folder: str | Path, dtype: torch.dtype = torch.float32) -> DenseDecoder:
    """Return the engine's decoder with the weights of `folder`."""
    decoder = build_model(read_model_config(folder), dtype=dtype, device=torch.device("cpu"))
    load_checkpoint(folder, decoder.table)
    return decoder


def decoder_logprobs(
    decoder: DenseDecoder, ids: Sequence[int] | np.ndarray, temperature: float = 1.0, chunks: Sequence[int] = ()
) -> np.ndarray:
    """Return what `reference_logprobs` does, from the engine's decoder; `chunks` are the lengths of the first forwards."""
    ids = np.asarray(ids, dtype=np.int64)
    cache, rows, start = DenseCache(), [], 0
    with torch.inference_mode():
        for length in (*chunks, len(ids) - sum(chunks)):
            positions = torch.arange(start, start + length)
            rows.append(decoder.logits(decoder.forward(torch.as_tensor(ids)[positions], positions, cache)))
            start += length
    return _chosen_logprobs(torch.cat(rows), ids, temperature)
