"""Updates that were asked for by a caller who no longer waits: timed out, interrupted, or told that the service is silent.

A service that is back answers such a call all the same, and the update would keep every other one away for as long as this client
lives, since nobody knows its id. The I/O thread owns one of these and ends what the late answer names.
"""

from __future__ import annotations

from rollout.client.pending import Call, Pending
from rollout.wire.codec import Frame, Packet, encode
from rollout.wire.control_messages import WeightsTicket
from rollout.wire.operations import Op
from rollout.wire.security import new_token


class Unclaimed:
    """Ids of calls whose ticket nobody takes; see the module."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: set[bytes] = set()

    def add(self, pending: Pending) -> None:
        """Take note of a pending that nobody waits for any more; only calls that open an update count."""
        if isinstance(pending, Call) and pending.opens:
            self._calls.add(pending.request_id)

    def refused(self, request_id: bytes) -> None:
        """Forget a call that the service refused: nothing was opened."""
        self._calls.discard(request_id)

    def abort(self, answer: Packet | None) -> list[Frame] | None:
        """Return the message that ends what an answer opened, None if that is somebody's or nothing."""
        if answer is None or answer.request_id not in self._calls or not isinstance(answer.body, WeightsTicket):
            return None
        self._calls.discard(answer.request_id)
        return encode(Op.WEIGHTS_ABORT, new_token(), {"update_id": answer.body.update_id})
