"""The dense decoder on a CUDA device: the same weights as `DenseDecoder`, run by fused kernels.

`decode` is one token for each lane of a bucket, made to be captured: it allocates nothing, asks the device nothing and
writes the buffers it is given. Few rows go through five launches a layer,

    x --[norm, qkv]--> --[QK-norm, rotate, store, attend]--> --[o, +x]--> x --[norm, gate, up, silu *]--> --[down, +x]--> x

more rows through the library's products with the small parts between them. `prefill` runs packed prompt chunks that may
continue pages that are filled. Hidden states stay in the model's dtype between launches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from areno.kernels import linear as products
from areno.kernels.activation import silu_mul
from areno.kernels.attention import TILING, WorkList, Workspace, build_work_list, decode_attention_fused
from areno.kernels.norm import add_rms_norm, rms_norm
from areno.kernels.rope_kv import rope_kv
from areno.kernels.rows import LaneBuffers
from areno.kv.store import KVStore
from areno.models.dense import DenseDecoder, DenseLayer

FUSED_ROWS = 16
"""Up to this many rows the fused products are used."""

SHORT_TOKENS = 1024
"""Rows up to this length go through a plain grid of chunks; longer ones through a work list."""

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Memory inside a decode step, shared by all buckets and layers. Shapes: [B, columns] each."""

    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    delta: torch.Tensor
    gate_up: torch.Tensor
    active: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """Packed prompt chunks. Shapes: ids, positions, slots [T] int32; `starts_q` and `starts_k` int32 [C + 1]; `places` int64 [S].

    `places` are the slots of all keys that the chunks see, chunk by chunk: what was cached, then what this prefill stores.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts_q: torch.Tensor
    starts_k: torch.Tensor
    places: torch.Tensor
    counts: Sequence[int]
    spans: Sequence[int]


class FusedDecoder:
    """Runs `model` with kernels over `store`. Shapes: page table [R, P] int32."""

    def __init__(self, model: DenseDecoder, store: KVStore, *, lanes: int, max_tokens: int, pdl: bool = False) -> None:
        config = model.config
        self._model, self._store, self._config = model, store, config
        self._pdl = pdl and torch.cuda.get_device_capability(model.table.device) >= (9, 0)
        device, dtype = model.table.device, model.table.dtype
        self._scale = 1.0 / math.sqrt(config.head_dim)
        self._qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._angles = model.rotary.angles
        self._programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count
        self._max_chunks = TILING.max_chunks(max_tokens)
        self._workspace = Workspace.allocate(
            lanes=lanes,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            chunks=self._max_chunks,
            device=device,
        )
        self._split = products.allocate_workspace(device)
        windows = sorted({window or 0 for window in config.windows})
        self._work = {window: WorkList.allocate(lanes=lanes, chunks=self._max_chunks, device=device) for window in windows}
        columns = {
            "normed": config.hidden_size,
            "qkv": self._qkv_size,
            "attended": config.num_heads * config.head_dim,
            "delta": config.hidden_size,
            "gate_up": 2 * config.intermediate_size,
            "active": config.intermediate_size,
        }
        self._scratch = Scratch(**{name: torch.empty((lanes, size), dtype=dtype, device=device) for name, size in columns.items()})

    def spans_short(self, longest: int) -> bool:
        """Return whether rows of at most `longest` tokens take the plain grid: part of what a captured step is."""
        return longest <= SHORT_TOKENS

    @property
    def pdl(self) -> bool:
        """Whether a step's kernels start before the one before them has ended."""
        return self._pdl

    @property
    def embedding(self) -> torch.Tensor:
        """Rows of the token embedding. Shapes: [V, hidden]."""
        return self._model.embedding.weight

    def decode(self, lanes: LaneBuffers, x_BH: torch.Tensor, logits_BV: torch.Tensor, page_table_RP: torch.Tensor, *, short: bool) -> None:
        """Run one token of each lane from its embedding in `x` to its logits. Mutates: x, logits, scratch, the store."""
        work: dict[int, WorkList] = {}
        if not short:
            work = self._work
            for window, listed in work.items():
                build_work_list(
                    lanes.lengths, lanes.running, listed, max_chunks=self._max_chunks, page_size=self._store.page_size, window=window
                )
        if x_BH.shape[0] <= FUSED_ROWS:
            self._decode_fused(lanes, x_BH, logits_BV, page_table_RP, work)
        else:
            self._decode_products(lanes, x_BH, logits_BV, page_table_RP, work)

    def _decode_fused(
        self, lanes: LaneBuffers, x: torch.Tensor, logits: torch.Tensor, page_table_RP: torch.Tensor, work: dict[int, WorkList]
    ) -> None:
        count, split, pdl = x.shape[0], self._split, self._pdl
        qkv, attended, active = self._scratch.qkv[:count], self._scratch.attended[:count], self._scratch.active[:count]
        for index, layer in enumerate(self._model.layers):
            norm, linear = layer.attention_norm, layer.qkv
            products.fused_norm_linear(x, norm.weight, norm.eps, linear.weight, linear.bias, qkv, workspace=split, pdl=pdl)
            self._attend(index, layer, lanes, qkv, attended, page_table_RP, work)
            products.linear_add(attended, layer.output.weight, layer.output.bias, x, workspace=split, pdl=pdl)
            norm, linear = layer.mlp_norm, layer.gate_up
            products.fused_norm_gate_up(x, norm.weight, norm.eps, linear.weight, linear.bias, active, workspace=split, pdl=pdl)
            products.linear_add(active, layer.down.weight, layer.down.bias, x, workspace=split, pdl=pdl)
        norm = self._model.norm
        products.fused_norm_linear(x, norm.weight, norm.eps, self._model.head.weight, None, logits, workspace=split, pdl=pdl)

    def _decode_products(
        self, lanes: LaneBuffers, x: torch.Tensor, logits: torch.Tensor, page_table_RP: torch.Tensor, work: dict[int, WorkList]
    ) -> None:
        count, scratch = x.shape[0], self._scratch
        normed, qkv, attended = scratch.normed[:count], scratch.qkv[:count], scratch.attended[:count]
        delta, gate_up, active = scratch.delta[:count], scratch.gate_up[:count], scratch.active[:count]
        layers = self._model.layers
        rms_norm(x, layers[0].attention_norm.weight, layers[0].attention_norm.eps, normed, pdl=self._pdl)
        for index, layer in enumerate(layers):
            following = layers[index + 1].attention_norm if index + 1 < len(layers) else self._model.norm
            _product(normed, layer.qkv.weight, layer.qkv.bias, qkv)
            self._attend(index, layer, lanes, qkv, attended, page_table_RP, work)
            _product(attended, layer.output.weight, layer.output.bias, delta)
            add_rms_norm(x, delta, layer.mlp_norm.weight, layer.mlp_norm.eps, normed, pdl=self._pdl)
            _product(normed, layer.gate_up.weight, layer.gate_up.bias, gate_up)
            silu_mul(gate_up, active, pdl=self._pdl)
            _product(active, layer.down.weight, layer.down.bias, delta)
            add_rms_norm(x, delta, following.weight, following.eps, normed, pdl=self._pdl)
        self.head_into(normed, logits)

    def _attend(
        self,
        index: int,
        layer: DenseLayer,
        lanes: LaneBuffers,
        qkv: torch.Tensor,
        attended: torch.Tensor,
        page_table_RP: torch.Tensor,
        work: dict[int, WorkList],
    ) -> None:
        config = self._config
        window = config.windows[index] or 0
        decode_attention_fused(
            qkv,
            None if layer.qk_norm is None else layer.qk_norm.weight,
            self._angles,
            self._store.keys[index],
            self._store.values[index],
            page_table_RP,
            lanes.lengths,
            lanes.running,
            attended.view(-1, config.num_heads, config.head_dim),
            self._workspace,
            eps=config.rms_norm_eps,
            scale=self._scale,
            max_chunks=self._max_chunks if work else TILING.max_chunks(SHORT_TOKENS),
            window=window,
            work=work.get(window),
            num_programs=self._programs,
            pdl=self._pdl,
        )

    def head_into(self, normed_SH: torch.Tensor, logits_SV: torch.Tensor) -> None:
        """Write the logits of normed hidden states. Shapes: [S, hidden] to [S, V] fp32."""
        weight = self._model.head.weight
        if weight.dtype == torch.float32:
            torch.mm(normed_SH, weight.t(), out=logits_SV)
        else:
            torch.mm(normed_SH, weight.t(), out_dtype=torch.float32, out=logits_SV)

    def prefill(self, plan: ChunkPlan) -> torch.Tensor:
        """Run packed chunks; return the hidden states after the final norm. Shapes: [T, hidden]. Mutates: the store."""
        config, layers = self._config, self._model.layers
        x = self._model.embedding(plan.ids)
        normed, q = torch.empty_like(x), x.new_empty((x.shape[0], config.num_heads, config.head_dim))
        rms_norm(x, layers[0].attention_norm.weight, layers[0].attention_norm.eps, normed)
        active = x.new_empty((x.shape[0], config.intermediate_size))
        for index, layer in enumerate(layers):
            following = layers[index + 1].attention_norm if index + 1 < len(layers) else self._model.norm
            qkv = functional.linear(normed, layer.qkv.weight, layer.qkv.bias)
            keys, values = self._store.keys[index], self._store.values[index]
            weight = None if layer.qk_norm is None else layer.qk_norm.weight
            rope_kv(qkv, plan.positions, plan.slots, self._angles, weight, q, keys, values, eps=config.rms_norm_eps)
            attended = self._attend_chunks(index, q, plan)
            delta = functional.linear(attended.view(x.shape[0], -1), layer.output.weight, layer.output.bias)
            add_rms_norm(x, delta, layer.mlp_norm.weight, layer.mlp_norm.eps, normed)
            silu_mul(functional.linear(normed, layer.gate_up.weight, layer.gate_up.bias), active)
            delta = functional.linear(active, layer.down.weight, layer.down.bias)
            add_rms_norm(x, delta, following.weight, following.eps, normed)
        return normed

    def _attend_chunks(self, index: int, q_THD: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
        keys, values = (tensor[index].flatten(0, 1).index_select(0, plan.places) for tensor in (self._store.keys, self._store.values))
        window = self._config.windows[index] or 0
        if q_THD.dtype != torch.float32:
            attended: torch.Tensor = varlen_attn(
                q_THD,
                keys,
                values,
                plan.starts_q,
                plan.starts_k,
                max(plan.counts),
                max(plan.spans),
                window_size=(window - 1 if window else -1, 0),
                **_GROUPED,
            )  # type: ignore[assignment]
            return attended
        return _reference_attention(q_THD, keys, values, plan.counts, plan.spans, window)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _reference_attention(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, counts: Sequence[int], spans: Sequence[int], window: int
) -> torch.Tensor:
    """Attend chunk by chunk in the inputs' dtype: the fast kernels take half-precision numbers only."""
    share = q_THD.shape[1] // k_SKD.shape[1]
    parts, first_q, first_k = [], 0, 0
    for count, span in zip(counts, spans):
        q = q_THD[first_q : first_q + count].transpose(0, 1)
        k, v = (tensor[first_k : first_k + span].repeat_interleave(share, dim=1).transpose(0, 1) for tensor in (k_SKD, v_SKD))
        query = torch.arange(span - count, span, device=q.device)[:, None]
        key = torch.arange(span, device=q.device)[None, :]
        seen = key <= query
        if window:
            seen &= key > query - window
        parts.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1))
        first_q, first_k = first_q + count, first_k + span
    if first_q < q_THD.shape[0]:
        parts.append(torch.zeros_like(q_THD[first_q:]))
    return torch.cat(parts)
