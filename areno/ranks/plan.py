"""What a rank is told at its start: the JSON file that rank 0 writes and `python -m areno.ranks.follower --config FILE` reads. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from areno.ranks.codec import broken_log

PROTOCOL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One follower's part. Descriptors are inherited; `folder` is private and holds `meeting`, where the group's ranks find each other.

    `backend` is gloo or nccl, or "none" for ranks that each hold a whole model and follow the log by themselves. `dedicated` says that
    rank 0's process does nothing but run the engine, so that it may be ended when it hangs.
    """

    protocol: int = PROTOCOL
    rank: int
    size: int
    segment_fd: int
    event_fd: int
    leader_pid: int
    dedicated: bool
    model: str
    device: str
    threads: int
    backend: str
    folder: str
    meeting: str
    rank_timeout_s: float
    stall_s: float
    code: Mapping[str, str]
    checkpoint: str

    def to_json(self) -> str:
        """Return the form that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankPlan:
        """Read a plan. Raises: EngineFailure where it is another version's."""
        fields = json.loads(text)
        known = {one.name for one in dataclasses.fields(cls)}
        if fields.get("protocol") != PROTOCOL or set(fields) != known:
            raise broken_log(f"the plan of protocol {fields.get('protocol')} is not of protocol {PROTOCOL}")
        return cls(**fields)
