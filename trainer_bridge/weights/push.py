"""One weight update, from the trainer's tensors to a version that the service has proven.

    begin (manifest) -> stage bucket by bucket -> canaries from the trainer's model -> commit (digests, canaries) -> report

A trainer calls `WeightPush.push` after an optimizer step, from the thread that runs it; episodes go on meanwhile. Invariant:
whatever fails, the update is aborted and the service serves the previous weights; `version` is the last committed one.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial as bound
from typing import Any, Literal, TypeVar, cast, overload

import numpy as np
import torch

from trainer_bridge.errors import InvalidOption, PushWarning
from trainer_bridge.option_names import OTHER_OPTIONS, checks_names
from trainer_bridge.options import MODES, check_canaries_fit, check_push_arguments, check_push_options, checked_canary_ids
from trainer_bridge.outage import outage_code
from trainer_bridge.weights.changes import ChangeWatch
from trainer_bridge.weights.names import DTYPES
from trainer_bridge.weights.proof import (
    AutocastFactory,
    CanaryFunction,
    CanaryRecord,
    default_canary_ids,
    function_canaries,
    model_canaries,
)
from trainer_bridge.weights.ranks import OUR_DEFAULT, Ranks
from trainer_bridge.weights.report import PendingPush, PushReport
from trainer_bridge.weights.service import WeightClient, checked_client, service_facts
from trainer_bridge.weights.sources import Loaded, Sources, manifest_of, sources_of
from trainer_bridge.weights.staging import Sent, stage_all
from trainer_bridge.weights.transport import Transport, make_transport

log = logging.getLogger("trainer_bridge.push")

Outcome = TypeVar("Outcome")
NamedParameters = Iterable[tuple[str, torch.Tensor]]
DEFAULT_TIMEOUT_S = 120.0
Wait = Literal["published", "staged"]
# What belongs to the other of the two calls.
_OF_PUSH = {name: f"push({name}=...) takes it" for name in ("trainer_step", "partial", "mode", "drain_s", "wait", "canary")}
_OF_INIT = {
    name: f"WeightPush(client, model, {name}=...) takes it"
    for name in ("canary_ids", "autocast", "allow_unchanged", "transport", "bucket_bytes", "timeout_s", "process_group")
}


@dataclass(slots=True)
class _Update:
    """One push under way. `update_id` is None until it is open; other ranks than 0 never open one."""

    trainer_step: int
    started: float
    mode: str
    drain_s: float
    restore: int | None = None
    partial: bool = False
    update_id: str | None = None
    regained: bool = False
    incarnation: str = ""
    sent: Sent = field(default_factory=Sent)
    canaries: list[CanaryRecord] = field(default_factory=list)


@checks_names(InvalidOption, {**OTHER_OPTIONS, **_OF_PUSH})
class WeightPush:
    """Push a model's weights, with proof.

    `client`: the service's blocking client (None on all ranks but 0). `model`: the trainer's module; it names the tensors, its
    adapters are merged, its shards gathered, and it makes the canaries. `canary_ids`: the sequences to compare (default: three
    fixed ones). `autocast`: makes the context that training runs its forward in, for example
    `lambda: torch.autocast("cuda", torch.bfloat16)`. `allow_unchanged`: accept pushes that change nothing; weights that the
    service lost and asks for (`info().needs_weights`) are never such a push. `transport`: "auto" takes the fastest that works,
    see `transport.py`. `bucket_bytes`: how much goes at once. `timeout_s`: how long the service may take to
    open an update, to stage a bucket or to abort; a commit ends by the service's own bounds (`host_timeout_s`, evaluations, `drain_s`).
    `process_group`: the ranks that push together, by default all of torch.distributed; None for this process alone.
    Raises: InvalidOption, PushError without a running engine.
    """

    def __init__(
        self,
        client: WeightClient | None,
        model: torch.nn.Module | None = None,
        *,
        canary_ids: Sequence[Sequence[int] | np.ndarray] | None = None,
        autocast: AutocastFactory = contextlib.nullcontext,
        allow_unchanged: bool = False,
        transport: str | Transport = "auto",
        bucket_bytes: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        process_group: Any = OUR_DEFAULT,
    ):
        self._ranks = Ranks(process_group)

        def checked() -> list[np.ndarray] | None:
            check_push_options(autocast=autocast, allow_unchanged=allow_unchanged, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
            _check_model(model)
            return None if canary_ids is None else checked_canary_ids(canary_ids)

        # Whatever speaks against it is found inside a step, so that the other ranks hear of it and wait for nothing.
        given_ids = self._on_all(checked)
        self._client, self._model, self._timeout_s = client, model, timeout_s
        self._autocast = autocast
        self._changes = ChangeWatch(allowed=allow_unchanged)
        self._pending: PendingPush | None = None
        self._num_pushes = 0
        # The update that the service may still hold for this trainer, and the thread that opened it.
        self._open: tuple[str, int] | None = None
        facts = self._agreed(lambda: self._meet(transport, bucket_bytes))
        self._version: int = facts["version"]
        self._first_version, self._published = self._version, set[int]()
        # Versions that updates of this trainer were to have; one whose answer got lost may have been published.
        self._tickets = {self._version}
        self._dtype = DTYPES[facts["dtype"]]
        self._canary_ids = self._on_all(lambda: _canary_ids(given_ids, num_ids=facts["num_valid_ids"], max_len=facts["max_model_len"]))

    def _meet(self, transport: str | Transport, bucket_bytes: int | None) -> dict[str, Any]:
        """Choose the transport and return the service's facts. Raises: InvalidOption, PushError without a running engine."""
        client = checked_client(self._client)
        device = _device_of(self._model)
        self._transport = make_transport(transport, client, bucket_bytes=bucket_bytes, timeout_s=self._timeout_s, device=device)
        info = client.info()
        self._incarnation: str = info.incarnation
        return service_facts(info)

    @property
    def _talker(self) -> WeightClient:
        assert self._client is not None, "rank 0 alone talks"
        return self._client

    def _agreed(self, step: Callable[[], dict[str, Any]], other: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Run `step` on rank 0 and `other` on the others; return what `step` gave, on every rank.

        Blocks: until all ranks are here. Raises: what a rank raised, on the other ranks as PushError.
        """
        outcome: dict[str, Any] = {}
        try:
            if self._ranks.leads:
                outcome = step()
            else:
                other()
        except BaseException as error:
            self._ranks.agree(error)
            raise
        return self._ranks.agree(outcome)

    def _on_all(self, step: Callable[[], Outcome]) -> Outcome:
        """Run `step` on every rank and return what it gave here. Blocks and raises: as `_agreed`."""
        given: list[Outcome] = []

        def run() -> dict[str, Any]:
            given.append(step())
            return {}

        self._agreed(run, other=run)
        return given[0]

    @property
    def version(self) -> int:
        """Return the version of the last committed push, at first the one that the service served."""
        return self._version

    def owns(self, version: int) -> bool:
        """Return whether a version is one of this trainer's, or at least as old as the one that it began with.

        A service that was started again serves its folder's weights under a version between two of the trainer's.
        """
        return version <= self._first_version or version in self._published

    @overload
    def push(
        self,
        named_parameters: NamedParameters | None = None,
        *,
        canary: CanaryFunction | None = None,
        trainer_step: int | None = None,
        partial: bool = False,
        mode: str = "inflight",
        drain_s: float = 60.0,
        wait: Literal["published"] = "published",
    ) -> PushReport: ...

    @overload
    def push(
        self,
        named_parameters: NamedParameters | None = None,
        *,
        canary: CanaryFunction | None = None,
        trainer_step: int | None = None,
        partial: bool = False,
        mode: str = "inflight",
        drain_s: float = 60.0,
        wait: Literal["staged"],
    ) -> PendingPush: ...

    @checks_names(InvalidOption, {**OTHER_OPTIONS, **_OF_INIT})
    def push(
        self,
        named_parameters: NamedParameters | None = None,
        *,
        canary: CanaryFunction | None = None,
        trainer_step: int | None = None,
        partial: bool = False,
        mode: str = "inflight",
        drain_s: float = 60.0,
        wait: Wait = "published",
    ) -> PushReport | PendingPush:
        """Send the weights, prove them, publish them as a new version. Every rank of a sharded trainer calls it.

        `named_parameters` defaults to the model's own; an iterator is read once, bucket by bucket. `canary(ids)` returns the
        trainer's log-probabilities of `ids[1:]`; it defaults to the model's forward, and without model or function only the
        digests are checked. `partial`: what is not named keeps its values; without it, a missing tensor is refused. `wait`: with
        "staged" it returns a `PendingPush` as soon as the trainer may change its weights, while the service proves and publishes.
        `mode` says what becomes of running requests: they go on and only the commit pauses them ("inflight"), they end by
        themselves within `drain_s` seconds while new ones queue ("drain"), or they are cut and go on by themselves as new requests
        under the new weights ("abort_requests"). An episode notices none of these.
        Blocks: as `wait` says. Raises: PushError and its kind, and the service's errors; the update is then aborted and the
        previous weights serve on.
        """
        self._on_all(
            lambda: check_push_arguments(canary=canary, trainer_step=trainer_step, partial=partial, mode=mode, drain_s=drain_s, wait=wait)
        )
        step = self._num_pushes if trainer_step is None else int(trainer_step)
        update = _Update(step, time.monotonic(), mode, float(drain_s), partial=partial)
        return self._push(update, named_parameters, canary, wait)

    def _push(
        self,
        update: _Update,
        named_parameters: NamedParameters | None = None,
        canary: CanaryFunction | None = None,
        wait: Wait = "published",
    ) -> PushReport | PendingPush:
        if self._pending is not None:
            self._pending.result()
        sources, shapes_known = self._on_all(lambda: sources_of(named_parameters, self._model))
        try:
            self._agreed(lambda: self._begin(update, sources, shapes_known=shapes_known))
            self._stage(update, sources)
            self._agreed(lambda: self._make_canaries(update, canary), other=lambda: self._canaries(canary))
        except BaseException as error:
            self._abort(update, error)
            raise
        commit, conclude = bound(self._commit, update), bound(self._conclude, update)
        if wait == "staged":
            self._pending = PendingPush(commit if self._ranks.leads else None, conclude)
            return self._pending
        return conclude(commit)

    def _begin(self, update: _Update, sources: Sources, *, shapes_known: bool) -> dict[str, Any]:
        """Open the update and the transport."""
        if self._open is not None and self._open[1] == threading.get_ident():
            # Its push is over, but the abort was interrupted, or got no answer. What speaks against it still, begin tells.
            with contextlib.suppress(Exception):
                self._abort_open()
        info = self._talker.info()
        update.incarnation = info.incarnation
        update.regained = info.needs_weights is not None or info.incarnation != self._incarnation
        self._changes.begin(foreign=update.regained or info.version != self._version)
        if not update.regained and info.version not in self._tickets:
            _warn(
                f"version {info.version} was pushed by another trainer, and this push goes over it: "
                f"tokens of versions other than one's own are dropped as stale on both sides"
            )
        manifest = manifest_of(sources, dtype=self._dtype) if shapes_known else None  # type: ignore[arg-type]
        ticket = self._talker.weights_begin(
            manifest, trainer_step=update.trainer_step, restore=update.restore, partial=update.partial, timeout_s=self._timeout_s
        )
        self._open = ticket.update_id, threading.get_ident()
        self._tickets.add(ticket.version)
        update.update_id = ticket.update_id
        self._transport.open(info, update.update_id)
        return {}

    def _stage(self, update: _Update, sources: Sources) -> None:
        """Stage everything on rank 0 while all ranks gather. Raises: as `_agreed`, after the gathering has been gone through."""
        whole = Loaded(sources)

        def stage() -> dict[str, Any]:
            try:
                stage_all(self._transport, whole, update.sent, dtype=self._dtype)
                self._changes.check(update.sent.digests)
            except BaseException:
                if self._ranks.size > 1:
                    # The others gather on; without us they would wait for ever.
                    with contextlib.suppress(BaseException):
                        whole.go_through()
                raise
            return {}

        self._agreed(stage, other=whole.go_through)

    def _make_canaries(self, update: _Update, canary: CanaryFunction | None) -> dict[str, Any]:
        started = time.monotonic()
        update.canaries = self._canaries(canary)
        update.sent.prepare_s += time.monotonic() - started
        return {}

    def _conclude(self, update: _Update, commit: Callable[[], PushReport]) -> PushReport:
        """Let every rank know how the commit ended."""
        self._pending = None
        try:
            report = PushReport(**self._agreed(lambda: asdict(commit())))
        except BaseException as error:
            self._abort(update, error)
            raise
        self._num_pushes += 1
        self._published.add(report.version)
        self._version = report.version
        if self._ranks.leads:
            self._incarnation = update.incarnation
        if self._ranks.leads:
            log.info("weights pushed: %s", report.line())
        if self._ranks.leads and report.warning is not None and report.warning == self._changes.warning:
            _warn(f"{report.warning}: was the optimizer step made, and on these parameters?")
        return report

    def push_if_needed(self) -> PushReport | None:
        """Push the model's weights if the service lost its own; for `RolloutSource(safe_point=...)`.

        If the model still has the weights of the last push they come back under their version, so that no token grows older; if
        it has others they are pushed under a new one, and so they are to a service that was started again as a whole: it serves
        its folder's weights and knows of none that it lost. Returns None where nothing is asked for or the service is away, which the
        source bounds by `outage_s`. Every rank of a sharded trainer calls it.
        Blocks: as `push`. Raises: as `push`.
        """
        try:
            asked = self._agreed(self._asked_for)
            if asked["version"] is not None:
                return self._give_back(asked["version"])
            return self.push() if asked["restarted"] else None
        except Exception as error:
            if outage_code(error) is None:
                raise
            return None

    def _asked_for(self) -> dict[str, Any]:
        info = self._talker.info()
        restarted = info.health == "ready" and info.incarnation != self._incarnation and info.version != self._version
        return {"version": info.needs_weights if info.health == "needs_weights" else None, "restarted": restarted}

    def _give_back(self, lost: int) -> PushReport:
        """Restore the lost version where it is this trainer's last one and unchanged, else push anew."""
        if lost == self._version and self._num_pushes:
            try:
                update = _Update(self._num_pushes, time.monotonic(), MODES[0], 0.0, restore=lost)
                return cast(PushReport, self._push(update))
            except Exception as error:
                # Other weights than were lost, or a commit that left nothing to compare with.
                if getattr(error, "code", None) not in ("weights_changed", "weight_update_failed"):
                    raise
        return self.push()

    def _canaries(self, canary: CanaryFunction | None) -> list[CanaryRecord]:
        if canary is not None:
            return function_canaries(canary, self._canary_ids)
        if self._model is not None:
            return model_canaries(self._model, self._canary_ids, autocast=self._autocast)
        _warn("no canary: only digests prove this push; pass canary=fn(ids) -> logprobs, or make the WeightPush with the model")
        return []

    def _abort(self, update: _Update, error: BaseException) -> None:
        if update.update_id is None:
            return
        if getattr(error, "code", None) == "drain_timeout":
            error.add_note("this push has aborted its update: push again, with a larger drain_s or another mode")
        interrupt: BaseException | None = None
        # A transport of the user's own may fail here as well, and a second interrupt come; the service must hear of the abort all the same.
        for abort in (self._transport.abort, self._abort_open):
            try:
                abort()
            except Exception as second:  # The first error is the one to report; the next push aborts again.
                error.add_note(f"the abort of the update failed too: {second}")
            except BaseException as second:
                interrupt = second
        if interrupt is not None and isinstance(error, Exception):
            raise interrupt from error

    def _abort_open(self) -> None:
        """Let the service drop the update that a push left open, if one did."""
        if self._open is not None:
            self._talker.weights_abort(self._open[0], timeout_s=self._timeout_s)
            self._open = None

    def _commit(self, update: _Update) -> PushReport:
        """Let the service prove and publish; compare with the push before."""
        assert update.update_id is not None, "an update is open before its commit"
        sent = update.sent
        outcome = self._talker.weights_commit(
            update.update_id, digests=sent.digests, canaries=update.canaries, mode=update.mode, drain_s=update.drain_s
        )
        self._open = None
        unchanged = self._changes.published(
            sent.digests, version=outcome.version, changed_tensors=outcome.changed_tensors, regained=update.regained
        )
        return PushReport(
            version=outcome.version,
            trainer_step=update.trainer_step,
            transport=self._transport.name,
            transport_reason=self._transport.reason,
            num_tensors=len(sent.digests),
            num_bytes=sent.num_bytes,
            changed_tensors=outcome.changed_tensors,
            changed_bytes=outcome.changed_bytes,
            seconds=time.monotonic() - update.started,
            prepare_s=sent.prepare_s,
            staging_s=sent.staging_s,
            swap_ms=outcome.swap_ms,
            proof_ms=outcome.proof_ms,
            pause_ms=outcome.pause_ms,
            canary_gap=outcome.canary_gap,
            canary_mean_gap=outcome.canary_mean_gap,
            decode_canary_gap=outcome.decode_canary_gap,
            inspect_s=outcome.inspect_s,
            derive_s=outcome.derive_s,
            warning=unchanged or outcome.warning,
        )


def _check_model(model: object) -> None:
    """Raises: InvalidOption for what is no module."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise InvalidOption(
            f"model is a {type(model).__name__}",
            field="model",
            value=type(model).__name__,
            limit="a torch.nn.Module",
            remedy="pass the model that is trained, or leave it out and name tensors: push(named_parameters)",
        )


def _canary_ids(given: list[np.ndarray] | None, *, num_ids: int, max_len: int) -> list[np.ndarray]:
    """Return the sequences to compare. Raises: InvalidOption for given ones that the served model cannot take."""
    if given is None:
        return default_canary_ids(num_ids, max_len)
    check_canaries_fit(given, num_valid_ids=num_ids, max_model_len=max_len)
    return given


def _warn(text: str) -> None:
    """Warn where the trainer's code called, however many of our own frames lie between."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(("trainer_bridge.", "areno.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(PushWarning(text), stacklevel=level)


def _device_of(model: torch.nn.Module | None) -> torch.device:
    """Return where a model's first parameter is; the host, if nothing is known."""
    first = None if model is None else next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
