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

import contextlib
import enum
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from areno.errors import DigestMismatch, EngineFailure, InvalidRequest, ManifestMismatch
from areno.parallel import TPGroup
from areno.request import MAX_TEMPERATURE, MIN_TEMPERATURE
from areno.weights.derived import DerivedCopy
from areno.weights.digest import MASK64, bits_of, digest, digest_part, digest_rows, digest_slice, signed
from areno.weights.manifest import OLD_SERVE_ON, SOURCE_NAMES, check_manifest, mismatch
from areno.weights.names import ParameterTable, TensorSpec, canonical_name, dtype_name, is_finite, list_names, nearest_name
from areno.weights.shards import Overlap, TensorShard, merge_digests
from areno.weights.slices import SliceLedger
from areno.weights.staged import Layout, PendingFacts, StagedFacts, inspect, inspect_on_device, inspect_rows, join_facts, known

if TYPE_CHECKING:
    from areno.kernels.weights import Exchange

_SCRATCH_BYTES = 16 << 20
# On the host it stays in the cache, so that a swap reads and writes live and staged memory once each.
_HOST_SCRATCH_BYTES = 1 << 19
_LOOK_BYTES = 1 << 30
"""Staged bytes that one look on a device waits for, so that its launches are few and a commit finds little left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A sequence whose log-probabilities under the new weights the trainer knows.

    Shapes: ids int64 [n], n >= 2; expected_logprobs float32 [n - 1], of ids[1:] at `temperature`.
    Raises: InvalidRequest.
    """

    ids: np.ndarray
    expected_logprobs: np.ndarray
    temperature: float = 1.0

    def __post_init__(self) -> None:
        ids, expected = np.asarray(self.ids), np.asarray(self.expected_logprobs)
        if ids.ndim != 1 or ids.size < 2 or ids.dtype.kind not in "iu":
            raise _invalid_canary("ids", f"shape {ids.shape} and dtype {ids.dtype}", "one dimension of at least two integers")
        if expected.shape != (ids.size - 1,) or expected.dtype.kind != "f":
            raise _invalid_canary(
                "expected_logprobs", f"shape {expected.shape} and dtype {expected.dtype}", f"floats of shape ({ids.size - 1},)"
            )
        if not np.isfinite(expected).all() or (expected > 0).any():
            raise _invalid_canary("expected_logprobs", "a value that is positive, infinite or NaN", "log-probabilities: finite, at most 0")
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise _invalid_canary("temperature", repr(self.temperature), f"0 or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
        object.__setattr__(self, "ids", ids.astype(np.int64))
        object.__setattr__(self, "expected_logprobs", expected.astype(np.float32))


def _invalid_canary(field: str, found: str, limit: str) -> InvalidRequest:
    return InvalidRequest(
        f"a canary's {field} has {found}",
        field=f"canary.{field}",
        value=found,
        limit=f"needed: {limit}",
        remedy="score the canary with the trainer's new weights",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What a committed update did. Units: names say them; gaps are in nats, None without canaries.

    `staging_s` runs from begin to verification; `inspect_s` is how much of it went into proving staged tensors on the host (digest,
    finiteness, what changed), `derive_s` into copies of them in the layout that is multiplied; `pause_ms` is all the time in which
    no row could decode.
    """

    version: int
    num_tensors: int
    num_bytes: int
    changed_tensors: int
    changed_bytes: int
    staging_s: float
    swap_ms: float
    proof_ms: float
    pause_ms: float
    canary_gap: float | None = None
    canary_mean_gap: float | None = None
    decode_canary_gap: float | None = None
    inspect_s: float = 0.0
    derive_s: float = 0.0
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """How much was staged, in serving dtype, and how much of it differs from the live weights bit for bit."""

    num_tensors: int
    num_bytes: int
    changed_tensors: int
    changed_bytes: int


class UpdateState(enum.Enum):
    """Where an update stands; the engine closes it by dropping it."""

    OPEN = "open"
    VERIFIED = "verified"
    SWAPPED = "swapped"


class WeightUpdate:
    """An open update of `table`. One at a time: it stages in the table's one staging storage."""

    __slots__ = (
        "_conflicts",
        "_copies",
        "_exchange",
        "_facts",
        "_group",
        "_looker",
        "_looks",
        "_manifest",
        "_opened_at",
        "_prepared",
        "_scratch",
        "_slices",
        "_sources",
        "_staged",
        "_stream",
        "_table",
        "_tied",
        "_unknown",
        "counts",
        "derive_s",
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
        self._group = group or TPGroup.single(table.device)
        self._manifest = None if manifest is None else check_manifest(table, manifest, partial=partial)
        self._table = table
        self._staged = table.staging()
        self._sources: dict[str, str] = {}
        # What is known of staged tensors, taken away when one comes again.
        self._facts: dict[str, StagedFacts | PendingFacts] = {}
        # Tensors whose part here came again under an alias with other values; other ranks' parts may be equal.
        self._conflicts: set[str] = set()
        self._stream = self._looker = None
        if table.device.type == "cuda":
            # Looking at what is staged must not hold up the copies behind it.
            self._stream, self._looker = torch.cuda.Stream(table.device), torch.cuda.Stream(table.device)
            self._stream.wait_stream(torch.cuda.current_stream(table.device))
        self._tied: dict[str, int] = {}
        self._slices = SliceLedger()
        # On a device: copies to be launched together, staged tensors that nothing is known of yet, and when looks began and ended.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unknown: dict[str, int] = {}
        self._looks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._scratch: torch.Tensor | None = None
        self._exchange: Exchange | None = None
        # Derived copies of the staged weights by storage; after a swap, of those that were live.
        self._prepared: dict[str, list[tuple[DerivedCopy, torch.Tensor]]] = {}
        self._opened_at = time.monotonic()
        self.version = version
        self.partial = partial
        self.state = UpdateState.OPEN
        self.counts: UpdateCounts | None = None
        self.staging_s = math.nan
        self.inspect_s = 0.0
        self.derive_s = 0.0

    def stage(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor, cast to the serving dtype. The same name again overwrites.

        Raises: ManifestMismatch (unknown, not announced, wrong shape or dtype, not finite, another tensor under an alias).
        """
        assert self.state is not UpdateState.SWAPPED, f"tensor {name} came after the swap; stage before commit"
        canonical = canonical_name(name)
        tensor = tensor.detach()
        self._check_offer(name, canonical, TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape)))
        self.state = UpdateState.OPEN
        self._slices.forget(canonical)
        if canonical in self._table.tied:
            # Not stored: its digest is compared with its twin's when everything is in.
            cast = tensor.to(self._table.dtype)
            _check_finite(name, cast, self._table.dtype)
            self._tied[canonical] = digest(cast)
            return
        target, shard = self._staged.views[canonical], self._table.shards.get(canonical)
        part = tensor if shard is None else shard.take(tensor)
        earlier = self._sources.get(canonical, name)
        if earlier == name:
            self._conflicts.discard(canonical)
        elif not torch.equal(bits_of(part.to(device=target.device, dtype=target.dtype)), bits_of(target)):
            if shard is None:
                raise _offered_twice(canonical, earlier, name)
            self._conflicts.add(canonical)
        self._take_back(canonical)
        with self._beside_decode([tensor], complete=not tensor.is_cuda):
            target.copy_(part)
        if self._stream is None:
            started = time.perf_counter()
            facts = inspect(target, self._table.views[canonical], _layout_of(shard))
            self.inspect_s += time.perf_counter() - started
            if not facts.finite and shard is None:
                raise _not_finite(name, self._table.dtype)
            self._facts[canonical] = facts
        else:
            self._unknown[canonical] = target.nbytes
        self._sources[canonical] = name
        self._derive(canonical)
        self._look(at_least=_LOOK_BYTES)

    @contextlib.contextmanager
    def _beside_decode(self, sources: Iterable[torch.Tensor], *, complete: bool) -> Iterator[None]:
        """Let copies run on the update's own stream while decode goes on, unless sources are `complete` after what was launched before."""
        if self._stream is None:
            yield
            return
        if not complete:
            self._stream.wait_stream(torch.cuda.current_stream(self._table.device))
        for source in sources:
            if source.is_cuda:
                source.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def slice_memory(self, name: str, *, start: int, count: int, spec: TensorSpec) -> torch.Tensor | None:
        """Return where elements `start` to `start` + `count` of a tensor are staged, to be filled and then given to `stage_slice`.

        What was there counts as not staged. None where the values have to be looked at first: cast, cut, compared, or on a device.
        Raises: as `stage_slice`.
        """
        canonical, size = canonical_name(name), math.prod(spec.shape)
        self._check_offer(name, canonical, spec)
        fits = 0 <= start <= size - count and self._sources.get(canonical, name) == name
        looked_at = canonical in self._table.tied or canonical in self._table.shards
        if self._stream is not None or looked_at or spec.dtype != dtype_name(self._table.dtype) or not fits:
            return None
        self._slices.check(canonical, start, count)
        self._slices.drop(canonical, start)
        self._take_back(canonical)
        self.state = UpdateState.OPEN
        return self._staged.views[canonical].view(-1)[start : start + count]

    def stage_slice(self, name: str, values: torch.Tensor, *, start: int, spec: TensorSpec) -> None:
        """Take `values` as elements `start`, `start` + 1, ... of a tensor of `spec`, flat in row-major order.

        Slices of a tensor come in any order and may be repeated; the tensor is staged once they cover it. Their bounds must
        stay the same within an update. Values on a CUDA device are complete when they come, and stay until `settle_slices`.
        Raises: ManifestMismatch as `stage`, and for slices that reach over the end or into each other.
        """
        assert self.state is not UpdateState.SWAPPED, f"a slice of {name} came after the swap; stage before commit"
        canonical, count, size = canonical_name(name), values.numel(), math.prod(spec.shape)
        self._check_offer(name, canonical, spec)
        if values.ndim != 1 or dtype_name(values.dtype) != spec.dtype or not 0 <= start <= size - count:
            raise mismatch(
                f"a slice of {name} holds {values.dtype} elements {start} to {start + count}, the tensor {size} of {spec.dtype}",
                name,
                "send flat slices that lie within the tensor",
            )
        self.state = UpdateState.OPEN
        self._slices.check(canonical, start, count)
        earlier = self._sources.get(canonical, name)
        if earlier != name:
            raise mismatch(f"tensor {canonical} was offered twice, as {earlier} and as {name}", name, "send each tensor under one name")
        self._take_back(canonical)
        self._unknown.pop(canonical, None)
        self._tied.pop(canonical, None)
        if canonical in self._table.tied:
            cast = values.to(self._table.dtype)
            _check_finite(name, cast, self._table.dtype)
            if self._slices.add(canonical, start, count, StagedFacts(digest_slice(cast, start), True, False), size=size):
                self._tied[canonical] = self._slices.facts(canonical).digest
            return
        shard = self._table.shards.get(canonical)
        facts = self._stage_run(canonical, shard, values, start)
        if facts is not None and not facts.finite and shard is None:
            raise _not_finite(name, self._table.dtype)
        if not self._slices.add(canonical, start, count, facts, size=size):
            return
        self._sources[canonical] = name
        if facts is None:
            self._unknown[canonical] = self._staged.views[canonical].nbytes
        else:
            self._facts[canonical] = self._slices.facts(canonical)
        self._derive(canonical)

    def _take_back(self, name: str) -> None:
        """Forget a tensor that comes again."""
        self._sources.pop(name, None)
        self._facts.pop(name, None)
        if name in self._table.views:
            self._prepared.pop(self._table.storage_of(name), None)

    def _derive(self, name: str) -> None:
        """Make the copies of a storage that tensor `name` made whole: beside decode, not in the pause."""
        storage = self._table.storage_of(name)
        if self._sources.keys() >= self._table.parts_of(storage):
            self._make_copies(storage)

    def _make_copies(self, storage: str) -> None:
        copies, started = self._table.copies_of(storage), time.perf_counter()
        if copies:
            self._prepared[storage] = [(copy, copy.made_of(self._staged.live[storage])) for copy in copies]
            self.derive_s += time.perf_counter() - started

    def _derive_rest(self) -> None:
        """Make the copies of storages that a partial update brought in part: the rest of them holds the live values."""
        for storage in {self._table.storage_of(name) for name in self._sources} - self._prepared.keys():
            if self._table.copies_of(storage):
                for name in self._table.parts_of(storage) - self._sources.keys():
                    self._staged.views[name].copy_(self._table.views[name])
                self._make_copies(storage)

    def _exchange_copies(self) -> None:
        for storage, prepared in self._prepared.items():
            self._prepared[storage] = [(copy, copy.exchange(other)) for copy, other in prepared]

    def _stage_run(self, name: str, shard: TensorShard | None, values: torch.Tensor, start: int) -> StagedFacts | None:
        """Copy what is this rank's of a run of elements; return what the host learns of it, None on a device."""
        live, staged, count = self._table.views[name], self._staged.views[name], values.numel()
        overlaps = [Overlap(0, start, start, 1, count, 0)] if shard is None else list(shard.overlaps(start, count))
        copies = [(one.of_shard(staged), one.of_run(values)) for one in overlaps]
        if self._stream is not None:
            if values.is_cuda and staged.is_cuda:
                self._copies += copies
                return None
            with self._beside_decode([values], complete=True):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
            return None
        for target, source in copies:
            # Values that were read into staging are there already.
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        started = time.perf_counter()
        parts = [inspect_rows(one.of_shard(staged), one.of_shard(live), one.index, one.stride) for one in overlaps]
        self.inspect_s += time.perf_counter() - started
        return join_facts(parts)

    def settle_slices(self) -> None:
        """Copy every slice and wait for it; what it was copied from may be written then. Begins, on a device, to look at the tensors."""
        if self._stream is None:
            return
        self._launch_copies()
        self._stream.synchronize()
        self._look(at_least=_LOOK_BYTES)

    def _launch_copies(self) -> None:
        """Launch the copies that wait, those of one dtype together."""
        copies, self._copies = self._copies, []
        with self._beside_decode((source for _, source in copies), complete=True):
            for dtype in {source.dtype for _, source in copies}:
                alike = [(target, source) for target, source in copies if source.dtype == dtype]
                torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike], non_blocking=True)

    def _look(self, *, at_least: int) -> None:
        """Find out about the tensors staged on a device, if they have that many bytes; nothing is waited for."""
        if not self._unknown or sum(self._unknown.values()) < at_least:
            return
        names, self._unknown = list(self._unknown), {}
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        assert self._stream is not None and self._looker is not None, "on the host nothing waits to be looked at"
        self._looker.wait_stream(self._stream)
        with torch.cuda.stream(self._looker):
            events[0].record()
            layouts = [layout for name in names if (layout := _layout_of(self._table.shards.get(name)))]
            facts = inspect_on_device([(self._staged.views[name], self._table.views[name]) for name in names], layouts or None)
            events[1].record()
        self._facts.update(zip(names, facts))
        self._looks.append(events)

    def _check_offer(self, name: str, canonical: str, offered: TensorSpec) -> None:
        target = self._table.tied.get(canonical, canonical)
        if target not in self._table.views:
            raise mismatch(f"tensor {name} is not in the model", name, nearest_name(canonical, self._table.views))
        if offered.shape != self._table.shape_of(target):
            raise mismatch(
                f"tensor {name} has shape {offered.shape}, the model's is {self._table.shape_of(target)}",
                name,
                "send it whole and unreshaped; nothing is broadcast",
            )
        if offered.dtype not in SOURCE_NAMES:
            raise mismatch(f"tensor {name} has dtype {offered.dtype}", name, f"send {', '.join(SOURCE_NAMES)}")
        if self._manifest is None:
            return
        announced = self._manifest.get(canonical)
        if announced is None:
            raise mismatch(f"tensor {name} was not announced in the manifest", name, "begin an update whose manifest names it")
        if announced.dtype != offered.dtype:
            raise mismatch(
                f"tensor {name} has dtype {offered.dtype}, the manifest says {announced.dtype}", name, "send what the manifest announces"
            )

    def verify(self, digests: Mapping[str, int] | None) -> None:
        """Prove that everything is staged, and equal to the trainer's tensors after the cast if `digests` are given.

        Of several ranks all verify, and all come to the same end. Mutates: `counts`, `staging_s`. Blocks: for the other ranks.
        Raises: ManifestMismatch (incomplete, not finite), DigestMismatch naming the tensors.
        """
        assert self.state is not UpdateState.SWAPPED, "an update is verified before its swap"
        self.staging_s = time.monotonic() - self._opened_at
        self._check_complete()
        self._learn()
        self._check_tied()
        if digests is not None:
            self._check_digests(digests)
        self.counts = self._count()
        self._derive_rest()
        if self._staged.device.type == "cuda":
            from areno.kernels.weights import Exchange

            self._exchange = Exchange([(self._table.views[name], self._staged.views[name]) for name in self._sources])
        else:
            num_bytes = _HOST_SCRATCH_BYTES if self._table.device.type == "cpu" else _SCRATCH_BYTES
            elements = min(num_bytes // self._table.dtype.itemsize, max(self._table.views[name].numel() for name in self._sources))
            with torch.inference_mode(False):
                self._scratch = torch.empty(elements, dtype=self._table.dtype, device=self._table.device)
        self.state = UpdateState.VERIFIED

    def _learn(self) -> None:
        """Wait for what is still to be found out of the staged tensors; refuse those that are not finite, by name."""
        if self._stream is not None:
            self._launch_copies()
            self._look(at_least=0)
            for stream in (self._stream, self._looker):
                if stream is not None:
                    stream.synchronize()
            self.inspect_s += sum(begun.elapsed_time(ended) for begun, ended in self._looks) / 1e3
            self._looks.clear()
        names = list(self._sources)
        facts = known(self._facts[name] for name in names)
        if self._group.size > 1:
            facts = self._merge(names, facts)
        self._facts.update(zip(names, facts))
        broken = [name for name in names if not self._fact(name).finite]
        if broken:
            raise mismatch(
                f"tensors that hold NaN or infinity as {self._table.dtype}: {list_names(broken)}",
                sorted(broken),
                "look for a diverged step in the trainer",
            )

    def _merge(self, names: list[str], facts: list[StagedFacts]) -> list[StagedFacts]:
        """Return what all ranks together know of whole tensors. Blocks: for the other ranks."""
        words = [word for name, one in zip(names, facts) for word in (*one.words(), int(name in self._conflicts))]
        found = self._group.gather_words(words)
        merged, torn = [], []
        for place, name in enumerate(names):
            ranks = [rank[4 * place : 4 * place + 4] for rank in found]
            if any(rank[3] for rank in ranks):
                # The other name is known only to the ranks whose part differs.
                raise _offered_twice(name, "another name", self._sources[name])
            whole = merge_digests([rank[0] for rank in ranks], self._table.shards[name].copies)
            if whole is None:
                torn.append(name)
            merged.append(StagedFacts(whole or 0, all(rank[1] for rank in ranks), any(rank[2] for rank in ranks)))
        if torn:
            raise DigestMismatch(
                f"ranks hold other values of {list_names(torn)}",
                field="digests",
                value=sorted(torn),
                limit=f"copies of one tensor must be equal; {OLD_SERVE_ON}",
                remedy="push again; if it comes back, start the engine again",
            )
        return merged

    def _fact(self, name: str) -> StagedFacts:
        facts = self._facts[name]
        assert isinstance(facts, StagedFacts), f"nothing is known of {name} yet"
        return facts

    def _check_complete(self) -> None:
        needed = self._table.views.keys() if not self.partial else (self._manifest or {}).keys() - self._table.tied.keys()
        missing = needed - self._sources.keys()
        if missing:
            raise mismatch(
                f"{len(missing)} of {len(needed)} tensors never came: {list_names(missing)}",
                sorted(missing),
                "stage every tensor, then commit",
            )
        if not self._sources:
            raise mismatch("no tensor was staged", [], "stage the tensors before the commit, or abort")

    def _check_tied(self) -> None:
        for name, found in self._tied.items():
            target = self._table.tied[name]
            if found != (self._fact(target).digest if target in self._sources else _digests_of(self._table, [target], self._group)[target]):
                raise mismatch(
                    f"tensor {name} is tied to {target} in this model, but the values differ",
                    name,
                    "send them equal, or serve a model with tie_word_embeddings false",
                )

    def _check_digests(self, digests: Mapping[str, int]) -> None:
        expected = {canonical_name(name): value for name, value in digests.items()}
        strange = [name for name, value in expected.items() if type(value) is not int]
        if strange:
            raise mismatch(
                f"digests that are no integers: {list_names(strange)}", sorted(strange), "send areno.weights.digest.digest(tensor)"
            )
        unknown = expected.keys() - self._sources.keys() - self._tied.keys() - self._table.tied.keys()
        if unknown:
            raise mismatch(
                f"digests name tensors that were not staged: {list_names(unknown)}",
                sorted(unknown),
                "send digests of the staged tensors only",
            )
        absent = self._sources.keys() - expected.keys()
        found = {name: self._fact(name).digest for name in self._sources.keys() & expected.keys()} | self._tied
        wrong = sorted(name for name, value in found.items() if name in expected and value != expected[name] & MASK64)
        if wrong or absent:
            told = [f"differ for {list_names(wrong)}"] if wrong else []
            told += [f"are missing for {list_names(absent)}"] if absent else []
            raise DigestMismatch(
                f"digests {' and '.join(told)}",
                field="digests",
                value=sorted([*wrong, *absent]),
                limit=f"they are of the tensors as {self._table.dtype}, row by row; {OLD_SERVE_ON}",
                remedy="cast on the trainer with tensor.to(dtype) before taking the digest, and send each tensor under its own name",
            )

    def _count(self) -> UpdateCounts:
        sizes = {name: math.prod(self._table.shape_of(name)) * self._table.dtype.itemsize for name in self._sources}
        changed = [name for name in sizes if self._fact(name).changed]
        return UpdateCounts(len(sizes), sum(sizes.values()), len(changed), sum(sizes[name] for name in changed))

    def swap(self) -> None:
        """Exchange the contents of live and staged storage for every staged tensor; again: exchange them back.

        Tensors that a partial update did not bring keep their values. Mutates: live, staged and derived tensors.
        """
        assert self.state is not UpdateState.OPEN, "an update is verified before its swap"
        if self._exchange is not None:
            self._exchange.run()
        else:
            self._swap_through_scratch()
        self._exchange_copies()
        self._table.rebuild_small()
        if self._stream is not None:
            torch.cuda.current_stream(self._table.device).synchronize()
        self.state = UpdateState.VERIFIED if self.state is UpdateState.SWAPPED else UpdateState.SWAPPED

    def _swap_through_scratch(self) -> None:
        assert self._scratch is not None, "verification makes room for the swap"
        size = self._scratch.numel()
        for name in self._sources:
            live, staged = self._table.views[name].view(-1), self._staged.views[name].view(-1)
            for start in range(0, live.numel(), size):
                live_part, staged_part = live[start : start + size], staged[start : start + size]
                kept = self._scratch[: live_part.numel()].copy_(live_part)
                live_part.copy_(staged_part, non_blocking=True)
                staged_part.copy_(kept, non_blocking=True)


def _check_finite(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if not is_finite(tensor):
        raise _not_finite(name, dtype)


def _not_finite(name: str, dtype: torch.dtype) -> ManifestMismatch:
    return mismatch(f"tensor {name} holds NaN or infinity as {dtype}", name, "look for a diverged step in the trainer")


def _offered_twice(name: str, first: str, second: str) -> ManifestMismatch:
    return mismatch(
        f"tensor {name} was offered twice, as {first} and as {second}, with other values", second, "send each tensor under one name"
    )


def _layout_of(shard: TensorShard | None) -> Layout | None:
    return None if shard is None else Layout(shard.first, shard.run, shard.stride)


def digests(table: ParameterTable, group: TPGroup | None = None) -> dict[str, int]:
    """Return the digest of every live tensor by its Hugging Face name, read from the storage that serves.

    Of several ranks all call it, and all get the digests of the whole tensors. Blocks: for the other ranks. Raises: EngineFailure
    where copies of one tensor differ.
    """
    return _digests_of(table, list(table.views), group or TPGroup.single(table.device))


def _digests_of(table: ParameterTable, names: list[str], group: TPGroup) -> dict[str, int]:
    if group.size == 1:
        return {name: digest(table.views[name]) for name in names}
    found = []
    for name in names:
        shard, view = table.shards[name], table.views[name]
        if view.is_cuda:
            found.append(int(digest_part(view, shard.first, run=shard.run, stride=shard.stride)))
        else:
            found.append(signed(digest_rows(view.view(-1, shard.run), shard.first, shard.stride)))
    ranks = group.gather_words(found)
    merged = {}
    for place, name in enumerate(names):
        value = merge_digests([rank[place] for rank in ranks], table.shards[name].copies)
        if value is None:
            raise EngineFailure(
                f"ranks hold other values of {name}",
                field="tp",
                limit="copies of one tensor must be equal",
                remedy="start the engine again, or push a full update",
            )
        merged[name] = value
    return merged
