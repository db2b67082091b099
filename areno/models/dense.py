"""The dense decoder of the Llama, Qwen2 and Qwen3 families: packed tokens in, hidden states and logits out.

The families differ only in what `ModelConfig` says (biases, QK-norm, head size, tied head). Attention is handed in for
each forward: the caller owns the KV store and knows which tokens see which. One layer is

    x --norm--> qkv --(QK-norm)--> rotate q,k --attend--> o --(+x)--> x --norm--> gate,up --silu(gate)*up--> down --(+x)--> x

Of a model that is cut into ranks a decoder is one rank's part: its heads, its columns of the MLP and its ids. Its attention output and
its MLP output are parts of sums, which the group adds up before they join the residual.

Invariant: a forward reads weights only through live storage, so an update of its contents needs nothing else than
the table's derived hooks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn import functional

from areno.layers.embedding import Embedding, Head
from areno.layers.linear import Linear, allocate_linear
from areno.layers.norm import RMSNorm
from areno.layers.rotary import RotaryAngles, RotaryTable
from areno.models.model_config import ModelConfig
from areno.models.shards import shard_model
from areno.parallel import TPGroup
from areno.weights.cut import Cut
from areno.weights.names import ParameterTable
from areno.weights.shards import TensorShard

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
    """A decoder of one family, for inference only. `table` owns its weights.

    `config` has the heads and MLP columns that are here, `shard` says what of the whole model that is.
    """

    __slots__ = ("_pack_weights", "config", "embedding", "group", "head", "layers", "norm", "rotary", "shard", "table")

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        pack_weights: bool,
        group: TPGroup | None = None,
    ):
        self.group = group = group or TPGroup.single(device)
        self.shard = shard_model(config, group.rank, group.size)
        self.config = config = self.shard.local
        self.table = ParameterTable(dtype, device)
        weight = self._allocate_ids(EMBEDDING_NAME)
        self.embedding = Embedding(weight, first_id=self.shard.ids.start, group=group)
        self._pack_weights = pack_weights
        self.layers = [self._allocate_layer(index) for index in range(config.num_layers)]
        self.norm = self._allocate_norm("model.norm.weight")
        if config.tie_word_embeddings:
            self.table.tie(HEAD_NAME, EMBEDDING_NAME)
        else:
            weight = self._allocate_ids(HEAD_NAME)
        self.head = Head(self.table, weight, pack=pack_weights)
        self.rotary = RotaryTable(config.head_dim, config.rope, num_positions, dtype=dtype, device=device)

    def _allocate_ids(self, name: str) -> torch.Tensor:
        ids, columns = self.shard.ids, Cut.whole(self.config.hidden_size)
        shards = {name: TensorShard.of(ids, columns, ranks=self.group.size)} if self.group.size > 1 else None
        return self.table.allocate(name, (ids.size, columns.size), shards=shards)

    def _allocate_vector(self, name: str, size: int) -> torch.Tensor:
        """Allocate a vector that every rank holds."""
        shards = {name: TensorShard.of(Cut.whole(size), None, ranks=self.group.size)} if self.group.size > 1 else None
        return self.table.allocate(name, (size,), shards=shards)

    def _allocate_norm(self, name: str) -> RMSNorm:
        config = self.config
        return RMSNorm(self._allocate_vector(name, config.hidden_size), config.rms_norm_eps, config.hidden_size)

    def _allocate_linear(self, module: str, name: str, parts: Mapping[str, Cut], in_size: int | Cut, *, bias: bool) -> Linear:
        return allocate_linear(self.table, module, name, parts, in_size, bias=bias, pack=self._pack_weights, ranks=self.group.size)

    def _allocate_layer(self, index: int) -> DenseLayer:
        config, shard = self.config, self.shard
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_rows, kv_rows = shard.heads.times(config.head_dim), shard.kv_heads.times(config.head_dim)
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        gate_up = {"gate_proj": shard.mlp, "up_proj": shard.mlp}
        hidden = Cut.whole(config.hidden_size)
        return DenseLayer(
            attention_norm=self._allocate_norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._allocate_linear(attention, "qkv_proj", qkv, config.hidden_size, bias=config.attention_bias),
            qk_norm=self._allocate_qk_norm(attention) if config.qk_norm else None,
            output=self._allocate_part(attention, "o_proj", hidden, q_rows, bias=config.output_bias),
            mlp_norm=self._allocate_norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._allocate_linear(mlp, "gate_up_proj", gate_up, config.hidden_size, bias=config.mlp_bias),
            down=self._allocate_part(mlp, "down_proj", hidden, shard.mlp, bias=config.mlp_bias),
        )

    def _allocate_part(self, module: str, name: str, rows: Cut, columns: Cut, *, bias: bool) -> Linear:
        """Allocate a projection whose outputs the ranks add up; one of them adds the bias."""
        linear = self._allocate_linear(module, name, {name: rows}, columns, bias=bias)
        return linear if self.group.rank == 0 else replace(linear, bias=None)

    def _allocate_qk_norm(self, attention: str) -> RMSNorm:
        """Allocate q's and k's norm weights and the per-head tensor derived from them, so that one norm does both."""
        config, table = self.config, self.table
        q_weight = self._allocate_vector(f"{attention}.q_norm.weight", config.head_dim)
        k_weight = self._allocate_vector(f"{attention}.k_norm.weight", config.head_dim)
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
            self._add(layer.down, x_T, functional.silu(gate_TI).mul_(up_TI))
        return self.norm(x_T)

    def _add(self, linear: Linear, residual_T: torch.Tensor, x_T: torch.Tensor) -> None:
        """Add a projection to the residual: all ranks' parts of it."""
        if self.group.size == 1:
            linear.add_to(residual_T, x_T)
        else:
            residual_T.add_(self.group.all_reduce_(linear(x_T).contiguous()))

    def _add_attention(self, index: int, layer: DenseLayer, x_T: torch.Tensor, angles: RotaryAngles, attend: Attend) -> None:
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        qkv_THD = layer.qkv(layer.attention_norm(x_T)).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        qk_THD, v_TKD = qkv_THD.split((num_heads + num_kv_heads, num_kv_heads), 1)
        if layer.qk_norm is not None:
            qk_THD = layer.qk_norm(qk_THD)
        q_THD, k_TKD = angles.rotate(qk_THD).split((num_heads, num_kv_heads), 1)
        self._add(layer.output, x_T, attend(index, q_THD, k_TKD, v_TKD).reshape(-1, num_heads * config.head_dim))

    def logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Return the logits of chosen hidden states, of a rank those of its ids. Shapes: [S, hidden] -> [S, W], fp32."""
        return self.head(hidden_SH)
