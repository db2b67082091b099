"""What decides whether a generation is taken at all, and when the engine may have it.

`Admission` is written by the front's parts (is a host ready, which version is served) and read by the request desk. The
functions judge one request: its id, whether its arrays fit together, what it may come to hold. What the parameters mean is
the engine's to judge.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollout.errors import Busy, Conflict, Gone, InvalidRequest, RequestTooLong, RolloutError
from rollout.service.ledger import Ledger
from rollout.service.records import Record, Reservation
from rollout.wire.codec import NO_REQUEST, Arrays
from rollout.wire.generation_messages import Generate

# No id is larger, whatever the model.
MOST_IDS = 2**31


class Admission:
    """The front's state that admission depends on. `refusal` gives the reason why nothing is taken at all, or None."""

    def __init__(self, refusal: Callable[[], RolloutError | None]) -> None:
        self.refusal = refusal
        self.ready = False
        self.paused = False
        # Requests wait here while a commit lets the engine run empty.
        self.held = False
        # What memory the engine has given back: None, "kv" or "weights".
        self.asleep: str | None = None
        self.version = 0
        # Of the engine, once one was ready.
        self.max_model_len: int | None = None
        self.vocab_size = MOST_IDS

    def open_for(self, record: Record) -> bool:
        """Tell whether the engine may have this record now."""
        there = self.ready and not self.held and self.asleep is None
        return there and self.refusal() is None and (record.min_version is None or record.min_version <= self.version)

    def waits_for(self, record: Record) -> str:
        """Say what keeps a record from the engine."""
        if not self.ready:
            return "waits for an engine host"
        if record.min_version is not None and record.min_version > self.version:
            return f"waits for version {record.min_version}"
        return "waits until the engine is awake" if self.asleep is not None else "waits for a commit"

    def prompt_refusal(self, body: Generate, arrays: Arrays) -> RolloutError | None:
        """Return why the engine would refuse this prompt, as far as this process must know before it reads or carries it."""
        prompt = arrays["prompt_ids"]
        prompt_tokens = int(prompt.size)
        if body.stop and prompt_tokens and not 0 <= int(prompt.min()) <= int(prompt.max()) < self.vocab_size:
            # Earlier output is decoded here, and a decoder fails on what is no id.
            where = int(np.flatnonzero((prompt < 0) | (prompt >= self.vocab_size))[0])
            return InvalidRequest(
                f"prompt_ids[{where}]={int(prompt[where])} is outside the vocabulary",
                field="prompt_ids",
                value=int(prompt[where]),
                limit=f"allowed: 0 to {self.vocab_size - 1}",
                remedy="encode with this model's tokenizer",
            )
        if self.max_model_len is None or prompt_tokens <= self.max_model_len:
            return None
        total = prompt_tokens - body.prior_output_tokens + body.max_new_tokens
        return RequestTooLong(
            f"prompt of {prompt_tokens} and max_new_tokens={body.max_new_tokens} make {total} tokens",
            field="max_new_tokens",
            value=total,
            limit=f"the context holds {self.max_model_len}",
            remedy="shorten the prompt or lower max_new_tokens",
        )

    def needs_of(self, body: Generate, arrays: Arrays, members: int) -> Reservation:
        """Return what each of the members of a message may come to hold. Numbers that make no sense reserve nothing: the engine
        refuses them.
        """
        prompt_tokens = int(arrays["prompt_ids"].size)
        left = body.max_new_tokens - max(0, body.prior_output_tokens)
        left = max(0, min(left, self.max_model_len or left))
        first = body.prompt_logprobs_from
        return Reservation(
            max_tokens=left,
            scored_tokens=0 if first is None else max(0, prompt_tokens - max(0, first)),
            text_tokens=left + min(max(0, body.prior_output_tokens), prompt_tokens) if body.stop else 0,
            keeps=body.return_kept_ids,
            input_bytes=-(-sum(array.nbytes for name, array in arrays.items() if name != "member_ids") // max(1, members)),
        )


def id_refusal(ledger: Ledger, session: int, request_id: bytes, known: Record | None) -> RolloutError | None:
    """Return why this id cannot name a new request of a session, or None. `known` is its record with another body."""
    if request_id == NO_REQUEST:
        return InvalidRequest(
            "a request id of zeros", field="request_id", limit="16 bytes that are not all zero", remedy="draw 16 random bytes"
        )
    if known is not None:
        return Conflict(
            f"request {request_id.hex()} exists with another body",
            field="request_id",
            value=request_id.hex(),
            remedy="draw a new request id",
        )
    if ledger.is_gone(session, request_id):
        return Gone(
            f"request {request_id.hex()} ended and was acknowledged",
            field="request_id",
            value=request_id.hex(),
            remedy="draw a new request id",
        )
    return None


def form_refusal(arrays: Arrays) -> RolloutError | None:
    """Return which arrays of a generation do not fit together, or None."""
    ids, values = arrays.get("bias_ids"), arrays.get("bias_values")
    num_ids, num_values = (0 if array is None else int(array.size) for array in (ids, values))
    if num_ids != num_values or (ids is not None and np.unique(ids).size != num_ids):
        return InvalidRequest(
            f"{num_ids} bias ids and {num_values} bias values",
            field="logit_bias",
            value=num_ids,
            limit="one value for each id, each id once",
            remedy="send bias_ids and bias_values of one length, without repeats",
        )
    members = arrays.get("member_ids")
    if members is not None and (not len(members) or len({row.tobytes() for row in members}) != len(members)):
        return InvalidRequest(
            f"a group of {len(members)} members",
            field="n",
            value=len(members),
            limit="at least one member, each with a request id of its own",
            remedy="ask for n >= 1 and draw one request id for each member",
        )
    return None


def room_refusal(ledger: Ledger, session: int, needs: Reservation, count: int, now: float) -> RolloutError | None:
    """Return why this many requests of a client find no room now, or None."""
    if not ledger.has_room(needs, count):
        whose, load, options = "", (ledger.live + ledger.deciding, ledger.reserved_bytes), "max_requests and max_record_bytes"
    elif not ledger.client_has_room(session, needs, count):
        whose, load, options = " of this client", ledger.client_load(session), "max_client_requests and max_client_record_bytes"
    else:
        return None
    busy = Busy(
        f"{load[0]} requests{whose} reserve {load[1]} bytes, {count} more would reserve {count * needs.num_bytes}",
        limit=f"the {'client' if whose else 'service'}'s admission limit is reached",
        remedy=f"ask again in retry_after_s, or start the service with larger {options}",
    )
    busy.retry_after_s = ledger.retry_after_s(count, now)
    return busy
