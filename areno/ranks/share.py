"""One follower's share of the engine: carries out the entries of the log, as the engine itself does on rank 0.

It decides nothing and tells nobody what was sampled; what its result ring holds is read and dropped, as late as rank 0 reads its own.
A weight update that is refused is refused alike on every rank: rank 0 raises it, the others go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areno import commands
from areno.canary import CanaryProof
from areno.config import EngineConfig, ResolvedConfig
from areno.errors import ArenoError, Asleep, EngineFailure, WeightUpdateError
from areno.interprocess import DeviceImports, ImportedMemory
from areno.models.model_config import ModelConfig
from areno.parallel import TPGroup
from areno.rank import Rank, build_rank, fill_randomly
from areno.ranks import operations as ops
from areno.ranks.answers import Answer
from areno.ranks.segment import BROADCAST, LogSegment
from areno.ranks.state_check import state_of
from areno.weights.canary import Canary
from areno.weights.live_digests import digests
from areno.weights.load import load_checkpoint
from areno.weights.names import HostCopy, TensorSpec
from areno.weights.slices import DeviceRun, Slice
from areno.weights.update import WeightUpdate
from areno.weights.whole import whole_tensor


def make_rank(config: EngineConfig, resolved: ResolvedConfig, model_config: ModelConfig, group: TPGroup) -> Rank:
    """Build and fill one rank, ready for commands."""
    rank = build_rank(config, resolved, model_config, group.device, group=group)
    if config.load_format == "dummy":
        fill_randomly(rank.model, resolved.seed)
    else:
        load_checkpoint(Path(config.model), rank.model.table, group)
    rank.warm_up(resolved.buckets)
    return rank


def resolved_from_json(text: str) -> ResolvedConfig:
    """Return resolved options from JSON."""
    fields = json.loads(text)
    return ResolvedConfig(**{**fields, "buckets": tuple(fields["buckets"])})


class Share:
    """See the module. `segment` is where pieces of weights come by; `Build` comes first."""

    def __init__(self, segment: LogSegment, rank: int, model_config: ModelConfig, device: torch.device, group: TPGroup) -> None:
        self._segment, self._number, self._model_config, self._device, self._group = segment, rank, model_config, device, group
        self._built: _Built | None = None
        self._update: WeightUpdate | None = None
        self._pieces: dict[str, torch.Tensor] = {}
        self._imports: DeviceImports | None = None
        self._moved_out: HostCopy | None = None
        self._handlers: dict[type, Callable[[Any], object]] = {
            ops.Build: self._build,
            ops.ScoreIds: self._score,
            ops.OpenUpdate: self._open_update,
            ops.StagePiece: self._stage_piece,
            ops.OpenMemory: lambda entry: self._memory(entry.handle),
            ops.StageRun: self._stage_run,
            ops.LaunchSlices: lambda _: self._open.launch_slices(),
            ops.CopyRuns: lambda _: self._open.settle_slices(),
            ops.InspectUpdate: self._inspect,
            ops.VerifyUpdate: self._verify,
            ops.SwapUpdate: self._swap,
            ops.MeasureCanaries: self._measure,
            ops.PublishUpdate: self._publish,
            ops.AbortUpdate: self._abort,
            ops.TakeDigests: lambda _: digests(self._own.rank.model.table, self._group),
            ops.GatherTensor: lambda entry: whole_tensor(self._own.rank.model.table, entry.name, self._group),
            ops.ReleaseKV: self._release,
            ops.MoveOutWeights: self._move_out,
            ops.WakeUp: self._wake,
            ops.WarmUp: self._warm_up,
        }

    def run(self, entry: ops.Entry) -> Answer | None:
        """Carry out one entry; return the answer of one that is answered. Raises: what is no refusal that all ranks share."""
        refusal: ArenoError | None = None
        if isinstance(entry, commands.Command):
            with torch.inference_mode():
                self._own.rank.executor.execute(entry)
                self._own.rank.ring.ready(drain=False)
            return None
        try:
            self._handlers[type(entry)](entry)
        except (WeightUpdateError, Asleep) as error:
            refusal = error
        return Answer(rank=self._number, refusal=refusal) if isinstance(entry, ops.ANSWERED) else None

    def stop(self) -> None:
        """Leave the group, after all that was launched: it waits for captured steps that name it."""
        if self._built is not None:
            self._built.rank.forget_captures()
        self._group.close()

    def state(self) -> np.ndarray:
        """Return what `CheckState` asks for."""
        return state_of(self._own.rank.path)

    @property
    def _own(self) -> _Built:
        assert self._built is not None, "the log begins with Build"
        return self._built

    @property
    def _open(self) -> WeightUpdate:
        if self._update is None:
            raise EngineFailure("the log goes on with an update that is not open here", field="tp", remedy="start the engine again")
        return self._update

    def _build(self, entry: ops.Build) -> None:
        config = EngineConfig(**json.loads(entry.config))
        resolved = resolved_from_json(entry.resolved)
        self._built = _Built(make_rank(config, resolved, self._model_config, self._group), resolved)

    def _score(self, entry: ops.ScoreIds) -> None:
        with torch.inference_mode():
            self._own.rank.forward.score(entry.ids, entry.temperature)

    def _open_update(self, entry: ops.OpenUpdate) -> None:
        manifest = None
        if entry.manifest:
            manifest = {name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in json.loads(entry.manifest).items()}
        table = self._own.rank.model.table
        self._update = WeightUpdate(table, manifest, version=entry.version, partial=entry.partial, group=self._group)

    def _stage_piece(self, entry: ops.StagePiece) -> None:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        shape = tuple(entry.shape.tolist())
        if not entry.whole:
            # Memory of its own: copies of a device may come later, and a bulk slot is written again once this entry is done.
            values = self._receive(entry, torch.empty(entry.count, dtype=dtype, device=self._lands_on(entry)))
            one = Slice(entry.name, values, entry.start, TensorSpec(entry.dtype, shape))
            self._open.stage_slices([one], complete=entry.slot != BROADCAST)
            return
        size = int(np.prod(entry.shape, dtype=np.int64))
        if entry.start == 0:
            self._pieces[entry.name] = torch.empty(size, dtype=dtype, device=self._lands_on(entry))
        self._receive(entry, self._pieces[entry.name][entry.start : entry.start + entry.count])
        if entry.start + entry.count == size:
            self._open.stage(entry.name, self._pieces.pop(entry.name).view(shape))

    def _memory(self, handle: str) -> ImportedMemory:
        if self._imports is None:
            self._imports = DeviceImports(self._device)
        return self._imports.memory(bytes.fromhex(handle))

    def _stage_run(self, entry: ops.StageRun) -> None:
        opened = self._memory(entry.handle)
        run = DeviceRun(opened.memory, opened.address, entry.offset, entry.count, entry.dtype, b"")
        self._open.stage_slices([Slice(entry.name, run, entry.start, TensorSpec(entry.dtype, tuple(entry.shape.tolist())))])

    def _lands_on(self, entry: ops.StagePiece) -> torch.device:
        return self._device if entry.slot == BROADCAST else torch.device("cpu")

    def _receive(self, entry: ops.StagePiece, target: torch.Tensor) -> torch.Tensor:
        """Fill `target` with a piece and return it."""
        if entry.slot == BROADCAST:
            return self._group.broadcast_(target)
        if not entry.count:
            return target
        return target.copy_(torch.frombuffer(self._segment.bulk(entry.slot), dtype=target.dtype, count=entry.count))

    def _inspect(self, entry: ops.InspectUpdate) -> None:
        self._open.inspect()

    def _verify(self, entry: ops.VerifyUpdate) -> None:
        with torch.inference_mode():
            self._open.verify(json.loads(entry.digests) if entry.digests else None)

    def _swap(self, entry: ops.SwapUpdate) -> None:
        with torch.inference_mode():
            self._open.swap()

    def _measure(self, entry: ops.MeasureCanaries) -> None:
        with torch.inference_mode():
            self._own.proof.measure(canaries_of(entry))

    def _publish(self, entry: ops.PublishUpdate) -> None:
        self._own.rank.executor.version = entry.version
        self._abort(None)

    def _abort(self, entry: object) -> None:
        if self._imports is not None:
            if self._update is not None:
                # What is still copied from there belongs to an update that is given up.
                self._update.settle_slices()
            self._imports.close()
            self._imports = None
        self._update = None
        self._pieces.clear()

    def _release(self, entry: ops.ReleaseKV) -> None:
        with torch.inference_mode():
            self._own.rank.ring.ready(drain=True)
            self._own.rank.release_kv()
        self._empty_cache()

    def _move_out(self, entry: ops.MoveOutWeights) -> None:
        if self._moved_out is None:
            self._moved_out = self._own.rank.model.table.move_out()
        self._empty_cache()

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _wake(self, entry: ops.WakeUp) -> None:
        rank = self._own.rank
        with torch.inference_mode():
            try:
                if self._moved_out is not None:
                    rank.model.table.move_in(self._moved_out)
                    self._moved_out = None
                rank.store.restore()
            except RuntimeError as error:
                if isinstance(error, ArenoError) or (self._device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError)):
                    raise
                rank.store.release()
                raise Asleep(
                    f"rank {self._number} has no memory to wake",
                    field="level",
                    limit=str(error).splitlines()[0],
                    remedy="free the memory that was lent out, then wake again",
                ) from error

    def _warm_up(self, entry: ops.WarmUp) -> None:
        with torch.inference_mode():
            self._own.rank.capture(self._own.resolved.buckets)


class _Built:
    """A rank and what follows from it."""

    __slots__ = ("proof", "rank", "resolved")

    def __init__(self, rank: Rank, resolved: ResolvedConfig) -> None:
        self.rank, self.resolved = rank, resolved
        self.proof = CanaryProof(rank.forward, rank.store, rank.proof_path, rank.proof_ring, resolved)


def canaries_entry(canaries: Sequence[Canary]) -> ops.MeasureCanaries:
    """Return the entry that scores these canaries."""
    return ops.MeasureCanaries(
        counts=np.array([canary.ids.size for canary in canaries], np.int64),
        ids=np.concatenate([canary.ids for canary in canaries]) if canaries else np.empty(0, np.int64),
        logprobs=np.concatenate([canary.expected_logprobs for canary in canaries]) if canaries else np.empty(0, np.float32),
        temperatures=np.array([canary.temperature for canary in canaries], np.float64),
    )


def canaries_of(entry: ops.MeasureCanaries) -> list[Canary]:
    """Return the canaries of an entry."""
    ends = np.cumsum(entry.counts)
    return [
        Canary(
            ids=entry.ids[end - count : end],
            expected_logprobs=entry.logprobs[end - count - index : end - index - 1],
            temperature=float(temperature),
        )
        for index, (end, count, temperature) in enumerate(zip(ends.tolist(), entry.counts.tolist(), entry.temperatures.tolist()))
    ]
