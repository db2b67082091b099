"""The host's loop with a fake engine and a front that is played by hand: what it holds back, and what it never holds back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollout.service.engine_host import EngineHost
from rollout.service.last_weights import LastWeights
from rollout.wire.codec import NO_REQUEST, Packet, decode, encode
from rollout.wire.host_messages import Step
from rollout.wire.operations import HOST_REPLIES, Op
from rollout.wire.session_messages import StatsResult
from rollout.wire.transport import Context, Peer, Poller, Sent
from tests.fakes import FakeEngine

CREDIT = 2**16
IDS = np.arange(2000, dtype=np.int64) % 200
# Two log-probabilities of all ids but the first.
ANSWER_BYTES = 8 * (IDS.size - 1)
SCORES = 30


class LookingEngine(FakeEngine):
    """An engine whose device looks at staged weights until it is told that it has seen them."""

    def __init__(self) -> None:
        super().__init__(model="")
        self.seen = threading.Event()

    def inspect_update(self) -> bool:
        """Return whether the device is done."""
        return self.seen.is_set()


class HandFront:
    """The front's end of a host's link."""

    def __init__(self, peer: Peer, engine: LookingEngine) -> None:
        self._peer, self._poller, self.engine = peer, Poller([peer]), engine

    def send(self, op: Op, number: int = 0, fields: dict[str, object] | None = None, arrays: dict[str, np.ndarray] | None = None) -> None:
        """Send under a call id that is a number."""
        assert self._peer.send(encode(op, number.to_bytes(16), fields or {}, arrays)) is Sent.OK

    def receive(self, timeout_s: float) -> Packet | None:
        """Return the next message, or None."""
        if not self._poller.wait(timeout_s):
            return None
        incoming = self._peer.receive()
        return None if incoming is None else decode(incoming.frames, HOST_REPLIES)

    def all(self, quiet_s: float = 0.3) -> list[Packet]:
        """Return what comes until it is quiet."""
        packets: list[Packet] = []
        while (packet := self.receive(quiet_s)) is not None:
            packets.append(packet)
        return packets


@pytest.fixture
def front(tmp_path: Path) -> Iterator[HandFront]:
    context = Context()
    bound = context.pair_bound(f"ipc://{tmp_path}/link", 2**26)
    engine = LookingEngine()

    def serve() -> None:
        own = Context()
        EngineHost(engine, own.pair_connected(bound.address, 2**26), tmp_path, LastWeights(engine, None), CREDIT).run()
        own.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    front = HandFront(bound, engine)
    ready = front.receive(10.0)
    assert ready is not None and ready.op is Op.HOST_READY
    yield front
    front.send(Op.SHUTDOWN)
    thread.join(10.0)
    assert not thread.is_alive()
    context.close()


def test_scores_wait_while_the_front_acknowledges_nothing_and_then_all_are_answered_once_and_in_order(front: HandFront) -> None:
    for number in range(1, SCORES + 1):
        front.send(Op.SCORE, number, {"temperature": 1.0}, {"ids": IDS})
    answered, steps = [], []
    deadline = time.monotonic() + 20.0
    while len(answered) < SCORES:
        assert time.monotonic() < deadline, "it waits for ever"
        packets = front.all()
        scored = [packet for packet in packets if packet.op is Op.SCORED]
        answered += [int.from_bytes(packet.request_id) for packet in scored]
        assert len(scored) * ANSWER_BYTES < CREDIT + ANSWER_BYTES, "unacknowledged answers stay within the bound and one more"
        front.send(Op.STATS, 99)
        numbers = front.receive(5.0)
        assert numbers is not None and numbers.request_id == (99).to_bytes(16), "nothing else waits"
        assert isinstance(numbers.body, StatsResult) and numbers.body.engine is not None
        assert numbers.body.engine["unacknowledged_bytes"] == len(scored) * ANSWER_BYTES
        steps = [packet.body.seq for packet in packets if isinstance(packet.body, Step)]
        front.send(Op.STEP_ACK, 0, {"seq": max(steps)})
    assert answered == list(range(1, SCORES + 1))


def test_a_score_that_waits_is_refused_by_name_if_the_engine_refuses_it_then(front: HandFront) -> None:
    for number in range(1, 12):
        front.send(Op.SCORE, number, {"temperature": 1.0}, {"ids": IDS})
    seqs = [packet.body.seq for packet in front.all() if isinstance(packet.body, Step)]
    front.send(Op.SLEEP, 50, {"level": "kv"})
    slept = front.receive(5.0)
    assert slept is not None and slept.op is Op.DONE
    front.send(Op.STEP_ACK, 0, {"seq": max(seqs)})
    rest = [packet for packet in front.all() if packet.request_id != NO_REQUEST]
    assert [packet.op for packet in rest] == [Op.ERROR] * len(rest) and rest
    assert {packet.body.code for packet in rest} == {"asleep"}  # type: ignore[attr-defined]


OPENED = {"update_id": "u", "version": 5, "manifest": None, "partial": False}
COMMITTED = {"update_id": "u", "digests": None, "canary_temperatures": []}


def test_a_commit_waits_for_the_look_at_what_is_staged_and_nothing_else_does(front: HandFront) -> None:
    front.send(Op.UPDATE_OPEN, 1, OPENED)
    assert [packet.op for packet in front.all()] == [Op.DONE]
    front.send(Op.WEIGHTS_COMMIT, 2, COMMITTED)
    front.send(Op.WEIGHTS_COMMIT, 3, COMMITTED | {"update_id": "another"})
    front.send(Op.STATS, 4)
    answers = front.all()
    assert [int.from_bytes(packet.request_id) for packet in answers] == [3, 4]
    assert answers[0].op is Op.ERROR and answers[0].body.code == "no_update"  # type: ignore[attr-defined]
    front.engine.seen.set()
    committed = front.receive(5.0)
    assert committed is not None and int.from_bytes(committed.request_id) == 2
    assert committed.op is Op.ERROR and committed.body.code == "manifest_mismatch", "nothing was staged"  # type: ignore[attr-defined]


def test_a_commit_that_waits_ends_with_its_update(front: HandFront) -> None:
    front.send(Op.UPDATE_OPEN, 1, OPENED)
    front.send(Op.WEIGHTS_COMMIT, 2, COMMITTED)
    front.send(Op.WEIGHTS_ABORT, 3, {"update_id": "u"})
    answers = {int.from_bytes(packet.request_id): packet for packet in front.all()}
    assert answers.keys() == {1, 2, 3}
    assert answers[2].op is Op.ERROR and answers[2].body.code == "no_update"  # type: ignore[attr-defined]
    assert answers[3].op is Op.DONE
    front.send(Op.UPDATE_OPEN, 4, OPENED | {"update_id": "next", "version": 6})
    assert [packet.op for packet in front.all()] == [Op.DONE]
