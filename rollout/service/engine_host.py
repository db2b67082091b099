"""The process that runs the engine: takes orders from the front, steps, and sends what the steps learned.

Started by `python -m rollout.service.engine_host --config FILE`; ends itself when the front is gone.

    front --SUBMIT KILL SCORE PAUSE UPDATE...--> inbound socket --+
                                                                  v
            poll (blocks while idle) -> drain inbound -> engine.step -> one piece of weight staging -> outbox.flush
                ^                                                                                        |
                +----- front's messages and acknowledgements wake it                 STEP, replies ------+--> front

Invariant: the loop waits only in poll, and only when no request can advance; a send never waits.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.config import DEFAULT_ENGINE
from rollout.errors import InvalidConfig, error_fields
from rollout.service.host_config import HostConfig, remove_leftovers
from rollout.service.last_weights import LastWeights
from rollout.service.logs import set_up_logging
from rollout.service.parent_watch import ParentWatch
from rollout.service.step_outbox import StepOutbox
from rollout.service.weight_intake import StagedFile, WeightIntake
from rollout.wire.codec import NO_REQUEST, Arrays, Packet, decode, encode
from rollout.wire.control_messages import Sleep, WeightsCommit, WeightsReport, WeightsStageFile, WeightsUpdateRef
from rollout.wire.generation_messages import Score
from rollout.wire.host_messages import EndHints, ExpectReturn, Kill, StepAck, Submit, UpdateOpen
from rollout.wire.operations import HOST_REQUESTS, Op
from rollout.wire.session_messages import EngineFacts
from rollout.wire.transport import Context, Peer, Poller
from rollout.wire.weight_handles import WeightsJoinGroup, WeightsStageBucket

if TYPE_CHECKING:
    from areno.config import EngineConfig
    from areno.request import Request

log = logging.getLogger("rollout.engine_host")
MAX_INBOUND_PER_TURN = 512
EXIT_LOAD_FAILED = 3
WAKE_AGAIN_S = 1.0
AWAITED_WEIGHTS_S = 0.001
# While no row waits for the next step weights are staged for so long between two looks at messages, which a turn of the loop costs.
IDLE_STAGING_S = 0.01
TIDY_S = 5.0
EXIT_ENGINE_FAILED = 4


def checked_options(options: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's config of these options; loads no torch. Raises: the engine's InvalidConfig, InvalidConfig."""
    from areno.config import EngineConfig

    try:
        return EngineConfig(**options)
    except TypeError as error:
        raise InvalidConfig(f"engine options {sorted(options)} are not the engine's: {error}", field="engine_options") from None


def option_default(name: str) -> str:
    """Return what the engine uses for an option that is left out, as text."""
    from areno.config import EngineConfig

    return str(EngineConfig.__dataclass_fields__[name].default)


def load_engine(**options: Any) -> Any:
    """Return the engine of these options; the default factory. This process is there for nothing else."""
    from areno import Engine

    return Engine(checked_options(options), dedicated=True)


def _factory(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return load_engine if name == DEFAULT_ENGINE else getattr(importlib.import_module(module), attribute)


def _finite(values: Mapping[str, Any]) -> dict[str, object]:
    """Return values that the wire carries: numbers without NaN, text, None."""
    plain: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, (np.integer, np.floating, np.bool_)):
            value = value.item()
        plain[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return plain


def _no_array(dtype: type) -> np.ndarray:
    return np.empty(0, dtype)


def requests_of(body: Submit, arrays: Arrays) -> list[Request]:
    """Return the engine's requests of a message. Raises: the engine's InvalidRequest and its kinds."""
    from areno.request import Request, SamplingParams

    params = body.params
    sampling = SamplingParams(
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(zip(arrays["bias_ids"].tolist(), arrays["bias_values"].tolist())) if "bias_ids" in arrays else {},
        stop_ids=arrays.get("stop_ids", ()),
        ignore_eos=params.ignore_eos,
        forced_ids=arrays.get("forced_ids"),
        logprobs=params.logprobs,
        prompt_logprobs_from=params.prompt_logprobs_from,
        return_kept_ids=params.return_kept_ids,
        seed=body.seeds[0],
    )
    return [
        Request(
            request_id=engine_id,
            prompt_ids=arrays["prompt_ids"],
            # Made anew, and checked again, for further members only.
            sampling=sampling if seed == sampling.seed else replace(sampling, seed=seed),
            lineage=params.lineage,
            cache_salt=params.cache_salt,
            kv_policy=params.kv_policy,
            max_kv_lag=params.max_kv_lag,
            # The front's numbers are unique, so the first member's can name the group.
            group=body.engine_ids[0] if body.grouped else None,
            prior_output_tokens=params.prior_output_tokens,
        )
        for engine_id, seed in zip(body.engine_ids, body.seeds)
    ]


class EngineHost:
    """The loop; owns the engine, its intake and the outbox."""

    def __init__(self, engine: Any, peer: Peer, weights_dir: Path, last: LastWeights, credit_bytes: int) -> None:
        self._engine, self._peer, self._last = engine, peer, last
        # Readable when another rank of the engine is lost: an engine without work has to notice it too.
        self._lost_fd: int | None = engine.lost_fd
        self._poller = Poller([peer] if self._lost_fd is None else [peer, self._lost_fd])
        self._outbox = StepOutbox(peer, credit_bytes)
        self._intake = WeightIntake(engine, weights_dir)
        # Scores that came while the front had too much to take; what one session may have open bounds them.
        self._late_scores: deque[Packet] = deque()
        self._late_commits: deque[Packet] = deque()
        self._paused = False
        self._asleep = self._keep_again = self._waits_for_room = False
        self._wake_at: float | None = None
        self._holds_segments, self._tidied_at = False, 0.0
        self._stopping = False
        self._handlers: dict[Op, Callable[[Packet], None]] = {
            Op.SUBMIT: self._submit,
            Op.STEP_ACK: self._step_ack,
            Op.KILL: self._kill,
            Op.EXPECT_RETURN: self._expect_return,
            Op.END_HINTS: self._end_hints,
            Op.SCORE: self._score,
            Op.STATS: self._stats,
            Op.PAUSE: self._pause,
            Op.RESUME: self._resume,
            Op.UPDATE_OPEN: self._update_open,
            Op.WEIGHTS_STAGE_FILE: self._stage_file,
            Op.WEIGHTS_STAGE_BUCKET: self._stage_bucket,
            Op.WEIGHTS_JOIN_GROUP: self._join_group,
            Op.WEIGHTS_COMMIT: self._commit,
            Op.WEIGHTS_ABORT: self._abort,
            Op.SLEEP: self._sleep,
            Op.WAKE: self._wake,
            Op.SHUTDOWN: self._shutdown,
        }

    def run(self) -> None:
        """Serve until told to stop. Blocks."""
        info = self._engine.info
        facts = {name: getattr(info, name) for name in EngineFacts.model_fields}
        facts |= {"eos_ids": [int(one) for one in info.eos_ids]}
        log.info("results of the engine come by %s: %s", info.result_transport, info.result_transport_reason)
        self._outbox.reply(Op.HOST_READY, NO_REQUEST, {"engine": facts, "version": int(self._engine.version)})
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._intake.end()

    def _turn(self) -> None:
        if self._waits_for_room != self._outbox.wants_room:
            self._waits_for_room = self._outbox.wants_room
            self._poller.watch(self._peer, writable=self._waits_for_room)
        if self._lost_fd in self._poller.wait(self._timeout_s()):
            self._engine.check_ranks()
        self._drain()
        while self._late_scores and not self._outbox.full:
            self._handle(self._late_scores.popleft())
        for _ in range(len(self._late_commits)):
            self._handle(self._late_commits.popleft())
        self._wake_when_due()
        self._tidy_when_due()
        if self._can_step():
            self._outbox.add(self._engine.step())
        elif (self._paused or self._asleep) and not self._outbox.full:
            # Cancels and deadlines end during a pause too, and what was launched before it is told.
            self._outbox.add(self._engine.collect())
        staged = self._intake.advance(0.0 if self._can_step() else IDLE_STAGING_S)
        if staged is not None:
            self._answer_staged(staged)
        self._last.advance()
        self._outbox.flush(int(self._engine.version))

    def _timeout_s(self) -> float | None:
        """Return how long to wait for messages: not while there is work, a moment while weights are on their way, else until a wake."""
        if self._can_step() or self._last.busy or (self._intake.busy and not self._intake.waits):
            return 0.0
        waits = [AWAITED_WEIGHTS_S] if self._intake.busy or self._late_commits else []
        if self._wake_at is not None:
            waits.append(max(0.0, self._wake_at - time.monotonic()))
        if self._holds_segments:
            waits.append(TIDY_S)
        return min(waits, default=None)

    def _tidy_when_due(self) -> None:
        """Give memory of dead trainers back, now and then."""
        if self._holds_segments and time.monotonic() - self._tidied_at > TIDY_S:
            self._holds_segments, self._tidied_at = self._intake.tidy(), time.monotonic()

    def _can_step(self) -> bool:
        return not self._paused and not self._asleep and not self._outbox.full and bool(self._engine.has_work)

    def _drain(self) -> None:
        for _ in range(MAX_INBOUND_PER_TURN):
            incoming = self._peer.receive()
            if incoming is None:
                return
            packet = decode(incoming.frames, HOST_REQUESTS)
            if packet.op is Op.SCORE and (self._late_scores or self._outbox.full):
                self._late_scores.append(packet)
            else:
                self._handle(packet)

    def _handle(self, packet: Packet) -> None:
        try:
            self._handlers[packet.op](packet)
        except Exception as error:
            # A refused call is data for its caller; only an engine that is of no use any more ends this process.
            self._raise_broken(error)
            if packet.request_id == NO_REQUEST:
                log.exception("%s failed", packet.op.name)
            else:
                self._outbox.reply(Op.ERROR, packet.request_id, error_fields(error))

    @staticmethod
    def _raise_broken(error: Exception) -> None:
        """Let an engine's failure end the process; the front answers every call and request with it."""
        from areno.errors import EngineFailure

        if isinstance(error, EngineFailure):
            raise error

    def _submit(self, packet: Packet) -> None:
        """Queue a request, or the members of a group: all of them or none."""
        body = packet.body
        assert isinstance(body, Submit)
        submitted: list[int] = []
        try:
            for request in requests_of(body, packet.arrays):
                self._engine.submit(request)
                submitted.append(request.request_id)
        except Exception as error:
            for engine_id in submitted:
                self._engine.cancel(engine_id)
            for engine_id in body.engine_ids:
                self._outbox.refuse(engine_id, error)
        else:
            for engine_id in body.engine_ids:
                self._outbox.accept(engine_id)

    def _step_ack(self, packet: Packet) -> None:
        assert isinstance(packet.body, StepAck)
        self._outbox.acknowledge(packet.body.seq)

    def _kill(self, packet: Packet) -> None:
        from areno.step_output import FinishKind

        body = packet.body
        assert isinstance(body, Kill)
        done = bool(self._engine.cancel(body.engine_id, kind=FinishKind(body.kind), detail=body.detail))
        if packet.request_id != NO_REQUEST:
            self._outbox.reply(Op.CANCEL_RESULT, packet.request_id, {"cancelled": done, "state": "live" if done else "ended"})

    def _expect_return(self, packet: Packet) -> None:
        body = packet.body
        assert isinstance(body, ExpectReturn)
        self._engine.expect_return(body.lineage, body.expect_s, cache_salt=body.cache_salt, owner=body.owner)

    def _end_hints(self, packet: Packet) -> None:
        assert isinstance(packet.body, EndHints)
        self._engine.end_hints(packet.body.owner)

    def _score(self, packet: Packet) -> None:
        assert isinstance(packet.body, Score)
        score = self._engine.score(packet.arrays["ids"].astype(np.int64), temperature=packet.body.temperature)
        arrays = {
            "token_logprobs": np.asarray(score.token_logprobs, np.float32),
            "raw_logprobs": np.asarray(score.raw_logprobs, np.float32),
        }
        self._outbox.reply(Op.SCORED, packet.request_id, {"version": int(score.version)}, arrays)

    def _stats(self, packet: Packet) -> None:
        numbers = {**self._engine.stats(), "unacknowledged_bytes": self._outbox.num_bytes}
        self._outbox.reply(Op.STATS_RESULT, packet.request_id, {"values": {}, "engine": _finite(numbers)})

    def _pause(self, packet: Packet) -> None:
        self._paused = True

    def _resume(self, packet: Packet) -> None:
        self._paused = False

    def _sleep(self, packet: Packet) -> None:
        assert isinstance(packet.body, Sleep)
        self._wake_at = None
        self._intake.lend()
        self._outbox.add(self._engine.sleep(packet.body.level))
        self._asleep = True
        if packet.body.level == "weights" and self._last.busy:
            # What is not there cannot be written on; it begins again when it is back.
            self._last.close()
            self._keep_again = True
        if packet.request_id != NO_REQUEST:
            self._outbox.reply(Op.DONE, packet.request_id, {})

    def _wake(self, packet: Packet) -> None:
        """Wake the engine; where nobody waits for the answer, try again until there is memory."""
        if packet.request_id == NO_REQUEST:
            self._wake_at = time.monotonic()
            return
        self._engine.wake()
        self._woke()
        self._outbox.reply(Op.DONE, packet.request_id, {})

    def _woke(self) -> None:
        self._asleep, self._wake_at = False, None
        if self._keep_again:
            self._keep_again = False
            self._last.committed()

    def _wake_when_due(self) -> None:
        if self._wake_at is None or time.monotonic() < self._wake_at:
            return
        from areno.errors import Asleep

        try:
            self._engine.wake()
        except Asleep as error:
            log.warning("the engine sleeps on: %s", error)
            self._wake_at = time.monotonic() + WAKE_AGAIN_S
        else:
            self._woke()

    def _update_open(self, packet: Packet) -> None:
        body = packet.body
        assert isinstance(body, UpdateOpen)
        manifest = None if body.manifest is None else {name: (spec.dtype, tuple(spec.shape)) for name, spec in body.manifest.items()}
        self._intake.begin(body.update_id, body.version, manifest, partial=body.partial)
        self._outbox.reply(Op.DONE, packet.request_id, {})

    def _stage_file(self, packet: Packet) -> None:
        body = packet.body
        assert isinstance(body, WeightsStageFile)
        self._intake.stage_file(packet.request_id, body.update_id, body.path, size=body.size, xxh3=body.xxh3)

    def _stage_bucket(self, packet: Packet) -> None:
        assert isinstance(packet.body, WeightsStageBucket)
        self._intake.stage_bucket(packet.request_id, packet.body, packet.arrays.get("content"))

    def _join_group(self, packet: Packet) -> None:
        assert isinstance(packet.body, WeightsJoinGroup)
        self._intake.join_group(packet.request_id, packet.body)

    def _answer_staged(self, staged: StagedFile) -> None:
        if staged.error is None:
            self._outbox.reply(Op.DONE, staged.call_id, {})
        else:
            self._raise_broken(staged.error)
            self._outbox.reply(Op.ERROR, staged.call_id, error_fields(staged.error))

    def _commit(self, packet: Packet) -> None:
        body, arrays = packet.body, packet.arrays
        assert isinstance(body, WeightsCommit)
        if not self._intake.inspected(body.update_id):
            # The device reads all weights once for that; rows decode meanwhile.
            self._late_commits.append(packet)
            return
        report = self._intake.commit(
            body.update_id,
            body.digests,
            arrays.get("canary_ids", _no_array(np.int64)),
            arrays.get("canary_counts", _no_array(np.int64)),
            arrays.get("canary_logprobs", _no_array(np.float32)),
            body.canary_temperatures,
        )
        self._holds_segments = self._intake.tidy()
        self._last.committed()
        self._outbox.reply(
            Op.WEIGHTS_REPORT, packet.request_id, _finite({name: getattr(report, name) for name in WeightsReport.model_fields})
        )

    def _abort(self, packet: Packet) -> None:
        assert isinstance(packet.body, WeightsUpdateRef)
        self._intake.abort(packet.body.update_id)
        if packet.request_id != NO_REQUEST:
            self._outbox.reply(Op.DONE, packet.request_id, {})

    def _shutdown(self, packet: Packet) -> None:
        self._stopping = True


# What handlers use; the second part with an engine that has loaded torch.
_USED = ("numpy.ma", "uuid", "areno.errors", "areno.request", "areno.step_output")
_USED_WITH_TORCH = ("areno.weights.update", "safetensors.torch", "torch.distributed")


def _load_ahead(device: str) -> None:
    """Load what handlers use, so that no message of anybody's makes this process look for code."""
    for name in (*_USED, *(_USED_WITH_TORCH if "torch" in sys.modules else ())):
        importlib.import_module(name)
    if device.startswith("cuda"):
        with contextlib.suppress(ImportError):
            importlib.import_module("cuda.bindings.driver")


def _serve(config: HostConfig, peer: Peer) -> int:
    gc.disable()
    peer.send(encode(Op.HOST_LOADING, NO_REQUEST, {}))
    try:
        if config.threads is not None and config.engine == DEFAULT_ENGINE:
            import torch

            torch.set_num_threads(max(1, config.threads // checked_options(config.engine_arguments).tp))
        engine = _factory(config.engine)(**config.engine_arguments)
        _load_ahead(str(engine.info.device))
        # What is loaded now stays: no collection has to go through it, neither while it is made nor later.
        gc.freeze()
        gc.enable()
    except Exception as error:
        # A refusal says all in itself; only what nobody foresaw needs its traceback.
        if not hasattr(error, "what"):
            log.exception("the engine cannot be loaded")
        peer.send(encode(Op.HOST_FAILED, NO_REQUEST, {"error": error_fields(error)}))
        return EXIT_LOAD_FAILED
    last = LastWeights(engine, None if config.keep_last is None else Path(config.keep_last))
    try:
        if config.lost is not None:
            last.restore(int(config.lost["version"]), config.lost["digests"])
        EngineHost(engine, peer, Path(config.weights_dir), last, config.credit_bytes).run()
    except Exception as error:
        log.exception("the engine host fails")
        peer.send(encode(Op.HOST_FAILED, NO_REQUEST, {"error": error_fields(error)}))
        return EXIT_ENGINE_FAILED
    finally:
        last.close()
        engine.close()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the host; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rollout.service.engine_host", description="The engine process of a rollout service.")
    parser.add_argument("--config", required=True, help="JSON file written by the front")
    with open(parser.parse_args(arguments).config) as file:
        config = HostConfig(**json.load(file))
    set_up_logging("engine_host", config.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Who asks a host that hangs gets the stacks of its threads on standard error; it goes on.
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def orphaned() -> None:
        remove_leftovers(config)
        os._exit(0)

    ParentWatch(orphaned)
    context = Context()
    peer = context.pair_connected(config.endpoint, config.max_message_bytes)
    try:
        return _serve(config, peer)
    finally:
        context.close()


if __name__ == "__main__":
    status = main()
    # All is said and closed. Taking the libraries apart would take longer than any of it (0.4 s for torch alone), and after a device
    # error that stays the device's libraries may wait or abort there.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
