"""Weight updates of an engine: one at a time is opened, staged beside decode, and committed between two launches.

    begin --> stage, stage_slices ... settle_slices --> commit: verify -> swap -> prove -> publish
                                                          failure: swap back; the old weights serve on

The engine's thread calls it. Every step is told to the other ranks first or refused here before they hear of it. Invariant: no token is
computed by half an update, and one that fails leaves weights and version as they were.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from areno.canary import CanaryGaps, CanaryProof
from areno.config import ResolvedConfig
from areno.device_errors import LESS_MEMORY, device_errors
from areno.errors import CanaryMismatch, InvalidRequest, NoUpdate, UpdateBusy, WeightUpdateError
from areno.executor import Executor
from areno.parallel import TPGroup
from areno.ranks import operations as ops
from areno.ranks.ranks import Ranks, open_entry, verify_entry
from areno.ranks.share import canaries_entry
from areno.scheduler import Scheduler
from areno.score import scorable_ids
from areno.weights.canary import Canary
from areno.weights.manifest import mismatch
from areno.weights.names import ParameterTable, TensorSpec
from areno.weights.report import UpdateReport
from areno.weights.slices import DeviceRun, OpenSlice, Slice
from areno.weights.update import WeightUpdate


class Launched(NamedTuple):
    """Copies on this device that are over once `event` has passed, and on the others' once they have done entry `by` of the log."""

    event: torch.cuda.Event
    by: int


class Updates:
    """The open update, if any, and the way to its publication. Units: `published` counts commits that went through."""

    def __init__(
        self,
        table: ParameterTable,
        proof: CanaryProof,
        *,
        executor: Executor,
        scheduler: Scheduler,
        ranks: Ranks,
        group: TPGroup,
        resolved: ResolvedConfig,
        vocab_size: int,
    ) -> None:
        self._table, self._proof, self._executor, self._scheduler = table, proof, executor, scheduler
        self._ranks, self._group, self._resolved, self._vocab_size = ranks, group, resolved, vocab_size
        self._update: WeightUpdate | None = None
        # Whether other ranks were told of runs that they are still to copy, and the newest entry by which they do.
        self._runs_told, self._copied_by = False, 0
        self.published = 0

    def check_none_open(self, limit: str, *, value: int | None = None) -> None:
        """Refuse what cannot go on beside an open update; `value` is the version asked for, if any. Raises: UpdateBusy."""
        if self._update is not None:
            raise UpdateBusy(
                f"an update to version {self._update.version} is open",
                field="version",
                value=self._update.version if value is None else value,
                limit=limit,
                remedy="commit or abort it first",
            )

    def begin(self, manifest: Mapping[str, TensorSpec] | None, *, version: int, partial: bool) -> None:
        """Open an update; as `Engine.begin_update`."""
        self.check_none_open("one update at a time", value=version)
        if version <= self._executor.version:
            raise WeightUpdateError(
                f"version={version} does not grow",
                field="version",
                value=version,
                limit=f"the live version is {self._executor.version}",
                remedy="use a larger version",
            )
        self._update = WeightUpdate(self._table, manifest, version=version, partial=partial, group=self._group)
        self._ranks.tell(open_entry(manifest, version=version, partial=partial))

    def stage(self, name: str, tensor: torch.Tensor) -> None:
        """As `Engine.stage`."""
        update = self._open_update()
        if not isinstance(tensor, torch.Tensor):
            raise mismatch(f"tensor {name} is a {type(tensor).__name__}", name, "stage torch tensors")
        # What ends it between rank 0's part and the others' leaves them with different sets.
        with self._ranks.together(), device_errors(f"while tensor {name} was staged", out_of_memory=_no_room("stage", name)):
            update.stage(name, tensor)
            self._ranks.stage(name, tensor, start=0, shape=tuple(tensor.shape), whole=True)

    def open_slice(self, name: str, *, start: int, count: int, spec: TensorSpec) -> OpenSlice | None:
        """As `Engine.open_slice`."""
        if self._ranks.size > 1:
            # The other ranks are told of values that have come.
            return None
        with device_errors(f"while a slice of {name} was staged", out_of_memory=_no_room("stage", name)):
            return self._open_update().open_slice(name, start=start, count=count, spec=spec)

    def close_slice(self, filled: OpenSlice) -> None:
        """As `Engine.close_slice`."""
        with device_errors(f"while a slice of {filled.name} was staged", out_of_memory=_no_room("stage", filled.name)):
            self._open_update().close_slice(filled)

    def open_memory(self, handle: bytes) -> None:
        """As `Engine.open_memory`."""
        self._open_update()
        if self._ranks.size > 1:
            self._ranks.tell(ops.OpenMemory(handle=handle.hex()))
            # Who waits for the copies after this waits for it too.
            self._runs_told = True

    def stage_slices(self, slices: Sequence[Slice]) -> None:
        """As `Engine.stage_slices`."""
        update = self._open_update()
        with self._ranks.together(), device_errors("while slices were staged", out_of_memory=_no_room("stage", "slices")):
            if self._ranks.size == 1:
                update.stage_slices(slices)
                return
            for one in slices:
                if isinstance(one.values, DeviceRun):
                    update.stage_slices([one])
                    self._ranks.tell(_run_entry(one, one.values))
                    self._runs_told = True
                    continue
                # The other ranks are sent the values on the current stream, from where they are.
                values = one.tensor
                update.stage_slices([one._replace(values=values)], complete=not values.is_cuda)
                self._ranks.stage(one.name, values, start=one.start, shape=one.spec.shape, whole=False)

    def launch_slices(self) -> Launched | None:
        """As `Engine.launch_slices`."""
        with device_errors("while slices were staged", out_of_memory=_no_room("stage", "slices")):
            event = self._open_update().launch_slices()
            self._tell_launch()
            return None if event is None else Launched(event, self._copied_by)

    def _tell_launch(self) -> None:
        if self._runs_told:
            self._runs_told, self._copied_by = False, self._ranks.tell(ops.CopyRuns())
        else:
            self._ranks.tell(ops.LaunchSlices())

    def slices_copied(self, launched: Launched) -> bool:
        """As `Engine.slices_copied`."""
        with device_errors("while slices were staged"):
            return launched.event.query() and self._ranks.executed(launched.by)

    def settle_slices(self) -> None:
        """As `Engine.settle_slices`."""
        with device_errors("while slices were staged", out_of_memory=_no_room("stage", "slices")):
            update = self._open_update()
            self._tell_launch()
            update.settle_slices()
            self._ranks.wait_for_entry(self._copied_by)

    def inspect(self) -> bool:
        """As `Engine.inspect_update`."""
        update = self._open_update()
        with device_errors("while staged weights were inspected", out_of_memory=_no_room("inspect", "weights")):
            if not update.inspecting:
                self._ranks.tell(ops.InspectUpdate())
            return update.inspect()

    def commit(self, *, digests: Mapping[str, int] | None, canaries: Sequence[Canary]) -> UpdateReport:
        """As `Engine.commit_update`."""
        update = self._open_update()
        started = time.perf_counter()
        self._update = None
        no_room = None if self._ranks.size > 1 else _no_room("prove", f"version {update.version}")
        try:
            for canary in canaries:
                scorable_ids("canary.ids", canary.ids, vocab_size=self._vocab_size, max_model_len=self._resolved.max_model_len)
            with self._ranks.together(), device_errors("while weights were committed", out_of_memory=no_room), torch.inference_mode():
                number = self._ranks.tell(verify_entry(digests))
                update.verify(digests)
                self._ranks.expect(number)
                verified = time.perf_counter()
                self._swap(update)
                swapped = time.perf_counter()
                try:
                    self._ranks.tell(canaries_entry(canaries))
                    gaps = self._proof.measure(canaries)
                    self._judge(gaps, update)
                except BaseException:
                    self._swap(update)
                    raise
                proved = time.perf_counter()
                self._ranks.expect(self._ranks.tell(ops.PublishUpdate(version=update.version)))
        except (WeightUpdateError, InvalidRequest):
            self._ranks.tell(ops.AbortUpdate())
            raise
        self._executor.version = update.version
        self._scheduler.commit_version(update.version)
        self.published += 1
        counts = update.counts
        assert counts is not None, "a verified update has counts"
        return UpdateReport(
            version=update.version,
            num_tensors=counts.num_tensors,
            num_bytes=counts.num_bytes,
            changed_tensors=counts.changed_tensors,
            changed_bytes=counts.changed_bytes,
            staging_s=update.staging_s,
            swap_ms=(swapped - verified) * 1e3,
            proof_ms=(verified - started + proved - swapped) * 1e3,
            pause_ms=(time.perf_counter() - started) * 1e3,
            canary_gap=gaps.largest,
            canary_mean_gap=gaps.mean,
            decode_canary_gap=gaps.decode,
            inspect_s=update.inspect_s,
            derive_s=update.derive_s,
            warning=None if counts.changed_tensors else "no tensor differs from the previous version",
        )

    def _swap(self, update: WeightUpdate) -> None:
        self._ranks.tell(ops.SwapUpdate())
        with device_errors("while weights were swapped"):
            update.swap()

    def abort(self) -> None:
        """As `Engine.abort_update`."""
        if self._update is not None:
            self._update = None
            self._ranks.tell(ops.AbortUpdate())

    def drop(self) -> None:
        """Forget the open update without a word to other ranks: they end."""
        self._update = None

    def _open_update(self) -> WeightUpdate:
        if self._update is None:
            raise NoUpdate("no update is open", limit="begin_update opens one", remedy="call begin_update first")
        return self._update

    def _judge(self, gaps: CanaryGaps, update: WeightUpdate) -> None:
        if gaps.largest is None or gaps.mean is None or gaps.decode is None:
            return
        limit, mean_limit = self._resolved.canary_tolerance, self._resolved.canary_mean_tolerance
        if gaps.largest <= limit and gaps.mean <= mean_limit and gaps.decode <= limit:
            return
        # Of a partial one the trainer's other tensors may have changed since they were last sent.
        first = "send all tensors (partial=False), since those that were not sent may differ; " if update.partial else ""
        raise CanaryMismatch(
            f"canaries differ from the trainer's log-probabilities: max {gaps.largest:.3g} at {gaps.worst}, "
            f"mean {gaps.mean:.3g}, through decode {gaps.decode:.3g} nats",
            field="canaries",
            value=gaps.largest,
            limit=f"allowed: max {limit:g}, mean {mean_limit:g}; the old weights serve on",
            remedy=f"{first}check that trainer and service run the same model and dtype, or raise canary_tolerance",
        )


def _run_entry(one: Slice, run: DeviceRun) -> ops.StageRun:
    return ops.StageRun(
        name=one.name,
        dtype=run.dtype,
        shape=np.array(one.spec.shape, np.int64),
        start=one.start,
        count=run.size,
        handle=run.handle.hex(),
        offset=run.offset,
    )


def _no_room(what: str, name: str) -> WeightUpdateError:
    return WeightUpdateError(
        f"the device has no memory to {what} {name}", field="device", limit="the old weights serve on", remedy=f"abort, and {LESS_MEMORY}"
    )
