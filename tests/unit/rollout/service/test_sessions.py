"""Sessions belong to who shows the secret, and last as long as their lease."""

from __future__ import annotations

import pytest

from rollout.errors import AccessDenied, Busy, NoSession
from rollout.service.sessions import MAX_KEPT_ANSWER_BYTES, MAX_KEPT_ANSWERS, Channel, SessionBook

ROUTE, OTHER = b"\0aaaa", b"\0bbbb"


def test_a_connection_without_hello_has_no_session() -> None:
    with pytest.raises(NoSession, match="HELLO"):
        SessionBook(1.0).heard(Channel.DATA, ROUTE, 0.0)


def test_a_session_continues_on_a_new_connection_only_with_its_secret() -> None:
    book = SessionBook(1.0)
    session = book.open("a", Channel.DATA, ROUTE, 0.0)
    with pytest.raises(NoSession, match="secret"):
        book.resume(session.session_id, bytes(16), Channel.DATA, OTHER, 0.0)
    assert book.resume(bytes(16), session.secret, Channel.DATA, OTHER, 0.0) is None
    assert book.resume(session.session_id, session.secret, Channel.DATA, OTHER, 0.0) is session
    assert book.heard(Channel.DATA, OTHER, 0.0) is session
    with pytest.raises(NoSession):
        book.heard(Channel.DATA, ROUTE, 0.0)


def test_the_two_sockets_are_bound_apart() -> None:
    book = SessionBook(1.0)
    session = book.open("a", Channel.DATA, ROUTE, 0.0)
    with pytest.raises(NoSession):
        book.heard(Channel.CONTROL, ROUTE, 0.0)
    book.resume(session.session_id, session.secret, Channel.CONTROL, OTHER, 0.0)
    assert book.heard(Channel.CONTROL, OTHER, 0.0) is session


def test_a_lease_ends_unless_something_is_heard() -> None:
    book = SessionBook(1.0)
    quiet, loud = book.open("quiet", Channel.DATA, ROUTE, 0.0), book.open("loud", Channel.DATA, OTHER, 0.0)
    book.heard(Channel.DATA, OTHER, 0.5)
    assert book.next_expiry() == 1.0
    assert book.expired(1.0) == [quiet]
    book.close(quiet)
    assert book.expired(1.4) == []
    book.extend_all(10.0, 0.0)
    assert book.expired(11.0) == []
    assert book.expired(11.5) == [loud]
    assert len(book) == 1


def test_a_connection_that_says_hello_again_leaves_its_former_session() -> None:
    book = SessionBook(1.0)
    first = book.open("a", Channel.DATA, ROUTE, 0.0)
    second = book.open("a", Channel.DATA, ROUTE, 0.0)
    assert book.heard(Channel.DATA, ROUTE, 0.0) is second
    assert first.routes == {}
    book.close(first)
    assert book.heard(Channel.DATA, ROUTE, 0.0) is second


def test_another_connection_under_the_same_routing_id_is_a_stranger_and_unbinds_the_session() -> None:
    book = SessionBook(1.0)
    session = book.open("a", Channel.DATA, ROUTE, 0.0, "key#1")
    assert book.heard(Channel.DATA, ROUTE, 0.0, "key#1") is session
    with pytest.raises(NoSession):
        book.heard(Channel.DATA, ROUTE, 0.0, "key#2")
    assert session.routes == {}, "nothing is sent to the stranger"
    assert book.resume(session.session_id, session.secret, Channel.DATA, OTHER, 0.0, "key#3") is session


def test_a_session_is_continued_by_the_principal_that_opened_it_only() -> None:
    book = SessionBook(1.0)
    session = book.open("a", Channel.DATA, ROUTE, 0.0, "key#1")
    with pytest.raises(AccessDenied):
        book.resume(session.session_id, session.secret, Channel.DATA, OTHER, 0.0, "other#2")
    assert book.heard(Channel.DATA, ROUTE, 0.0, "key#1") is session


def test_a_name_cannot_forge_a_line_of_the_log() -> None:
    assert SessionBook(1.0).open("a\nfront ERROR" + "b" * 300, Channel.DATA, ROUTE, 0.0).label == "a?front ERROR" + "b" * 51 + "#1"


def test_sessions_are_bounded_and_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.service.sessions.MAX_SESSIONS", 1)
    book = SessionBook(1.0)
    first = book.open("a", Channel.DATA, ROUTE, 0.0)
    with pytest.raises(Busy, match="GOODBYE"):
        book.open("b", Channel.DATA, OTHER, 0.0)
    assert book.bound_to(Channel.DATA, ROUTE) is first and book.bound_to(Channel.DATA, OTHER) is None


def test_after_a_standstill_a_lease_leaves_time_for_what_was_sent_meanwhile() -> None:
    """The wait that was planned before the process stood still is no time in which it read anything."""
    book = SessionBook(1.0)
    session = book.open("a", Channel.DATA, ROUTE, 0.0)
    book.extend_all(0.7, 1.8)
    assert book.expired(1.8) == [] and book.next_expiry() == 2.3
    book.extend_all(0.0, 2.2)
    assert book.expired(2.3) == [session]


def test_the_last_words_of_a_connection_that_is_gone_are_heard_and_nobody_elses() -> None:
    """A client that says goodbye and leaves is gone for a send before its goodbye is read."""
    book = SessionBook(1.0)
    session = book.open("a", Channel.DATA, ROUTE, 0.0, "local#1")
    book.unbind(session, Channel.DATA)
    assert Channel.DATA not in session.routes
    assert book.heard(Channel.DATA, ROUTE, 0.5, "local#1") is session and Channel.DATA not in session.routes
    for route, user in ((ROUTE, "local#2"), (OTHER, "local#1")):
        with pytest.raises(NoSession):
            book.heard(Channel.DATA, route, 0.5, user)
    book.resume(session.session_id, session.secret, Channel.DATA, OTHER, 0.6, "local#3")
    with pytest.raises(NoSession):
        book.heard(Channel.DATA, ROUTE, 0.7, "local#1")
    book.unbind(session, Channel.DATA)
    book.close(session)
    with pytest.raises(NoSession):
        book.heard(Channel.DATA, OTHER, 0.8, "local#3")
    assert not book._leaving


def test_a_new_session_on_a_former_connections_route_is_its_own() -> None:
    book = SessionBook(1.0)
    first = book.open("a", Channel.DATA, ROUTE, 0.0, "local#1")
    book.unbind(first, Channel.DATA)
    second = book.open("b", Channel.DATA, ROUTE, 0.1, "local#2")
    assert book.heard(Channel.DATA, ROUTE, 0.2, "local#2") is second
    with pytest.raises(NoSession):
        book.heard(Channel.DATA, ROUTE, 0.3, "local#1")


def test_the_last_answers_to_control_calls_are_kept_within_bounds() -> None:
    session = SessionBook(30.0).open("a", Channel.CONTROL, b"\0aaaa", 0.0)
    session.keep_answer(bytes(16), [b"none wants this one"])
    assert session.answer_to(bytes(16)) is None
    ids = [bytes([1 + number]) * 16 for number in range(MAX_KEPT_ANSWERS + 5)]
    for one in ids:
        session.keep_answer(one, [b"h", one])
    assert [session.answer_to(one) is None for one in ids] == [True] * 5 + [False] * MAX_KEPT_ANSWERS
    session.keep_answer(ids[0], [b"x" * (MAX_KEPT_ANSWER_BYTES - 40)])
    assert session.answer_to(ids[0]) is not None and session.answer_to(ids[-1]) is not None and session.answer_to(ids[-3]) is None
    session.keep_answer(ids[0], [b"h"])
    session.keep_answer(ids[1], [b"x" * MAX_KEPT_ANSWER_BYTES])
    assert session.answer_to(ids[1]) is not None and session.answer_to(ids[0]) is None
    session.keep_answer(ids[2], [b"x" * (MAX_KEPT_ANSWER_BYTES + 1)])
    assert session.answer_to(ids[2]) is None and session.answer_to(ids[1]) is None, "one that is too large is not kept"
