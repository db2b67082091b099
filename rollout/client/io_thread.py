"""The daemon thread that owns a client's sockets, its lease and everything in flight.

    callers --post(command)--> wake-up pipe --> poll --> commands, data socket, control socket, timers
    callers <--Event / loop.call_soon_threadsafe-- listeners of what changed (one post per event loop and turn)

It says HELLO, keeps the lease by heartbeats whatever the callers do, takes packed deltas apart into the records of the
streams, acknowledges them, continues its session after a lost connection, and fails what waits on a silent service.
Invariant: nobody else touches the sockets; every pending ends (answer, ending or error), also when this thread breaks.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rollout.client.flush import Flush, read_flush
from rollout.client.link import Link
from rollout.client.liveness import Liveness
from rollout.client.loop_posts import LoopPosts
from rollout.client.pending import Call, Pending, StreamRecord
from rollout.client.resubmission import Cut, NoRoomYet, continued_frames, ended_where_cut, ending_there, is_cut, joined_ending
from rollout.client.roster import Changes, Roster
from rollout.client.unclaimed import Unclaimed
from rollout.errors import (
    AccessDenied,
    Busy,
    ClientClosed,
    InternalError,
    InvalidRequest,
    ProtocolMismatch,
    RolloutError,
    ServerRestarted,
    ServiceStopping,
    WireError,
    error_from_fields,
)
from rollout.standstill import StandstillClock
from rollout.wire.arrays import MAX_NAMED_IDS
from rollout.wire.codec import NO_REQUEST, Frame, Packet, decode, encode, read_header
from rollout.wire.curve import ClientKey
from rollout.wire.generation_messages import Deltas, Ending
from rollout.wire.operations import CLIENT_REPLIES, Op
from rollout.wire.security import control_address_for, new_token
from rollout.wire.session_messages import ErrorBody, Welcome
from rollout.wire.transport import Context, Poller

log = logging.getLogger("rollout.client")
MAX_MESSAGE_BYTES = 2**30
MAX_HEARTBEAT_S = 5.0
SUSPENSION_S = 1.0
# Flushes that follow each other sooner are acknowledged together, unless they have so many bytes (half of the least credit) or endings.
ACKNOWLEDGE_S = 0.05
ACKNOWLEDGE_BYTES = 2**15


class IoThread:
    """See the module. Public methods may be called from any thread."""

    def __init__(self, address: str, name: str, timeout_s: float, key: ClientKey | None = None) -> None:
        self.address, self._name, self._timeout_s, self._key = address, name, timeout_s, key
        self.streams: dict[bytes, StreamRecord] = {}
        self._cancelling: set[bytes] = set()
        # Streams that an update cut, by the id under which they go on; `streams` keeps them under the caller's.
        self._continued: dict[bytes, StreamRecord] = {}
        self._no_room = NoRoomYet()
        # Streams that one message began together, by that message's id: an error under it is every one's.
        self._groups: dict[bytes, set[StreamRecord]] = {}
        self._calls: dict[bytes, tuple[Call, bool]] = {}
        self._unclaimed = Unclaimed()
        self._commands: deque[Callable[[], None]] = deque()
        # Sockets rather than a pipe: once closed they refuse, while a closed descriptor's number may be somebody else's.
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self.connected = Pending(NO_REQUEST, [], time.monotonic())
        self.closed: RolloutError | None = None
        self.welcome: Welcome | None = None
        self._closing = False
        # Messages for the control socket from before its address is known.
        self._waiting_for_control: deque[list[Frame]] = deque()
        self._posts = LoopPosts()
        # Of who listens to streams, counted by readers, and of the streams themselves.
        self.listening, self._coming = Changes(), Changes()
        self._roster = Roster(self._coming, self.listening)
        self._service = Liveness(address, timeout_s)
        self._next_heartbeat = self._service.last_heard
        self._seq = self._unacknowledged = 0
        self._acknowledged_at = float("-inf")
        self.thread = threading.Thread(target=self._run, name="rollout-client", daemon=True)
        self.thread.start()

    # Any thread

    @property
    def state(self) -> str:
        """connecting, connected, silent (past the time-out) or stopped (the service said so)."""
        if self._service.stopped is not None:
            return "stopped"
        return "silent" if self._service.silent else "connected" if self.connected.done else "connecting"

    def post(self, command: Callable[[], None]) -> None:
        """Run a command in the I/O thread soon."""
        self._commands.append(command)
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    def submit(self, records: Sequence[StreamRecord]) -> None:
        """Send the message of one generation or group; its records are in `streams` already."""

        def start() -> None:
            self._coming.count()
            for record in records:
                record.since = time.monotonic()
                if record.group_id is not None and not record.done:
                    self._groups.setdefault(record.group_id, set()).add(record)
            self._start(records[0], self._data)
            if records[0].error is not None:
                # What keeps the message from going keeps it from going for all.
                for record in records:
                    self._end(record, records[0].error)

        self.post(start)

    def call(self, call: Call, *, control: bool) -> None:
        """Send a call."""

        def start() -> None:
            self._calls[call.request_id] = (call, control)
            self._start(call, self._control if control else self._data)

        self.post(start)

    def forget(self, call: Call) -> None:
        """Drop a call whose caller no longer waits."""

        def drop() -> None:
            self._calls.pop(call.request_id, None)
            if call.done and call.reply is None:
                return
            self._unclaimed.add(call)
            self._end_unclaimed(call.reply)

        self.post(drop)

    def say(self, frames: list[Frame]) -> None:
        """Send a message that has no answer; lost with the connection."""
        self.post(lambda: self._data.send(frames))

    def cancel(self, request_id: bytes) -> None:
        """Ask for a generation's end without waiting for the answer; asked again where the connection was lost before its end came."""

        def ask() -> None:
            record = self.streams.get(request_id)
            if record is not None:
                self._cancelling.add(request_id)
                self._end_waiting(record)
            self._send_cancel(request_id if record is None else record.wire_id)

        self.post(ask)

    def to_cancel(self, request_id: bytes) -> bytes:
        """Return the id by which the service knows a generation that is to be cancelled; an update lets it go on no more."""
        record = self.streams.get(request_id)
        if record is None:
            return request_id
        target = record.wire_id

        def mark() -> None:
            if request_id in self.streams:
                self._cancelling.add(request_id)
                if record.wire_id != target:
                    self._send_cancel(record.wire_id)
                self._end_waiting(record)

        self.post(mark)
        return target

    def _send_cancel(self, wire_id: bytes) -> None:
        self._data.send(encode(Op.CANCEL, new_token(), {"target": wire_id}))

    def _stream(self, wire_id: bytes) -> StreamRecord | None:
        """Return the stream that goes under this id now; None for an id under which it went before."""
        record = (self._continued.get(wire_id) if self._continued else None) or self.streams.get(wire_id)
        return record if record is not None and record.wire_id == wire_id else None

    def close(self) -> None:
        """End the session and the thread soon; idempotent."""

        def stop() -> None:
            self._closing = True

        self.post(stop)

    # The thread

    def _run(self) -> None:
        error: RolloutError = ClientClosed("the client was closed", remedy="connect again")
        context = Context()
        try:
            self._context = context
            self._poller = Poller([self._wake_in.fileno()])
            self._data = self._open(self.address)
            self._control: Link | None = None
            self._hello(self._data)
            self._loop()
        except Exception as broken:
            log.exception("the client's I/O thread broke")
            error = ClientClosed(f"the client's I/O thread broke: {type(broken).__name__}: {broken}", remedy="connect again")
        self.closed = error
        self._fail(lambda pending: error)
        self._commands_after_end(error)
        self._posts.send()
        context.close()
        self._wake_in.close()
        self._wake_out.close()

    def _commands_after_end(self, error: RolloutError) -> None:
        """Let commands that came too late fail like the rest."""
        while self._commands:
            with contextlib.suppress(Exception):
                self._commands.popleft()()
        self._fail(lambda pending: error)

    def _loop(self) -> None:
        timeout_s, clock = 0.0, StandstillClock(SUSPENSION_S)
        while not self._closing:
            ready = self._poller.wait(timeout_s)
            self._service.last_heard += clock.stood_still(time.monotonic(), timeout_s)
            if self._wake_in.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(65536)
            while self._commands:
                self._commands.popleft()()
            for link in (self._data, self._control):
                if link is not None:
                    for error in link.denials():
                        self._deny(link, error)
                    if link.is_another and (link is self._data or self._data.welcomed):
                        # What was on its way is gone, answers too, and the service does not know this connection.
                        self._hello(link)
                    link.send_unsent()
                    self._drain(link)
            self._service.last_heard += clock.stood_still(time.monotonic(), 0.0)
            timeout_s = self._tick()
            self._posts.send()
        if self._data.welcomed:
            self._data.peer.send(encode(Op.GOODBYE, NO_REQUEST, {}))

    def _tick(self) -> float:
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_s()
            if self._data.welcomed and not self._data.is_full:
                self._data.send(encode(Op.HEARTBEAT, new_token(), {}))
                if self._unacknowledged:
                    self._acknowledge([])
            for record in list(self.streams.values()):
                record.settle_idle()
            self._roster.let_go()
        # The control connection continues the session of the other one.
        greeting = self._data if self._control is None or not self._data.welcomed else self._control
        if now >= greeting.hello_due:
            self._hello(greeting)
        self._service.look(now)
        if self._service.in_doubt:
            self._fail(lambda pending: self._service.overdue(now, pending.since))
        return max(0.0, min(min(self._next_heartbeat, greeting.hello_due, self._ask_again(now)) - now, self._service.wait_s / 4))

    def _heartbeat_s(self) -> float:
        lease_s = self.welcome.lease_s if self.welcome is not None else self._timeout_s
        return min(lease_s / 4, self._timeout_s / 3, MAX_HEARTBEAT_S)

    def _open(self, address: str) -> Link:
        return Link(self._context.dealer(address, MAX_MESSAGE_BYTES, key=self._key), self._poller, with_key=self._key is not None)

    def _deny(self, link: Link, error: RolloutError) -> None:
        link.denied = error
        if link is self._data:
            self._fail(lambda _: error)
            return
        for call, control in list(self._calls.values()):
            if control:
                self._end(call, error)

    def _fail(self, verdict: Callable[[Pending], RolloutError | None]) -> None:
        everything: list[Pending] = [self.connected, *(call for call, _ in list(self._calls.values())), *list(self.streams.values())]
        for pending in everything:
            error = verdict(pending) if not pending.done else None
            if error is not None:
                self._unclaimed.add(pending)
                self._end(pending, error)

    def _end(self, pending: Pending, error: RolloutError | None = None) -> None:
        """Publish an outcome and forget the pending."""
        if pending.done:
            return
        self._calls.pop(pending.request_id, None)
        if self.streams.get(pending.request_id) is pending:
            del self.streams[pending.request_id]
            self._cancelling.discard(pending.request_id)
        if isinstance(pending, StreamRecord):
            self._continued.pop(pending.wire_id, None)
            self._no_room.forget(pending.request_id)
            self._leave_group(pending)
            self._coming.count()
        pending.error = error
        pending.done = True
        self._posts.tell(pending)
        # Who listens from now on finds the outcome; and a record whose readers refer to it must not wait for the garbage collector.
        pending.listeners = []

    def _leave_group(self, record: StreamRecord) -> None:
        if record.group_id is not None:
            group = self._groups.get(record.group_id, set())
            group.discard(record)
            if not group:
                self._groups.pop(record.group_id, None)

    # Sending

    def _start(self, pending: Pending, link: Link | None) -> None:
        if pending.done:
            return
        pending.since = time.monotonic()
        too_large = self._too_large(pending.frames)
        if too_large is not None:
            self._end(pending, too_large)
        elif link is not None and link.denied is not None:
            self._end(pending, link.denied)
        elif self._service.is_gone:
            self._end(pending, self._service.no_answer(0.0))
        elif link is None:
            # The control socket is known once the service has said WELCOME.
            self._waiting_for_control.append(pending.frames)
        else:
            link.send(pending.frames)
            if self._service.in_doubt:
                # A generation may be answered late by a service that is back; a heartbeat is answered at once.
                self._data.send(encode(Op.HEARTBEAT, new_token(), {}))

    def _too_large(self, frames: list[Frame]) -> RolloutError | None:
        """Refuse here what the service's socket would answer by closing the connection, and with it everybody's."""
        size = sum(memoryview(frame).nbytes for frame in frames)
        if self.welcome is None or size <= self.welcome.max_message_bytes:
            return None
        return InvalidRequest(
            f"the message has {size} bytes",
            field="max_message_bytes",
            value=size,
            limit=f"the service takes {self.welcome.max_message_bytes}",
            remedy="send less at once, or start the service with a larger max_message_bytes",
        )

    def _hello(self, link: Link) -> None:
        """Open a session, or continue ours on this socket."""
        fields: dict[str, object] = {"name": self._name}
        if self.welcome is not None:
            fields |= {"session": self.welcome.session, "secret": self.welcome.secret}
        link.hello(fields)

    # Receiving

    def _drain(self, link: Link) -> None:
        while (incoming := link.peer.receive()) is not None:
            self._service.heard()
            try:
                packet = decode(incoming.frames, CLIENT_REPLIES)
            except ProtocolMismatch as error:
                if self.connected.done:
                    log.warning("%s", error)
                else:
                    self._fail(lambda _, error=error: error)  # type: ignore[misc]
                continue
            except RolloutError as error:
                self._not_understood(incoming.frames, error)
                continue
            self._take(link, packet)

    def _not_understood(self, frames: Sequence[bytes], error: RolloutError) -> None:
        """Drop a message that is none; the call that it was to answer fails, since no other answer will come."""
        log.warning("a message from the service is not understood: %s", error)
        with contextlib.suppress(WireError):
            call = self._calls.get(read_header(frames[0]).request_id)
            if call is not None:
                self._end(call[0], InternalError(f"the service's answer is not understood: {error.what}", limit=error.limit))

    def _take(self, link: Link, packet: Packet) -> None:
        if isinstance(packet.body, Deltas):
            self._deltas(packet, packet.body)
        elif packet.op is Op.ALIVE:
            self._alive(packet)
        elif isinstance(packet.body, Welcome):
            self._welcomed(link, packet.request_id, packet.body)
        elif isinstance(packet.body, ErrorBody):
            self._error(link, packet.request_id, packet.body)
        else:
            call = self._calls.get(packet.request_id)
            if call is not None:
                call[0].reply = packet
                self._end(call[0])
            else:
                self._end_unclaimed(packet)

    def _end_unclaimed(self, answer: Packet | None) -> None:
        frames = self._unclaimed.abort(answer)
        if frames is not None and self._control is not None:
            self._control.send(frames)

    def _welcomed(self, link: Link, hello_id: bytes, body: Welcome) -> None:
        if hello_id != link.hello_id:
            return
        link.welcome()
        self._service.stopped = None
        if link is self._data:
            resumed = self.welcome is not None
            self.welcome = body
            # The lease is known only now; the heartbeat planned before may come after its end.
            self._next_heartbeat = min(self._next_heartbeat, time.monotonic() + self._heartbeat_s())
            if self._control is None:
                address = control_address_for(self.address, body.control_address)
                self._control = self._open(address)
                self._control.queue.extend(self._waiting_for_control)
            self._hello(self._control)
            if resumed:
                self._resume_streams()
            self._end(self.connected)
        self._resend_calls(link)
        link.send_queue()

    def _resend_calls(self, link: Link) -> None:
        """Send open calls of this socket again: data calls are idempotent, the front ignores a control call that is open there."""
        queued = {id(frames) for frames in (*link.queue, *self._waiting_for_control)}
        for call, control in list(self._calls.values()):
            if control == (link is self._control) and id(call.frames) not in queued:
                link.send_now(call.frames)

    def _resume_streams(self) -> None:
        """Continue every stream on the new connection: from its own position, or by its idempotent request."""
        queued = {id(frames) for frames in self._data.queue}
        # A copy in one go: callers add streams from their own threads meanwhile.
        records = [record for record in list(self.streams.values()) if record not in self._no_room]
        begun = [record for record in records if record.length > record.base]
        for record in records:
            if record.length == record.base and id(record.frames_now) not in queued:
                # The members of a group share one message, which goes once.
                queued.add(id(record.frames_now))
                self._data.send_now(record.frames_now)
        self._attach(begun)
        for request_id in self._cancelling & self.streams.keys():
            self._send_cancel(self.streams[request_id].wire_id)

    def _attach(self, records: Iterable[StreamRecord]) -> None:
        every = list(records)
        for start in range(0, len(every), MAX_NAMED_IDS):
            part = every[start : start + MAX_NAMED_IDS]
            arrays: dict[str, np.ndarray] = {
                "request_ids": np.frombuffer(b"".join(record.wire_id for record in part), np.uint8).reshape(-1, 16),
                "offsets": np.array([record.length - record.base for record in part], np.int64),
            }
            self._data.send(encode(Op.ATTACH, new_token(), {}, arrays))

    def _error(self, link: Link, request_id: bytes, body: ErrorBody) -> None:
        error = error_from_fields(body.model_dump())
        if request_id == link.hello_id and not link.welcomed:
            self._hello_refused(link, error)
        elif body.code == "no_session":
            self._session_lost(link, request_id)
        elif request_id == NO_REQUEST and body.code == ServiceStopping.code:
            # What it still answers is under way; the next look at the clock fails what stays without an answer.
            self._service.stopped = error
        elif request_id == NO_REQUEST and body.code == AccessDenied.code:
            self._deny(self._data, error)
        elif request_id == NO_REQUEST:
            log.warning("the service says: %s", error)
        else:
            self._unclaimed.refused(request_id)
            call = self._calls.get(request_id)
            pending = call[0] if call is not None else self._stream(request_id)
            if isinstance(pending, StreamRecord) and body.code == Busy.code and self._waits_for_room(pending, body.retry_after_s):
                return
            for one in (pending,) if pending is not None else tuple(self._groups.get(request_id, ())):
                self._end(one, error)

    def _hello_refused(self, link: Link, error: RolloutError) -> None:
        gone = error.code in ("server_restarted", "no_session")
        if gone and link is self._control:
            # The session is the data connection's to renew: what was under way hears of it once, and what comes later does not.
            if self._data.welcomed:
                self._hello(self._data)
        elif gone and self.welcome is not None:
            self.welcome = None
            for one in (self._data, self._control):
                if one is not None:
                    one.queue.clear()
            self._fail(lambda _: ServerRestarted(error.what, limit=error.limit, remedy="submit the request again"))
            self._hello(link)
        else:
            self._fail(lambda _: error)

    def _session_lost(self, link: Link, request_id: bytes) -> None:
        """Say HELLO again on a new connection, then send what it refused."""
        call = self._calls.get(request_id)
        if call is not None:
            link.queue.append(call[0].frames)
        if link.welcomed:
            self._hello(link)
        if link is self._data and self._control is not None and self._control.welcomed:
            self._hello(self._control)

    def _alive(self, packet: Packet) -> None:
        """Continue streams whose ending never came; acknowledge endings that nobody waits for."""
        ids = [row.tobytes() for row in packet.arrays.get("request_ids", ())]
        found = {one: self._stream(one) for one in ids}
        self._attach(record for record in found.values() if record is not None)
        unknown = [one for one, record in found.items() if record is None]
        if unknown:
            self._acknowledge(unknown)

    def _acknowledge(self, ended: list[bytes]) -> None:
        self._unacknowledged, self._acknowledged_at = 0, self._service.last_heard
        arrays = {"request_ids": np.frombuffer(b"".join(ended), np.uint8).reshape(-1, 16)} if ended else None
        self._data.send(encode(Op.ACK, NO_REQUEST, {"seq": self._seq}, arrays))

    def _deltas(self, packet: Packet, body: Deltas) -> None:
        """Take a flush apart: one slice per stream, no work per token."""
        self._seq = body.seq
        flush = read_flush(packet.arrays, body)
        if flush is None:
            log.error("a flush whose arrays do not fit together is dropped")
            return
        roster = self._roster
        # Whatever was continued once has another id now; without any, ids are what callers know.
        roster.look_up(flush.ids, self._stream if self._continued else self.streams.get)
        for index, score in flush.extras.scores.items():
            record = roster.records[index]
            if record is not None and record.prompt_score is None:
                record.prompt_score = score
        firsts, gaps = roster.take(flush)
        ended = self._endings(flush, gaps) if flush.endings else []
        self._posts.tell_flush(roster, flush, firsts)
        self._attach(gaps)
        self._unacknowledged += packet.num_bytes
        since_s = self._service.last_heard - self._acknowledged_at
        if ended or self._unacknowledged >= ACKNOWLEDGE_BYTES or since_s >= ACKNOWLEDGE_S:
            self._acknowledge(ended)

    def _endings(self, flush: Flush, gaps: list[StreamRecord]) -> list[bytes]:
        """Take a flush's endings; returns the ids of those that are to be acknowledged. Mutates: `gaps`, by what is not whole."""
        ended: list[bytes] = []
        missing = set(map(id, gaps))
        for index, ending in flush.endings.items():
            if index >= len(flush.ends):
                continue
            request_id, record = flush.ids[16 * index : 16 * index + 16], self._roster.records[index]
            if record is None or id(record) in missing:
                ended += [request_id] if record is None else []
            elif record.is_whole(ending):
                ended.append(request_id)
                self._ended(record, ending, flush.extras.texts.get(index))
            else:
                gaps.append(record)
        return ended

    def _ended(self, record: StreamRecord, ending: Ending, text: str | None) -> None:
        """Publish a stream's end, or let it go on where an update cut it."""
        if is_cut(record, ending) and record.request_id not in self._cancelling:
            self._go_on(record, Cut(ending, text))
            return
        self._publish(record, joined_ending(record, ending), text)

    def _publish(self, record: StreamRecord, ending: Ending, text: str | None) -> None:
        record.settle()
        record.text, record.ending = text, ending
        self._end(record)

    def _go_on(self, record: StreamRecord, cut: Cut) -> None:
        """Send the rest of a generation that an update cut, as a request of its own."""
        wire_id = new_token()
        frames = continued_frames(record, cut.ending, wire_id)
        too_large = self._too_large(frames)
        if too_large is not None:
            self._end(record, too_large)
            return
        self._leave_group(record)
        self._continued.pop(record.wire_id, None)
        record.go_on(cut.ending, wire_id, frames)
        record.since = time.monotonic()
        self._continued[wire_id] = record
        self._no_room.sent(record, cut)
        self._coming.count()
        self._posts.tell(record)
        self._data.send(frames)

    def _waits_for_room(self, record: StreamRecord, retry_after_s: float | None) -> bool:
        """Let the rest of a cut generation wait where others have its room; False for any other request, which `busy` ends."""
        if not self._no_room.wait(record, retry_after_s, time.monotonic()):
            return False
        if record.request_id in self._cancelling:
            self._end_waiting(record)
        return True

    def _end_waiting(self, record: StreamRecord) -> None:
        """End a cut generation whose rest waits for room where it was cut; no effect on any other."""
        cut = self._no_room.take(record.request_id)
        if cut is not None:
            self._publish(record, ended_where_cut(record, cut), cut.text)

    def _ask_again(self, now: float) -> float:
        """Send again what waited for room; returns when the next one is due."""
        for record, cut in self._no_room.take_due(now):
            late = ending_there(record, cut, now)
            if late is None:
                self._go_on(record, cut)
            else:
                self._publish(record, late, cut.text)
        return self._no_room.next_due
