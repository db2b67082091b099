"""A stop string ends a request in the front: no token after it, one terminal event, whatever else happens at that moment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.errors import HostFailed
from rollout.service.stop_text import StopMatch, StopText
from rollout.service.token_store import BYTES_PER_TOKEN
from rollout.wire.codec import decode, encode
from rollout.wire.operations import HOST_REPLIES, Op
from tests.unit.rollout.agent.byte_tokenizer import files, spelled
from tests.unit.rollout.service.request_desk import Desk, ending

STOPPED = spelled("ab STOP")


def begun(**fields: object) -> tuple[Desk, bytes, int]:
    """Return a desk with one live request that stops at STOP, its id and its engine number."""
    desk = Desk()
    request_id = desk.generate(**{"stop": ["STOP"], "max_new_tokens": 50, **fields})  # type: ignore[arg-type]
    engine_id = desk.record(request_id).engine_id
    desk.step(accepted=[engine_id])
    return desk, request_id, engine_id


def say(desk: Desk, engine_id: int, ids: list[int], **more: Any) -> None:
    desk.step([(engine_id, token) for token in ids], **more)


def kills(desk: Desk) -> list[tuple[int, str]]:
    return [(body.engine_id, body.kind) for body in desk.link.of(Op.KILL)]


def test_the_engine_never_sees_the_strings_and_the_record_ends_with_the_id_that_completes_one() -> None:
    desk, request_id, engine_id = begun()
    [submit] = desk.link.of(Op.SUBMIT)
    assert submit.params.stop == []
    other = desk.generate(max_new_tokens=5)
    other_id = desk.record(other).engine_id
    say(desk, engine_id, STOPPED[:-1], accepted=[other_id])
    assert kills(desk) == []
    desk.step([(engine_id, STOPPED[-1]), (other_id, 9), (engine_id, 7), (other_id, 9), (engine_id, 8)])
    assert kills(desk) == [(engine_id, "stop")]
    assert request_id not in desk.reader.endings, "the engine's word on the cache is outstanding"
    say(desk, engine_id, [9])
    spans = [[0, 0], [8, 1], [11, 2]]
    desk.step(finished=[ending(engine_id, len(STOPPED) + 3, "stop", kv_spans=spans, kv_rebuilt_at=[5, 12])])
    end = desk.reader.endings[request_id]
    assert (end.kind, end.stop_string, end.stop_id, end.output_tokens) == ("stop", "STOP", None, len(STOPPED))
    assert desk.reader.ids[request_id] == STOPPED and desk.reader.texts[request_id] == "ab "
    assert end.kv_spans == [[0, 0], [8, 1]] and end.kv_rebuilt_at == [5], "what belongs to dropped ids is left out"
    assert (end.cached_tokens, end.seed) == (2, 5)
    assert desk.ledger.counters.tokens_after_stop == 3 and desk.ledger.counters.late_tokens == 0
    assert desk.reader.ids[other] == [9, 9] and desk.desk.num_watched == 0


def test_a_length_end_at_the_completing_id_is_a_stop_and_the_engine_is_not_asked_again() -> None:
    desk, request_id, engine_id = begun(max_new_tokens=len(STOPPED))
    say(desk, engine_id, STOPPED, finished=[ending(engine_id, len(STOPPED), "length")])
    end = desk.reader.endings[request_id]
    assert (end.kind, end.stop_string) == ("stop", "STOP") and kills(desk) == []


def test_a_stop_id_that_completes_a_string_is_named_beside_it() -> None:
    desk, request_id, engine_id = begun()
    say(desk, engine_id, STOPPED, finished=[ending(engine_id, len(STOPPED), "stop", stop_id=STOPPED[-1])])
    end = desk.reader.endings[request_id]
    assert (end.kind, end.stop_string, end.stop_id) == ("stop", "STOP", STOPPED[-1])


@pytest.mark.parametrize("kind", ["length", "cancelled", "expired", "failed"])
def test_a_request_that_meets_no_string_keeps_its_own_end_and_has_its_text(kind: str) -> None:
    desk, request_id, engine_id = begun()
    say(desk, engine_id, STOPPED[:5], finished=[ending(engine_id, 5, kind)])
    end = desk.reader.endings[request_id]
    assert (end.kind, end.stop_string, desk.reader.texts[request_id]) == (kind, None, "ab ST")
    plain = desk.generate()
    say(desk, desk.record(plain).engine_id, [1], finished=[ending(desk.record(plain).engine_id, 1)])
    assert desk.reader.endings[plain].text_bytes is None, "without stop strings nobody pays for text"


def test_a_cancel_after_the_completing_id_changes_nothing() -> None:
    desk, request_id, engine_id = begun()
    say(desk, engine_id, STOPPED)
    desk.cancel(request_id)
    assert desk.replies[-1][2] == {"cancelled": False, "state": "ending"}
    desk.step(finished=[ending(engine_id, len(STOPPED) + 1, "stop")])
    assert desk.reader.endings[request_id].kind == "stop" and kills(desk) == [(engine_id, "stop")]


def test_a_cancel_under_way_does_not_hide_a_string_that_was_complete_before() -> None:
    desk, request_id, engine_id = begun()
    desk.cancel(request_id)
    call = desk.link.sent[-1]
    say(desk, engine_id, [*STOPPED, 4])
    frames = encode(Op.CANCEL_RESULT, call.request_id, {"cancelled": True, "state": "live"})
    desk.calls.answer(decode([bytes(frame) for frame in frames], HOST_REPLIES))
    assert desk.replies[-1][2] == {"cancelled": False, "state": "live"}
    desk.step(finished=[ending(engine_id, len(STOPPED) + 1, "cancelled")])
    end = desk.reader.endings[request_id]
    assert (end.kind, end.output_tokens) == ("stop", len(STOPPED)) and kills(desk) == [(engine_id, "cancelled")]


@pytest.mark.parametrize("by", ["cancel", "deadline"])
def test_while_the_engine_is_paused_a_met_end_is_told_with_its_next_word(by: str) -> None:
    desk, request_id, engine_id = begun(deadline_s=5.0)
    desk.admission.paused = True
    say(desk, engine_id, STOPPED)
    assert request_id not in desk.reader.endings and kills(desk) == [(engine_id, "stop")]
    if by == "cancel":
        desk.cancel(request_id)
        assert desk.replies[-1][2] == {"cancelled": False, "state": "ending"}
    else:
        desk.desk.expire(6.0)
    desk.step([(engine_id, 4)], finished=[ending(engine_id, len(STOPPED) + 1, "stop")])
    end = desk.reader.endings[request_id]
    assert (end.kind, end.stop_string, end.output_tokens) == ("stop", "STOP", len(STOPPED))
    assert kills(desk) == [(engine_id, "stop")]


def test_a_deadline_after_the_completing_id_is_too_late() -> None:
    desk, request_id, engine_id = begun(deadline_s=5.0)
    say(desk, engine_id, STOPPED)
    desk.desk.expire(6.0)
    desk.step(finished=[ending(engine_id, len(STOPPED), "stop")])
    assert desk.reader.endings[request_id].kind == "stop" and kills(desk) == [(engine_id, "stop")]


def test_a_host_that_dies_after_the_completing_id_has_not_failed_that_request() -> None:
    desk, request_id, engine_id = begun()
    other = desk.generate(stop=["zzz"])
    say(desk, engine_id, STOPPED)
    desk.desk.fail_submitted(HostFailed("it died"))
    desk.flush()
    assert desk.reader.endings[request_id].kind == "stop" and desk.reader.endings[request_id].error is None
    assert desk.reader.endings[other].kind == "failed"
    assert desk.desk.num_watched == 0


def test_a_session_that_ends_leaves_nothing_to_be_watched() -> None:
    desk, _, engine_id = begun()
    waiting = desk.generate(stop=["x"], min_version=9)
    say(desk, engine_id, STOPPED)
    desk.desk.end_session(desk.session, "gone")
    desk.sessions.close(desk.session)
    desk.step(finished=[ending(engine_id, len(STOPPED), "stop")])
    assert desk.desk.num_watched == 0 and desk.desk.num_held == 0
    assert desk.ledger.records() == [] and waiting not in desk.reader.endings


def test_a_refused_request_is_not_watched() -> None:
    desk = Desk()
    request_id = desk.generate(stop=["x"])
    engine_id = desk.record(request_id).engine_id
    desk.step(refused=[{"engine_id": engine_id, "error": {"code": "invalid_request", "what": "no", "field": "top_p"}}])
    assert desk.errors() == [(request_id, "invalid_request", "top_p")] and desk.desk.num_watched == 0


def test_text_is_reserved_and_what_was_not_used_comes_back() -> None:
    desk, _, engine_id = begun()
    assert desk.ledger.reserved_bytes == 50 * (BYTES_PER_TOKEN + 16) + 3 * 4, "the prompt's three ids among it"
    say(desk, engine_id, STOPPED)
    desk.step(finished=[ending(engine_id, len(STOPPED), "stop")])
    assert desk.ledger.reserved_bytes == len(STOPPED) * BYTES_PER_TOKEN + len("ab ")


def test_an_interrupted_output_goes_on_where_it_was_cut() -> None:
    desk = Desk()
    request_id = desk.generate(prompt=[1, 2, *STOPPED[:5]], prior_output_tokens=5, stop=["STOP"], max_new_tokens=20, min_new_tokens=6)
    engine_id = desk.record(request_id).engine_id
    say(desk, engine_id, STOPPED[5:], accepted=[engine_id])
    desk.step(finished=[ending(engine_id, 2, "stop", prompt_tokens=7)])
    assert desk.reader.endings[request_id].stop_string == "STOP"
    assert desk.reader.ids[request_id] == STOPPED[5:] and desk.reader.texts[request_id] == "ab "


def test_stop_strings_that_cannot_be_matched_are_refused_by_name() -> None:
    desk = Desk(served={})
    request_id = desk.generate(stop=["x"])
    assert desk.errors() == [(request_id, "invalid_request", "stop")]
    assert desk.generate() not in [one for one, _, _ in desk.errors()], "others need no tokenizer"
    undecodable = Desk()
    assert undecodable.errors() == [] and undecodable.generate(stop=["\ufffd"]) == undecodable.errors()[0][0]


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, 2**40])
def test_earlier_output_that_is_no_id_is_refused_and_leaves_no_record(bad: int) -> None:
    desk = Desk()
    desk.admission.vocab_size = 256
    arrays = {"prompt_ids": np.array([1, bad], np.int64)}
    request_id = desk.generate(biases=arrays, stop=["x"], prior_output_tokens=1)
    assert desk.errors() == [(request_id, "invalid_request", "prompt_ids")]
    assert not desk.ledger.records() and desk.ledger.reserved_bytes == 0


def test_members_of_a_group_share_the_reading_of_their_earlier_output_and_nothing_after_it() -> None:
    text = StopText(files())
    assert text.refusal(["ab"]) is None
    matcher = text.matcher(["ab"], min_new_tokens=0, earlier=spelled("za"))
    one, other = matcher.fork(), matcher.fork()
    assert one.add(spelled("b")[0]) == StopMatch("ab", "z")
    assert other.add(spelled("c")[0]) is None and other.text() == "zac"
