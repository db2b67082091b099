"""The service's one exception tree, and the table between wire codes and classes.

Every refusal carries what failed with the offending value, the limit or cause, and the remedy; plus a stable
`code`. The engine's own codes cross the wire unchanged and come out as the classes of the same name here.

    RolloutError (Exception)
    ├── InvalidRequest (ValueError)            invalid_request
    │   ├── RequestTooLong                     request_too_long
    │   └── DuplicateRequest                   duplicate_request
    ├── InvalidConfig (ValueError)             invalid_config
    │   ├── AddressInUse                       address_in_use        another service answers there
    │   └── InsecureAddress                    insecure_address      TCP without encryption was not asked for
    ├── CheckpointError (ValueError)           checkpoint_invalid
    ├── UnsupportedModel (ValueError)          unsupported_model
    ├── WireError (ValueError)                 malformed             bytes that are no message
    │   ├── ProtocolMismatch                   protocol_version
    │   ├── UnknownOperation                   unknown_operation
    │   └── NoSession                          no_session            say HELLO first
    ├── RequestError (RuntimeError)            request_error
    │   ├── Conflict                           conflict              same request id, other body
    │   ├── Gone                               gone                  ended, delivered and forgotten
    │   ├── NoEvaluation                       no_evaluation         ended, or another client's
    │   ├── VersionChanged                     version_changed       an evaluation outlived its deadline and saw two versions
    │   └── RequestFailed                      request_failed        ended as failed; carries what was sampled
    ├── AccessDenied (PermissionError)         access_denied         the service does not know the key, or none was shown
    ├── Unavailable (ConnectionError)          unavailable
    │   ├── NoService                          no_service            nothing announced in the state folder
    │   ├── ServerUnavailable                  server_unavailable    no answer within the time-out
    │   ├── ServerRestarted                    server_restarted      another incarnation answers now
    │   ├── ServiceStopping                    service_stopping
    │   ├── HostFailed                         host_failed           the engine host died
    │   ├── Asleep                             asleep                the engine has given its memory back
    │   ├── NeedsWeights                       needs_weights         the engine waits for a trainer's weights
    │   └── Busy                               busy                  admission limit reached
    ├── ClientUnusable (RuntimeError)          client_unusable
    │   ├── ForkedClient                       forked_client
    │   └── ClientClosed                       client_closed
    ├── PauseHeld (RuntimeError)               pause_held            another client's pause keeps the engine still
    ├── WeightUpdateError (RuntimeError)       weight_update_failed
    │   ├── ManifestMismatch                   manifest_mismatch
    │   ├── DigestMismatch                     digest_mismatch
    │   ├── CanaryMismatch                     canary_mismatch
    │   ├── UpdateBusy                         update_busy
    │   ├── NoUpdate                           no_update
    │   ├── DrainTimeout                       drain_timeout         requests ran on past the drain's deadline
    │   ├── WeightsUnchanged                   weights_unchanged
    │   ├── WeightsChanged                     weights_changed       a restore brought other weights
    │   ├── WeightsFileRefused                 weights_file_refused
    │   ├── BucketRefused                      bucket_refused        a bucket that is not what was announced
    │   └── TransportUnavailable               transport_unavailable this engine cannot be reached that way
    ├── EngineFailure (RuntimeError)           engine_failure
    └── InternalError (RuntimeError)           internal_error        a bug; the cause's type and text
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

MAX_VALUE_TEXT = 200


class RolloutError(Exception):
    """Base of all service and client errors; ``str(error)`` is "<what>; <limit or cause>; <remedy>"."""

    code: str = "rollout_error"

    def __init__(
        self,
        what: str,
        *,
        field: str | None = None,
        value: object = None,
        limit: str | None = None,
        remedy: str | None = None,
        code: str | None = None,
    ) -> None:
        self.what, self.field, self.value, self.limit, self.remedy = what, field, value, limit, remedy
        if code is not None:
            self.code = code
        super().__init__("; ".join(part for part in (what, limit, remedy) if part))


class InvalidRequest(RolloutError, ValueError):
    """A request parameter is outside its domain; nothing reached the model."""

    code = "invalid_request"


class RequestTooLong(InvalidRequest):
    """Prompt plus budget can never fit the context or the KV pool."""

    code = "request_too_long"


class DuplicateRequest(InvalidRequest):
    """The engine already runs a request under this number."""

    code = "duplicate_request"


class InvalidConfig(RolloutError, ValueError):
    """A service option is outside its domain."""

    code = "invalid_config"


class AddressInUse(InvalidConfig):
    """Another service owns the address."""

    code = "address_in_use"


class InsecureAddress(InvalidConfig):
    """The address would carry tokens and weights in clear."""

    code = "insecure_address"


class CheckpointError(RolloutError, ValueError):
    """A checkpoint is incomplete, contradictory or unreadable."""

    code = "checkpoint_invalid"


class UnsupportedModel(RolloutError, ValueError):
    """A model uses a feature that the engine refuses by name."""

    code = "unsupported_model"


class WireError(RolloutError, ValueError):
    """Bytes that are not a message of this protocol."""

    code = "malformed"


class ProtocolMismatch(WireError):
    """The two sides speak different protocol versions."""

    code = "protocol_version"


class UnknownOperation(WireError):
    """The operation is not in the closed list of this socket."""

    code = "unknown_operation"


class NoSession(WireError):
    """The connection has no session; HELLO comes first."""

    code = "no_session"


class RequestError(RolloutError, RuntimeError):
    """A request cannot be carried on under its id."""

    code = "request_error"


class Conflict(RequestError):
    """The request id is taken by a request with another body."""

    code = "conflict"


class Gone(RequestError):
    """The request ended and was delivered, or was never known; it is not run a second time."""

    code = "gone"


class NoEvaluation(RequestError):
    """No such evaluation is open for this client."""

    code = "no_evaluation"


class VersionChanged(RequestError):
    """An evaluation was to see one version and saw more; its hold on commits had run out."""

    code = "version_changed"


class RequestFailed(RequestError):
    """A request ended as failed. `generation` holds what was sampled before, `reason_code` the cause's code."""

    code = "request_failed"
    generation: object = None
    reason_code: str | None = None


class AccessDenied(RolloutError, PermissionError):
    """The key that was shown may not do this, was taken away, or none was shown."""

    code = "access_denied"


class Unavailable(RolloutError, ConnectionError):
    """The service cannot take the call now."""

    code = "unavailable"


class NoService(Unavailable):
    """No running service is announced in the state folder."""

    code = "no_service"


class ServerUnavailable(Unavailable):
    """The service did not answer within the time-out."""

    code = "server_unavailable"


class ServerRestarted(Unavailable):
    """Another incarnation of the service answers; requests of the former one are lost."""

    code = "server_restarted"


class ServiceStopping(Unavailable):
    """The service is shutting down."""

    code = "service_stopping"


class HostFailed(Unavailable):
    """The engine host died or could not be started."""

    code = "host_failed"


class Asleep(Unavailable):
    """The engine sleeps for a client that uses its memory; requests wait, this call is refused."""

    code = "asleep"


class NeedsWeights(Unavailable):
    """The engine host restarted after trained weights had been served; it waits for them."""

    code = "needs_weights"


class Busy(Unavailable):
    """An admission limit is reached; ask again in `retry_after_s` seconds, by when room is expected."""

    code = "busy"
    retry_after_s: float | None = None


class ClientUnusable(RolloutError, RuntimeError):
    """The client object cannot be used here."""

    code = "client_unusable"


class ForkedClient(ClientUnusable):
    """The client was made in the parent of this forked process."""

    code = "forked_client"


class ClientClosed(ClientUnusable):
    """The client was closed."""

    code = "client_closed"


class PauseHeld(RolloutError, RuntimeError):
    """The engine stands still for another client; only that client can resume it."""

    code = "pause_held"


class WeightUpdateError(RolloutError, RuntimeError):
    """A weight update was refused or undone; the previous weights serve on."""

    code = "weight_update_failed"


class ManifestMismatch(WeightUpdateError):
    """The offered tensors are not the model's tensors."""

    code = "manifest_mismatch"


class DigestMismatch(WeightUpdateError):
    """A staged tensor's digest differs from the announced one."""

    code = "digest_mismatch"


class CanaryMismatch(WeightUpdateError):
    """The new weights do not give the trainer's log-probabilities."""

    code = "canary_mismatch"


class UpdateBusy(WeightUpdateError):
    """Another update is open."""

    code = "update_busy"


class NoUpdate(WeightUpdateError):
    """No such update is open."""

    code = "no_update"


class DrainTimeout(WeightUpdateError):
    """The requests in the engine did not end within the drain's deadline; the update stays open."""

    code = "drain_timeout"


class WeightsUnchanged(WeightUpdateError):
    """Several pushes in a row changed nothing."""

    code = "weights_unchanged"


class WeightsChanged(WeightUpdateError):
    """A restore brought other weights than the version had."""

    code = "weights_changed"


class WeightsFileRefused(WeightUpdateError):
    """A weights file is outside the folder, a link, or not the announced bytes."""

    code = "weights_file_refused"


class BucketRefused(WeightUpdateError):
    """A bucket of weights is cut short, changed, or not the announced bytes; nothing of the update is published."""

    code = "bucket_refused"


class TransportUnavailable(WeightUpdateError):
    """The engine host cannot take weights by this transport; another one may work."""

    code = "transport_unavailable"


class EngineFailure(RolloutError, RuntimeError):
    """The engine broke in the middle of its work."""

    code = "engine_failure"


class InternalError(RolloutError, RuntimeError):
    """Something that nobody foresaw; names the cause."""

    code = "internal_error"


def _tree(root: type[RolloutError]) -> dict[str, type[RolloutError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


class _Codes:
    by_code: ClassVar[dict[str, type[RolloutError]]] = {}


def error_class(code: str) -> type[RolloutError]:
    """Return the class of a wire code; an unknown code gives the base class."""
    if not _Codes.by_code:
        _Codes.by_code.update(_tree(RolloutError))
    return _Codes.by_code.get(code, RolloutError)


def shown(value: object, limit: int = MAX_VALUE_TEXT) -> str:
    """Return a value as an error's text shows it: its repr, cut to `limit` characters; never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits has no text, and a stranger's repr may fail
        text = f"<{type(value).__name__} without a text>"
    return text if len(text) <= limit else text[:limit] + "..."


def plain_text(text: str, limit: int = 2000) -> str:
    """Return `text` bounded and free of lone surrogates, so that it can always be sent."""
    return text[:limit].encode("utf-8", "backslashreplace").decode("utf-8")


def plain_value(value: object) -> bool | int | float | str | None:
    """Return an offending value as something that msgpack can always carry."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    return plain_text(value if isinstance(value, str) else shown(value), MAX_VALUE_TEXT)


def error_fields(error: BaseException) -> dict[str, object]:
    """Return the wire form of any exception; engine errors keep their code, strangers become `internal_error`."""
    code = getattr(error, "code", None)
    if not isinstance(code, str) or not hasattr(error, "what"):
        return {"code": "internal_error", "what": plain_text(f"{type(error).__name__}: {error}")}
    fields: dict[str, object] = {"code": code, "what": plain_text(str(error.what))}
    for name in ("field", "limit", "remedy"):
        text = getattr(error, name, None)
        if text is not None:
            fields[name] = plain_text(str(text))
    value = plain_value(getattr(error, "value", None))
    if value is not None:
        fields["value"] = value
    retry_after_s = getattr(error, "retry_after_s", None)
    if isinstance(retry_after_s, float):
        fields["retry_after_s"] = retry_after_s
    return fields


def error_from_fields(fields: Mapping[str, object]) -> RolloutError:
    """Return the exception of a wire error."""
    code = str(fields.get("code", RolloutError.code))
    text = {name: str(fields[name]) for name in ("field", "limit", "remedy") if fields.get(name) is not None}
    error = error_class(code)(str(fields.get("what", code)), value=fields.get("value"), code=code, **text)
    retry_after_s = fields.get("retry_after_s")
    if isinstance(error, Busy) and isinstance(retry_after_s, float):
        error.retry_after_s = retry_after_s
    return error
