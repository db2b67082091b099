"""What bounds a source, and what it counts.

`source.RolloutSource` makes the options out of its arguments, `flight.GroupFlight` keeps to them and fills in the counters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_bridge.errors import InvalidOption, shown
from trainer_bridge.turns import is_count, is_finite, listed

MODES = ("inflight", "drain", "abort_requests")
MAX_SECONDS = 1e6
MAX_CANARIES = 64
"""How many the wire carries with a commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What bounds a source; see `RolloutSource`. Raises: InvalidOption."""

    group_size: int
    max_staleness: int
    max_ahead: int
    fresh_groups: int
    min_valid_members: int
    max_attempts: int
    epochs: int | None
    outage_s: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.outage_s, bool) or not isinstance(self.outage_s, int | float) or not 0 < self.outage_s < math.inf:
            raise InvalidOption(
                f"outage_s={shown(self.outage_s)}",
                field="outage_s",
                value=self.outage_s,
                limit="a finite number of seconds above 0",
                remedy="give the seconds that the service may be away",
            )
        for name in self.__dataclass_fields__:
            if name == "outage_s":
                continue
            value, least = getattr(self, name), 0 if name in ("max_staleness", "fresh_groups") else 1
            if name == "epochs" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
                raise InvalidOption(
                    f"{name}={shown(value)}",
                    field=name,
                    value=value,
                    limit=f"an integer from {least} to 2**31 - 1",
                    remedy=f"set {name} within it",
                )
        if self.fresh_groups > self.max_ahead:
            raise InvalidOption(
                f"fresh_groups={self.fresh_groups}",
                field="fresh_groups",
                value=self.fresh_groups,
                limit=f"at most max_ahead={self.max_ahead}",
                remedy="lower it",
            )
        if self.min_valid_members > self.group_size:
            raise InvalidOption(
                f"min_valid_members={self.min_valid_members}",
                field="min_valid_members",
                value=self.min_valid_members,
                limit=f"at most group_size={self.group_size}",
                remedy="lower it",
            )


def _refuse(name: str, value: object, limit: str, remedy: str) -> InvalidOption:
    return InvalidOption(f"{name}={shown(value)}", field=name, value=value, limit=limit, remedy=remedy)


def check_push_options(*, autocast: object, allow_unchanged: object, bucket_bytes: object, timeout_s: object) -> None:
    """Check the options of a `WeightPush`. Raises: InvalidOption."""
    if not callable(autocast):
        raise _refuse("autocast", autocast, "a function that makes a context", "pass lambda: torch.autocast(...)")
    if not isinstance(allow_unchanged, bool):
        raise _refuse("allow_unchanged", allow_unchanged, "True or False", "pass a bool")
    if bucket_bytes is not None and not (is_count(bucket_bytes) and 1 <= int(bucket_bytes) < 2**62):  # type: ignore[call-overload]
        raise _refuse("bucket_bytes", bucket_bytes, "an integer from 1 to 2**62 - 1", "use the default")
    if not is_finite(timeout_s) or not 0 < float(timeout_s) <= MAX_SECONDS:  # type: ignore[arg-type]
        raise _refuse("timeout_s", timeout_s, f"seconds above 0, at most {MAX_SECONDS:g}", "use the default")


def checked_canary_ids(canary_ids: object) -> list[np.ndarray]:
    """Return sequences to compare as int64. Raises: InvalidOption."""
    sequences = listed(canary_ids)
    if sequences is None or isinstance(canary_ids, (str, bytes)):
        raise _refuse("canary_ids", canary_ids, "a sequence of sequences of token ids", "leave it out for three fixed ones")
    arrays = []
    for place, sequence in enumerate(sequences):
        ids = listed(sequence)
        if ids is None or len(ids) < 2 or not all(is_count(one) and int(one) < 2**31 for one in ids):
            raise _refuse(
                f"canary_ids[{place}]",
                sequence,
                "at least two token ids, integers of at least 0",
                "pass integers, a context and what follows it",
            )
        arrays.append(np.array(ids, np.int64))
    if len(arrays) > MAX_CANARIES:
        raise _refuse("canary_ids", len(arrays), f"at most {MAX_CANARIES} sequences", "pass fewer: three are the default")
    return arrays


def check_canaries_fit(canary_ids: Sequence[np.ndarray], *, num_valid_ids: int, max_model_len: int) -> None:
    """Check sequences to compare against what the served model can take. Raises: InvalidOption."""
    for place, ids in enumerate(canary_ids):
        if len(ids) > max_model_len:
            raise _refuse(f"canary_ids[{place}]", ids, f"the service's max_model_len of {max_model_len} tokens", "pass a shorter sequence")
        if int(ids.max()) >= num_valid_ids:
            raise _refuse(
                f"canary_ids[{place}]", ids, f"token ids below the model's {num_valid_ids}", "take ids of the model's own tokenizer"
            )


def check_hook(push: object, every: object = 1, on_report: object = None) -> None:
    """Check what pushes by itself after steps. Raises: InvalidOption."""
    if not callable(getattr(push, "push", None)):
        raise _refuse("push", push, "a WeightPush", "pass WeightPush(client, model)")
    if not is_count(every) or not 1 <= int(every) < 2**63:  # type: ignore[call-overload]
        raise _refuse("every", every, "an integer of at least 1", "every=1 pushes after each step")
    if on_report is not None and not callable(on_report):
        raise _refuse("on_report", on_report, "a function of a PushReport, or None", "leave it out, or pass a function such as print")


def check_push_arguments(
    *,
    canary: object = None,
    trainer_step: object = None,
    partial: object = False,
    mode: object,
    drain_s: object,
    wait: object = "published",
) -> None:
    """Check the arguments of one push, or those that it will have. Raises: InvalidOption."""
    if canary is not None and not callable(canary):
        raise _refuse("canary", canary, "a function of ids, or None", "pass a function that returns log-probabilities of ids[1:]")
    if trainer_step is not None and not (is_count(trainer_step) and int(trainer_step) < 2**63):  # type: ignore[call-overload]
        raise _refuse("trainer_step", trainer_step, "an integer of at least 0, or None", "leave it out to have pushes counted")
    if not isinstance(partial, bool):
        raise _refuse("partial", partial, "True or False", "pass a bool")
    if not is_finite(drain_s) or not 0 <= float(drain_s) <= MAX_SECONDS:  # type: ignore[arg-type]
        raise _refuse("drain_s", drain_s, f"seconds from 0 to {MAX_SECONDS:g}", "leave drain_s at 60")
    if not isinstance(wait, str) or wait not in ("published", "staged"):
        raise _refuse("wait", wait, "'published' or 'staged'", "leave it out to wait for the version")
    if not isinstance(mode, str) or mode not in MODES:
        raise _refuse("mode", mode, f"known: {', '.join(MODES)}", "leave mode out")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStats:
    """Counters since the source was made (`in_flight`, `ready` and `waiting` are of now).

    `failures` counts failed groups and `failed_members` members without a trainable sample, both by cause: the code or type of
    what was raised, or whose failure it was in which phase, as in `environment_step`. `last_errors` has the last text of each.
    """

    delivered: int
    dropped_stale: int
    in_flight: int
    ready: int
    waiting: int
    failures: dict[str, int]
    failed_members: dict[str, int]
    last_errors: dict[str, str]
