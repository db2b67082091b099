"""The dense decoder on a CUDA device: the same weights as `DenseDecoder`, run by fused kernels.

`decode` is one token for each lane of a bucket, made to be captured: it allocates nothing, asks the device nothing and
writes the buffers it is given. Few rows go through five launches a layer,

    x --[norm, qkv]--> --[QK-norm, rotate, store, attend]--> --[o, +x]--> x --[norm, gate, up, silu *]--> --[down, +x]--> x

more rows through the library's products with the small parts between them. `prefill` runs packed prompt chunks that may
continue pages that are filled; it can be captured too where the device reads their lengths. Hidden states stay in the
model's dtype between launches.

A rank of several has its own heads, MLP columns and ids. Attention output and MLP output are then parts of sums: they go to a buffer
of their own, are added up over the ranks, and join the residual together with the next norm. Few rows do both in one kernel that reads
the other ranks' memory (`areno.peer_sums`); a kernel behind a library's collective is not started before that has ended.
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
from areno.kernels.attention import (
    FEW_ROWS_TILING,
    MANY_ROWS_TILING,
    PROGRAMS_PER_PROCESSOR,
    TILING,
    Tiling,
    WorkList,
    Workspace,
    build_work_list,
    decode_attention_fused,
)
from areno.kernels.norm import add_rms_norm, rms_norm
from areno.kernels.prefill_attention import prefill_attention
from areno.kernels.rope_kv import rope_kv
from areno.kernels.rows import LaneBuffers
from areno.kv.store import KVStore
from areno.layers.norm import RMSNorm
from areno.models.dense import DenseDecoder, DenseLayer
from areno.peer_sums import PeerSums

FUSED_ROWS = 16
"""Up to this many rows the fused products are used."""

MANY_ROWS = 128
"""From this many rows on attention goes through more and smaller programs."""

SPANS = (512, 1024, 2048, 4096, 8192)
"""Bounds on the length of all rows for which a step has a grid of its own; longer rows go through a work list."""

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Memory inside a step or a prefill, shared by all sizes and layers. Shapes: [tokens, columns] each."""

    x: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    attended: torch.Tensor
    delta: torch.Tensor
    gate_up: torch.Tensor
    active: torch.Tensor

    def first(self, tokens: int) -> Scratch:
        """Return room for this many tokens, in place."""
        return Scratch(**{name: getattr(self, name)[:tokens] for name in Scratch.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedChunks:
    """Prompt chunks whose lengths the device reads. Shapes: `blocks` int32 [NB, 4] and `pages` int32 as in `prefill_attention`."""

    blocks: torch.Tensor
    pages: torch.Tensor
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenChunks:
    """Prompt chunks whose lengths the host knows. Shapes: `starts_q` and `starts_k` int32 [C + 1]; `places` int64 [S].

    `places` are the slots of all keys that the chunks see, chunk by chunk: what was cached, then what this prefill stores.
    """

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    places: torch.Tensor
    counts: Sequence[int]
    spans: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenRows:
    """What a decode step attends to. `work` lists chunks by window where the grid is not bounded by `max_chunks` a lane."""

    lanes: LaneBuffers
    page_table: torch.Tensor
    work: dict[int, WorkList]
    max_chunks: int
    tiling: Tiling


class FusedDecoder:
    """Runs `model` with kernels over `store`. Shapes: page table [R, P] int32."""

    def __init__(self, model: DenseDecoder, store: KVStore, *, lanes: int, prefill_tokens: int, max_tokens: int, pdl: bool = True) -> None:
        config = model.config
        self._model, self._store, self._config, self._group = model, store, config, model.group
        self._pdl = pdl and torch.cuda.get_device_capability(model.table.device) >= (9, 0)
        device, dtype = model.table.device, model.table.dtype
        self._scale = 1.0 / math.sqrt(config.head_dim)
        self._qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._angles = model.rotary.angles
        self._programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        self._max_tokens = max_tokens
        most_chunks = max(tiling.max_chunks(max_tokens) for tiling in (TILING, FEW_ROWS_TILING, MANY_ROWS_TILING))
        self._workspace = Workspace.allocate(
            lanes=lanes,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            chunks=most_chunks,
            device=device,
        )
        self._split = products.allocate_workspace(device)
        windows = sorted({window or 0 for window in config.windows})
        self._work = {window: WorkList.allocate(lanes=lanes, chunks=most_chunks, device=device) for window in windows}
        columns = {
            "x": config.hidden_size,
            "normed": config.hidden_size,
            "qkv": self._qkv_size,
            "q": config.num_heads * config.head_dim,
            "attended": config.num_heads * config.head_dim,
            "delta": config.hidden_size,
            "gate_up": 2 * config.intermediate_size,
            "active": config.intermediate_size,
        }
        self._peers: PeerSums | None = None
        if self._group.size > 1:
            self._peers = PeerSums.connect(self._group, rows=lanes, hidden=config.hidden_size, dtype=dtype)
        rows = max(lanes, prefill_tokens)
        self._scratch = Scratch(**{name: torch.zeros((rows, size), dtype=dtype, device=device) for name, size in columns.items()})

    def span_of(self, longest: int) -> int:
        """Return the bound on lengths that a step over rows of at most `longest` tokens is made for; 0 beyond all of them."""
        return next((span for span in SPANS if span >= longest), 0)

    @property
    def pdl(self) -> bool:
        """Whether a step's kernels start before the one before them has ended."""
        return self._pdl

    @property
    def embedding(self) -> torch.Tensor:
        """Rows of the token embedding, of a rank those of its ids. Shapes: [V, hidden]."""
        return self._model.embedding.weight

    def decode(self, lanes: LaneBuffers, x_BH: torch.Tensor, logits_BV: torch.Tensor, page_table_RP: torch.Tensor, *, span: int) -> None:
        """Run one token of each lane from its embedding in `x` to its logits; no row is longer than `span`, if that is not 0.

        Mutates: x, logits, scratch, the store.
        """
        work: dict[int, WorkList] = {}
        fused = x_BH.shape[0] <= FUSED_ROWS
        tiling = FEW_ROWS_TILING if fused else TILING if x_BH.shape[0] < MANY_ROWS else MANY_ROWS_TILING
        max_chunks = tiling.max_chunks(span or self._max_tokens)
        if not span:
            work = self._work
            for window, listed in work.items():
                build_work_list(
                    lanes.lengths,
                    lanes.running,
                    listed,
                    max_chunks=max_chunks,
                    page_size=self._store.page_size,
                    window=window,
                    tiling=tiling,
                )
        seen = _SeenRows(lanes=lanes, page_table=page_table_RP, work=work, max_chunks=max_chunks, tiling=tiling)
        if fused and self._group.size > 1:
            self._decode_ranks(x_BH, logits_BV, seen)
        elif fused:
            self._decode_fused(x_BH, logits_BV, seen)
        else:
            self._decode_products(x_BH, logits_BV, seen)

    def _decode_fused(self, x: torch.Tensor, logits: torch.Tensor, seen: _SeenRows) -> None:
        count, split, pdl = x.shape[0], self._split, self._pdl
        qkv, attended, active = self._scratch.qkv[:count], self._scratch.attended[:count], self._scratch.active[:count]
        for index, layer in enumerate(self._model.layers):
            norm, linear = layer.attention_norm, layer.qkv
            products.fused_norm_linear(x, norm.weight, norm.eps, linear.weight, linear.bias, qkv, workspace=split, pdl=pdl)
            self._attend(index, layer, qkv, attended, seen)
            products.linear_add(attended, layer.output.weight, layer.output.bias, x, workspace=split, pdl=pdl)
            norm, linear = layer.mlp_norm, layer.gate_up
            products.fused_norm_gate_up(x, norm.weight, norm.eps, linear.weight, linear.bias, active, workspace=split, pdl=pdl)
            products.linear_add(active, layer.down.weight, layer.down.bias, x, workspace=split, pdl=pdl)
        norm = self._model.norm
        products.fused_norm_linear(x, norm.weight, norm.eps, self._model.head.weight, None, logits, workspace=split, pdl=pdl)

    def _decode_ranks(self, x: torch.Tensor, logits: torch.Tensor, seen: _SeenRows) -> None:
        """Run few rows where other ranks hold the rest of each layer."""
        scratch, split, pdl = self._scratch.first(x.shape[0]), self._split, self._pdl
        normed, active, layers = scratch.normed, scratch.active, self._model.layers

        def multiply(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
            products.fused_norm_linear(source, None, 0.0, weight, bias, out, workspace=split, pdl=pdl)

        rms_norm(x, layers[0].attention_norm.weight, layers[0].attention_norm.eps, normed)
        for index, layer in enumerate(layers):
            following = layers[index + 1].attention_norm if index + 1 < len(layers) else self._model.norm
            multiply(normed, layer.qkv.weight, layer.qkv.bias, scratch.qkv)
            self._attend(index, layer, scratch.qkv, scratch.attended, seen)
            multiply(scratch.attended, layer.output.weight, layer.output.bias, self._part(0, scratch))
            self._add(0, x, layer.mlp_norm, scratch)
            linear = layer.gate_up
            products.fused_norm_gate_up(normed, None, 0.0, linear.weight, linear.bias, active, workspace=split, pdl=pdl)
            multiply(active, layer.down.weight, layer.down.bias, self._part(1, scratch))
            self._add(1, x, following, scratch)
        multiply(normed, self._model.head.weight, None, logits)

    def _part(self, turn: int, scratch: Scratch) -> torch.Tensor:
        """Return where this rank's part of a layer's first (0) or second (1) sum goes. Shapes: [tokens, hidden]."""
        tokens = scratch.x.shape[0]
        return scratch.delta if self._peers is None or tokens > self._peers.rows else self._peers.part(turn, tokens)

    def _add(self, turn: int, x: torch.Tensor, norm: RMSNorm, scratch: Scratch) -> None:
        """Add that sum, of all ranks, to the residual and norm it. Mutates: x, scratch."""
        normed, delta = scratch.normed, scratch.delta
        if self._peers is not None and x.shape[0] <= self._peers.rows:
            self._peers.add_rms_norm(turn, x, norm.weight, norm.eps, normed, pdl=self._pdl)
            return
        self._group.all_reduce_(delta)
        add_rms_norm(x, delta, norm.weight, norm.eps, normed, pdl=self._pdl and self._group.size == 1)

    def _decode_products(self, x: torch.Tensor, logits: torch.Tensor, seen: _SeenRows) -> None:
        scratch = self._scratch.first(x.shape[0])
        normed = scratch.normed
        layers = self._model.layers
        first, alone = layers[0].attention_norm, self._group.size == 1
        rms_norm(x, first.weight, first.eps, normed, pdl=self._pdl and alone)
        for index, layer in enumerate(layers):
            following = layers[index + 1].attention_norm if index + 1 < len(layers) else self._model.norm
            _product(normed, layer.qkv.weight, layer.qkv.bias, scratch.qkv)
            self._attend(index, layer, scratch.qkv, scratch.attended, seen)
            self._finish_layer(layer, following, x, scratch)
        self.head_into(normed, logits)

    def _attend(self, index: int, layer: DenseLayer, qkv: torch.Tensor, attended: torch.Tensor, seen: _SeenRows) -> None:
        config = self._config
        window = config.windows[index] or 0
        decode_attention_fused(
            qkv,
            None if layer.qk_norm is None else layer.qk_norm.weight,
            self._angles,
            self._store.keys[index],
            self._store.values[index],
            seen.page_table,
            seen.lanes.lengths,
            seen.lanes.running,
            attended.view(-1, config.num_heads, config.head_dim),
            self._workspace,
            eps=config.rms_norm_eps,
            scale=self._scale,
            max_chunks=seen.max_chunks,
            window=window,
            work=seen.work.get(window),
            num_programs=self._programs,
            tiling=seen.tiling,
            pdl=self._pdl,
        )

    def head_into(self, normed_SH: torch.Tensor, logits_SV: torch.Tensor) -> None:
        """Write the logits of normed hidden states. Shapes: [S, hidden] to [S, V] fp32."""
        weight = self._model.head.weight
        if weight.dtype == torch.float32:
            torch.mm(normed_SH, weight.t(), out=logits_SV)
        else:
            torch.mm(normed_SH, weight.t(), out_dtype=torch.float32, out=logits_SV)

    def _finish_layer(self, layer: DenseLayer, following: RMSNorm, x: torch.Tensor, scratch: Scratch) -> None:
        """Go from what was attended to the next layer's normed input. Mutates: x, scratch."""
        _product(scratch.attended, layer.output.weight, layer.output.bias, self._part(0, scratch))
        self._add(0, x, layer.mlp_norm, scratch)
        _product(scratch.normed, layer.gate_up.weight, layer.gate_up.bias, scratch.gate_up)
        silu_mul(scratch.gate_up, scratch.active, pdl=self._pdl)
        _product(scratch.active, layer.down.weight, layer.down.bias, self._part(1, scratch))
        self._add(1, x, following, scratch)

    @property
    def prefilled(self) -> torch.Tensor:
        """Hidden states of the last prefill. Shapes: [tokens, hidden]."""
        return self._scratch.normed

    def prefill(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, chunks: PagedChunks | SeenChunks) -> torch.Tensor:
        """Run packed chunks; return the hidden states after the final norm. Shapes: int32 [T]; [T, hidden]. Mutates: scratch, the store."""
        config, layers = self._config, self._model.layers
        scratch = self._scratch.first(ids.shape[0])
        heads = (-1, config.num_heads, config.head_dim)
        q, attended = scratch.q.view(heads), scratch.attended.view(heads)
        if self._group.size == 1:
            torch.index_select(self.embedding, 0, ids, out=scratch.x)
        else:
            scratch.x.copy_(self._model.embedding(ids))
        rms_norm(scratch.x, layers[0].attention_norm.weight, layers[0].attention_norm.eps, scratch.normed)
        for index, layer in enumerate(layers):
            following = layers[index + 1].attention_norm if index + 1 < len(layers) else self._model.norm
            _product(scratch.normed, layer.qkv.weight, layer.qkv.bias, scratch.qkv)
            keys, values = self._store.keys[index], self._store.values[index]
            weight = None if layer.qk_norm is None else layer.qk_norm.weight
            rope_kv(scratch.qkv, positions, slots, self._angles, weight, q, keys, values, eps=config.rms_norm_eps)
            window = config.windows[index] or 0
            if isinstance(chunks, PagedChunks):
                prefill_attention(
                    q,
                    keys,
                    values,
                    chunks.blocks,
                    chunks.pages,
                    attended,
                    scale=self._scale,
                    window=window,
                    block_m=chunks.block_tokens,
                )
            else:
                attended.copy_(_attend_seen(q, keys, values, chunks, window))
            self._finish_layer(layer, following, scratch.x, scratch)
        return scratch.normed


def _attend_seen(q_THD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunks: SeenChunks, window: int) -> torch.Tensor:
    k_SKD, v_SKD = (tensor.flatten(0, 1).index_select(0, chunks.places) for tensor in (keys, values))
    if q_THD.dtype == torch.float32:
        return _reference_attention(q_THD, k_SKD, v_SKD, chunks.counts, chunks.spans, window)
    attended: torch.Tensor = varlen_attn(
        q_THD,
        k_SKD,
        v_SKD,
        chunks.starts_q,
        chunks.starts_k,
        max(chunks.counts),
        max(chunks.spans),
        window_size=(window - 1 if window else -1, 0),
        **_GROUPED,
    )  # type: ignore[assignment]
    return attended


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
