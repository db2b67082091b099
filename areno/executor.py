"""One rank: executes the command log in order against model, store and tables. It decides nothing.

A launch that samples or scores takes the next slot of the result ring with the seats and generations that the scheduler
planned for its lanes, and with the version of the weights it ran with.
"""

from __future__ import annotations

import time

from areno.commands import ApplyDelta, ClearPages, Command, CopyPages, DecodeLaunch, PrefillLaunch
from areno.decode.path import DecodePath
from areno.decode.results import ResultRing
from areno.forward import Forward
from areno.kv.store import KVStore


class Executor:
    """Runs commands. `launch_s` adds up the time inside launches, so that the host's share of a step can be told."""

    __slots__ = ("_forward", "_path", "_ring", "_store", "launch_s", "version")

    def __init__(self, forward: Forward, store: KVStore, path: DecodePath, ring: ResultRing, *, version: int) -> None:
        self._forward, self._store, self._path, self._ring = forward, store, path, ring
        self.version = version
        self.launch_s = 0.0

    def execute(self, command: Command) -> None:
        """Run one command."""
        if isinstance(command, ApplyDelta):
            self._path.apply(command.slot)
            return
        started = time.perf_counter()
        if isinstance(command, ClearPages):
            self._store.clear(command.pages)
        elif isinstance(command, CopyPages):
            self._store.copy(command.sources, command.targets, command.tokens)
        elif isinstance(command, PrefillLaunch):
            self._prefill(command)
        else:
            self._decode(command)
        self.launch_s += time.perf_counter() - started

    def _prefill(self, launch: PrefillLaunch) -> None:
        computed = self._forward.prefill(launch.chunks)
        if launch.fork_sources.size:
            self._store.copy(launch.fork_sources, launch.fork_targets)
        if launch.reports:
            record, records = self._ring.take(seats=launch.seats, generations=launch.generations, version=self.version)
            record.scores.extend(computed.scores)
            self._path.sample_prefill(launch, computed, records)
            self._ring.launched()

    def _decode(self, launch: DecodeLaunch) -> None:
        _, records = self._ring.take(seats=launch.seats, generations=launch.generations, version=self.version)
        self._path.decode(launch, records)
        self._ring.launched()
