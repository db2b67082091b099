"""A stream's record: cursors over growing columns, whole log-probabilities or an error."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.client.columns import Columns, FlushColumns, KeptColumns
from rollout.client.parameters import Wants
from rollout.client.pending import DeltaCursor, StreamRecord
from rollout.client.results import PromptScore
from rollout.errors import RequestFailed, RolloutError
from rollout.wire.generation_messages import Ending
from rollout.wire.session_messages import ErrorBody

NAN = float("nan")


def record(*, wants_logprobs: bool = True, wants_kept: bool = False) -> StreamRecord:
    return StreamRecord(bytes(16), [], 0.0, prompt_ids=np.array([1], np.int32), wants=Wants(logprobs=wants_logprobs, kept_ids=wants_kept))


def columns(ids: list[int], behaviour: list[float] | None = None, logprob: float = -1.0) -> Columns:
    count = len(ids)
    return Columns(
        np.array(ids, np.int32),
        np.full(count, logprob, np.float32),
        np.full(count, -2.0, np.float32),
        np.array(behaviour or [NAN] * count, np.float32),
        np.full(count, 3, np.int64),
    )


def take(stream: StreamRecord, offset: int, tokens: Columns, kept: tuple[np.ndarray, np.ndarray] | None = None) -> bool:
    return stream.append(offset, FlushColumns(tokens), 0, len(tokens.ids), kept)


def ended(stream: StreamRecord, kind: str = "length", error: ErrorBody | None = None) -> StreamRecord:
    stream.ending = Ending(index=0, kind=kind, output_tokens=stream.length, error=error, seed=5)  # type: ignore[arg-type]
    stream.done = True
    return stream


def test_slices_handed_out_stay_as_they_were_while_the_record_grows() -> None:
    stream = record()
    take(stream, 0, columns([1, 2]))
    early = stream.tokens(0, 2)
    for offset in range(2, 500):
        assert take(stream, offset, columns([offset]))
    assert early.ids.tolist() == [1, 2]
    assert not early.ids.flags.writeable
    assert stream.tokens(0, 500).ids.tolist() == [1, 2, *range(2, 500)]


def test_what_is_there_already_is_trimmed_and_a_gap_takes_nothing() -> None:
    stream = record()
    assert take(stream, 0, columns([1, 2, 3]))
    assert take(stream, 1, columns([2]))
    assert take(stream, 2, columns([3, 4]))
    assert not take(stream, 5, columns([9]))
    assert stream.tokens(0, stream.length).ids.tolist() == [1, 2, 3, 4]


def test_behaviour_logprobs_are_whole_where_any_differs_and_none_where_none_does() -> None:
    stream = record()
    take(stream, 0, columns([1, 2], behaviour=[NAN, -0.25]))
    behaviour = ended(stream).generation().behaviour_logprobs
    assert behaviour is not None
    assert behaviour.tolist() == [-1.0, -0.25]
    plain = record()
    take(plain, 0, columns([1]))
    assert ended(plain).generation().behaviour_logprobs is None


def test_a_missing_logprob_is_an_error_and_never_a_number() -> None:
    stream = record()
    take(stream, 0, columns([1], logprob=NAN))
    with pytest.raises(RolloutError, match="do not train on it"):
        ended(stream).generation()
    silent = record(wants_logprobs=False)
    take(silent, 0, columns([1], logprob=NAN))
    assert ended(silent).generation().logprobs is None


def test_a_failed_request_raises_with_its_cause_and_its_tokens() -> None:
    stream = record()
    take(stream, 0, columns([1, 2]))
    with pytest.raises(RequestFailed, match="failed after 2 tokens: it broke; why; do this") as failed:
        ended(stream, "failed", ErrorBody(code="host_failed", what="it broke", limit="why", remedy="do this")).result()
    assert failed.value.reason_code == "host_failed"
    assert failed.value.generation.ids.tolist() == [1, 2]  # type: ignore[attr-defined]


def test_a_listener_that_comes_late_is_woken_at_once() -> None:
    woken: list[int] = []
    stream = ended(record())
    listener = stream.listen(lambda: woken.append(1))
    assert woken == [1]
    stream.unlisten(listener)
    stream.unlisten(listener)


def packed(sets: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([len(one) for one in sets], np.int32), np.array([token for one in sets for token in one], np.int32)


@pytest.mark.parametrize("seed", range(3))
def test_kept_columns_equal_lists_and_pieces_stay_as_they_were(seed: int) -> None:
    draw = np.random.default_rng(seed)
    column, oracle, pieces = KeptColumns(), [], []
    for _ in range(40):
        sets = [draw.integers(0, 99, int(draw.integers(0, 9))).tolist() for _ in range(int(draw.integers(0, 12)))]
        column.append(*packed(sets))
        oracle += sets
        start = int(draw.integers(0, len(oracle) + 1))
        pieces.append((start, len(oracle), column.cut(start, len(oracle))))
    for start, stop, (counts, ids) in pieces:
        expected = packed(oracle[start:stop])
        assert counts.tolist() == expected[0].tolist() and ids.tolist() == expected[1].tolist()
        assert not ids.flags.writeable


def test_kept_sets_that_are_there_already_are_trimmed_with_their_tokens() -> None:
    stream = record(wants_kept=True)
    take(stream, 0, columns([1, 2]), packed([[1, 9], [2]]))
    take(stream, 1, columns([2, 3]), packed([[2], [3, 4, 5]]))
    generation = ended(stream).generation()
    assert generation.kept_counts is not None and generation.kept_ids is not None
    assert generation.kept_counts.tolist() == [2, 1, 3] and generation.kept_ids.tolist() == [1, 9, 2, 3, 4, 5]
    assert stream.delta(2, 3, None).kept_ids.tolist() == [3, 4, 5]  # type: ignore[union-attr]
    assert record().delta(0, 0, None).kept_ids is None


def test_a_kept_set_that_was_asked_for_is_never_missing() -> None:
    stream = record(wants_kept=True)
    take(stream, 0, columns([1]))
    with pytest.raises(RolloutError, match="lacks kept sets"):
        ended(stream).generation()


def test_an_ending_is_believed_only_with_all_that_it_speaks_of() -> None:
    stream = record()
    take(stream, 0, columns([1]))
    assert stream.is_whole(Ending(index=0, kind="length", output_tokens=1))
    assert not stream.is_whole(Ending(index=0, kind="length", output_tokens=2))
    scored = Ending(index=0, kind="length", output_tokens=1, prompt_scored=True)
    assert not stream.is_whole(scored)
    stream.prompt_score = PromptScore(start=1, logprobs=np.zeros(1), raw_logprobs=np.zeros(1), version=0)
    assert stream.is_whole(scored)


def test_a_cursor_gives_every_token_and_the_prompt_score_once() -> None:
    stream = record()
    cursor = DeltaCursor(stream)
    assert cursor.read() is None
    take(stream, 0, columns([1, 2]))
    stream.prompt_score = PromptScore(start=1, logprobs=np.zeros(1), raw_logprobs=np.zeros(1), version=0)
    first = cursor.read()
    assert first is not None
    assert (first.offset, first.ids.tolist(), first.finished) == (0, [1, 2], None) and first.prompt_logprobs is stream.prompt_score
    assert cursor.read() is None
    take(stream, 2, columns([3]))
    ended(stream)
    last = cursor.read()
    assert last is not None
    assert (last.offset, last.ids.tolist()) == (2, [3]) and last.finished is not None and cursor.over
    assert last.prompt_logprobs is None and last.finished.prompt_logprobs is stream.prompt_score
