"""Flushes are cursors over records: packed, bounded by credit, repeated after a failed send, never twice after a good one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rollout.service import streams as streams_module
from rollout.service.ledger import Ledger
from rollout.service.records import PromptScore, Record, Reservation, Terminal
from rollout.service.sessions import Channel, Session, SessionBook
from rollout.service.streams import Streams, token_arrays
from rollout.service.token_store import KeptSets, TokenColumns
from rollout.wire.codec import decode
from rollout.wire.operations import CLIENT_REPLIES
from rollout.wire.transport import Sent


class Desk:
    """A ledger, one session and streams whose sends are kept."""

    def __init__(self, *, interval_s: float = 0.0, credit_bytes: int = 2**20) -> None:
        self.outcome = Sent.OK
        self.sent: list[Any] = []
        self.ledger = Ledger(1000, 2**30)
        self.sessions = SessionBook(30.0)
        self.session = self.sessions.open("test", Channel.DATA, b"\0abcd", 0.0)
        self.streams = Streams(self.ledger, self.sessions, self._send, interval_s=interval_s, credit_bytes=credit_bytes)
        self.next_id = 1

    def _send(self, session: Session, frames: list[Any]) -> Sent:
        if self.outcome is Sent.OK:
            self.sent.append(decode([bytes(frame) for frame in frames], CLIENT_REPLIES))
        return self.outcome

    def open(self, *, keeps: bool = False) -> Record:
        request_id = self.next_id.to_bytes(16, "little")
        self.next_id += 1
        needs = Reservation(max_tokens=9, keeps=keeps)
        record = self.ledger.open(self.session.number, request_id, b"", prompt_tokens=1, needs=needs, seed=1, now=0.0)
        self.ledger.accept(record)
        self.streams.attach(record)
        return record

    def grow(self, *records: Record, ids: list[int], version: int = 0, logprobs: bool = True, kept: KeptSets | None = None) -> None:
        floats = np.array(ids, np.float32) if logprobs else np.full(len(ids), np.nan, np.float32)
        columns = TokenColumns(
            np.array(ids, np.int32), -floats, -floats, np.full(len(ids), np.nan, np.float32), np.full(len(ids), version, np.int64), kept
        )
        engine_ids = np.array([record.engine_id for record in records], np.int64)
        self.streams.grew(self.ledger.take_step(engine_ids, columns))

    def score(self, record: Record, start: int, count: int) -> None:
        floats = -np.arange(start, start + count, dtype=np.float32)
        record.prompt_score = PromptScore(start=start, version=7, logprobs=floats, raw_logprobs=2 * floats)
        self.streams.scored(record)

    def end(self, record: Record, kind: str = "length", text: str | None = None) -> None:
        self.ledger.end(record, Terminal(kind=kind, text=text))
        self.streams.ended(record)


def test_one_message_carries_the_news_of_all_streams_packed() -> None:
    desk = Desk()
    first, second, third = desk.open(), desk.open(), desk.open()
    desk.grow(first, second, first, ids=[1, 2, 3], version=4)
    desk.grow(second, ids=[5], version=5)
    desk.end(third)
    assert desk.streams.flush(1.0) is None
    [packet] = desk.sent
    rows = {row.tobytes(): index for index, row in enumerate(packet.arrays["request_ids"])}
    starts = np.cumsum(packet.arrays["counts"]) - packet.arrays["counts"]
    versions = np.repeat(packet.arrays["version_values"], packet.arrays["version_counts"])

    def of(record: Record) -> tuple[list[int], list[int]]:
        index = rows[record.request_id]
        span = slice(int(starts[index]), int(starts[index] + packet.arrays["counts"][index]))
        return packet.arrays["token_ids"][span].tolist(), versions[span].tolist()

    assert of(first) == ([1, 3], [4, 4])
    assert of(second) == ([2, 5], [4, 5])
    assert of(third) == ([], [])
    assert [(ending.index, ending.kind) for ending in packet.body.finished] == [(rows[third.request_id], "length")]
    assert "behaviour_logprobs" not in packet.arrays, "equal ones are not sent"
    assert desk.streams.flush(2.0) is None
    assert len(desk.sent) == 1, "nothing new, nothing sent"


def test_log_probabilities_that_nobody_asked_for_stay_away() -> None:
    desk = Desk()
    desk.grow(desk.open(), ids=[1], logprobs=False)
    desk.streams.flush(1.0)
    assert "logprobs" not in desk.sent[0].arrays


@pytest.mark.parametrize("missing", ([0], [2], [0, 1], [0, 1, 2]))
def test_a_column_stays_away_only_if_every_entry_is_missing(missing: list[int]) -> None:
    column = np.array([-1.0, -2.0, -3.0], np.float32)
    column[missing] = np.nan
    ids, nothing = np.zeros(3, np.int32), np.full(3, np.nan, np.float32)
    arrays = token_arrays(TokenColumns(ids, column, nothing, column, np.zeros(3, np.int64)))
    assert "raw_logprobs" not in arrays
    assert ("logprobs" in arrays) == ("behaviour_logprobs" in arrays) == (len(missing) < 3)


@pytest.mark.parametrize("versions", ([], [4], [4, 4, 4], [4, 4, 5], [4, 5, 4], [5, 5, 4, 4, 4, 5]))
def test_versions_go_as_runs(versions: list[int]) -> None:
    nothing = np.full(len(versions), np.nan, np.float32)
    arrays = token_arrays(TokenColumns(np.zeros(len(versions), np.int32), nothing, nothing, nothing, np.array(versions, np.int64)))
    values, counts = arrays["version_values"].tolist(), arrays["version_counts"].tolist()
    assert list(zip(values, counts)) == [(value, len(list(run))) for value, run in itertools.groupby(versions)]


def test_one_step_for_the_streams_of_several_clients_goes_to_each_its_own() -> None:
    desk = Desk()
    first = [desk.open(), desk.open()]
    own, desk.session = desk.session, desk.sessions.open("other", Channel.DATA, b"\0efgh", 0.0)
    other = desk.open()
    desk.grow(first[0], other, first[1], ids=[1, 2, 3])
    desk.streams.flush(1.0)
    assert [packet.arrays["token_ids"].tolist() for packet in desk.sent] == [[1, 3], [2]]
    assert own.flush_seq == desk.session.flush_seq == 1


def test_a_full_socket_leaves_the_cursor_and_a_later_flush_is_larger() -> None:
    desk = Desk()
    record = desk.open()
    desk.grow(record, ids=[1])
    desk.outcome = Sent.FULL
    again = desk.streams.flush(1.0)
    assert again is not None
    assert 1.0 < again < 1.1
    desk.grow(record, ids=[2])
    desk.outcome = Sent.OK
    desk.streams.flush(again)
    assert desk.sent[0].arrays["offsets"].tolist() == [0]
    assert desk.sent[0].arrays["token_ids"].tolist() == [1, 2]


def test_credit_bounds_what_is_under_way_until_it_is_acknowledged() -> None:
    desk = Desk(credit_bytes=400)
    record = desk.open()
    for value in range(20):
        desk.grow(record, ids=[value])
        desk.streams.flush(float(value))
    under_way = desk.session.unacked_bytes
    assert len(desk.sent) < 20
    assert under_way < 400 + 1000
    desk.session.acknowledge(desk.session.flush_seq)
    assert desk.session.unacked_bytes == 0
    desk.streams.flush(100.0)
    received = [token for packet in desk.sent for token in packet.arrays["token_ids"].tolist()]
    assert received == list(range(20))


def test_flushes_to_one_client_keep_their_distance() -> None:
    desk = Desk(interval_s=0.5)
    record = desk.open()
    desk.grow(record, ids=[1])
    assert desk.streams.flush(10.0) is None
    desk.grow(record, ids=[2])
    assert desk.streams.flush(10.1) == 10.5
    assert len(desk.sent) == 1
    desk.streams.flush(10.5)
    assert len(desk.sent) == 2


def test_a_new_connection_gets_nothing_until_it_attaches_and_then_from_its_own_position() -> None:
    desk = Desk()
    record = desk.open()
    desk.grow(record, record, record, ids=[1, 2, 3])
    desk.streams.flush(1.0)
    desk.streams.detach(desk.session)
    desk.grow(record, ids=[4])
    desk.end(record)
    desk.streams.flush(2.0)
    assert len(desk.sent) == 1
    desk.streams.attach(record, 2)
    desk.streams.flush(3.0)
    assert desk.sent[1].arrays["offsets"].tolist() == [2]
    assert desk.sent[1].arrays["token_ids"].tolist() == [3, 4]
    assert desk.sent[1].body.finished[0].output_tokens == 4


def test_an_ended_stream_without_tokens_left_can_attach_for_its_ending() -> None:
    desk = Desk()
    record = desk.open()
    desk.grow(record, ids=[1])
    desk.end(record)
    desk.streams.flush(1.0)
    desk.streams.attach(record, 1)
    desk.streams.flush(2.0)
    assert desk.sent[1].arrays["counts"].tolist() == [0]
    assert len(desk.sent[1].body.finished) == 1


def test_kept_sets_lie_beside_the_tokens_of_the_streams_that_have_them() -> None:
    desk = Desk()
    keeping, plain = desk.open(keeps=True), desk.open()
    kept = KeptSets(np.array([2, 0, 1], np.int32), np.array([5, 6, 9], np.int32))
    desk.grow(keeping, plain, keeping, ids=[1, 2, 3], kept=kept)
    desk.streams.flush(1.0)
    [packet] = desk.sent
    of = dict(zip(packet.arrays["token_ids"].tolist(), packet.arrays["kept_counts"].tolist()))
    assert of == {1: 2, 3: 1, 2: 0}
    assert packet.arrays["kept_ids"].tolist() == [5, 6, 9]
    desk.grow(plain, ids=[4])
    desk.streams.flush(2.0)
    assert "kept_counts" not in desk.sent[1].arrays, "a flush without kept sets has no such arrays"


def test_a_scored_prompt_goes_once_and_again_to_a_client_that_attaches() -> None:
    desk = Desk()
    record, other = desk.open(), desk.open()
    desk.grow(other, ids=[1])
    desk.score(record, 3, 2)
    desk.streams.flush(1.0)
    [packet] = desk.sent
    index = [row.tobytes() for row in packet.arrays["request_ids"]].index(record.request_id)
    assert packet.arrays["prompt_scores"].tolist() == [[index, 3, 2, 7]]
    assert packet.arrays["prompt_logprobs"].tolist() == [-3, -4] and packet.arrays["prompt_raw_logprobs"].tolist() == [-6, -8]
    desk.grow(record, ids=[2])
    desk.end(record)
    desk.streams.flush(2.0)
    assert "prompt_scores" not in desk.sent[1].arrays
    assert desk.sent[1].body.finished[0].prompt_scored, "a client that lost it knows"
    desk.streams.detach(desk.session)
    desk.streams.attach(record, 1)
    desk.streams.flush(3.0)
    assert desk.sent[2].arrays["prompt_scores"].tolist() == [[0, 3, 2, 7]] and len(desk.sent[2].body.finished) == 1


def test_a_score_that_found_no_room_is_sent_later() -> None:
    desk = Desk()
    record = desk.open()
    desk.score(record, 1, 1)
    desk.outcome = Sent.FULL
    desk.streams.flush(1.0)
    desk.outcome = Sent.OK
    assert desk.streams.due_bytes() == 8
    desk.streams.flush(2.0)
    assert len(desk.sent[0].arrays["prompt_scores"]) == 1 and desk.streams.due_bytes() == 0


def test_texts_come_with_their_endings() -> None:
    desk = Desk()
    first, second, third = desk.open(), desk.open(), desk.open()
    for record, text in ((first, "a\u00e9"), (second, None), (third, "")):
        desk.end(record, "stop", text)
    desk.streams.flush(1.0)
    [packet] = desk.sent
    rows = [row.tobytes() for row in packet.arrays["request_ids"]]
    sizes = {rows[ending.index]: ending.text_bytes for ending in packet.body.finished}
    assert sizes == {first.request_id: 3, second.request_id: None, third.request_id: 0}
    assert packet.arrays["texts"].tobytes().decode() == "a\u00e9"


def test_a_flush_is_bounded_in_bytes_and_the_rest_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "MAX_FLUSH_BYTES", 600)
    desk = Desk()
    keeping, plain, scored = desk.open(keeps=True), desk.open(), desk.open()
    kept = KeptSets(np.array([1] * 9, np.int32), np.arange(9, dtype=np.int32))
    desk.grow(*[keeping] * 9, ids=list(range(9)), kept=kept)
    desk.grow(*[plain] * 9, ids=list(range(9)))
    desk.score(scored, 0, 100)
    for record in (keeping, plain, scored):
        desk.end(record, text="x" * 400)
    for turn in range(12):
        desk.streams.flush(float(turn))
    assert len(desk.sent) > 3
    counts = {record.request_id: 0 for record in (keeping, plain, scored)}
    ended, kept_ids = 0, []
    for packet in desk.sent:
        assert sum(array.nbytes for array in packet.arrays.values()) < 3000
        for row, count in zip(packet.arrays["request_ids"], packet.arrays["counts"].tolist()):
            counts[row.tobytes()] += count
        kept_ids += packet.arrays.get("kept_ids", np.empty(0)).tolist()
        ended += len(packet.body.finished)
    assert list(counts.values()) == [9, 9, 0] and ended == 3 and kept_ids == list(range(9))
    assert desk.streams.due_bytes() == 0
