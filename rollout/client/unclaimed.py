"""Updates and evaluations that were asked for by a caller who no longer waits: timed out, interrupted, or told that the service is silent.

Such a call is answered all the same, and the update would keep every other one away for as long as this client lives, the
evaluation every commit until its deadline, since nobody knows their ids. The I/O thread owns one of these and ends what the late
answer names.
"""

from __future__ import annotations

from rollout.client.pending import Call, Pending
from rollout.wire.codec import Frame, Packet, encode
from rollout.wire.control_messages import EvaluationTicket, WeightsTicket
from rollout.wire.operations import Op
from rollout.wire.security import new_token


class Unclaimed:
    """Ids of calls whose ticket nobody takes; see the module."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: set[bytes] = set()

    def add(self, pending: Pending) -> None:
        """Take note of a pending that nobody waits for any more; only calls that open something count."""
        if isinstance(pending, Call) and pending.opens:
            self._calls.add(pending.request_id)

    def refused(self, request_id: bytes) -> None:
        """Forget a call that the service refused: nothing was opened."""
        self._calls.discard(request_id)

    def abort(self, answer: Packet | None) -> list[Frame] | None:
        """Return the message that ends what an answer opened, None if that is somebody's or nothing."""
        if answer is None or answer.request_id not in self._calls:
            return None
        self._calls.discard(answer.request_id)
        body = answer.body
        if isinstance(body, WeightsTicket):
            return encode(Op.WEIGHTS_ABORT, new_token(), {"update_id": body.update_id})
        if isinstance(body, EvaluationTicket):
            return encode(Op.EVALUATE_END, new_token(), {"evaluation_id": body.evaluation_id})
        return None
