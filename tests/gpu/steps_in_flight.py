"""Captured steps replayed with three in flight, each ring slot read from pinned memory as its event passes: for `check_rows`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

import numpy as np
import torch

from areno.decode.tables import DecodeTables
from areno.kernels.reduce import Draw
from areno.kernels.rows import LaneBuffers, begin_step
from areno.kernels.sample import SampleWorkspace, sample
from areno.sampling.variant import Variant
from tests.unit.areno.kernels import sampling_cases as cases

VARIANT = Variant(noise=True, temperature=True)
CUDA = torch.device("cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Rows at their start, what they draw from, and what torch says of each step. Shapes: `told` int32 [steps][3, B]."""

    start: DecodeTables
    logits: torch.Tensor
    num_valid: int
    told: list[np.ndarray]


def reference_steps(vocab: int, num_valid: int, *, lanes: int = 8, steps: int = 24) -> Steps:
    """Return steps in which rows end, each at its own time; by torch on the card."""
    rng = np.random.default_rng(9)
    start = cases.tables(lanes, vocab, rng, VARIANT)
    start.state.page_table[: lanes - 1] = 9
    start.field("length").fill_(3)
    start.field("remaining").copy_(torch.from_numpy(rng.integers(2, 2 * steps, lanes)))
    logits = cases.random_logits(rng, lanes, vocab).cuda()
    rows = cases.copied(start, CUDA)
    told = [cases.by_torch(rows, logits, VARIANT, num_valid).words for _ in range(steps)]
    return Steps(start=start, logits=logits, num_valid=num_valid, told=told)


def check_steps(expected: Steps, *, pdl: bool) -> dict:
    """Replay a captured step with three in flight and read each ring slot as its event passes."""
    (lanes, vocab), steps = expected.logits.shape, len(expected.told)
    found = cases.copied(expected.start, CUDA)
    buffers = LaneBuffers.allocate(lanes, CUDA)
    counter = torch.zeros((), dtype=torch.int32, device=CUDA)
    ring = torch.full((4, 6, lanes), -77, dtype=torch.int32).pin_memory()
    workspace = SampleWorkspace.allocate(lanes, vocab, CUDA, filters=False)
    embedding, x = torch.randn((vocab, 64), device=CUDA).bfloat16(), torch.zeros((lanes, 64), device=CUDA).bfloat16()
    draw = Draw(
        lanes=lanes,
        logits=expected.logits,
        state=found.state,
        slots=found.slots,
        variant=VARIANT,
        num_valid_ids=expected.num_valid,
        running=buffers.running,
        starved=buffers.starved,
    )

    def step() -> None:
        begin_step(found.state, buffers, counter, embedding, x, page_size=cases.PAGE_SIZE, pdl=pdl)
        sample(draw, workspace, ring, counter, pdl=pdl)

    step()
    torch.cuda.synchronize()
    _restore(found, expected.start, counter)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    _restore(found, expected.start, counter)
    torch.cuda.synchronize()
    pending: deque[tuple[int, torch.cuda.Event]] = deque()
    records = []
    for number in range(steps + 3):
        if number < steps:
            graph.replay()
            event = torch.cuda.Event()
            event.record()
            pending.append((number % 4, event))
        if number >= 3:
            place, event = pending.popleft()
            event.synchronize()
            records.append(ring[place].numpy().copy())
    said = 0
    for number, (record, told) in enumerate(zip(records, expected.told, strict=True)):
        ran = told[0] > 0
        assert record[0].tolist() == told[0].tolist(), f"step {number}: status {record[0]}, expected {told[0]}"
        assert record[2][ran].tolist() == told[2][ran].tolist(), f"step {number}: tokens {record[2]}, expected {told[2]}"
        said += int(ran.sum())
    assert said > steps, f"only {said} tokens in {steps} steps"
    return {"name": f"steps in flight, pdl={pdl}", "tokens": said}


def _restore(found: DecodeTables, source: DecodeTables, counter: torch.Tensor) -> None:
    for field in fields(source.state):
        getattr(found.state, field.name).copy_(getattr(source.state, field.name))
    counter.zero_()
