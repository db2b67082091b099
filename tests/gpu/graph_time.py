"""How long a launch takes inside a captured graph; shared by the card scripts of this folder."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def time_graph(step: Callable[[int], object], num_launches: int) -> float:
    """Return microseconds of one launch: the median over replays of a graph of `num_launches`."""
    step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_launches):
            step(index)
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1000 * statistics.median(times[2:]) / num_launches
