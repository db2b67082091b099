"""Every call of the client but generations: what is sent, and how the answer becomes a value.

Both facades run the same operations, one by waiting, one by awaiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from rollout.client.parameters import Ids, checked_request_id, id_array
from rollout.client.results import CanarySpec, CancelResult, EngineFacts, Evaluation, Score, ServiceInfo, UpdateReport, UpdateTicket
from rollout.errors import InvalidRequest, shown
from rollout.wire.codec import Packet
from rollout.wire.control_messages import EvaluationTicket, WeightsReport, WeightsTicket
from rollout.wire.generation_messages import CancelResult as CancelResultBody
from rollout.wire.generation_messages import Scored
from rollout.wire.operations import Op
from rollout.wire.session_messages import InfoResult, StatsResult, TokenizerFilesResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[T]):
    """A call: message and reader of its answer."""

    op: Op
    read: Callable[[Packet], T]
    fields: Mapping[str, object] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    control: bool = False


def _nothing(packet: Packet) -> None:
    return None


def _info(packet: Packet) -> ServiceInfo:
    body = packet.body
    assert isinstance(body, InfoResult)
    fields = body.model_dump()
    engine = fields.pop("engine")
    facts = None if engine is None else EngineFacts(**{**engine, "eos_ids": tuple(engine["eos_ids"])})
    return ServiceInfo(**{**fields, "incarnation": body.incarnation.hex(), "engine": facts, "paused_by": tuple(body.paused_by)})


def info() -> Operation[ServiceInfo]:
    """What the service is."""
    return Operation(op=Op.INFO, read=_info)


def _stats(packet: Packet) -> dict[str, object]:
    body = packet.body
    assert isinstance(body, StatsResult)
    return {**body.values, "engine": body.engine}


def stats() -> Operation[dict[str, object]]:
    """Counters and gauges."""
    return Operation(op=Op.STATS, read=_stats)


def _files(packet: Packet) -> dict[str, bytes]:
    body = packet.body
    assert isinstance(body, TokenizerFilesResult)
    content, files, at = packet.arrays["content"].tobytes(), {}, 0
    for entry in body.files:
        files[entry.name] = content[at : at + entry.size]
        at += entry.size
    return files


def tokenizer_files() -> Operation[dict[str, bytes]]:
    """The model folder's tokenizer files."""
    return Operation(op=Op.TOKENIZER_FILES, read=_files)


def _cancelled(packet: Packet) -> CancelResult:
    body = packet.body
    assert isinstance(body, CancelResultBody)
    return CancelResult(cancelled=body.cancelled, state=body.state)


def cancel(request_id: bytes, current: Callable[[bytes], bytes]) -> Operation[CancelResult]:
    """End a generation; `current` tells under which id the service knows it."""
    checked = checked_request_id(request_id, "pass the request_id of a stream, or the one that was given to generate")
    return Operation(op=Op.CANCEL, read=_cancelled, fields={"target": current(checked)})


def _score(packet: Packet) -> Score:
    body = packet.body
    assert isinstance(body, Scored)
    return Score(
        token_logprobs=packet.arrays["token_logprobs"].copy(), raw_logprobs=packet.arrays["raw_logprobs"].copy(), version=body.version
    )


def score(ids: Ids, temperature: float) -> Operation[Score]:
    """Score given ids."""
    return Operation(op=Op.SCORE, read=_score, fields={"temperature": temperature}, arrays={"ids": id_array("ids", ids)})


def pause() -> Operation[None]:
    """Let the engine stand still while this client holds it."""
    return Operation(op=Op.PAUSE, read=_nothing, control=True)


def resume() -> Operation[None]:
    """Drop this client's pause; refused while only others hold one."""
    return Operation(op=Op.RESUME, read=_nothing, control=True)


def _evaluation(packet: Packet) -> Evaluation:
    body = packet.body
    assert isinstance(body, EvaluationTicket)
    return Evaluation(evaluation_id=body.evaluation_id, version=body.version)


def evaluate_begin(deadline_s: float) -> Operation[Evaluation]:
    """Keep commits away."""
    return Operation(op=Op.EVALUATE_BEGIN, read=_evaluation, fields={"deadline_s": deadline_s}, control=True)


def evaluate_end(evaluation: Evaluation) -> Operation[None]:
    """Let commits go on."""
    return Operation(op=Op.EVALUATE_END, read=_nothing, fields={"evaluation_id": evaluation.evaluation_id}, control=True)


def sleep(level: str) -> Operation[None]:
    """Let the engine give memory back while this client holds it."""
    return Operation(op=Op.SLEEP, read=_nothing, fields={"level": level}, control=True)


def wake() -> Operation[None]:
    """Drop this client's sleep."""
    return Operation(op=Op.WAKE, read=_nothing, control=True)


def shutdown() -> Operation[None]:
    """End the service."""
    return Operation(op=Op.SHUTDOWN, read=_nothing, control=True)


def _ticket(packet: Packet) -> UpdateTicket:
    body = packet.body
    assert isinstance(body, WeightsTicket)
    return UpdateTicket(update_id=body.update_id, version=body.version)


def _spec(name: str, spec: Any) -> dict[str, Any]:
    """Return a manifest's entry as it goes over the wire. Raises: InvalidRequest."""
    known = isinstance(name, str) and isinstance(spec, Mapping) and set(spec) == {"dtype", "shape"} and isinstance(spec["shape"], Sequence)
    if known and all(isinstance(dim, int) and not isinstance(dim, bool) for dim in spec["shape"]):
        return {"dtype": spec["dtype"], "shape": list(spec["shape"])}
    raise InvalidRequest(
        f"the manifest says {shown(spec)} of {shown(name)}",
        field=f"manifest.{name}" if isinstance(name, str) else "manifest",
        value=spec,
        limit="a mapping with dtype and shape (integers) is needed",
        remedy="name each tensor's dtype and shape, or leave the manifest out",
    )


def _no_mapping(name: str, value: object, remedy: str) -> InvalidRequest:
    kind = type(value).__name__
    return InvalidRequest(f"{name} is a {kind}", field=name, value=kind, limit="a mapping by tensor name is needed", remedy=remedy)


def _digests(digests: object) -> dict[str, int] | None:
    """Return digests as plain integers. Raises: InvalidRequest."""
    if digests is None:
        return None
    if not isinstance(digests, Mapping):
        raise _no_mapping("digests", digests, "pass what the push computed, or leave digests out")
    for name, value in digests.items():
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
        if not isinstance(name, str) or not whole or not 0 <= value < 2**64:
            raise InvalidRequest(
                f"the digest of {shown(name)} is {shown(value)}",
                field=f"digests.{name}" if isinstance(name, str) else "digests",
                value=value,
                limit="a digest is an integer from 0 to 2**64 - 1",
                remedy="pass what areno.weights.digest computes",
            )
    return {name: int(value) for name, value in digests.items()}


def _is_canary(value: object) -> bool:
    return all(hasattr(value, name) for name in ("ids", "expected_logprobs", "temperature"))


def _canary_arrays(canaries: Sequence[CanarySpec]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return temperatures and packed arrays of canaries. Raises: InvalidRequest."""
    if isinstance(canaries, (str, bytes)) or not isinstance(canaries, Sequence) or not all(map(_is_canary, canaries)):
        raise InvalidRequest(
            f"canaries is {shown(canaries)}",
            field="canaries",
            value=type(canaries).__name__,
            limit="a sequence of rollout.CanarySpec is needed",
            remedy="pass [rollout.CanarySpec(ids=..., expected_logprobs=...)], or leave canaries out",
        )
    if not canaries:
        return [], {}
    temperatures, ids, expected = [], [], []
    for canary in canaries:
        one = id_array("canaries.ids", canary.ids).astype(np.int64)
        try:
            with np.errstate(over="ignore"):
                temperature, logprobs = float(canary.temperature), np.asarray(canary.expected_logprobs, np.float32)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequest(
                f"a canary of {one.size} ids is not made of numbers",
                field="canaries",
                value=shown(canary.temperature),
                limit="temperature is a number, expected_logprobs are floats",
                remedy="pass log-probabilities of ids[1:] and the temperature they were computed at",
            ) from None
        if logprobs.shape != (one.size - 1,):
            raise InvalidRequest(
                f"a canary of {one.size} ids has log-probabilities of shape {logprobs.shape}",
                field="canaries",
                value=str(logprobs.shape),
                limit="one fewer than ids",
                remedy="pass log-probabilities of ids[1:]",
            )
        temperatures.append(temperature)
        ids.append(one)
        expected.append(logprobs)
    return temperatures, {
        "canary_ids": np.concatenate(ids),
        "canary_counts": np.array([one.size for one in ids], np.int64),
        "canary_logprobs": np.concatenate(expected),
    }


def weights_begin(
    manifest: Mapping[str, Mapping[str, Any]] | None, *, trainer_step: int | None, restore: int | None, partial: bool
) -> Operation[UpdateTicket]:
    """Open an update."""
    if manifest is not None and not isinstance(manifest, Mapping):
        raise _no_mapping("manifest", manifest, "leave it out, or map each tensor's name to its dtype and shape")
    specs = None if manifest is None else {name: _spec(name, spec) for name, spec in manifest.items()}
    fields = {"manifest": specs, "trainer_step": trainer_step, "restore": restore, "partial": partial}
    return Operation(op=Op.WEIGHTS_BEGIN, read=_ticket, fields=fields, control=True)


def weights_stage_file(update_id: str, path: str, *, size: int, xxh3: str | None) -> Operation[None]:
    """Let the engine host take a file's tensors."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidRequest(
            f"path is a {type(path).__name__}",
            field="path",
            value=type(path).__name__,
            limit="a path of a file below info().weights_dir",
            remedy="pass a str or a Path",
        )
    fields = {"update_id": update_id, "path": str(path), "size": size, "xxh3": xxh3}
    return Operation(op=Op.WEIGHTS_STAGE_FILE, read=_nothing, fields=fields, control=True)


def weights_stage_bucket(
    update_id: str,
    bucket: int,
    *,
    size: int,
    pieces: Mapping[str, Any],
    handle: Mapping[str, Any],
    xxh3: str | None,
    content: np.ndarray | None,
) -> Operation[None]:
    """Let the engine host take a bucket's tensors."""
    fields = {"update_id": update_id, "bucket": bucket, "size": size, "pieces": dict(pieces), "handle": dict(handle), "xxh3": xxh3}
    arrays = {} if content is None else {"content": content}
    return Operation(op=Op.WEIGHTS_STAGE_BUCKET, read=_nothing, fields=fields, arrays=arrays, control=True)


def weights_join_group(
    update_id: str, *, host: str, port: int, backend: str, timeout_s: float, device: bytes | None, group: bytes | None
) -> Operation[None]:
    """Let the engine host join a process group of two as rank 1."""
    place = {"host": host, "port": port, "backend": backend, "timeout_s": float(timeout_s), "device": device}
    fields = {"update_id": update_id, **place, **({} if group is None else {"group": group})}
    return Operation(op=Op.WEIGHTS_JOIN_GROUP, read=_nothing, fields=fields, control=True)


def _report(packet: Packet) -> UpdateReport:
    body = packet.body
    assert isinstance(body, WeightsReport)
    return UpdateReport(**body.model_dump())


def weights_commit(
    update_id: str, *, digests: Mapping[str, int] | None, canaries: Sequence[CanarySpec], mode: str = "inflight", drain_s: float = 60.0
) -> Operation[UpdateReport]:
    """Prove and publish an update."""
    temperatures, arrays = _canary_arrays(canaries)
    fields = {
        "update_id": update_id,
        "digests": _digests(digests),
        "canary_temperatures": temperatures,
        "mode": mode,
        "drain_s": drain_s,
    }
    return Operation(op=Op.WEIGHTS_COMMIT, read=_report, fields=fields, arrays=arrays, control=True)


def weights_abort(update_id: str) -> Operation[None]:
    """Drop an update; idempotent."""
    return Operation(op=Op.WEIGHTS_ABORT, read=_nothing, fields={"update_id": update_id}, control=True)
