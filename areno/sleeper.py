"""An engine that gives memory back for a while: that of the KV, or that of KV and weights.

    awake --sleep("kv")--> KV returned --sleep("weights")--> weights on the host too --wake--> awake

The engine's thread calls it, and asks it before whatever needs the memory. Invariant: no request is lost; each waits, keeps its tokens,
counters and seed, and rebuilds its KV in a new epoch.
"""

from __future__ import annotations

import torch

from areno.device_errors import device_errors
from areno.errors import Asleep, InvalidRequest
from areno.rank import Rank
from areno.ranks import operations as ops
from areno.ranks.ranks import Ranks
from areno.scheduler import Scheduler
from areno.step_output import StepOutput, join_outputs
from areno.updates import Updates
from areno.weights.names import HostCopy

SLEEP_LEVELS = ("kv", "weights")


class Sleeper:
    """What is given back: `level` is None, "kv" or "weights" (both)."""

    def __init__(self, rank: Rank, scheduler: Scheduler, ranks: Ranks, updates: Updates, *, buckets: tuple[int, ...]) -> None:
        self._rank, self._scheduler, self._ranks, self._updates, self._buckets = rank, scheduler, ranks, updates, buckets
        self._table, self._store = rank.model.table, rank.store
        self._moved_out: HostCopy | None = None
        self.level: str | None = None

    @property
    def has_weights(self) -> bool:
        """Whether the live weights are where the model reads them."""
        return self._moved_out is None

    def check_awake(self, what: str) -> None:
        """Refuse what needs the memory. Raises: Asleep."""
        if self.level is not None:
            raise Asleep(
                f"{what} is refused",
                field="level",
                value=self.level,
                limit="the engine sleeps: its KV" + (" and weights are" if self.level == "weights" else " is") + " not there",
                remedy="wake it first",
            )

    def sleep(self, level: str, *, has_twins: bool) -> StepOutput:
        """As `Engine.sleep`."""
        if level not in SLEEP_LEVELS:
            raise InvalidRequest(
                f"level={level!r} is unknown", field="level", value=level, limit=f"known: {', '.join(SLEEP_LEVELS)}", remedy="use 'kv'"
            )
        if has_twins:
            raise InvalidRequest(
                "an engine with twins cannot sleep",
                field="level",
                value=level,
                limit="they share its memory, and their captured steps know its addresses",
                remedy="compare engines in another process",
            )
        self._updates.check_none_open("an engine that sleeps can prove no weights")
        outputs: list[StepOutput] = []
        with self._ranks.together(), device_errors("while the engine went to sleep"), torch.inference_mode():
            if self.level is None:
                for command in self._scheduler.empty_device():
                    self._ranks.tell(command)
                    self._rank.executor.execute(command)
                outputs = [self._scheduler.consume(result) for result in self._rank.ring.ready(drain=True)]
                self._scheduler.clear_prefix_cache()
                released = self._ranks.tell(ops.ReleaseKV())
                self._rank.release_kv()
                self._ranks.expect(released)
                self.level = "kv"
            if level == "weights" and self.level == "kv":
                moved = self._ranks.tell(ops.MoveOutWeights())
                self._moved_out = self._table.move_out()
                self._ranks.expect(moved)
                self.level = "weights"
            if self._store.keys.is_cuda:
                torch.cuda.empty_cache()
        return join_outputs(outputs, self._scheduler.take_endings(), self._scheduler.take_prompt_scores())

    def wake(self) -> None:
        """As `Engine.wake`."""
        if self.level is None:
            return
        no_memory = Asleep(
            "the device has no memory to wake the engine",
            field="level",
            value=self.level,
            limit=f"it takes {self._store.num_bytes + (self._table.num_bytes if self._moved_out is not None else 0):,} bytes",
            remedy="free the memory that was lent out, then wake again",
        )
        with self._ranks.together(), device_errors("while the engine woke", out_of_memory=no_memory), torch.inference_mode():
            woken = self._ranks.tell(ops.WakeUp())
            try:
                if self._moved_out is not None:
                    self._table.move_in(self._moved_out)
                    self._moved_out, self.level = None, "kv"
                self._store.restore()
                self._ranks.expect(woken)
            except BaseException:
                self._store.release()
                self._ranks.expect(self._ranks.tell(ops.ReleaseKV()))
                if self.level == "weights":
                    self._ranks.expect(self._ranks.tell(ops.MoveOutWeights()))
                raise
            self.level = None
            self._ranks.tell(ops.WarmUp())
            self._rank.capture(self._buckets)
