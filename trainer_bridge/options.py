"""What bounds a source, and what it counts.

`source.RolloutSource` makes the options out of its arguments, `flight.GroupFlight` keeps to them and fills in the counters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer_bridge.errors import InvalidOption, shown


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
