"""The dense decoder of the Llama, Qwen2 and Qwen3 families: packed tokens in, hidden states and logits out.

The families differ only in what `ModelConfig` says (biases, QK-norm, head size, tied head). Attention is handed in for
each forward: the caller owns the KV store and knows which tokens see which. One layer is

    x --norm--> qkv --(QK-norm)--> rotate q,k --attend--> o --(+x)--> x --norm--> gate,up --silu(gate)*up--> down --(+x)--> x

Invariant: a forward reads weights only through live storage, so an update of its contents needs nothing else than
the table's derived hooks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from areno.layers.embedding import Embedding, Head
from areno.layers.linear import Linear, allocate_linear
from areno.layers.norm import RMSNorm
from areno.layers.rotary import RotaryAngles, RotaryTable
from areno.models.model_config import ModelConfig
from areno.weights.names import ParameterTable

EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"


class Attend(Protocol):
    """Stores the new keys and values of one layer and attends: q and k are normed and rotated, out is [T, H, D]."""

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """The weights of one layer; `qk_norm` holds q's norm for the first heads and k's for the rest."""

    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class DenseDecoder:
    """A decoder of one family, for inference only. `table` owns its weights."""

    __slots__ = ("_pack_weights", "config", "embedding", "head", "layers", "norm", "rotary", "table")

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, num_positions: int, pack_weights: bool):
        self.config = config
        self.table = ParameterTable(dtype, device)
        weight = self.table.allocate(EMBEDDING_NAME, (config.vocab_size, config.hidden_size))
        self.embedding = Embedding(weight)
        self._pack_weights = pack_weights
        self.layers = [self._allocate_layer(index) for index in range(config.num_layers)]
        self.norm = self._allocate_norm("model.norm.weight")
        if config.tie_word_embeddings:
            self.table.tie(HEAD_NAME, EMBEDDING_NAME)
        else:
            weight = self.table.allocate(HEAD_NAME, (config.vocab_size, config.hidden_size))
        self.head = Head(self.table, weight, pack=pack_weights)
        self.rotary = RotaryTable(config.head_dim, config.rope, num_positions, dtype=dtype, device=device)

    def _allocate_norm(self, name: str) -> RMSNorm:
        config = self.config
        return RMSNorm(self.table.allocate(name, (config.hidden_size,)), config.rms_norm_eps, config.hidden_size)

    def _allocate_layer(self, index: int) -> DenseLayer:
        config, table, pack = self.config, self.table, self._pack_weights
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        hidden = {"down_proj": config.hidden_size}
        return DenseLayer(
            attention_norm=self._allocate_norm(f"{prefix}.input_layernorm.weight"),
            qkv=allocate_linear(table, attention, "qkv_proj", qkv, config.hidden_size, bias=config.attention_bias, pack=pack),
            qk_norm=self._allocate_qk_norm(attention) if config.qk_norm else None,
            output=allocate_linear(table, attention, "o_proj", {"o_proj": config.hidden_size}, q_size, bias=config.output_bias, pack=pack),
            mlp_norm=self._allocate_norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=allocate_linear(table, mlp, "gate_up_proj", gate_up, config.hidden_size, bias=config.mlp_bias, pack=pack),
            down=allocate_linear(table, mlp, "down_proj", hidden, config.intermediate_size, bias=config.mlp_bias, pack=pack),
        )

    def _allocate_qk_norm(self, attention: str) -> RMSNorm:
        """Allocate q's and k's norm weights and the per-head tensor derived from them, so that one norm does both."""
        config, table = self.config, self.table
        q_weight = table.allocate(f"{attention}.q_norm.weight", (config.head_dim,))
        k_weight = table.allocate(f"{attention}.k_norm.weight", (config.head_dim,))
        shape = (config.num_heads + config.num_kv_heads, config.head_dim)
        weight = torch.full(shape, math.nan, dtype=table.dtype, device=table.device)

        def rebuild() -> None:
            weight[: config.num_heads].copy_(q_weight.expand(config.num_heads, -1))
            weight[config.num_heads :].copy_(k_weight.expand(config.num_kv_heads, -1))

        table.register_derived(f"{attention}.qk_norm", rebuild)
        return RMSNorm(weight, config.rms_norm_eps, config.head_dim)

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the hidden states after the final norm. Shapes: ids and positions [T] -> [T, hidden], model dtype."""
        angles = self.rotary.select(positions_T)
        x_T = self.embedding(ids_T)
        for index, layer in enumerate(self.layers):
            self._add_attention(index, layer, x_T, angles, attend)
            gate_TI, up_TI = layer.gate_up(layer.mlp_norm(x_T)).chunk(2, -1)
            layer.down.add_to(x_T, functional.silu(gate_TI).mul_(up_TI))
        return self.norm(x_T)

    def _add_attention(self, index: int, layer: DenseLayer, x_T: torch.Tensor, angles: RotaryAngles, attend: Attend) -> None:
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        qkv_THD = layer.qkv(layer.attention_norm(x_T)).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        qk_THD, v_TKD = qkv_THD.split((num_heads + num_kv_heads, num_kv_heads), 1)
        if layer.qk_norm is not None:
            qk_THD = layer.qk_norm(qk_THD)
        q_THD, k_TKD = angles.rotate(qk_THD).split((num_heads, num_kv_heads), 1)
        layer.output.add_to(x_T, attend(index, q_THD, k_TKD, v_TKD).reshape(-1, num_heads * config.head_dim))

    def logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Return the logits of chosen hidden states. Shapes: [S, hidden] -> [S, V], fp32."""
        return self.head(hidden_SH)
