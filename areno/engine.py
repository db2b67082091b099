"""The engine: composes model, store, tables, scheduler and executor, and is all that a caller sees of them.

One round of `step`:

    submit/cancel --> Scheduler.plan --> [ApplyDelta | PrefillLaunch | DecodeLaunch]* --> Executor --> ResultRing
          ^                                                                                              |
        caller <------------- StepOutput <------------- Scheduler.consume <-----------------------------+

The caller's thread does everything; nothing here waits for anybody. A weight update is staged between steps and
committed between two launches, so no token is computed by half of it.

With `tp` above 1 this is rank 0: whatever runs on its device is first appended to the log that the other ranks follow (`ranks/`), so
that every rank does the same in the same order, and a rank that is lost ends the engine with a typed error.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from areno.canary import CanaryProof
from areno.config import DeviceLimits, EngineConfig, resolve
from areno.current_device import current_device, on_device
from areno.device_errors import LESS_MEMORY, device_errors, device_failure
from areno.errors import InvalidConfig, InvalidRequest, RequestTooLong
from areno.info import EngineInfo
from areno.models.model_config import ModelConfig, read_model_config
from areno.models.shards import check_tp, shard_model
from areno.parallel import TPGroup
from areno.rank import Rank, build_rank, check_host_memory, check_kernels, fill_randomly, find_device, measure_device
from areno.ranks import operations as ops
from areno.ranks.ranks import Ranks, build_entry, start_ranks
from areno.ranks.state_check import CHECK_LAUNCHES, state_of
from areno.request import Request, RequestLimits, SamplingParams
from areno.scheduler import Scheduler
from areno.score import Score, scorable_ids
from areno.sleeper import Sleeper
from areno.step_output import FinishKind, StepOutput, join_outputs
from areno.twin import twin_config
from areno.updates import Launched, Updates
from areno.weights.canary import Canary
from areno.weights.live_digests import digests
from areno.weights.load import load_checkpoint
from areno.weights.names import TensorSpec
from areno.weights.report import UpdateReport
from areno.weights.slices import OpenSlice, Slice
from areno.weights.whole import whole_tensor

# As long as steps of few layers take when every kernel is launched by itself; one that takes longer is no hurry.
LAUNCH_GRACE_S = 2e-3


class Engine:
    """An inference engine for one model folder. Not thread-safe: one thread calls it.

    `beside` is another engine whose weights and K/V memory this one uses (see `twin`). `dedicated` says that this process does
    nothing but run the engine, so that other ranks may end it when it hangs. `ranks` are others that follow this engine's log with
    a whole model each, for tests of the log; `tp` starts its own.
    Raises: CheckpointError, UnsupportedModel, InvalidConfig; EngineFailure if the device or another rank fails, here and in every
    method that runs on it, after which the engine is of no use.
    """

    def __init__(self, config: EngineConfig, *, beside: Engine | None = None, dedicated: bool = False, ranks: Ranks | None = None) -> None:
        if not isinstance(config, EngineConfig):
            raise InvalidConfig(
                f"config is a {type(config).__name__}",
                field="config",
                value=type(config).__name__,
                limit="an EngineConfig, which is checked when it is made",
                remedy="pass EngineConfig(model=...)",
            )
        model_config, device = read_model_config(Path(config.model)), find_device(config.device)
        check_tp(model_config, config.tp)
        self._ranks: Ranks = ranks or start_ranks(config, device, dedicated=dedicated)
        try:
            with current_device(device):
                self._compose(config, model_config, device, beside)
        except BaseException as error:
            # The frames hold captured steps, and a group does not end before the steps that name it.
            traceback.clear_frames(error.__traceback__)
            self._ranks.close()
            raise

    def _compose(self, config: EngineConfig, model_config: ModelConfig, device: torch.device, beside: Engine | None) -> None:
        self._device = device
        self._group: TPGroup = self._ranks.meet() if beside is None else beside._group
        # Sizes and limits are those of one rank's part, and the same for all ranks.
        local = shard_model(model_config, self._group.rank, self._group.size).local
        token_kv_elements = 2 * local.num_layers * local.num_kv_heads * local.head_dim
        with self._ranks.together():
            self._device_limits: DeviceLimits = (
                measure_device(device, config, model_config, self._group) if beside is None else beside._device_limits
            )
        resolved = resolve(
            config, self._device_limits, model_max_len=model_config.max_position_embeddings, token_kv_elements=token_kv_elements
        )
        if device.type == "cpu" and beside is None:
            # All ranks are processes of this host.
            token_bytes = self._group.size * token_kv_elements * getattr(torch, resolved.dtype).itemsize
            check_host_memory(config, resolved, resolved.page_size * token_bytes)
        elif device.type != "cpu":
            check_kernels(config, resolved, local)
        self._ranks.bound_launches(resolved.run_ahead + 1)
        built = self._ranks.tell(build_entry(config, resolved))
        with self._ranks.together(), device_errors("while the engine was built"):
            rank = build_rank(config, resolved, model_config, device, beside=None if beside is None else beside._rank, group=self._group)
            if beside is None and config.load_format == "dummy":
                fill_randomly(rank.model, resolved.seed)
            elif beside is None:
                load_checkpoint(Path(config.model), rank.model.table, self._group)
            rank.warm_up(resolved.buckets)
        self._ranks.expect(built)
        self._rank: Rank = rank
        self._table, self._store, self._forward = rank.model.table, rank.store, rank.forward
        self._path, self._ring, self._executor = rank.path, rank.ring, rank.executor
        # Kernel by kernel, another rank's launches are at times the slowest of all. Rank 0 would run ahead of those, and give lanes
        # that have ended to nobody for as long; while requests wait for a lane, it waits too. The device has all that it can do.
        self._launches_slowly = self._ranks.size > 1 and device.type == "cuda" and not config.graphs and resolved.run_ahead > 0
        limits = RequestLimits(
            vocab_size=model_config.vocab_size,
            num_valid_ids=model_config.num_valid_ids,
            max_model_len=resolved.max_model_len,
            pool_tokens=resolved.pool_tokens,
            eos_ids=model_config.eos_ids,
            sampling_slots=config.sampling_slots,
            kept_ids=config.kept_ids,
        )
        self._scheduler = Scheduler(config, resolved, limits)
        self._config, self._resolved = config, resolved
        self._company: WeakSet[Engine] | None = None
        self._updates = Updates(
            self._table,
            CanaryProof(rank.forward, rank.store, rank.proof_path, rank.proof_ring, resolved),
            executor=rank.executor,
            scheduler=self._scheduler,
            ranks=self._ranks,
            group=self._group,
            resolved=resolved,
            vocab_size=model_config.vocab_size,
        )
        self._sleeper = Sleeper(rank, self._scheduler, self._ranks, self._updates, buckets=resolved.buckets)
        self._steps = 0
        self._step_s = 0.0
        self._checked_launches = 0
        self.info = EngineInfo(
            model_type=model_config.model_type,
            dtype=resolved.dtype,
            device=resolved.device,
            vocab_size=model_config.vocab_size,
            num_valid_ids=model_config.num_valid_ids,
            eos_ids=model_config.eos_ids,
            max_model_len=resolved.max_model_len,
            page_size=resolved.page_size,
            num_pages=resolved.num_pages,
            pool_tokens=resolved.pool_tokens,
            max_rows=resolved.max_rows,
            sampling_slots=config.sampling_slots,
            run_ahead=resolved.run_ahead,
            decode_tables=config.decode_tables,
            kept_ids=config.kept_ids,
            result_transport=rank.transport.kind,
            result_transport_reason=rank.transport.reason,
            num_parameters=self._table.num_parameters,
            tp=self._ranks.size,
        )

    @property
    def device(self) -> torch.device:
        """The device the engine runs on; with `tp` above 1 the first rank's."""
        return self._device

    @property
    def version(self) -> int:
        """Version of the live weights."""
        return self._executor.version

    @property
    def manifest(self) -> dict[str, TensorSpec]:
        """What a full update brings, by Hugging Face name; a tied head may come along and is compared."""
        return self._table.manifest()

    @property
    def lost_fd(self) -> int | None:
        """A descriptor that becomes readable when another rank is lost; None where there is none. `check_ranks` says why."""
        return self._ranks.lost_fd

    def check_ranks(self) -> None:
        """Raise what a lost rank left; for a caller that has no work for the engine. Raises: EngineFailure."""
        self._ranks.check()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or deliver something."""
        return self._scheduler.has_work

    def twin(self, **changes: Any) -> Engine:
        """Return another engine over this one's weights and K/V memory, to compare ways of decoding in one process.

        `changes` are options by name: `areno.twin.TWIN_OPTIONS`. Of all engines over one memory only one may have work at a time. A
        weight update of one changes the weights of all, but no other's version. Raises: InvalidConfig.
        """
        twin = Engine(twin_config(self._config, self._resolved, changes), beside=self)
        if self._company is None:
            self._company = WeakSet([self])
        self._company.add(twin)
        twin._company = self._company
        return twin

    def submit(self, request: Request) -> None:
        """Queue a request; it ends through a later `StepOutput.finished`. Raises: InvalidRequest and its kinds."""
        if self._company is not None and any(other.has_work for other in self._company if other is not self):
            raise InvalidRequest(
                "another engine over this memory has work",
                field="request_id",
                value=request.request_id,
                limit="one of them at a time",
                remedy="step the other one until has_work is false",
            )
        self._scheduler.submit(request)

    def cancel(self, request_id: int, *, kind: FinishKind = FinishKind.CANCELLED, detail: str | None = None) -> bool:
        """End a request early, keeping the tokens really sampled; return False if it is unknown, ended or ending.

        True means that its terminal record follows; a row that met its own end first keeps that end.
        """
        return self._scheduler.cancel(request_id, kind=kind, detail=detail)

    @on_device
    def step(self) -> StepOutput:
        """Plan, launch at most one prefill and one decode, and return what has become known.

        Raises: EngineFailure, Asleep.
        """
        self._sleeper.check_awake("step")
        try:
            with self._ranks.together():
                return self._step()
        except RuntimeError as error:
            failure = device_failure(error)
            if failure is None:
                raise
            raise failure from error

    def _step(self) -> StepOutput:
        started = time.perf_counter()
        outputs: list[StepOutput] = []
        last_launch = self._ring.last_launch
        with torch.inference_mode():
            if self._launches_slowly and self._scheduler.has_waiting:
                self._ranks.catch_up()
                self._ring.await_newest(LAUNCH_GRACE_S)
            # What the device has said since the last step makes this plan: where the host is the slower one, every launch before.
            outputs.extend(self._read(drain=False))
            for command in self._scheduler.plan():
                self._ranks.tell(command)
                self._executor.execute(command)
                outputs.extend(self._read(drain=False))
        if self._ring.last_launch == last_launch:
            outputs.extend(self._read(drain=True))
        self._steps += 1
        if self._ranks.size > 1:
            self._compare_ranks()
        endings = self._scheduler.take_endings()
        output = join_outputs(outputs, endings, self._scheduler.take_prompt_scores())
        self._step_s += time.perf_counter() - started
        return output

    def _compare_ranks(self) -> None:
        """Every few hundred launches, compare the rows of all ranks; what they say is read when it is there."""
        self._ranks.compare()
        if self._ring.last_launch - self._checked_launches >= CHECK_LAUNCHES:
            self._checked_launches = self._ring.last_launch
            self._ranks.begin_check(lambda: state_of(self._path))

    @on_device
    def collect(self) -> StepOutput:
        """Return what the launches already made have said, making none: what a paused engine still has to tell.

        Raises: EngineFailure.
        """
        with self._ranks.together(), device_errors("while results were read"):
            read = self._read(drain=True)
        return join_outputs(read, self._scheduler.take_endings(), self._scheduler.take_prompt_scores())

    @on_device
    def score(self, ids: Sequence[int] | np.ndarray, *, temperature: float = 1.0) -> Score:
        """Return the log-probabilities of `ids[1:]` under the live weights. Raises: InvalidRequest, Asleep."""
        self._sleeper.check_awake("score")
        sampling = SamplingParams(temperature=temperature)
        array = scorable_ids("ids", ids, vocab_size=self.info.vocab_size, max_model_len=self.info.max_model_len)
        if array.size < 2:
            raise InvalidRequest(
                "ids holds one id", field="ids", value=1, limit="at least two are needed", remedy="score a sequence with a context"
            )
        no_room = (
            None
            if self._ranks.size > 1
            else RequestTooLong(
                f"the device has no memory to score {array.size} ids at once",
                field="ids",
                value=int(array.size),
                limit="a score runs without pages, beside what the engine holds",
                remedy=f"score a shorter sequence, or {LESS_MEMORY}",
            )
        )
        together = self._ranks.together()
        with together, device_errors("while ids were scored", out_of_memory=no_room), torch.inference_mode():
            self._ranks.tell(ops.ScoreIds(ids=array, temperature=sampling.temperature))
            tempered, raw = self._forward.score(array, sampling.temperature)
            return Score(token_logprobs=tempered.cpu().numpy().copy(), raw_logprobs=raw.cpu().numpy().copy(), version=self.version)

    @on_device
    def begin_update(self, manifest: Mapping[str, TensorSpec] | None, *, version: int, partial: bool = False) -> None:
        """Open a weight update; the manifest is checked before a byte is taken. Raises: UpdateBusy, ManifestMismatch, Asleep."""
        self._sleeper.check_awake("begin_update")
        self._updates.begin(manifest, version=version, partial=partial)

    @on_device
    def stage(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor of the open update, beside decode. Raises: NoUpdate, ManifestMismatch, WeightUpdateError."""
        self._updates.stage(name, tensor)

    @on_device
    def open_slice(self, name: str, *, start: int, count: int, spec: TensorSpec) -> OpenSlice | None:
        """Return where a slice is staged, for a caller that fills it there and gives it to `close_slice`; None where that cannot be.

        Raises: as `stage`.
        """
        return self._updates.open_slice(name, start=start, count=count, spec=spec)

    @on_device
    def close_slice(self, filled: OpenSlice) -> None:
        """Take a slice that was filled and looked at in place. Raises: as `stage`."""
        self._updates.close_slice(filled)

    def open_memory(self, handle: bytes) -> None:
        """Let the other ranks open another process's memory that slices will be staged from (`DeviceRun`). Raises: NoUpdate."""
        self._updates.open_memory(handle)

    @on_device
    def stage_slices(self, slices: Sequence[Slice]) -> None:
        """Take parts of tensors; see `Slice`. Raises: as `stage`.

        Values on a CUDA device are complete, and stay until `settle_slices` or until what `launch_slices` gave has passed.
        """
        self._updates.stage_slices(slices)

    @on_device
    def launch_slices(self) -> Launched | None:
        """Begin to copy every slice beside decode; return what `slices_copied` asks about, None where all are copied. Raises: NoUpdate."""
        return self._updates.launch_slices()

    @on_device
    def slices_copied(self, launched: Launched) -> bool:
        """Return whether the slices before a launch are copied: what they were copied from may be written then."""
        return self._updates.slices_copied(launched)

    @on_device
    def settle_slices(self) -> None:
        """Wait until every slice is copied; on a CUDA device copies of its memory are only launched before. Raises: NoUpdate."""
        self._updates.settle_slices()

    @on_device
    def inspect_update(self) -> bool:
        """Begin to find out about everything that is staged, beside decode; return whether that has ended.

        A commit does the rest and waits for it, so ask first where others should go on meanwhile. Raises: NoUpdate.
        """
        return self._updates.inspect()

    @on_device
    def commit_update(self, *, digests: Mapping[str, int] | None = None, canaries: Sequence[Canary] = ()) -> UpdateReport:
        """Verify, swap, prove and publish the open update; nothing decodes meanwhile.

        The update is closed either way; on failure the old weights serve on under their old version.
        Raises: NoUpdate, ManifestMismatch, DigestMismatch, CanaryMismatch, WeightUpdateError, InvalidRequest (a canary's ids).
        """
        return self._updates.commit(digests=digests, canaries=canaries)

    def abort_update(self) -> None:
        """Drop the open update, if any; the live weights are untouched. Raises: EngineFailure where another rank is lost."""
        self._updates.abort()

    @on_device
    def digests(self) -> dict[str, int]:
        """Return the digest of every live tensor by its Hugging Face name."""
        with self._ranks.together():
            self._ranks.tell(ops.TakeDigests())
            return digests(self._table, self._group)

    @property
    def asleep(self) -> str | None:
        """What is given back: "kv", "weights" (both), or None."""
        return self._sleeper.level

    @on_device
    def sleep(self, level: str = "kv") -> StepOutput:
        """Give the memory of the KV ("kv"), or of KV and weights ("weights"), back until `wake`; return what was still to be told.

        Every request waits, keeps its tokens, counters and seed and goes on after `wake`; new ones may be submitted and any
        cancelled. Repeated with a deeper level it gives back the rest, otherwise nothing. Blocks: for what is in flight and the
        copy of the weights. Raises: InvalidRequest, UpdateBusy, EngineFailure.
        """
        return self._sleeper.sleep(level, has_twins=self._company is not None)

    @on_device
    def wake(self) -> None:
        """Take the memory back: a new epoch, in which no page of before is known. Does nothing to an engine that is awake.

        Blocks: for the copy of the weights and, on a CUDA device, new captures. Raises: Asleep where memory is still taken, and
        the engine sleeps on; EngineFailure.
        """
        self._sleeper.wake()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors by Hugging Face name, as views: to be read between steps, never written.

        With `tp` above 1 they are this rank's parts of them.
        """
        return dict(self._table.views)

    @on_device
    def whole_tensor(self, name: str) -> torch.Tensor:
        """Return a live tensor by its Hugging Face name, whole, to be read at once and never written. Raises: Asleep, EngineFailure."""
        if not self._sleeper.has_weights:
            self._sleeper.check_awake("whole_tensor")
        with self._ranks.together():
            self._ranks.tell(ops.GatherTensor(name=name))
            return whole_tensor(self._table, name, self._group)

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests keep their pages."""
        self._scheduler.clear_prefix_cache()

    def expect_return(self, lineage: str, seconds: float, *, cache_salt: str | None = None, owner: str = "") -> bool:
        """Evict the cached prefix of a lineage's newest finished request late: its next request is expected in about `seconds`.

        A hint ends with that request, is gone once overdue by more than its own length, and never keeps pages from running requests.
        `owner` may end it (`end_hints`). Return whether there is anything to keep. Raises: InvalidRequest.
        """
        if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
            raise InvalidRequest(
                f"seconds={seconds!r}", field="seconds", value=seconds, limit="a positive, finite number", remedy="say how long the wait is"
            )
        return self._scheduler.prefix.expect(lineage, salt=cache_salt, owner=owner, seconds=float(seconds))

    def end_hints(self, owner: str = "") -> None:
        """End an owner's hints."""
        self._scheduler.prefix.end_hints(owner)

    def stats(self) -> dict[str, int | float | str]:
        """Return counters since the start and current sizes; seconds where the name ends in _s. Text only for `result_transport`."""
        scheduler = self._scheduler
        return {
            **{kind.value: 0 for kind in FinishKind},
            **{
                name: 0
                for name in (
                    "accepted",
                    "sampled_tokens",
                    "prefill_tokens",
                    "prompt_tokens",
                    "cached_tokens",
                    "decode_launches",
                    "starved",
                    "moves",
                    "forks",
                    "preemptions",
                    "grown_pages",
                    "prefills_restarted",
                    "recomputed",
                )
            },
            **scheduler.counters,
            **scheduler.gauges(),
            "steps": self._steps,
            "step_s": self._step_s,
            "launch_s": self._executor.launch_s,
            "version": self.version,
            "updates": self._updates.published,
            "result_transport": self.info.result_transport,
            "asleep": self._sleeper.level or "",
            "tp": self._ranks.size,
            "ranks_waited_s": self._ranks.waited_s,
        }

    @on_device
    def check_integrity(self) -> None:
        """Check every owner of state, and the tables against the plan where nothing is in flight. Raises: AssertionError."""
        self._scheduler.check_integrity()
        if self._sleeper.has_weights:
            self._table.check_integrity()
        if self._sleeper.level is not None:
            return
        assert not self._store.keys[:, 0].any() and not self._store.values[:, 0].any(), "the zero page was written"
        if self._ranks.size > 1:
            self._ranks.compare(wait=True)
            self._ranks.begin_check(lambda: state_of(self._path))
            self._ranks.compare(wait=True)
        if self._ring.num_pending:
            return
        state = {name: tensor.cpu().numpy() for name, tensor in self._path.row_state().items()}
        for row, live in self._scheduler.rows_expected().items():
            assert state["generation"][row] == live.generation, f"row {row} is of another request"
            assert state["alive"][row], f"row {row} died unseen"
            assert state["length"][row] == self._scheduler.known_tokens(live) - 1, f"row {row} has another length than the host knows"
            assert state["page_table"][row, : len(live.pages)].tolist() == live.pages, f"row {row} has other pages than the host knows"

    def close(self) -> None:
        """Drop the open update and end the other ranks; the engine holds nothing else beyond its memory. Blocks: at most some seconds."""
        self._updates.drop()
        self._ranks.close(self._leave)

    def _leave(self) -> None:
        """Drop what was captured with collectives inside: a group does not end before."""
        with current_device(self._device):
            self._rank.forget_captures()

    def _read(self, *, drain: bool) -> list[StepOutput]:
        return [self._scheduler.consume(result) for result in self._ring.ready(drain=drain)]
