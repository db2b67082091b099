"""Replies that find no room wait in their order, are counted in bytes, and stop a client that reads none of them from asking for more."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rollout.errors import Busy
from rollout.service.metrics import FrontMetrics
from rollout.service.outbound import MAX_UNSENT_BYTES, MAX_UNSENT_REPLIES, Outbound
from rollout.service.sessions import Channel, SessionBook
from rollout.wire.transport import Router, Sent


class PlayedRouter:
    """A socket with room for so many messages."""

    def __init__(self) -> None:
        self.room: int | None = 0
        self.sent: list[Any] = []

    def send(self, route: bytes, frames: list[Any]) -> Sent:
        if self.room is None:
            return Sent.GONE
        if not self.room:
            return Sent.FULL
        self.room -= 1
        self.sent.append(frames[0])
        return Sent.OK


def made() -> tuple[Outbound, PlayedRouter, SessionBook, FrontMetrics]:
    router, sessions, metrics = PlayedRouter(), SessionBook(30.0), FrontMetrics()
    return Outbound({Channel.DATA: cast(Router, router)}, sessions, metrics), router, sessions, metrics


def test_who_leaves_answers_unread_is_told_to_read_them_and_nobody_else_is() -> None:
    outbound, router, sessions, _ = made()
    lazy, other = (sessions.open(name, Channel.DATA, route, 0.0) for name, route in (("lazy", b"\0aaaa"), ("other", b"\0bbbb")))
    answers = [bytes([number]) + bytes(2**20 - 1) for number in range(MAX_UNSENT_BYTES // 2**20)]
    for answer in answers:
        outbound.check_room(lazy)
        outbound.send(Channel.DATA, b"\0aaaa", [answer])
    with pytest.raises(Busy, match=f"{MAX_UNSENT_BYTES} bytes of answers wait for this client.*read answers before") as refused:
        outbound.check_room(lazy)
    assert refused.value.retry_after_s is not None
    outbound.check_room(other)
    router.room = 1
    assert outbound.send_waiting() and outbound.unsent_bytes == MAX_UNSENT_BYTES - 2**20
    outbound.check_room(lazy)
    router.room = 10**6
    assert not outbound.send_waiting() and outbound.unsent_bytes == 0
    assert router.sent == answers, "all of them, once and in order"


@pytest.mark.parametrize("end", ["gone", "forgotten"])
def test_nothing_is_counted_for_a_connection_that_is_gone(end: str) -> None:
    outbound, router, sessions, metrics = made()
    session = sessions.open("one", Channel.DATA, b"\0aaaa", 0.0)
    for _ in range(MAX_UNSENT_REPLIES + 5):
        outbound.send(Channel.DATA, b"\0aaaa", [b"x" * 10])
    assert (outbound.unsent_bytes, metrics.undeliverable) == (10 * MAX_UNSENT_REPLIES, 5)
    if end == "gone":
        router.room = None
        assert not outbound.send_waiting()
    else:
        outbound.forget(session)
    assert outbound.unsent_bytes == 0
