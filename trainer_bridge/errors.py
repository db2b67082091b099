"""The bridge's one exception tree.

Every error says what failed with the offending value, the limit or cause, and the remedy; ``code`` is stable.

    BridgeError (Exception)
    ├── InvalidSample (ValueError)        sample_invalid       a record that must not be trained on
    ├── InvalidBatch (ValueError)         batch_invalid        arguments of collate, advantages or a loss do not fit
    │   └── KeptSetsMissing               kept_sets_missing    a ratio against a narrowed draw without the ids it was narrowed to
    ├── InvalidOption (ValueError)        option_invalid       an option of a source or a push
    ├── InvalidState (ValueError)         state_invalid        a state_dict that does not fit the source
    ├── RolloutShortfall (RuntimeError)   rollout_shortfall    fewer groups than asked for can be had
    │   ├── GroupShortfall                group_shortfall      a group with too few trainable members
    │   └── ServiceOutage                 service_outage       the service stayed away for too long
    ├── SourceClosed (RuntimeError)       source_closed
    ├── VersionBehind (RuntimeError)      version_behind       tokens are newer than the trainer's own version
    └── PushError (RuntimeError)          push_failed
        ├── UnpushableTensor (ValueError) tensor_unpushable    a name or a tensor that the service must not get
        ├── TransportUnusable             transport_unusable   the bytes cannot go that way between this trainer and this service
        └── WeightsUnchanged              weights_unchanged    several pushes in a row changed nothing

Warnings: PushWarning (UserWarning), for pushes that are legal and probably not meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

MAX_SHOWN = 200


def shown(value: object) -> str:
    """Return a value as an error's text shows it: its repr, bounded; never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits has no text, and a stranger's repr may fail
        text = f"<{type(value).__name__} without a text>"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


class BridgeError(Exception):
    """Base of all bridge errors; ``str(error)`` is "<what>; <limit or cause>; <remedy>"."""

    code: ClassVar[str] = "bridge_error"

    def __init__(self, what: str, *, field: str | None = None, value: object = None, limit: str | None = None, remedy: str | None = None):
        self.what, self.field, self.value, self.limit, self.remedy = what, field, value, limit, remedy
        super().__init__("; ".join(part for part in (what, limit, remedy) if part))


class InvalidSample(BridgeError, ValueError):
    """A record is incomplete or contradicts itself; a missing log-probability is never taken as 0."""

    code = "sample_invalid"


class InvalidBatch(BridgeError, ValueError):
    """Samples, advantages or tensors do not belong together."""

    code = "batch_invalid"


class KeptSetsMissing(InvalidBatch):
    """Tokens were drawn from a part of the vocabulary that nobody wrote down, so that no importance ratio is defined for them."""

    code = "kept_sets_missing"


class InvalidOption(BridgeError, ValueError):
    """An option is outside its domain."""

    code = "option_invalid"


class InvalidState(BridgeError, ValueError):
    """A saved state does not fit this source."""

    code = "state_invalid"


class RolloutShortfall(BridgeError, RuntimeError):
    """Fewer groups than asked for can be had; the ready ones stay ready. `failures` counts causes."""

    code = "rollout_shortfall"

    def __init__(self, what: str, *, failures: Mapping[str, int], limit: str | None = None, remedy: str | None = None):
        self.failures = dict(failures)
        super().__init__(what, field="n_groups", limit=limit, remedy=remedy)


class GroupShortfall(RolloutShortfall):
    """Too few members of a group can be trained on. `cause` is their most frequent cause, `failures` counts them all.

    `outage` is the service's code if it was the service that made the group fall short.
    """

    code = "group_shortfall"

    def __init__(
        self,
        what: str,
        *,
        cause: str,
        failures: Mapping[str, int],
        outage: str | None = None,
        limit: str | None = None,
        remedy: str | None = None,
    ):
        self.cause, self.outage = cause, outage
        super().__init__(what, failures=failures, limit=limit, remedy=remedy)


class ServiceOutage(RolloutShortfall):
    """The service failed every group for too long. `cause` is the code it last failed with; every prompt stays queued."""

    code = "service_outage"

    def __init__(self, what: str, *, cause: str, failures: Mapping[str, int], limit: str | None = None, remedy: str | None = None):
        self.cause = cause
        super().__init__(what, failures=failures, limit=limit, remedy=remedy)


class SourceClosed(BridgeError, RuntimeError):
    """The source was closed."""

    code = "source_closed"


class VersionBehind(BridgeError, RuntimeError):
    """A group holds tokens of a version that the trainer does not know yet."""

    code = "version_behind"


class PushError(BridgeError, RuntimeError):
    """A weight push was given up; the service serves the previous weights."""

    code = "push_failed"


class UnpushableTensor(PushError, ValueError):
    """A tensor's name, dtype or values must not reach the service."""

    code = "tensor_unpushable"


class TransportUnusable(PushError):
    """Trainer or service cannot use a transport; another one may work."""

    code = "transport_unusable"


class WeightsUnchanged(PushError):
    """Several pushes in a row changed nothing: the optimizer and the push look at different tensors."""

    code = "weights_unchanged"


class PushWarning(UserWarning):
    """A push that is legal and probably not what was meant."""
