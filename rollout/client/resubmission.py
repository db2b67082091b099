"""How a request goes on that an update cut: as a new request with prompt and partial output, under the caller's old id.

The I/O thread asks for the message when a generation ends as cancelled(update). Budget, minimum length, penalties, forced
ids, stop strings and noise count from before the earlier output, so the caller sees one generation that was never cut.
Where others have taken its room meanwhile the service says `busy`, which is no end: it waits here and is sent again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from rollout.client.pending import StreamRecord
from rollout.wire.codec import Frame, encode
from rollout.wire.generation_messages import CANCELLED_BY_UPDATE, Ending
from rollout.wire.operations import Op

LEAST_DEADLINE_S = 1e-3
# How long a request that found no room waits at most, and where the service does not say how long.
MOST_WAIT_S, USUAL_WAIT_S = 2.0, 0.5


def is_cut(record: StreamRecord, ending: Ending) -> bool:
    """Tell whether an ending is an update's, after which the request is to go on."""
    return ending.kind == "cancelled" and ending.detail == CANCELLED_BY_UPDATE and record.prepared is not None


def continued_frames(record: StreamRecord, ending: Ending, wire_id: bytes) -> list[Frame]:
    """Return the message of the rest of a request, to be sent under `wire_id`. Mutates: nothing."""
    assert record.prepared is not None, "only a request whose message is kept can go on"
    prepared = record.prepared
    fields = dict(prepared.fields)
    prior = fields.get("prior_output_tokens", 0)
    fields |= {"seed": ending.seed, "prior_output_tokens": (prior if isinstance(prior, int) else 0) + record.length}
    if record.prompt_score is not None:
        fields.pop("prompt_logprobs_from", None)
    deadline_s = fields.get("deadline_s")
    if isinstance(deadline_s, (int, float)):
        fields["deadline_s"] = max(LEAST_DEADLINE_S, deadline_s - (time.monotonic() - record.begun))
    arrays = {name: array for name, array in prepared.arrays.items() if name != "member_ids"}
    arrays["prompt_ids"] = np.concatenate([record.prompt_ids, record.tokens(0, record.length).ids])
    return encode(Op.GENERATE, wire_id, fields, arrays)


def joined_ending(record: StreamRecord, ending: Ending) -> Ending:
    """Return the ending of a whole generation from that of its last part."""
    if not record.rebuilt_at:
        return ending
    return ending.model_copy(
        update={
            "output_tokens": record.base + ending.output_tokens,
            "prompt_tokens": int(record.prompt_ids.size),
            "cached_tokens": record.cached_tokens,
            "kv_rebuilt_at": sorted({*record.rebuilt_at, *ending.kv_rebuilt_at}),
        }
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """The ending by which an update cut a generation, and the output's text up to there, None without stop strings."""

    ending: Ending
    text: str | None


def ending_there(record: StreamRecord, cut: Cut, now: float) -> Ending | None:
    """Return the ending of a generation that ends where it was cut because its deadline is over; None while there is time."""
    deadline_s = None if record.prepared is None else record.prepared.fields.get("deadline_s")
    if not isinstance(deadline_s, (int, float)) or now - record.begun < deadline_s:
        return None
    return ended_where_cut(record, cut).model_copy(update={"kind": "expired", "detail": "deadline_s passed"})


def ended_where_cut(record: StreamRecord, cut: Cut) -> Ending:
    """Return the ending of a generation that was made to go on already, and ends where it was cut."""
    length = int(record.prompt_ids.size) + record.length
    return cut.ending.model_copy(
        update={
            "output_tokens": record.length,
            "prompt_tokens": int(record.prompt_ids.size),
            "cached_tokens": record.cached_tokens,
            "kv_rebuilt_at": [place for place in record.rebuilt_at if place < length],
        }
    )


@dataclass(frozen=True, slots=True)
class _Waiting:
    due: float
    record: StreamRecord


class NoRoomYet:
    """Generations that an update cut and whose rest found no room, until they are sent again or end. Owned by the I/O thread."""

    __slots__ = ("_cuts", "_waiting")

    def __init__(self) -> None:
        # Where each of them was cut last, from then on until its end; and those that wait. By the caller's ids.
        self._cuts: dict[bytes, Cut] = {}
        self._waiting: dict[bytes, _Waiting] = {}

    def __contains__(self, record: StreamRecord) -> bool:
        return record.request_id in self._waiting

    def sent(self, record: StreamRecord, cut: Cut) -> None:
        """Take note of where a generation was cut whose rest is sent."""
        self._cuts[record.request_id] = cut

    def forget(self, request_id: bytes) -> None:
        """Forget a generation that ended; idempotent."""
        self._cuts.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def wait(self, record: StreamRecord, retry_after_s: float | None, now: float) -> bool:
        """Let a generation wait that found no room; False for one that nothing cut."""
        if record.request_id not in self._cuts:
            return False
        wait_s = min(MOST_WAIT_S, USUAL_WAIT_S if retry_after_s is None else retry_after_s)
        self._waiting[record.request_id] = _Waiting(now + wait_s, record)
        return True

    def take(self, request_id: bytes) -> Cut | None:
        """Take a generation out; returns where it was cut, None if it does not wait."""
        return None if self._waiting.pop(request_id, None) is None else self._cuts[request_id]

    def take_due(self, now: float) -> list[tuple[StreamRecord, Cut]]:
        """Take out what is to be sent again."""
        due = [one for one in self._waiting.values() if one.due <= now]
        for one in due:
            del self._waiting[one.record.request_id]
        return [(one.record, self._cuts[one.record.request_id]) for one in due]

    @property
    def next_due(self) -> float:
        """When the next one is due."""
        return min((one.due for one in self._waiting.values()), default=float("inf"))
