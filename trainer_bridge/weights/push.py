"""One weight update, from the trainer's tensors to a version that the service has proven.

    begin (manifest) -> stage bucket by bucket -> canaries from the trainer's model -> commit (digests, canaries) -> report

A trainer calls `WeightPush.push` after an optimizer step, from the thread that runs it; episodes go on meanwhile. Invariant:
whatever fails, the update is aborted and the service serves the previous weights; `version` is the last committed one.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from areno.weights.digest import digest
from trainer_bridge.errors import InvalidOption, PushError, PushWarning, WeightsUnchanged
from trainer_bridge.outage import outage_code
from trainer_bridge.weights.file import WeightFolder
from trainer_bridge.weights.names import DTYPE_NAMES, DTYPES, plain_name, serving_tensors, ties_head
from trainer_bridge.weights.proof import (
    AutocastFactory,
    CanaryFunction,
    CanaryRecord,
    default_canary_ids,
    function_canaries,
    model_canaries,
)

NamedParameters = Iterable[tuple[str, torch.Tensor]]
MAX_UNCHANGED = 3
MODES = ("inflight", "drain", "abort_requests")
DEFAULT_BUCKET_BYTES = 256 * 2**20


class WeightClient(Protocol):
    """What a push needs of the service's blocking client."""

    def info(self) -> Any: ...

    def weights_begin(self, manifest: Mapping[str, Any] | None, *, trainer_step: int | None = None, restore: int | None = None) -> Any: ...

    def weights_stage_file(self, update_id: str, path: str, *, size: int, xxh3: str | None) -> None: ...

    def weights_commit(
        self, update_id: str, *, digests: Mapping[str, int] | None, canaries: Sequence[Any] = (), mode: str, drain_s: float
    ) -> Any: ...

    def weights_abort(self, update_id: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What one push did. `changed_*` compare with the weights served before; `pause_ms` is all the time in which no row decodes.

    `canary_gap` is the largest |trainer - service| log-probability over the canaries, None without any; `proof_ms` includes
    the scoring of canaries by the service, `prepare_s` the casts, digests and the trainer's own canaries.
    """

    version: int
    trainer_step: int | None
    transport: str
    num_tensors: int
    num_bytes: int
    changed_tensors: int
    changed_bytes: int
    seconds: float
    prepare_s: float
    staging_s: float
    swap_ms: float
    proof_ms: float
    pause_ms: float
    canary_gap: float | None
    canary_mean_gap: float | None
    decode_canary_gap: float | None
    warning: str | None

    def __str__(self) -> str:
        """Return what one watches while training; `repr` has everything."""
        gap = "none compared" if self.canary_gap is None else f"{self.canary_gap:.1e}"
        warning = f", warning: {self.warning}" if self.warning else ""
        return f"version {self.version}, pause {self.pause_ms:.1f} ms, canary gap {gap}{warning}"


@dataclass(slots=True)
class _Sent:
    """What went out in one push so far."""

    digests: dict[str, int]
    num_bytes: int = 0
    prepare_s: float = 0.0
    staging_s: float = 0.0


class WeightPush:
    """Push a model's weights through a safetensors file, with proof.

    `client`: the service's blocking client. `model`: the trainer's module; it names the tensors and makes the canaries.
    `canary_ids`: the sequences to compare (default: three fixed ones). `autocast`: makes the context that training runs its
    forward in, for example `lambda: torch.autocast("cuda", torch.bfloat16)`. `allow_unchanged`: accept pushes that change
    nothing; weights that the service lost and asks for (`info().needs_weights`) are never such a push. `bucket_bytes`: how
    much goes into one file.
    """

    def __init__(
        self,
        client: WeightClient,
        model: torch.nn.Module | None = None,
        *,
        canary_ids: Sequence[Sequence[int] | np.ndarray] | None = None,
        autocast: AutocastFactory = contextlib.nullcontext,
        allow_unchanged: bool = False,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ):
        if bucket_bytes < 1:
            raise InvalidOption(
                f"bucket_bytes={bucket_bytes}", field="bucket_bytes", value=bucket_bytes, limit="at least 1", remedy="use the default"
            )
        self._client, self._model = client, model
        self._autocast, self._allow_unchanged, self._bucket_bytes = autocast, allow_unchanged, bucket_bytes
        info = client.info()
        if info.engine is None:
            raise PushError(
                "the service has no running engine",
                field="engine",
                value=None,
                limit="a push needs its limits",
                remedy="wait until info().engine is there",
            )
        self._dtype = _serving_dtype(info)
        self._folder = WeightFolder(info.weights_dir)
        self._version: int = info.version
        self._last_digests: dict[str, int] | None = None
        self._unchanged = 0
        self._num_pushes = 0
        if canary_ids is None:
            self._canary_ids = default_canary_ids(info.engine.num_valid_ids, info.engine.max_model_len)
        else:
            self._canary_ids = [np.asarray(ids, np.int64) for ids in canary_ids]

    @property
    def version(self) -> int:
        """Return the version of the last committed push, at first the one that the service served."""
        return self._version

    def push(
        self,
        named_parameters: NamedParameters | None = None,
        *,
        canary: CanaryFunction | None = None,
        trainer_step: int | None = None,
        mode: str = "inflight",
        drain_s: float = 60.0,
    ) -> PushReport:
        """Send the weights, prove them, publish them as a new version.

        `named_parameters` defaults to the model's own; an iterator is read once, bucket by bucket. `canary(ids)` returns the
        trainer's log-probabilities of `ids[1:]`; it defaults to the model's forward, and without model or function only the
        digests are checked. `mode` says what becomes of running requests: they go on and only the commit pauses them
        ("inflight"), they end by themselves within `drain_s` seconds while new ones queue ("drain"), or they are cut and go on by
        themselves as new requests under the new weights ("abort_requests"). An episode notices none of these.
        Blocks: until the version is published. Raises: PushError and its kind, and the service's errors; the update is then
        aborted and the previous weights serve on.
        """
        _check_mode(mode)
        return self._push(named_parameters, canary, trainer_step, mode, drain_s)

    def _push(
        self,
        named_parameters: NamedParameters | None = None,
        canary: CanaryFunction | None = None,
        trainer_step: int | None = None,
        mode: str = "inflight",
        drain_s: float = 60.0,
        *,
        restore: int | None = None,
    ) -> PushReport:
        started = time.monotonic()
        parameters, manifest = self._named(named_parameters)
        regained = self._compare_with_service()
        step = self._num_pushes if trainer_step is None else trainer_step
        ticket = self._client.weights_begin(manifest, trainer_step=step, restore=restore)
        try:
            self._folder.remove_leftovers()
            sent = self._stage(ticket.update_id, parameters)
            self._check_changed(sent.digests)
            prepare_from = time.monotonic()
            canaries = self._canaries(named_parameters, canary)
            sent.prepare_s += time.monotonic() - prepare_from
            outcome = self._client.weights_commit(ticket.update_id, digests=sent.digests, canaries=canaries, mode=mode, drain_s=drain_s)
        except BaseException as error:
            self._abort(ticket.update_id, error)
            raise
        finally:
            self._folder.remove_written()
        return self._publish(outcome, sent, step, time.monotonic() - started, regained=regained)

    def push_if_needed(self) -> PushReport | None:
        """Push the model's weights if the service lost its own and asks for them; for `RolloutSource(safe_point=...)`.

        If the model still has the weights of the last push they come back under their version, so that no token grows older; if
        it has others they are pushed under a new one. Returns None where nothing is asked for or the service is away, which the
        source bounds by `outage_s`.
        Blocks: as `push`. Raises: as `push`.
        """
        try:
            info = self._client.info()
            return self._give_back(info.needs_weights) if info.health == "needs_weights" else None
        except Exception as error:
            if outage_code(error) is None:
                raise
            return None

    def _give_back(self, lost: int) -> PushReport:
        """Restore the lost version where it is this trainer's last one and unchanged, else push anew."""
        if lost == self._version and self._num_pushes:
            try:
                return self._push(restore=lost)
            except Exception as error:
                # Other weights than were lost, or a commit that left nothing to compare with.
                if getattr(error, "code", None) not in ("weights_changed", "weight_update_failed"):
                    raise
        return self._push()

    def _named(self, named_parameters: NamedParameters | None) -> tuple[NamedParameters, dict[str, dict[str, Any]] | None]:
        """Return the parameters to send and, where shapes are known before any is read, the manifest."""
        if named_parameters is None:
            if self._model is None:
                raise InvalidOption(
                    "push() has nothing to send",
                    field="named_parameters",
                    value=None,
                    limit="this WeightPush was made without a model",
                    remedy="WeightPush(client, model), or push(model.named_parameters())",
                )
            named_parameters = list(self._model.named_parameters())
        elif not isinstance(named_parameters, Sequence):
            return named_parameters, None
        return named_parameters, self._manifest(named_parameters)

    def _manifest(self, named_parameters: Sequence[tuple[str, torch.Tensor]]) -> dict[str, dict[str, Any]]:
        tied = ties_head(self._model)
        served = {plain_name(name): tuple(tensor.shape) for name, tensor in named_parameters}
        return {
            name: {"dtype": DTYPE_NAMES[self._dtype], "shape": list(shape)}
            for name, shape in served.items()
            if not (tied and name == "lm_head.weight")
        }

    def _stage(self, update_id: str, parameters: NamedParameters) -> _Sent:
        sent = _Sent(digests={})
        last = time.monotonic()
        for bucket in self._buckets(parameters, sent.digests):
            sent.num_bytes += sum(tensor.nbytes for tensor in bucket.values())
            ready = time.monotonic()
            file = self._folder.write(update_id, bucket)
            self._client.weights_stage_file(update_id, str(file.path), size=file.size, xxh3=file.xxh3)
            sent.prepare_s += ready - last
            last = time.monotonic()
            sent.staging_s += last - ready
        return sent

    def _buckets(self, parameters: NamedParameters, digests: dict[str, int]) -> Iterator[dict[str, torch.Tensor]]:
        bucket: dict[str, torch.Tensor] = {}
        size = 0
        for name, tensor in serving_tensors(parameters, dtype=self._dtype, head_is_tied=ties_head(self._model)):
            if bucket and size + tensor.nbytes > self._bucket_bytes:
                yield bucket
                bucket, size = {}, 0
            digests[name] = digest(tensor)
            bucket[name] = tensor
            size += tensor.nbytes
        if bucket:
            yield bucket

    def _compare_with_service(self) -> bool:
        """Forget the last push where the service serves another's; return whether it lost its weights and asks for them.

        The same weights again are no push that changes nothing then.
        """
        info = self._client.info()
        lost = info.needs_weights is not None
        if lost or info.version != self._version:
            self._last_digests, self._unchanged = None, 0
        return lost

    def _check_changed(self, digests: dict[str, int]) -> None:
        """Count pushes in a row that equal the one before; refuse the third before it is committed."""
        if self._last_digests is None or digests != self._last_digests:
            return
        if self._unchanged + 1 >= MAX_UNCHANGED and not self._allow_unchanged:
            raise WeightsUnchanged(
                f"push number {self._num_pushes + 1} changes no tensor, like the {self._unchanged} before it",
                field="named_parameters",
                value=len(digests),
                limit=f"{MAX_UNCHANGED - 1} unchanged pushes in a row are accepted",
                remedy="check that the optimizer holds the parameters that are pushed (adapters merged?), or pass allow_unchanged=True",
            )

    def _canaries(self, named_parameters: NamedParameters | None, canary: CanaryFunction | None) -> list[CanaryRecord]:
        if canary is not None:
            return function_canaries(canary, self._canary_ids)
        if self._model is not None:
            return model_canaries(self._model, self._canary_ids, autocast=self._autocast)
        warnings.warn(
            PushWarning("no canary: only digests prove this push; pass canary=fn(ids) -> logprobs, or make the WeightPush with the model"),
            stacklevel=3,
        )
        return []

    def _abort(self, update_id: str, error: BaseException) -> None:
        try:
            self._client.weights_abort(update_id)
        except Exception as second:  # The first error is the one to report; the service drops the update with our lease.
            error.add_note(f"the abort of the update failed too: {second}")

    def _publish(self, outcome: Any, sent: _Sent, step: int, seconds: float, *, regained: bool) -> PushReport:
        known = self._last_digests
        same = not regained and (outcome.changed_tensors == 0 or known == sent.digests)
        self._unchanged = self._unchanged + 1 if same else 0
        self._last_digests = sent.digests
        self._num_pushes += 1
        self._version = outcome.version
        warning = outcome.warning
        if self._unchanged and not self._allow_unchanged:
            warning = f"version {outcome.version} equals the weights before it in every tensor"
            warnings.warn(PushWarning(f"{warning}: was the optimizer step made, and on these parameters?"), stacklevel=3)
        return PushReport(
            version=outcome.version,
            trainer_step=step,
            transport="file",
            num_tensors=len(sent.digests),
            num_bytes=sent.num_bytes,
            changed_tensors=outcome.changed_tensors,
            changed_bytes=outcome.changed_bytes,
            seconds=seconds,
            prepare_s=sent.prepare_s,
            staging_s=sent.staging_s,
            swap_ms=outcome.swap_ms,
            proof_ms=outcome.proof_ms,
            pause_ms=outcome.pause_ms,
            canary_gap=outcome.canary_gap,
            canary_mean_gap=outcome.canary_mean_gap,
            decode_canary_gap=outcome.decode_canary_gap,
            warning=warning,
        )


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise InvalidOption(f"mode={mode!r}", field="mode", value=mode, limit=f"known: {', '.join(MODES)}", remedy="leave mode out")


def _serving_dtype(info: Any) -> torch.dtype:
    name = str(info.engine.dtype)
    if name not in DTYPES:
        raise InvalidOption(
            f"the service serves {name}", field="dtype", value=name, limit=f"known: {', '.join(DTYPES)}", remedy="serve --dtype float32"
        )
    return DTYPES[name]
