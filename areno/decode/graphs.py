"""The resident path on a CUDA device: row state, step and result record stay there, one captured graph per kind of step.

A step is: prologue (what each lane runs), model, head, sampler, epilogue (record into the result ring, advance, stop
test). It depends on nothing of the host, so the host only replays it. Row operations come through a delta ring.

A kind of step that is new runs once launch by launch, which also compiles its kernels, and is captured afterwards; with
graphs off, or where memory is short, it stays that way. The rank makes two paths, one for requests, one for canaries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from areno.commands import DecodeLaunch, PrefillLaunch
from areno.decode.delta_ring import DeltaRing
from areno.decode.deltas import DeltaSlot
from areno.decode.results import LaneRecords, ResultRing
from areno.decode.tables import DecodeTables
from areno.decode.transport import Transport
from areno.forward import PrefillResult
from areno.kernels import rows as row_kernels
from areno.kernels import sample
from areno.kernels.filters import KeptRing
from areno.models.dense_cuda import FusedDecoder
from areno.models.model_config import ModelConfig
from areno.sampling.variant import Variant
from areno.uploads import upload

CAPTURE_BYTES = 256 << 20
"""Free memory below which no further graph is captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """What a captured step depends on: rows 0..bucket - 1, the sampler's parts, and the bound on the rows' lengths."""

    bucket: int
    variant: Variant
    span: int


class GraphPath:
    """Launches over resident tables on a CUDA device. Shapes: `ring` as in `ResultRing`."""

    def __init__(
        self,
        fused: FusedDecoder,
        tables: DecodeTables,
        ring: ResultRing,
        model: ModelConfig,
        transport: Transport,
        *,
        num_valid_ids: int,
        graphs: bool,
    ) -> None:
        self._fused, self.tables, self._ring, self._graphs_on = fused, tables, ring, graphs
        state = tables.state
        device, lanes = state.ints.device, state.alive.shape[0]
        self._device, self._num_valid_ids = device, num_valid_ids
        self._lanes = row_kernels.LaneBuffers.allocate(lanes, device)
        self._x = torch.zeros((lanes, model.hidden_size), dtype=fused.embedding.dtype, device=device)
        self._logits = torch.zeros((lanes, model.vocab_size), device=device)
        self._workspace = sample.SampleWorkspace.allocate(lanes, model.vocab_size, device, filters=True)
        self._kept = None
        if ring.launch_kept_ids is not None and ring.launch_kept_count is not None:
            self._kept = KeptRing(ids=ring.launch_kept_ids, counts=ring.launch_kept_count)
        self._counter = torch.zeros((), dtype=torch.int32, device=device)
        self._deltas = DeltaRing(transport)
        self._seen: set[StepKind] = set()
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    def apply(self, slot: DeltaSlot) -> None:
        """Apply row operations."""
        for sampling_slot, content in slot.contents:
            self.tables.slots.fill(sampling_slot, content)
        self._deltas.apply(slot, self.tables.state)

    def decode(self, launch: DecodeLaunch, records: LaneRecords) -> None:
        """Run one token of rows 0..bucket - 1; the device picks the ring's slot by its own count."""
        # Greedy lanes are told apart on the device, so that they need no graph of their own.
        variant = launch.variant if launch.variant.noise else replace(launch.variant, noise=True)
        kind = StepKind(bucket=launch.bucket, variant=variant, span=self._fused.span_of(launch.longest))
        graph = self._graphs.get(kind)
        if graph is not None:
            graph.replay()
            return
        if kind in self._seen and self._graphs_on and torch.cuda.mem_get_info(self._device)[0] >= CAPTURE_BYTES:
            self._capture(kind).replay()
            return
        self._seen.add(kind)
        self._step(kind)

    def warm_up(self, buckets: tuple[int, ...], variant: Variant) -> None:
        """Compile and capture steps of short rows. Only before the first request: no row is alive, so that none changes."""
        if not self._graphs_on:
            return
        for bucket in reversed(buckets):
            kind = StepKind(bucket=bucket, variant=variant, span=self._fused.span_of(1))
            self._step(kind)
            self._seen.add(kind)
            self._capture(kind)
        torch.cuda.synchronize(self._device)
        self._counter.zero_()

    def _capture(self, kind: StepKind) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(kind)
        self._graphs[kind] = graph
        return graph

    def _step(self, kind: StepKind) -> None:
        bucket, pdl = kind.bucket, self._fused.pdl
        lanes = row_kernels.LaneBuffers(*(buffer[:bucket] for buffer in self._lanes))
        x, logits = self._x[:bucket], self._logits[:bucket]
        state, page_size = self.tables.state, self.tables.page_size
        row_kernels.begin_step(state, lanes, self._counter, self._fused.embedding, x, page_size=page_size, pdl=pdl)
        self._fused.decode(lanes, x, logits, state.page_table, span=kind.span)
        draw = sample.Draw(
            lanes=bucket,
            logits=logits,
            state=state,
            slots=self.tables.slots,
            variant=kind.variant,
            num_valid_ids=self._num_valid_ids,
            sums=kind.variant.sums,
            running=lanes.running,
            starved=lanes.starved,
        )
        self._sample(draw, pdl=pdl)

    def sample_prefill(self, launch: PrefillLaunch, computed: PrefillResult, records: LaneRecords) -> None:
        """Draw the next token of each row whose prompt is complete and write its record; called for every launch that reports."""
        row_kernels.begin_sample(self._counter)
        if computed.logits is None:
            return
        places = np.array(computed.places, dtype=np.int32)
        lane_rows, logit_rows = upload(self._device, np.array(launch.rows, dtype=np.int32), places)
        draw = sample.Draw(
            lanes=places.size,
            logits=computed.logits,
            state=self.tables.state,
            slots=self.tables.slots,
            variant=launch.variant,
            num_valid_ids=self._num_valid_ids,
            sums=launch.variant.sums,
            lane_rows=lane_rows,
            logit_rows=logit_rows,
        )
        self._sample(draw, pdl=False)

    def _sample(self, draw: sample.Draw, *, pdl: bool) -> None:
        sample.sample(draw, self._workspace, self._ring.launch_words, self._counter, kept=self._kept, pdl=pdl)

    def row_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that integrity checks compare."""
        return {name: self.tables.field(name).clone() for name in ("alive", "length", "generation", "last_token", "page_table")}
