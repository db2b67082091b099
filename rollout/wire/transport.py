"""Sockets: their settings, and the calls the rest of the package uses instead of zmq's own.

A bound socket with a domain takes only connections that the gate lets in (`Doorway` carries its answers). One thread owns each
socket. Receiving is poll, then a receive that cannot block, so no time-out can drop a message
that was already taken. Sending never blocks and says what happened; frames are copied, so a caller may write its
buffers again at once, but for long ones that are `bytes` and never change: many messages share those. A peer that is gone
or full is reported, never skipped silently.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from rollout.errors import AddressInUse, ServerUnavailable
from rollout.wire.codec import MAX_FRAMES, Frame
from rollout.wire.curve import ClientKey, KeyPair
from rollout.wire.gate import Gate

# As plain numbers: the library's flags are enumerations, of which each "or" makes another.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _RCVMORE, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN), int(zmq.POLLOUT)
QUEUE_MESSAGES = 1000
# A routing id comes before a message of its greatest length.
ROUTE_BYTES = 256
# From here on a copy costs more than keeping an object alive until it was sent.
SHARED_BYTES = 64 * 2**10
LINGER_MS = 500
HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 15_000
# The kernel's probes of the other machine take as long together.
KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 5, 2
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1_000
HANDSHAKE_MS = 10_000
# Where libzmq looks for whom to ask about connections; one for each context.
GATE_ENDPOINT = "inproc://zeromq.zap.01"
MAX_GATE_MESSAGE_BYTES = 4096
_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "mismatch",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "cut",
}


class Sent(enum.Enum):
    """What became of a send."""

    OK = "ok"
    FULL = "full"
    GONE = "gone"


class Incoming(NamedTuple):
    """A received message; `route` is the peer's routing id on a router, else empty. `whole` is False when it
    had too many frames or bytes.

    `user` is what the gate called the connection, empty on a socket without one.
    """

    route: bytes
    frames: list[bytes]
    whole: bool
    user: str = ""


class Handshake(enum.Enum):
    """How a client's attempt to connect ended."""

    OK = "ok"
    REFUSED = "refused"
    MISMATCH = "mismatch"
    CUT = "cut"


class Context:
    """The sockets' common context; `close` waits at most the linger time."""

    def __init__(self) -> None:
        self._context = zmq.Context(io_threads=1)
        self._sockets: list[zmq.Socket[bytes]] = []

    def _socket(self, kind: int, address: str, max_message_bytes: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        if "[" in address:
            # Only where asked for: an IPv4 address on such a socket comes back in IPv6's form.
            socket.setsockopt(zmq.IPV6, 1)
        self._sockets = [one for one in self._sockets if not one.closed] + [socket]
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if address.startswith("tcp:"):
            _watch_network(socket, kind)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        return socket

    def doorway(self, gate: Gate) -> Doorway:
        """Let this gate judge the connections of every socket with a domain. Made before those are bound."""
        socket = self._socket(zmq.REP, GATE_ENDPOINT, MAX_GATE_MESSAGE_BYTES)
        socket.bind(GATE_ENDPOINT)
        return Doorway(socket, gate)

    def router(self, address: str, max_message_bytes: int, *, domain: bytes = b"", keys: KeyPair | None = None) -> Router:
        """Bind a router, encrypted if it has keys. Raises: AddressInUse."""
        socket = self._socket(zmq.ROUTER, address, max_message_bytes)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _guard(socket, domain)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        return Router(socket, _bind(socket, address))

    def dealer(self, address: str, max_message_bytes: int, *, key: ClientKey | None = None) -> Peer:
        """Connect to a router; nobody needs to listen yet."""
        socket = self._socket(zmq.DEALER, address, max_message_bytes)
        if key is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, key.pair.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, key.pair.secret.encode())
        handshakes = None
        if address.startswith("tcp:"):
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_FAILURES))
            self._sockets.append(monitor)
            handshakes = Handshakes(monitor)
        socket.connect(address)
        return Peer(socket, address, handshakes)

    def pair_bound(self, address: str, max_message_bytes: int, *, domain: bytes = b"") -> Peer:
        """Bind one end of a private link. Raises: AddressInUse."""
        socket = self._socket(zmq.PAIR, address, max_message_bytes)
        _guard(socket, domain)
        return Peer(socket, _bind(socket, address))

    def pair_connected(self, address: str, max_message_bytes: int) -> Peer:
        """Connect the other end of a private link."""
        socket = self._socket(zmq.PAIR, address, max_message_bytes)
        socket.connect(address)
        return Peer(socket, address)

    def close(self) -> None:
        """Close every socket left and the context. Blocks: at most the linger time."""
        for socket in self._sockets:
            socket.close(linger=LINGER_MS)
        self._sockets.clear()
        self._context.term()


def _watch_network(socket: zmq.Socket[bytes], kind: int) -> None:
    """Let a connection be given up whose other end cannot be reached any more. Only a network needs that: of a local peer's end the kernel
    tells, and one that is only stopped must not be taken for lost.

    A socket whose queue of received messages is full while its peer goes must not send heartbeats: the library would end the process
    with the next one (libzmq 4.3.5, "Assertion failed: !_io_error"). So those come from the end that connects, whose queue has no
    bound, what comes being bounded by the service's credit; the end that binds, which any peer may fill, asks the kernel alone.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    # The same for what was sent and not acknowledged.
    socket.setsockopt(zmq.TCP_MAXRT, HEARTBEAT_TIMEOUT_MS)
    if kind == zmq.DEALER:
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


@contextmanager
def _private_files() -> Iterator[None]:
    """Create files readable and connectable by their owner only."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    try:
        with _private_files():
            socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUse(
                f"address {address} is in use",
                field="address",
                value=address,
                limit="one service owns an address",
                remedy="stop the other one or choose another address",
            ) from None
        raise AddressInUse(
            f"address {address} cannot be bound: {error}",
            field="address",
            value=address,
            remedy="choose another address, or check its folder's rights",
        ) from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def _guard(socket: zmq.Socket[bytes], domain: bytes) -> None:
    """Let nobody in without the gate's word."""
    if domain:
        socket.setsockopt(zmq.ZAP_DOMAIN, domain)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    """Tell whether a receive would find a message; cheaper than the exception that says no."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def _receive(socket: zmq.Socket[bytes], room: int, max_bytes: int) -> tuple[list[bytes], bool] | None:
    """Return the frames of the next message, or None; frames beyond `room` or `max_bytes` are read and dropped."""
    if not _has_message(socket):
        return None
    try:
        frames = [socket.recv(_NOBLOCK)]
    except zmq.Again:
        return None
    return frames, _receive_rest(socket, frames, room, max_bytes)


def _receive_rest(socket: zmq.Socket[bytes], frames: list[bytes], room: int, max_bytes: int) -> bool:
    """Add the frames of a message that was begun; False if it has more than `room`, or more bytes than `max_bytes` in all.

    libzmq's own limit is for each frame.
    """
    whole = True
    left = max_bytes - len(frames[0])
    while socket.getsockopt(_RCVMORE):
        frame = socket.recv()
        left -= len(frame)
        if len(frames) < room and left >= 0:
            frames.append(frame)
        else:
            whole = False
    return whole


def _user_of(frame: zmq.Frame) -> str:
    """Return what the gate called the connection that sent this frame."""
    try:
        return str(frame.get("User-Id"))
    except (zmq.ZMQError, UnicodeDecodeError):
        return ""


def _send(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> Sent:
    last = len(frames) - 1
    try:
        for place, frame in enumerate(frames):
            # Once the first frame was taken, the others are.
            flags = _MORE if place < last else _NOBLOCK
            socket.send(frame, flags, len(frame) < SHARED_BYTES or not isinstance(frame, bytes))
    except zmq.Again:
        return Sent.FULL
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return Sent.GONE
        raise ServerUnavailable(f"a socket failed: {error}", remedy="restart the service") from error
    return Sent.OK


class Router:
    """The bound socket of a service; peers are known by routing ids that the socket itself draws."""

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self._socket, self.address = socket, address
        self._max_bytes = int(socket.getsockopt(zmq.MAXMSGSIZE)) + ROUTE_BYTES

    def receive(self) -> Incoming | None:
        """Return the next message that is there, or None."""
        if not _has_message(self._socket):
            return None
        try:
            first = self._socket.recv(_NOBLOCK, copy=False)
        except zmq.Again:
            return None
        frames = [first.bytes]
        whole = _receive_rest(self._socket, frames, MAX_FRAMES + 1, self._max_bytes)
        return Incoming(route=frames[0], frames=frames[1:], whole=whole, user=_user_of(first))

    def send(self, route: bytes, frames: Sequence[Frame]) -> Sent:
        """Send to one peer without blocking."""
        return _send(self._socket, [route, *frames])

    @staticmethod
    def drew(route: bytes) -> bool:
        """Tell whether this routing id was drawn by the socket and not chosen by the peer."""
        return len(route) == 5 and route[0] == 0

    def close(self) -> None:
        """Close; what is queued still goes out within the linger time."""
        self._socket.close(linger=LINGER_MS)


class Peer:
    """A socket with one other end: the client's side of a router, or a private link."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, handshakes: Handshakes | None = None) -> None:
        self._socket, self.address, self.handshakes = socket, address, handshakes
        self._max_bytes = int(socket.getsockopt(zmq.MAXMSGSIZE))

    def receive(self) -> Incoming | None:
        """Return the next message that is there, or None."""
        received = _receive(self._socket, MAX_FRAMES, self._max_bytes)
        return None if received is None else Incoming(route=b"", frames=received[0], whole=received[1])

    def send(self, frames: Sequence[Frame]) -> Sent:
        """Send without blocking."""
        return _send(self._socket, frames)

    def close(self) -> None:
        """Close; what is queued still goes out within the linger time."""
        self._socket.close(linger=LINGER_MS)
        if self.handshakes is not None:
            self.handshakes.close()


class Handshakes:
    """Tells how the attempts of a `Peer` to connect over a network ended."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def read(self) -> list[Handshake]:
        """Return what ended since the last call."""
        ended: list[Handshake] = []
        while (received := _receive(self._socket, 2, MAX_GATE_MESSAGE_BYTES)) is not None:
            ended.append(Handshake(_FAILURES.get(zmq.Event(parse_monitor_message(received[0])["event"]), "ok")))
        return ended

    def close(self) -> None:
        """Close."""
        self._socket.close(linger=0)


class Doorway:
    """Carries libzmq's questions to the gate and its answers back; the owner of the guarded sockets polls it with them."""

    def __init__(self, socket: zmq.Socket[bytes], gate: Gate) -> None:
        self._socket, self._gate = socket, gate

    def serve(self) -> None:
        """Answer what was asked."""
        while (received := _receive(self._socket, MAX_FRAMES, MAX_GATE_MESSAGE_BYTES)) is not None:
            self._socket.send_multipart(self._gate.judge(received[0]))


Pollable = Router | Peer | Doorway | Handshakes | int


class Poller:
    """Waits for sockets and file descriptors to become readable, and for sockets with unsent messages to become writable."""

    def __init__(self, watched: Iterable[Pollable] = ()) -> None:
        self._poller = zmq.Poller()
        self._things: dict[object, Pollable] = {}
        for thing in watched:
            self.watch(thing)

    @staticmethod
    def _key(thing: Pollable) -> object:
        return thing if isinstance(thing, int) else thing._socket

    def watch(self, thing: Pollable, *, writable: bool = False) -> None:
        """Watch for reading, and for room to send as well if asked. Changes an earlier watch."""
        key = self._key(thing)
        self._things[key] = thing
        self._poller.register(key, _POLLIN | (_POLLOUT if writable else 0))

    def forget(self, thing: Pollable) -> None:
        """Stop watching."""
        key = self._key(thing)
        if self._things.pop(key, None) is not None:
            self._poller.unregister(key)

    def wait(self, timeout_s: float | None) -> list[Pollable]:
        """Return what is ready. Blocks: at most `timeout_s`, without limit if None."""
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))
        return [self._things[key] for key, _ in self._poller.poll(timeout_ms) if key in self._things]
