"""Decode steps on a CUDA device: the kernels of one token for rows 0..bucket - 1, launched one by one or replayed as a graph.

A step is: prologue (what each lane runs), model, head, sampler, epilogue (record, advance, stop test). It depends on nothing of
the host but the row state that it is given in `StepMemory`, so both decode paths of a device run the very same steps: the
resident one over its tables, the rebuilt one over what it has just sent. A kind of step that is new runs once launch by launch,
which also compiles its kernels, and is captured afterwards; with graphs off, or where memory is short, it stays that way.

Invariant: a kind of step is always run over the same memory, since a captured one knows addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from areno.commands import DecodeLaunch
from areno.decode.capture import CapturePermit
from areno.decode.row_state import RowState
from areno.kernels import rows as row_kernels
from areno.kernels import sample
from areno.kernels.filters import KeptRing
from areno.models.dense_cuda import FusedDecoder
from areno.models.model_config import ModelConfig
from areno.sampling.penalties import SlotTables
from areno.sampling.shards import VocabularyShard
from areno.sampling.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """What a captured step depends on: rows 0..bucket - 1, the sampler's parts, and the bound on the rows' lengths."""

    bucket: int
    variant: Variant
    span: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What a step reads and writes beside the model. Shapes: `state` of at least the step's rows; `ring` int32 [slots, 6, lanes]."""

    state: RowState[torch.Tensor]
    ring: torch.Tensor
    kept: KeptRing | None


class DecodeSteps:
    """Runs the steps of one decode path of up to `lanes` rows, and the sampler after a prefill. Owns what is captured.

    `slots` are the path's sampling slots; `counter` counts launches on the device, which by it finds their slot of a ring. `shard` says
    which ids a rank of several has.
    """

    def __init__(
        self,
        fused: FusedDecoder,
        slots: SlotTables,
        model: ModelConfig,
        *,
        lanes: int,
        page_size: int,
        device: torch.device,
        permit: CapturePermit,
        shard: VocabularyShard | None = None,
    ) -> None:
        self._shard = shard
        self._fused, self._slots, self._page_size, self._device, self._permit = fused, slots, page_size, device, permit
        self._num_valid_ids = model.num_valid_ids
        self._lanes = row_kernels.LaneBuffers.allocate(lanes, device)
        self._x = torch.zeros((lanes, model.hidden_size), dtype=fused.embedding.dtype, device=device)
        # Of a rank as wide as its cut, so that rows begin where wide loads can; the last one's own ids may be fewer.
        num_ids, width = (model.vocab_size,) * 2 if shard is None else (shard.count, shard.width)
        self._logits = torch.zeros((lanes, width), device=device)[:, :num_ids]
        self._workspace = sample.SampleWorkspace.allocate(lanes, num_ids, device, filters=True, shard=shard)
        self._seen: set[StepKind] = set()
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if permit.enabled else None
        self.counter = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    def kind_of(self, launch: DecodeLaunch) -> StepKind:
        """Return the kind of step that a launch runs."""
        # Greedy lanes are told apart on the device, and one rank has all scores: they need no graphs of their own.
        variant = launch.variant
        if not variant.noise or (variant.wide and self._shard is None):
            variant = replace(variant, noise=True, wide=variant.wide and self._shard is not None)
        return StepKind(bucket=launch.bucket, variant=variant, span=self._fused.span_of(launch.longest))

    def graph_of(self, kind: StepKind) -> torch.cuda.CUDAGraph | None:
        """Return the captured step of a kind; None where it runs launch by launch."""
        return self._graphs.get(kind)

    def run(self, kind: StepKind, memory: StepMemory) -> None:
        """Run one token of rows 0..bucket - 1. Mutates: `memory`, the sampling slots, the store."""
        graph = self._graphs.get(kind)
        if graph is not None:
            graph.replay()
        elif kind in self._seen and self._permit.allows(kind):
            self._capture(kind, memory).replay()
        else:
            self._seen.add(kind)
            self._launch(kind, memory)

    def warm_up(self, buckets: tuple[int, ...], variant: Variant, memory_of: Callable[[StepKind], StepMemory]) -> None:
        """Compile and capture steps of short rows. Only while no row is alive and every result was read, so that none changes."""
        if not self._permit.enabled:
            return
        counted = self.counter.clone()
        for bucket in reversed(buckets):
            kind = StepKind(bucket=bucket, variant=variant, span=self._fused.span_of(1))
            memory = memory_of(kind)
            self._launch(kind, memory)
            self._seen.add(kind)
            self._capture(kind, memory)
        torch.cuda.synchronize(self._device)
        self.counter.copy_(counted)

    def forget_captures(self) -> None:
        """Drop the graphs, whose launches name addresses; kinds of steps are captured anew as they come, or by `warm_up`."""
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._seen.clear()
        self._permit.forget()
        self._pool = torch.cuda.graph_pool_handle() if self._permit.enabled else None

    def sample_prefill(self, variant: Variant, logits: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], memory: StepMemory) -> None:
        """Draw the next token of rows whose prompts are complete and record it; the launch is counted by the caller.

        Shapes: logits [S, W]; `rows` are int32 [B] each, the lanes' rows in `memory` and their places among the logits.
        """
        lane_rows, logit_rows = rows
        draw = sample.Draw(
            lanes=lane_rows.shape[0],
            logits=logits,
            state=memory.state,
            slots=self._slots,
            variant=variant,
            num_valid_ids=self._num_valid_ids,
            sums=variant.sums,
            lane_rows=lane_rows,
            logit_rows=logit_rows,
            shard=self._shard,
        )
        sample.sample(draw, self._workspace, memory.ring, self.counter, kept=memory.kept)

    def _capture(self, kind: StepKind, memory: StepMemory) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with self._permit.capture(graph, self._pool):
            self._launch(kind, memory)
        self._graphs[kind] = graph
        return graph

    def _launch(self, kind: StepKind, memory: StepMemory) -> None:
        bucket, pdl, state = kind.bucket, self._fused.pdl, memory.state
        lanes = row_kernels.LaneBuffers(*(buffer[:bucket] for buffer in self._lanes))
        x, logits = self._x[:bucket], self._logits[:bucket]
        first_id = None if self._shard is None else self._shard.first_id
        embedding, page_size = self._fused.embedding, self._page_size
        row_kernels.begin_step(state, lanes, self.counter, embedding, x, page_size=page_size, pdl=pdl, first_id=first_id)
        if self._shard is not None:
            self._shard.group.all_reduce_(x)
        self._fused.decode(lanes, x, logits, state.page_table, span=kind.span)
        draw = sample.Draw(
            lanes=bucket,
            logits=logits,
            state=state,
            slots=self._slots,
            variant=kind.variant,
            num_valid_ids=self._num_valid_ids,
            sums=kind.variant.sums,
            running=lanes.running,
            starved=lanes.starved,
            shard=self._shard,
        )
        sample.sample(draw, self._workspace, memory.ring, self.counter, kept=memory.kept, pdl=pdl)
