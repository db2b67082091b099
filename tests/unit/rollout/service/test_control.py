"""Pause and update are leases of their holder; versions, needed weights and restores follow the host's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from rollout.errors import Busy, HostFailed, NeedsWeights, NoEvaluation, NoUpdate, PauseHeld, ServiceStopping, UpdateBusy, WeightUpdateError
from rollout.service.admission import Admission
from rollout.service.calls import MAX_OPEN_CALLS, Calls
from rollout.service.commit_gate import CommitGate
from rollout.service.control import ControlDesk, refusal
from rollout.service.host_link import HostLink
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.wire.codec import Packet, decode, encode
from rollout.wire.operations import CONTROL_REQUESTS, HOST_REPLIES, Op

REPORT = {
    "version": 1, "num_tensors": 1, "num_bytes": 4, "changed_tensors": 1, "changed_bytes": 4, "staging_s": 0.0, "swap_ms": 0.0,
    "proof_ms": 0.0, "pause_ms": 0.0,
}  # fmt: skip


class ListLink:
    """A host link that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Op, Mapping[str, object], bytes]] = []

    def send(self, op: Op, fields: Mapping[str, object], arrays: object = None, call_id: bytes = bytes(16)) -> None:
        self.sent.append((op, fields, call_id))


class RequestsPlayed:
    """The requests in the engine, as the test says."""

    def __init__(self) -> None:
        self.num_in_engine = 0
        self.aborted: list[str] = []
        self.released = 0

    def abort_in_engine(self, detail: str) -> None:
        self.aborted.append(detail)

    def submit_held(self) -> None:
        self.released += 1


class Desk:
    """A control desk with two clients and a host that the test plays."""

    def __init__(self) -> None:
        self.link = ListLink()
        self.replies: list[tuple[Op, Mapping[str, object]]] = []
        self.published: list[int] = []
        self.admission = Admission(lambda: None)
        self.admission.ready = True
        self.calls = Calls(cast(HostLink, self.link), self._reply)
        self._versions = iter(range(1, 100))
        self.requests = RequestsPlayed()
        gate = CommitGate(self.admission, self.requests)
        self.control = ControlDesk(cast(HostLink, self.link), self.calls, self.admission, gate, lambda: next(self._versions), self._publish)
        book = SessionBook(30.0)
        self.first = book.open("first", Channel.DATA, b"\0aaaa", 0.0)
        self.second = book.open("second", Channel.DATA, b"\0bbbb", 0.0)

    def _reply(
        self, session: Session, channel: Channel, op: Op, request_id: bytes, fields: Mapping[str, object], arrays: object = None
    ) -> None:
        self.replies.append((op, fields))

    def _publish(self, version: int) -> None:
        self.published.append(version)
        self.admission.version = version

    def begin(self, session: Session, **fields: object) -> str:
        self.control.begin(session, packet(Op.WEIGHTS_BEGIN, **fields))
        self.answer(Op.DONE)
        assert self.replies[-1][0] is Op.WEIGHTS_TICKET
        return str(self.replies[-1][1]["update_id"])

    def commit(self, session: Session, update_id: str, **fields: object) -> None:
        self.control.commit(session, packet(Op.WEIGHTS_COMMIT, update_id=update_id, **fields))

    def answer(self, op: Op, **fields: object) -> None:
        """Let the host answer the last call."""
        call_id = self.link.sent[-1][2]
        self.calls.answer(decode([bytes(frame) for frame in encode(op, call_id, fields)], HOST_REPLIES))


def packet(op: Op, **fields: object) -> Packet:
    return decode([bytes(frame) for frame in encode(op, bytes(range(16)), fields)], CONTROL_REQUESTS)


def test_who_never_paused_cannot_resume_for_another_and_is_told_for_whom_the_engine_waits() -> None:
    desk = Desk()
    desk.control.pause(desk.first)
    with pytest.raises(PauseHeld, match=r"paused by first#1 for .*resume from that client"):
        desk.control.resume(desk.second)
    assert [one.split(" for ")[0] for one in desk.control.paused_by] == ["first#1"]
    desk.control.end_session(desk.first)
    desk.control.resume(desk.second)
    assert (desk.control.paused_by, desk.admission.paused) == ([], False)


def test_the_engine_stands_still_while_anybody_holds_a_pause() -> None:
    desk = Desk()
    desk.control.pause(desk.first)
    desk.control.pause(desk.first)
    desk.control.pause(desk.second)
    desk.control.resume(desk.first)
    assert desk.admission.paused
    desk.control.resume(desk.first)
    desk.control.end_session(desk.second)
    assert not desk.admission.paused
    assert [op for op, _, _ in desk.link.sent] == [Op.PAUSE, Op.RESUME]
    desk.control.pause(desk.first)
    desk.control.host_ready(0)
    assert [op for op, _, _ in desk.link.sent][2:] == [Op.PAUSE, Op.PAUSE], "a new host is told too"


def test_an_update_belongs_to_its_holder_until_it_ends() -> None:
    desk = Desk()
    update_id = desk.begin(desk.first)
    with pytest.raises(UpdateBusy, match="first#1") as busy:
        desk.begin(desk.second)
    assert busy.value.field == "update" and "lease" in str(busy.value.remedy), "who holds it may be gone"
    with pytest.raises(NoUpdate):
        desk.commit(desk.second, update_id)
    desk.commit(desk.first, update_id)
    with pytest.raises(WeightUpdateError, match="is being committed"):
        desk.control.abort(desk.first, packet(Op.WEIGHTS_ABORT, update_id=update_id))
    desk.control.end_session(desk.first)
    assert desk.control.update is not None, "a commit under way is not torn"
    desk.answer(Op.WEIGHTS_REPORT, **REPORT)
    assert desk.published == [1]
    assert desk.control.update is None
    desk.begin(desk.second)


def test_a_begin_that_the_engine_refuses_leaves_no_update_and_uses_up_its_version() -> None:
    desk = Desk()
    desk.control.begin(desk.first, packet(Op.WEIGHTS_BEGIN))
    desk.answer(Op.ERROR, code="manifest_mismatch", what="x")
    assert desk.replies[-1][1]["code"] == "manifest_mismatch"
    desk.begin(desk.second)
    assert desk.replies[-1][1]["version"] == 2


def test_an_abandoned_update_is_aborted_in_the_host() -> None:
    desk = Desk()
    update_id = desk.begin(desk.first)
    desk.control.end_session(desk.first)
    assert desk.link.sent[-1][:2] == (Op.WEIGHTS_ABORT, {"update_id": update_id})
    assert desk.control.update is None


def test_no_update_begins_without_a_host() -> None:
    desk = Desk()
    desk.admission.ready = False
    with pytest.raises(HostFailed, match="no engine host is ready"):
        desk.control.begin(desk.first, packet(Op.WEIGHTS_BEGIN))


def test_a_host_death_asks_for_weights_only_if_trained_ones_were_served() -> None:
    desk = Desk()
    desk.begin(desk.first)
    desk.control.host_died()
    assert desk.control.needs_weights is None
    assert desk.control.update is None
    desk.commit(desk.first, desk.begin(desk.first))
    desk.answer(Op.WEIGHTS_REPORT, **(REPORT | {"version": 2}))
    desk.control.host_died()
    assert desk.control.needs_weights == 2
    desk.commit(desk.first, desk.begin(desk.first))
    desk.answer(Op.WEIGHTS_REPORT, **(REPORT | {"version": 3}))
    assert desk.control.needs_weights is None


def test_a_restore_must_prove_the_digests_of_its_version() -> None:
    desk = Desk()
    with pytest.raises(WeightUpdateError, match="needed weights: none"):
        desk.begin(desk.first, restore=1)
    desk.commit(desk.first, desk.begin(desk.first))
    desk.answer(Op.WEIGHTS_REPORT, **REPORT)
    desk.control.host_died()
    with pytest.raises(WeightUpdateError, match="brought no digests of some tensors"):
        desk.begin(desk.first, restore=1)
    desk.commit(desk.first, desk.begin(desk.first), digests={"w": 7})
    desk.answer(Op.WEIGHTS_REPORT, **(REPORT | {"version": 2}))
    desk.control.host_died()
    desk.commit(desk.first, desk.begin(desk.first, restore=2), digests={"w": 8})
    assert desk.link.sent[-1][1]["digests"] == {"w": 7}, "the client's own word does not count"
    desk.answer(Op.ERROR, code="digest_mismatch", what="w differs")
    assert desk.replies[-1][1]["code"] == "weights_changed"
    assert desk.control.needs_weights == 2
    desk.commit(desk.first, desk.begin(desk.first, restore=2))
    desk.answer(Op.WEIGHTS_REPORT, **(REPORT | {"version": 2}))
    assert desk.control.needs_weights is None
    assert desk.published == [1, 2, 2]


def test_open_calls_get_the_error_of_the_hosts_death() -> None:
    desk = Desk()
    desk.control.begin(desk.first, packet(Op.WEIGHTS_BEGIN))
    desk.calls.fail_all(HostFailed("it died", remedy="r"))
    assert desk.replies == [(Op.ERROR, desk.replies[0][1])]
    assert desk.replies[0][1]["code"] == "host_failed"
    assert desk.control.update is None
    assert len(desk.calls) == 0


def test_what_a_client_with_too_many_open_calls_is_refused_has_not_happened_and_its_commit_goes_all_the_same() -> None:
    desk = Desk()
    update_id = desk.begin(desk.first)
    desk.control.begin_evaluation(desk.second, packet(Op.EVALUATE_BEGIN, deadline_s=9.0))
    desk.commit(desk.first, update_id)
    for _ in range(MAX_OPEN_CALLS):
        for session in (desk.first, desk.second):
            desk.calls.pass_on(session, Channel.DATA, bytes(range(16)), Op.STATS, {})
    with pytest.raises(Busy):
        desk.control.stage(desk.first, packet(Op.WEIGHTS_STAGE_FILE, update_id=update_id, path="p", size=1, xxh3=None))
    assert desk.control.update is not None and desk.control.update.staging == 0
    desk.control.end_session(desk.second)
    assert commits_sent(desk) == 1, "nobody could be told of a refusal: it goes from the loop, long after its message"
    desk.answer(Op.WEIGHTS_REPORT, **REPORT)
    assert desk.published == [1]
    with pytest.raises(Busy):
        desk.control.begin(desk.first, packet(Op.WEIGHTS_BEGIN))
    assert desk.control.update is None
    with pytest.raises(Busy):
        desk.control.sleep(desk.first, packet(Op.SLEEP, level="kv"))
    assert desk.admission.asleep is None


def test_why_nothing_is_taken_is_named_in_order() -> None:
    failure: Any = HostFailed("dead")
    assert isinstance(refusal(3, failure, True), ServiceStopping)
    assert isinstance(refusal(3, failure, False), HostFailed)
    assert isinstance(refusal(3, None, False), NeedsWeights)
    assert refusal(None, None, False) is None


def commits_sent(desk: Desk) -> int:
    return sum(op is Op.WEIGHTS_COMMIT for op, _, _ in desk.link.sent)


def test_a_drain_holds_new_requests_until_those_in_the_engine_have_ended_and_the_commit_is_over() -> None:
    desk = Desk()
    update_id = desk.begin(desk.first)
    desk.requests.num_in_engine = 2
    desk.commit(desk.first, update_id, mode="drain", drain_s=5.0)
    assert desk.admission.held and not commits_sent(desk) and desk.requests.aborted == []
    desk.requests.num_in_engine = 0
    desk.control.advance(0.0)
    assert commits_sent(desk) == 1 and desk.admission.held
    desk.answer(Op.WEIGHTS_REPORT, **REPORT)
    assert not desk.admission.held and desk.requests.released == 1


def test_a_drain_past_its_deadline_names_the_remedy_and_leaves_the_update_open() -> None:
    desk = Desk()
    update_id = desk.begin(desk.first)
    desk.requests.num_in_engine = 3
    desk.commit(desk.first, update_id, mode="drain", drain_s=0.0)
    assert desk.replies[-1][1]["code"] == "drain_timeout"
    assert "3 requests" in str(desk.replies[-1][1]["what"]) and "mode='inflight'" in str(desk.replies[-1][1]["remedy"])
    assert not desk.admission.held
    desk.commit(desk.first, update_id)
    desk.answer(Op.WEIGHTS_REPORT, **REPORT)
    assert desk.published == [1]


def test_abort_requests_cancels_what_the_engine_has_with_the_updates_name() -> None:
    desk = Desk()
    update_id = desk.begin(desk.first)
    desk.requests.num_in_engine = 1
    desk.commit(desk.first, update_id, mode="abort_requests")
    assert desk.requests.aborted == ["update"] and not commits_sent(desk)
    desk.control.advance(0.0)
    assert desk.requests.aborted == ["update"], "once is enough"


@pytest.mark.parametrize("end", ["abort", "session", "host"])
def test_a_waiting_commit_ends_with_its_update_its_holder_or_the_host_and_what_was_held_goes_on(end: str) -> None:
    desk = Desk()
    update_id = desk.begin(desk.first)
    desk.requests.num_in_engine = 1
    desk.commit(desk.first, update_id, mode="drain")
    if end == "abort":
        assert desk.control.abort(desk.first, packet(Op.WEIGHTS_ABORT, update_id=update_id))
        assert desk.replies[-1][1]["code"] == "no_update"
    elif end == "session":
        desk.control.end_session(desk.first)
        assert desk.link.sent[-1][:2] == (Op.WEIGHTS_ABORT, {"update_id": update_id})
    else:
        desk.control.host_died()
        assert desk.replies[-1][1]["code"] == "host_failed"
    desk.requests.num_in_engine = 0
    desk.control.advance(0.0)
    assert not desk.admission.held and not commits_sent(desk) and desk.control.update is None


def test_a_commit_waits_for_evaluations_and_a_later_evaluation_waits_for_the_commit() -> None:
    desk = Desk()
    update_id = desk.begin(desk.first)
    desk.control.begin_evaluation(desk.second, packet(Op.EVALUATE_BEGIN, deadline_s=50.0))
    first = desk.replies[-1][1]
    desk.commit(desk.first, update_id, mode="drain")
    assert not commits_sent(desk) and not desk.admission.held, "an evaluation's requests must get through"
    assert desk.control.waits_for(desk.first, bytes(range(16)))
    desk.control.begin_evaluation(desk.second, packet(Op.EVALUATE_BEGIN, deadline_s=50.0))
    assert len([op for op, _ in desk.replies if op is Op.EVALUATION]) == 1
    desk.control.end_evaluation(desk.second, packet(Op.EVALUATE_END, evaluation_id=first["evaluation_id"]))
    assert commits_sent(desk) == 1
    desk.answer(Op.WEIGHTS_REPORT, **REPORT)
    versions = [fields["version"] for op, fields in desk.replies if op is Op.EVALUATION]
    assert versions == [0, 1]


def test_an_evaluation_holds_commits_back_no_longer_than_its_deadline_or_its_session() -> None:
    desk = Desk()
    with pytest.raises(NoEvaluation, match="end your own"):
        desk.control.begin_evaluation(desk.second, packet(Op.EVALUATE_BEGIN, deadline_s=9.0))
        desk.control.end_evaluation(desk.first, packet(Op.EVALUATE_END, evaluation_id=desk.replies[-1][1]["evaluation_id"]))
    desk.commit(desk.first, desk.begin(desk.first))
    assert not commits_sent(desk)
    desk.control.end_session(desk.second)
    assert commits_sent(desk) == 1
    desk.answer(Op.WEIGHTS_REPORT, **REPORT)
    desk.control.begin_evaluation(desk.second, packet(Op.EVALUATE_BEGIN, deadline_s=0.5))
    desk.commit(desk.first, desk.begin(desk.first))
    assert commits_sent(desk) == 1
    soon = desk.control.advance(0.0)
    assert soon is not None
    desk.control.advance(soon)
    assert commits_sent(desk) == 2
