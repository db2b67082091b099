"""The sum over ranks inside a norm on cards: bits against torch, and times.

`python -m tests.gpu.check_peer_sum` checks, times and prints a table. All ranks lie in this process, each with a stream of its own, on
as many cards as there are, in turn: on one card the sums go through its own memory, whose times say nothing of a link's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from areno.kernels.peer_sum import peer_add_rms_norm

SUMS, REPLAYS = 24, 40
EPS = 1e-5
# Rows by ranks and hidden size; all programs of one card's ranks must be resident at once, which many long rows are not.
CASES = [(2, 64, 5), (2, 4096, 64), (3, 200, 9), (4, 4096, 1), (4, 4096, 64), (4, 5120, 40)]


class Ranks:
    """Buffers of some ranks, and their sums captured in a graph each."""

    def __init__(self, ranks: int, size: int, rows: int, *, shared: bool, add: Callable[..., None] = peer_add_rms_norm) -> None:
        count = torch.cuda.device_count()
        self.devices = [torch.device("cuda", rank % count) for rank in range(ranks)]
        for device in self.devices:
            for other in self.devices:
                # What enables a card's access to another one's memory.
                torch.zeros(1, device=device).to(other)
        self.size, self.rows, self.options, self.add = size, rows, {"shared": True} if shared else {}, add
        generator = torch.Generator().manual_seed(ranks * rows + size)
        self.start = torch.randn(rows, size, generator=generator).to(torch.bfloat16)
        self.weight = torch.rand(size, generator=generator).to(torch.bfloat16)
        self.source = torch.randn(SUMS, ranks, rows, size, generator=generator).to(torch.bfloat16)
        self.parts = [torch.full((2, rows, size), math.nan, dtype=torch.bfloat16, device=device) for device in self.devices]
        self.signals = [torch.zeros(2, rows, ranks, dtype=torch.int32, device=device) for device in self.devices]
        self.x = [self.start.to(device) for device in self.devices]
        self.out = [torch.full((SUMS, rows, size), math.nan, dtype=torch.bfloat16, device=device) for device in self.devices]
        self.weights = [self.weight.to(device) for device in self.devices]
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        self.stops = [torch.ones(1, dtype=torch.int32, pin_memory=True) for _ in self.devices]
        for rank in range(ranks):
            # What a program needs is loaded before any waits for another; this one leaves at once.
            self.launch(rank, 0)
        self.settle()
        for rank in range(ranks):
            self.signals[rank].zero_()
            self.stops[rank].zero_()
            self.x[rank].copy_(self.start)
        self.settle()

    def settle(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    def launch(self, rank: int, number: int) -> None:
        with torch.cuda.device(self.devices[rank]):
            arguments: Any = (self.x[rank], self.parts, self.signals, number % 2, self.weights[rank], EPS, self.out[rank][number])
            self.add(*arguments, rank=rank, stop=self.stops[rank], **self.options)

    def graphs(self, *, filled: bool) -> list[torch.cuda.CUDAGraph]:
        """Capture each rank's sums; `filled`: its parts and its residual are written as in a step."""
        made = []
        for rank, device in enumerate(self.devices):
            source, start = self.source[:, rank].to(device), self.start.to(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(device), torch.cuda.graph(graph, stream=self.streams[rank]):
                if filled:
                    self.x[rank].copy_(start)
                for number in range(SUMS):
                    if filled:
                        self.parts[rank][number % 2].copy_(source[number])
                    self.launch(rank, number)
            graph.kept = (source, start)  # type: ignore[attr-defined]
            made.append(graph)
        return made

    def replay(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        for device, stream, graph in zip(self.devices, self.streams, graphs, strict=True):
            with torch.cuda.device(device), torch.cuda.stream(stream):
                graph.replay()


def expected(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual after all sums and what each gave, by torch on the first card."""
    device = ranks.devices[0]
    x, weight, outs = ranks.start.to(device), ranks.weight.to(device), []
    for parts in ranks.source.to(device):
        total = torch.zeros(x.shape, device=device)
        for part in parts:
            total += part.float()
        x = (x.float() + total.to(x.dtype).float()).to(x.dtype)
        inverse = torch.rsqrt((x.float() ** 2).sum(1, keepdim=True) / ranks.size + EPS)
        outs.append(((x.float() * inverse).to(x.dtype).float() * weight.float()).to(x.dtype))
    return x, torch.stack(outs)


def check_sums(ranks: int, size: int, rows: int, *, shared: bool) -> str:
    """Replay a captured row of sums; every rank must have the residual's bits each time."""
    made = Ranks(ranks, size, rows, shared=shared)
    graphs = made.graphs(filled=True)
    residual, normed = expected(made)
    for _ in range(REPLAYS):
        for rank in range(ranks):
            made.x[rank].fill_(math.nan)
            made.out[rank].fill_(math.nan)
        made.settle()
        made.replay(graphs)
        made.settle()
        for rank in range(ranks):
            assert torch.equal(made.x[rank].to(residual.device), residual), f"rank {rank} of {ranks}, {rows} x {size}, shared={shared}"
            assert torch.equal(made.out[rank], made.out[0].to(made.devices[rank])), "ranks differ"
            assert not made.signals[rank].any(), "signals are taken back"
    # The order in which squares are added up is the kernel's own.
    gap = (made.out[0].to(normed.device).float() - normed.float()).abs().max().item()
    assert gap <= 2**-6 * normed.float().abs().max().item(), f"norms differ by {gap}"
    return f"{ranks} ranks, {rows} x {size}, shared={shared}: {REPLAYS} replays of {SUMS} sums, norms within {gap:.1e}"


def check() -> list[str]:
    """Run all checks; raises AssertionError with numbers."""
    found = []
    for ranks, size, rows in CASES:
        found += [check_sums(ranks, size, rows, shared=shared) for shared in (False, True)[: 1 + (rows >= ranks)]]
    return found


def time_sums(ranks: int, size: int, rows: int, *, shared: bool, add: Callable[..., None] = peer_add_rms_norm) -> float:
    """Return microseconds of one sum: the median over replays of a graph of them."""
    made = Ranks(ranks, size, rows, shared=shared, add=add)
    graphs, times = made.graphs(filled=False), []
    for _ in range(30):
        made.settle()
        started = time.perf_counter()
        for _ in range(10):
            made.replay(graphs)
        made.settle()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times[5:]) / (10 * SUMS)


def main() -> None:
    for line in check():
        print(line)
    for ranks, size in ((2, 4096), (4, 4096), (4, 5120)):
        for rows in (1, 8, 32, 64, 128, 256)[: 6 if torch.cuda.device_count() >= ranks else 4]:
            for shared in (False, True)[: 1 + (rows >= ranks)]:
                print(f"{ranks} ranks, {rows} x {size}, shared={shared}: {time_sums(ranks, size, rows, shared=shared):.2f} us", flush=True)


if __name__ == "__main__":
    main()
