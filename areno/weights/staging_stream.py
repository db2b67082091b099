"""Staging on a CUDA device, beside decode: copies on a stream of their own, and looks at what was copied on another.

    values --stream--> staged storage --looker--> facts, read at the commit

An update on a device owns one. Everything is looked at once all of it is there: a look reads as much memory as the copies move, and
beside them would hold up the trainer. Invariant: a look comes after the copies that it looks at; the host waits only in `settle` and
`finish`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch

from areno.weights.names import ParameterTable
from areno.weights.shards import TensorShard
from areno.weights.staged import Layout, PendingFacts, inspect_on_device


def layout_of(shard: TensorShard | None) -> Layout | None:
    """Return how a rank's part lies in its tensor; None for a whole one."""
    return None if shard is None else Layout(shard.first, shard.run, shard.stride)


class StagingStream:
    """Copies that wait to be launched together, and staged tensors that nothing is known of yet."""

    __slots__ = ("_complete", "_copies", "_kept", "_looker", "_looks", "_runs", "_staged", "_stream", "_table", "_unknown")

    def __init__(self, table: ParameterTable, staged: ParameterTable) -> None:
        self._table, self._staged = table, staged
        # Looking at what is staged must not hold up the copies behind it.
        self._stream, self._looker = torch.cuda.Stream(table.device), torch.cuda.Stream(table.device)
        self._stream.wait_stream(torch.cuda.current_stream(table.device))
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Whether all that they read is there already.
        self._complete = True
        # Copies of whole tensors (see `kernels.weights.Run`), and what has to live until they are launched.
        self._runs: list[tuple[int, int, int, int, int]] = []
        self._kept: list[object] = []
        self._unknown: dict[str, None] = {}
        # When looks began and ended.
        self._looks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def beside_decode(self, sources: Iterable[torch.Tensor], *, complete: bool) -> Iterator[None]:
        """Let copies run while decode goes on, after all that wait; unless their sources are `complete`, after what was launched before."""
        self._launch_copies()
        with self._on_stream(sources, complete=complete):
            yield

    @contextlib.contextmanager
    def _on_stream(self, sources: Iterable[torch.Tensor], *, complete: bool) -> Iterator[None]:
        if not complete:
            self._stream.wait_stream(torch.cuda.current_stream(self._table.device))
        for source in sources:
            if source.is_cuda:
                source.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def copy_later(self, copies: list[tuple[torch.Tensor, torch.Tensor]], *, complete: bool) -> None:
        """Take note of copies (target, source) between places on the device.

        Sources that are `complete` stay until the copies are over. Others are written, or read too, by what is on the current stream
        before the copies are launched, and are not kept by anybody.
        """
        self._copies += copies
        self._complete &= complete

    def copy_whole_later(self, target: torch.Tensor, source: int, shard: TensorShard | None, kept: object) -> None:
        """Take note of a copy to a contiguous tensor on the device, from the address of the whole tensor that it is or has a part of.

        `kept` owns what is there, which is complete, and stays until the copy is over.
        """
        at, item = target.data_ptr(), target.element_size()
        if shard is None:
            self._runs.append((at, source, target.nbytes, 1, 0))
        else:
            self._runs += [
                (at + one.target * item, source + one.source * item, one.width * item, one.rows, one.stride * item)
                for one in shard.overlaps(0, math.prod(shard.shape))
            ]
        self._kept.append(kept)

    def look_later(self, name: str) -> None:
        """Take note of a tensor that is staged and has to be looked at."""
        self._unknown[name] = None

    def forget(self, name: str) -> None:
        """Look no more at a tensor whose slices come again."""
        self._unknown.pop(name, None)

    def look(self) -> dict[str, PendingFacts]:
        """Begin to find out about what was staged and is not known of; return the facts to come. Nothing is waited for."""
        self._launch_copies()
        if not self._unknown:
            return {}
        names, self._unknown = list(self._unknown), {}
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._looker.wait_stream(self._stream)
        with torch.cuda.stream(self._looker):
            events[0].record()
            layouts = [layout for name in names if (layout := layout_of(self._table.shards.get(name)))]
            facts = inspect_on_device([(self._staged.views[name], self._table.views[name]) for name in names], layouts or None)
            events[1].record()
        self._looks.append(events)
        return dict(zip(names, facts))

    @property
    def looks_over(self) -> bool:
        """Whether every look that was begun has ended."""
        return self._looker.query()

    def launch(self) -> torch.cuda.Event:
        """Launch every copy; return what passes when they are over."""
        self._launch_copies()
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return copied

    def settle(self) -> None:
        """Launch every copy and wait for it. Blocks: for the copies."""
        self._launch_copies()
        self._stream.synchronize()

    def finish(self) -> tuple[dict[str, PendingFacts], float]:
        """Copy and look at everything; return the facts that were still to come, now there, and the seconds that all looks took."""
        facts = self.look()
        self._stream.synchronize()
        self._looker.synchronize()
        seconds = sum(begun.elapsed_time(ended) for begun, ended in self._looks) / 1e3
        self._looks.clear()
        return facts, seconds

    def _launch_copies(self) -> None:
        """Launch the copies that wait: whole tensors together, others of one dtype together."""
        if self._runs:
            from areno.kernels.weights import copy_runs

            with torch.cuda.stream(self._stream):
                copy_runs(self._table.device, self._runs)
            self._runs.clear()
            self._kept.clear()
        if not self._copies:
            return
        copies, self._copies = self._copies, []
        complete, self._complete = self._complete, True
        with self._on_stream(() if complete else (source for _, source in copies), complete=complete):
            for dtype in {source.dtype for _, source in copies}:
                alike = [(target, source) for target, source in copies if source.dtype == dtype]
                torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike], non_blocking=True)
