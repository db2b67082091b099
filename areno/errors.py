"""The engine's one exception tree.

Every refusal carries four parts: what failed with the offending value, the limit or cause, and the remedy
with the exact option; plus a stable ``code`` that the service sends over the wire unchanged.

    ArenoError (Exception)
    ├── InvalidRequest (ValueError)            invalid_request
    │   ├── RequestTooLong                     request_too_long     can never fit
    │   └── DuplicateRequest                   duplicate_request
    ├── InvalidConfig (ValueError)             invalid_config
    ├── CheckpointError (ValueError)           checkpoint_invalid
    ├── UnsupportedModel (ValueError)          unsupported_model
    ├── WeightUpdateError (RuntimeError)       weight_update_failed
    │   ├── ManifestMismatch                   manifest_mismatch
    │   ├── DigestMismatch                     digest_mismatch
    │   ├── CanaryMismatch                     canary_mismatch
    │   ├── UpdateBusy                         update_busy
    │   ├── NoUpdate                           no_update
    │   └── WeightsUnchanged                   weights_unchanged
    ├── Asleep (RuntimeError)                  asleep               KV or weights are not there now
    └── EngineFailure (RuntimeError)           engine_failure       the engine itself broke
"""

from __future__ import annotations

from typing import ClassVar


def shown(value: object, limit: int = 200) -> str:
    """Return a value as an error's text shows it: its repr, cut to `limit` characters; never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits has no text, and a stranger's repr may fail
        text = f"<{type(value).__name__} without a text>"
    return text if len(text) <= limit else text[:limit] + "..."


class ArenoError(Exception):
    """Base of all engine errors; ``str(error)`` is "<what>; <limit or cause>; <remedy>"."""

    code: ClassVar[str] = "engine_error"

    def __init__(self, what: str, *, field: str | None = None, value: object = None, limit: str | None = None, remedy: str | None = None):
        self.what, self.field, self.value, self.limit, self.remedy = what, field, value, limit, remedy
        super().__init__("; ".join(part for part in (what, limit, remedy) if part))


class InvalidRequest(ArenoError, ValueError):
    """A request parameter is outside its domain; nothing reached the model."""

    code = "invalid_request"


class RequestTooLong(InvalidRequest):
    """Prompt plus budget can never fit the context or the KV pool."""

    code = "request_too_long"


class DuplicateRequest(InvalidRequest):
    """A live request already has this id."""

    code = "duplicate_request"


class InvalidConfig(ArenoError, ValueError):
    """An engine option is outside its domain."""

    code = "invalid_config"


class CheckpointError(ArenoError, ValueError):
    """A checkpoint is incomplete, contradictory or unreadable."""

    code = "checkpoint_invalid"


class UnsupportedModel(ArenoError, ValueError):
    """A model uses a feature that the engine refuses by name."""

    code = "unsupported_model"


class WeightUpdateError(ArenoError, RuntimeError):
    """A weight update was refused or undone; the previous weights serve on."""

    code = "weight_update_failed"


class ManifestMismatch(WeightUpdateError):
    """The offered tensors are not the model's tensors (missing, unknown, misshaped, repeated, wrong dtype)."""

    code = "manifest_mismatch"


class DigestMismatch(WeightUpdateError):
    """A staged tensor's digest differs from the announced one."""

    code = "digest_mismatch"


class CanaryMismatch(WeightUpdateError):
    """The new weights do not give the trainer's log-probabilities; the old weights were restored."""

    code = "canary_mismatch"


class UpdateBusy(WeightUpdateError):
    """Another update is open."""

    code = "update_busy"


class NoUpdate(WeightUpdateError):
    """No update is open."""

    code = "no_update"


class WeightsUnchanged(WeightUpdateError):
    """Several pushes in a row changed nothing."""

    code = "weights_unchanged"


class Asleep(ArenoError, RuntimeError):
    """The engine sleeps: its memory is given back, and this call needs it."""

    code = "asleep"


class EngineFailure(ArenoError, RuntimeError):
    """The engine broke in the middle of its work; live requests fail with this cause."""

    code = "engine_failure"
