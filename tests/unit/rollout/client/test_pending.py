"""A stream's record: cursors over growing columns, whole log-probabilities or an error."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.client.parameters import Wants
from rollout.client.pending import Columns, StreamRecord
from rollout.errors import RequestFailed, RolloutError
from rollout.wire.messages import Ending, ErrorBody

NAN = float("nan")


def record(*, wants_logprobs: bool = True) -> StreamRecord:
    return StreamRecord(bytes(16), [], 0.0, prompt_ids=np.array([1], np.int32), wants=Wants(logprobs=wants_logprobs))


def columns(ids: list[int], behaviour: list[float] | None = None, logprob: float = -1.0) -> Columns:
    count = len(ids)
    return Columns(
        np.array(ids, np.int32),
        np.full(count, logprob, np.float32),
        np.full(count, -2.0, np.float32),
        np.array(behaviour or [NAN] * count, np.float32),
        np.full(count, 3, np.int64),
    )


def ended(stream: StreamRecord, kind: str = "length", error: ErrorBody | None = None) -> StreamRecord:
    stream.ending = Ending(index=0, kind=kind, output_tokens=stream.length, error=error, seed=5)  # type: ignore[arg-type]
    stream.done = True
    return stream


def test_slices_handed_out_stay_as_they_were_while_the_record_grows() -> None:
    stream = record()
    stream.append(0, columns([1, 2]))
    early = stream.tokens(0, 2)
    for offset in range(2, 500):
        assert stream.append(offset, columns([offset]))
    assert early.ids.tolist() == [1, 2]
    assert not early.ids.flags.writeable
    assert stream.tokens(0, 500).ids.tolist() == [1, 2, *range(2, 500)]


def test_what_is_there_already_is_trimmed_and_a_gap_takes_nothing() -> None:
    stream = record()
    assert stream.append(0, columns([1, 2, 3]))
    assert stream.append(1, columns([2]))
    assert stream.append(2, columns([3, 4]))
    assert not stream.append(5, columns([9]))
    assert stream.tokens(0, stream.length).ids.tolist() == [1, 2, 3, 4]


def test_behaviour_logprobs_are_whole_where_any_differs_and_none_where_none_does() -> None:
    stream = record()
    stream.append(0, columns([1, 2], behaviour=[NAN, -0.25]))
    behaviour = ended(stream).generation().behaviour_logprobs
    assert behaviour is not None
    assert behaviour.tolist() == [-1.0, -0.25]
    plain = record()
    plain.append(0, columns([1]))
    assert ended(plain).generation().behaviour_logprobs is None


def test_a_missing_logprob_is_an_error_and_never_a_number() -> None:
    stream = record()
    stream.append(0, columns([1], logprob=NAN))
    with pytest.raises(RolloutError, match="do not train on it"):
        ended(stream).generation()
    silent = record(wants_logprobs=False)
    silent.append(0, columns([1], logprob=NAN))
    assert ended(silent).generation().logprobs is None


def test_a_failed_request_raises_with_its_cause_and_its_tokens() -> None:
    stream = record()
    stream.append(0, columns([1, 2]))
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
