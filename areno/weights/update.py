"""One weight update: what was offered, what is staged, and the swap that makes it live.

The engine opens one, hands it tensors between its steps, verifies, swaps between two launches, proves the result and
either keeps it or swaps back. Nothing here touches live weights before `swap`.

    OPEN --verify--> VERIFIED --swap--> SWAPPED --swap--> VERIFIED
      ^----stage--------'

Invariant: a full update is complete or refused as a whole. Live storage keeps its addresses: the contents of live and
staged tensors change places (through a small scratch buffer, on a device in one pass), so a second swap restores the old bits.

In a tensor-parallel engine every rank has an update of its own table, is handed the same whole tensors in the same order, and keeps
its part of each. What names, shapes and order decide is refused alike everywhere; what values decide is left to `verify`, where the
ranks put together what they found and come to one verdict.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Iterable, Mapping

import torch

from areno.parallel import TPGroup
from areno.weights.digest import bits_of, digest, digest_slice
from areno.weights.manifest import check_manifest, check_offer, mismatch, not_finite, offered_twice
from areno.weights.names import ParameterTable, TensorSpec, canonical_name, dtype_name, is_finite
from areno.weights.prepared import PreparedCopies
from areno.weights.report import UpdateCounts
from areno.weights.shards import Overlap, TensorShard
from areno.weights.slices import DeviceRun, OpenSlice, Slice, SliceLedger
from areno.weights.staged import StagedFacts, inspect, inspect_rows, join_facts
from areno.weights.staged_set import StagedSet
from areno.weights.staging_stream import StagingStream, layout_of
from areno.weights.swap import Swap


class UpdateState(enum.Enum):
    """Where an update stands; the engine closes it by dropping it."""

    OPEN = "open"
    INSPECTED = "inspected"
    VERIFIED = "verified"
    SWAPPED = "swapped"


class WeightUpdate:
    """An open update of `table`. One at a time: it stages in the table's one staging storage."""

    __slots__ = (
        "_manifest",
        "_opened_at",
        "_prepared",
        "_received",
        "_slices",
        "_staged",
        "_stream",
        "_swap",
        "_table",
        "counts",
        "inspect_s",
        "partial",
        "staging_s",
        "state",
        "version",
    )

    def __init__(
        self,
        table: ParameterTable,
        manifest: Mapping[str, TensorSpec] | None,
        *,
        version: int,
        partial: bool,
        group: TPGroup | None = None,
    ):
        """Check the manifest against the model before a byte is taken. Raises: ManifestMismatch listing every wrong name."""
        self._manifest = None if manifest is None else check_manifest(table, manifest, partial=partial)
        self._table = table
        self._staged = table.staging()
        self._received = StagedSet(table, group or TPGroup.single(table.device))
        self._slices = SliceLedger()
        self._prepared = PreparedCopies(table, self._staged)
        self._stream = StagingStream(table, self._staged) if table.device.type == "cuda" else None
        self._swap: Swap | None = None
        self._opened_at = time.monotonic()
        self.version = version
        self.partial = partial
        self.state = UpdateState.OPEN
        self.counts: UpdateCounts | None = None
        self.staging_s = math.nan
        self.inspect_s = 0.0

    @property
    def derive_s(self) -> float:
        """Seconds spent in copies of the staged weights in the layout that is multiplied."""
        return self._prepared.seconds

    def stage(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor, cast to the serving dtype. The same name again overwrites.

        Raises: ManifestMismatch (unknown, not announced, wrong shape or dtype, not finite, another tensor under an alias).
        """
        assert self.state is not UpdateState.SWAPPED, f"tensor {name} came after the swap; stage before commit"
        tensor = tensor.detach()
        canonical = check_offer(self._table, self._manifest, name, TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape)))
        if canonical in self._table.tied:
            # Not stored: its digest is compared with its twin's when everything is in. What is refused here other ranks never hear of,
            # so what came before it stays.
            cast = tensor.to(self._table.dtype)
            _check_finite(name, cast, self._table.dtype)
            self.state = UpdateState.OPEN
            self._slices.forget(canonical)
            self._received.tied[canonical] = digest(cast)
            return
        self.state = UpdateState.OPEN
        self._slices.forget(canonical)
        target, shard = self._staged.views[canonical], self._table.shards.get(canonical)
        part = tensor if shard is None else shard.take(tensor)
        earlier = self._received.sources.get(canonical, name)
        if earlier == name:
            self._received.conflicts.discard(canonical)
        elif not torch.equal(bits_of(part.to(device=target.device, dtype=target.dtype)), bits_of(target)):
            if shard is None:
                raise offered_twice(canonical, earlier, name)
            self._received.conflicts.add(canonical)
        self._take_back(canonical)
        if self._stream is None:
            target.copy_(part)
            started = time.perf_counter()
            facts = inspect(target, self._table.views[canonical], layout_of(shard))
            self.inspect_s += time.perf_counter() - started
            if not facts.finite and shard is None:
                raise not_finite(name, self._table.dtype)
            self._received.facts[canonical] = facts
        else:
            with self._stream.beside_decode([tensor], complete=not tensor.is_cuda):
                target.copy_(part)
            self._stream.look_later(canonical)
        self._received.sources[canonical] = name
        self._prepared.add(canonical, self._received.sources.keys())

    def open_slice(self, name: str, *, start: int, count: int, spec: TensorSpec) -> OpenSlice | None:
        """Return where elements `start` to `start` + `count` of a tensor are staged, to be filled, looked at and given to `close_slice`.

        What was there counts as not staged. None where the values have to be looked at first: cast, cut, compared, or on a device.
        Raises: as `stage_slices`.
        """
        assert self.state is not UpdateState.SWAPPED, f"a slice of {name} came after the swap; stage before commit"
        canonical, size = check_offer(self._table, self._manifest, name, spec), math.prod(spec.shape)
        fits = 0 <= start <= size - count and self._received.sources.get(canonical, name) == name
        looked_at = canonical in self._table.tied or canonical in self._table.shards
        if self._stream is not None or looked_at or spec.dtype != dtype_name(self._table.dtype) or not fits:
            return None
        self._slices.check(canonical, start, count)
        self._slices.drop(canonical, start)
        self._take_back(canonical)
        self.state = UpdateState.OPEN
        staged, live = (table.views[canonical].view(-1)[start : start + count] for table in (self._staged, self._table))
        return OpenSlice(name, canonical, start, staged, live)

    def close_slice(self, filled: OpenSlice) -> None:
        """Take a slice that was filled and looked at where it is staged. Raises: ManifestMismatch as `stage_slices`."""
        assert self.state is not UpdateState.SWAPPED, f"a slice of {filled.name} came after the swap; stage before commit"
        canonical, size = filled.canonical, self._table.views[filled.canonical].numel()
        self.inspect_s += filled.inspect_s
        facts = filled.facts()
        if not facts.finite:
            raise not_finite(filled.name, self._table.dtype)
        self._slices.check(canonical, filled.start, filled.values.numel())
        self._take_back(canonical)
        self.state = UpdateState.OPEN
        if self._slices.add(canonical, filled.start, filled.values.numel(), facts, size=size):
            self._complete(filled.name, canonical)

    def stage_slices(self, slices: Iterable[Slice], *, complete: bool = True) -> None:
        """Take elements of tensors; see `Slice`.

        Slices of a tensor come in any order and may be repeated; the tensor is staged once they cover it. Their bounds must
        stay the same within an update. Values on a CUDA device stay until `settle_slices`, or what `launch_slices` gave has passed; the
        current stream may still write them, or read them for others, before that is called where they are not `complete`.
        Raises: ManifestMismatch as `stage`, and for slices that reach over the end or into each other; those before it are taken.
        """
        assert self.state is not UpdateState.SWAPPED, "slices came after the swap; stage before commit"
        self.state = UpdateState.OPEN
        for one in slices:
            if self._stream is None or not complete or not self._stage_whole(one, self._stream):
                self._stage_slice(one.name, one.tensor, one.start, one.spec, complete)

    def _stage_whole(self, one: Slice, stream: StagingStream) -> bool:
        """Take a slice if it is all of a tensor, lies on the device and comes for the first time: most do, and each has its price."""
        name, values, target = canonical_name(one.name), one.values, None
        if self._manifest is not None and self._manifest.get(name) == one.spec and not one.start:
            target = self._staged.views.get(name)
        if target is None or not target.is_cuda or self._slices.knows(name) or name in self._received.sources:
            return False
        if isinstance(values, DeviceRun):
            count, dtype, source = values.size, values.dtype, values.address + values.offset
        elif values.is_cuda and values.is_contiguous():
            count, dtype, source = values.numel(), dtype_name(values.dtype), values.data_ptr()
        else:
            return False
        if count != math.prod(one.spec.shape) or not dtype == one.spec.dtype == dtype_name(target.dtype):
            return False
        stream.copy_whole_later(target, source, self._table.shards.get(name), values)
        self._slices.add_whole(name, count)
        self._complete(one.name, name)
        return True

    def _stage_slice(self, name: str, values: torch.Tensor, start: int, spec: TensorSpec, complete: bool) -> None:
        canonical, count, size = check_offer(self._table, self._manifest, name, spec), values.numel(), math.prod(spec.shape)
        if values.ndim != 1 or dtype_name(values.dtype) != spec.dtype or not 0 <= start <= size - count:
            raise mismatch(
                f"a slice of {name} holds {values.dtype} elements {start} to {start + count}, the tensor {size} of {spec.dtype}",
                name,
                "send flat slices that lie within the tensor",
            )
        self._slices.check(canonical, start, count)
        earlier = self._received.sources.get(canonical, name)
        if earlier != name:
            raise mismatch(f"tensor {canonical} was offered twice, as {earlier} and as {name}", name, "send each tensor under one name")
        if canonical in self._table.tied:
            # Looked at before anything is forgotten: what is refused here other ranks never hear of.
            cast = values.to(self._table.dtype)
            _check_finite(name, cast, self._table.dtype)
            self._received.tied.pop(canonical, None)
            if self._slices.add(canonical, start, count, StagedFacts(digest_slice(cast, start), True, False), size=size):
                self._received.tied[canonical] = self._slices.facts(canonical).digest
            return
        self._take_back(canonical)
        if self._stream is not None:
            self._stream.forget(canonical)
        shard = self._table.shards.get(canonical)
        facts = self._stage_run(canonical, shard, values, start, complete)
        if facts is not None and not facts.finite and shard is None:
            raise not_finite(name, self._table.dtype)
        if self._slices.add(canonical, start, count, facts, size=size):
            self._complete(name, canonical)

    def _complete(self, name: str, canonical: str) -> None:
        """Take note of a tensor that all slices of are there."""
        self._received.sources[canonical] = name
        if self._stream is not None:
            self._stream.look_later(canonical)
        else:
            self._received.facts[canonical] = self._slices.facts(canonical)
        self._prepared.add(canonical, self._received.sources.keys())

    def _take_back(self, name: str) -> None:
        """Forget a tensor that comes again."""
        self._received.take_back(name)
        self._prepared.forget(name)

    def _stage_run(self, name: str, shard: TensorShard | None, values: torch.Tensor, start: int, complete: bool) -> StagedFacts | None:
        """Copy what is this rank's of a run of elements; return what the host learns of it, None on a device."""
        live, staged, count = self._table.views[name], self._staged.views[name], values.numel()
        overlaps = [Overlap(0, start, start, 1, count, 0)] if shard is None else list(shard.overlaps(start, count))
        copies = [(one.of_shard(staged), one.of_run(values)) for one in overlaps]
        if self._stream is not None:
            if values.is_cuda and staged.is_cuda:
                self._stream.copy_later(copies, complete=complete)
                return None
            with self._stream.beside_decode([values], complete=complete):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
            return None
        for target, source in copies:
            target.copy_(source)
        started = time.perf_counter()
        parts = [inspect_rows(one.of_shard(staged), one.of_shard(live), one.index, one.stride) for one in overlaps]
        self.inspect_s += time.perf_counter() - started
        return join_facts(parts)

    def launch_slices(self) -> torch.cuda.Event | None:
        """Begin to copy every slice; return what passes when that is over, None where it is."""
        return None if self._stream is None else self._stream.launch()

    def settle_slices(self) -> None:
        """Copy every slice and wait for it; what it was copied from may be written then."""
        if self._stream is not None:
            self._stream.settle()

    @property
    def inspecting(self) -> bool:
        """Whether `inspect` was asked for since something was staged."""
        return self.state is UpdateState.INSPECTED

    def inspect(self) -> bool:
        """Begin, on a device, to find out about everything that is staged; return whether all is known. The rest is left to `verify`."""
        assert self.state is not UpdateState.SWAPPED, "an update is inspected before its swap"
        if self.state is UpdateState.OPEN:
            self.state = UpdateState.INSPECTED
        if self._stream is None:
            return True
        self._received.facts.update(self._stream.look())
        return self._stream.looks_over

    def verify(self, digests: Mapping[str, int] | None) -> None:
        """Prove that everything is staged, and equal to the trainer's tensors after the cast if `digests` are given.

        Of several ranks all verify, and all come to the same end. Mutates: `counts`, `staging_s`. Blocks: for the other ranks.
        Raises: ManifestMismatch (incomplete, not finite), DigestMismatch naming the tensors.
        """
        assert self.state is not UpdateState.SWAPPED, "an update is verified before its swap"
        self.staging_s = time.monotonic() - self._opened_at
        self._received.check_complete(
            self._table.views.keys() if not self.partial else (self._manifest or {}).keys() - self._table.tied.keys()
        )
        if self._stream is not None:
            facts, seconds = self._stream.finish()
            self._received.facts.update(facts)
            self.inspect_s += seconds
        self._received.learn()
        self._received.check_tied()
        if digests is not None:
            self._received.check_digests(digests)
        self.counts = self._received.count()
        self._prepared.add_rest(self._received.sources)
        self._swap = Swap([(self._table.views[name], self._staged.views[name]) for name in self._received.sources])
        self.state = UpdateState.VERIFIED

    def swap(self) -> None:
        """Exchange the contents of live and staged storage for every staged tensor; again: exchange them back.

        Tensors that a partial update did not bring keep their values. Mutates: live, staged and derived tensors.
        """
        assert self.state in (UpdateState.VERIFIED, UpdateState.SWAPPED), "an update is verified before its swap"
        assert self._swap is not None, "verification makes room for the swap"
        self._swap.run()
        self._prepared.exchange()
        self._table.rebuild_small()
        if self._stream is not None:
            torch.cuda.current_stream(self._table.device).synchronize()
        self.state = UpdateState.VERIFIED if self.state is UpdateState.SWAPPED else UpdateState.SWAPPED


def _check_finite(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if not is_finite(tensor):
        raise not_finite(name, dtype)
