"""How a request goes on that an update cut: as a new request with prompt and partial output, under the caller's old id.

The I/O thread asks for the message when a generation ends as cancelled(update). Budget, minimum length, penalties, forced
ids, stop strings and noise count from before the earlier output, so the caller sees one generation that was never cut.
"""

from __future__ import annotations

import time

import numpy as np

from rollout.client.pending import StreamRecord
from rollout.wire.codec import Frame, encode
from rollout.wire.generation_messages import CANCELLED_BY_UPDATE, Ending
from rollout.wire.operations import Op

LEAST_DEADLINE_S = 1e-3


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
