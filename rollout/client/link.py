"""One socket of a client's I/O thread: whether it is welcome there, what waits for that, and what waits for room."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from rollout.client.endpoint import denial
from rollout.errors import RolloutError
from rollout.wire.codec import NO_REQUEST, Frame, encode
from rollout.wire.operations import Op
from rollout.wire.security import new_token
from rollout.wire.transport import Handshake, Peer, Poller, Sent

# How long WELCOME may take before HELLO is said again, at first; twice as long each time.
FIRST_PATIENCE_S, MOST_PATIENCE_S = 1.0, 16.0
# So many handshakes cut short in a row are no accident of a service that is just ending.
MAX_CUT_HANDSHAKES = 3


class Link:
    """See the module. `queue` holds messages until WELCOME; `denied` is why this connection will not come about."""

    __slots__ = (
        "_again_at",
        "_connected",
        "_cuts",
        "_patience_s",
        "_poller",
        "_unsent",
        "_with_key",
        "denied",
        "hello_id",
        "is_another",
        "peer",
        "queue",
        "welcomed",
    )

    def __init__(self, peer: Peer, poller: Poller, *, with_key: bool) -> None:
        self.peer, self._poller, self._with_key = peer, poller, with_key
        self.hello_id = NO_REQUEST
        self.welcomed = False
        self._patience_s, self._again_at = FIRST_PATIENCE_S, float("inf")
        self.queue: deque[list[Frame]] = deque()
        self._unsent: deque[list[Frame]] = deque()
        # Handshakes in a row that the other side cut short.
        self._cuts = 0
        # Whether there was a connection yet, and whether this is another one, to which HELLO was not said.
        self._connected = self.is_another = False
        self.denied: RolloutError | None = None
        poller.watch(peer)
        if peer.handshakes is not None:
            poller.watch(peer.handshakes)

    @property
    def is_full(self) -> bool:
        """Whether messages wait for room."""
        return bool(self._unsent)

    def hello(self, fields: dict[str, object]) -> None:
        """Open a session, or continue the one that the fields name."""
        self.welcomed = self.is_another = False
        self.hello_id = new_token()
        self._again_at = time.monotonic() + self._patience_s
        self._patience_s = min(2 * self._patience_s, MOST_PATIENCE_S)
        self.send_now(encode(Op.HELLO, self.hello_id, fields))

    def welcome(self) -> None:
        """Take note of WELCOME."""
        self.welcomed = True
        self._patience_s, self._again_at = FIRST_PATIENCE_S, float("inf")

    @property
    def hello_due(self) -> float:
        """When HELLO is to be said again: it, or WELCOME, may have gone with a connection, and nothing else is sent until WELCOME."""
        return float("inf") if self.welcomed or self._unsent else self._again_at

    def send(self, frames: list[Frame]) -> None:
        """Send a message once the service has said WELCOME."""
        if self.welcomed:
            self.send_now(frames)
        else:
            self.queue.append(frames)

    def send_queue(self) -> None:
        """Send what waited for WELCOME."""
        while self.queue:
            self.send_now(self.queue.popleft())

    def send_now(self, frames: list[Frame]) -> None:
        """Send a message as soon as there is room."""
        if self._unsent or self.peer.send(frames) is not Sent.OK:
            self._unsent.append(frames)
            self._poller.watch(self.peer, writable=True)

    def send_unsent(self) -> None:
        """Send what waited for room, as far as there is some."""
        if not self._unsent:
            return
        while self._unsent and self.peer.send(self._unsent[0]) is Sent.OK:
            self._unsent.popleft()
        self._poller.watch(self.peer, writable=bool(self._unsent))

    def denials(self) -> Iterator[RolloutError]:
        """Read how handshakes ended; yield an error for each that says that the service will not have this connection."""
        for ended in self.peer.handshakes.read() if self.peer.handshakes is not None else ():
            self._cuts = self._cuts + 1 if ended is Handshake.CUT else 0
            if ended is Handshake.OK:
                self.denied = None
                self._connected, self.is_another = True, self._connected
            elif ended is not Handshake.CUT or (self._with_key and self._cuts >= MAX_CUT_HANDSHAKES):
                yield denial(ended, self.peer.address, with_key=self._with_key)
