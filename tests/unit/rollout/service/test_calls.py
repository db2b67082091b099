"""What a client may have open at the engine host is bounded, and comes back with every answer."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.errors import Busy, HostFailed
from rollout.service.calls import MAX_OPEN_CALLS
from rollout.service.sessions import Channel
from rollout.wire.codec import decode, encode
from rollout.wire.operations import HOST_REPLIES, Op
from rollout.wire.security import new_token
from tests.unit.rollout.service.request_desk import Desk


def score(desk: Desk, session: object = None, ids: int = 4) -> None:
    owner = desk.session if session is None else session
    desk.calls.pass_on(owner, Channel.DATA, new_token(), Op.SCORE, {"temperature": 1.0}, {"ids": np.zeros(ids, np.int32)})  # type: ignore[arg-type]


def test_a_client_with_too_many_calls_is_refused_and_others_are_not() -> None:
    desk = Desk()
    for _ in range(MAX_OPEN_CALLS):
        score(desk)
    with pytest.raises(Busy, match="wait for answers"):
        score(desk)
    score(desk, desk.sessions.open("other", Channel.DATA, b"\0efgh", 0.0))
    desk.calls.fail_all(HostFailed("the host died"))
    assert len(desk.calls) == 0
    score(desk)


def test_a_client_with_too_many_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.service.calls.MAX_OPEN_CALL_BYTES", 100)
    desk = Desk()
    score(desk, ids=20)
    with pytest.raises(Busy, match="80 bytes wait"):
        score(desk, ids=6)
    score(desk, ids=5)


def test_a_cancel_goes_however_much_else_is_open_and_once() -> None:
    desk = Desk(max_requests=10)
    first, second = desk.generate(max_new_tokens=5), desk.generate(max_new_tokens=5)
    for _ in range(MAX_OPEN_CALLS):
        score(desk)
    for target in (first, second, first):
        desk.cancel(target)
    assert [body.kind for body in desk.link.of(Op.KILL)] == ["cancelled", "cancelled"]
    assert [fields["state"] for op, _, fields in desk.replies if op is Op.CANCEL_RESULT] == ["ending"], "the third, at once"


def test_a_cancel_that_is_sent_again_under_its_id_gets_one_answer_the_first_ones() -> None:
    desk = Desk()
    target, call_id = desk.generate(max_new_tokens=5), new_token()
    desk.cancel(target, call_id)
    desk.cancel(target, call_id)
    assert not desk.replies
    answer = encode(Op.CANCEL_RESULT, desk.link.sent[-1].request_id, {"cancelled": True, "state": "live"})
    desk.calls.answer(decode([bytes(frame) for frame in answer], HOST_REPLIES))
    assert [(one, fields["cancelled"]) for _, one, fields in desk.replies] == [(call_id, True)]
