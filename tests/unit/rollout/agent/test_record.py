"""The token record by itself: columns of one length, nothing made up, forks that share no sampled token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rollout.agent.errors import IncompleteGeneration
from rollout.agent.record import Draw, TokenRecord
from tests.unit.rollout.agent.fake_client import FakeClient, FakeGeneration


def generated(record: TokenRecord, ids: list[int], *, behaviour: bool = False, logprobs: bool = True, kept: bool = False) -> FakeGeneration:
    options = {"stop_ids": (), "ignore_eos": True, "max_new_tokens": 99, "logprobs": logprobs, "request_id": b"r" * 16, "seed": 1}
    options["return_kept_ids"] = kept
    return asyncio.run(FakeClient([ids], behaviour=behaviour).generate(record.current_ids(), **options))


def test_behaviour_logprobs_of_one_turn_make_a_column_that_others_fill_with_their_logprobs() -> None:
    record = TokenRecord()
    record.add_environment(np.array([1, 2]))
    record.add_turn(generated(record, [3, 4]), Draw())
    record.add_environment(np.array([5]))
    record.add_turn(generated(record, [6], behaviour=True), Draw())
    (row,) = record.rows()
    assert row.behaviour_logprobs is not None and row.logprobs is not None
    assert np.allclose(row.behaviour_logprobs[2:4], row.logprobs[2:4])
    assert np.allclose(row.behaviour_logprobs[5], row.logprobs[5] + 0.1)
    assert np.isnan(row.behaviour_logprobs[[0, 1, 4]]).all()
    record.check_integrity()


def test_a_turn_without_logprobs_leaves_the_row_without_the_column() -> None:
    record = TokenRecord()
    record.add_environment(np.array([1]))
    record.add_turn(generated(record, [3]), Draw())
    record.add_turn(generated(record, [4], logprobs=False), Draw())
    (row,) = record.rows()
    assert row.logprobs is None and row.raw_logprobs is None and row.num_sampled == 2


def test_an_empty_turn_is_no_place_in_a_row() -> None:
    record = TokenRecord()
    record.add_environment(np.array([1]))
    record.add_turn(generated(record, []), Draw())
    assert record.rows() == [] and record.num_turns == 1
    record.add_turn(generated(record, [4]), Draw())
    assert [turn.index for turn in record.rows()[0].turns] == [1]
    record.check_integrity()


def test_rows_without_a_sampled_token_are_left_out_and_forks_keep_theirs() -> None:
    record = TokenRecord()
    record.add_environment(np.array([1, 2]))
    record.add_turn(generated(record, [3]), Draw())
    record.fork(np.array([1]))
    record.fork(np.array([1, 9]))
    record.add_turn(generated(record, [5, 6]), Draw(temperature=0.5))
    record.fork(np.array([7]))
    first, second = record.rows()
    assert (first.ids.tolist(), second.ids.tolist()) == ([1, 2, 3], [1, 9, 5, 6])
    assert second.temperatures.tolist() == [1, 1, 0.5, 0.5]
    assert record.num_rows == 4 and record.length == 1
    record.check_integrity()


def test_the_integrity_check_sees_a_broken_record() -> None:
    record = TokenRecord()
    record.add_environment(np.array([1]))
    record.add_turn(generated(record, [3]), Draw())
    record._rows[0].turns.clear()
    record._rows[0].turns.append(record.add_turn(generated(record, [4]), Draw()))
    with pytest.raises(AssertionError):
        record.check_integrity()


def test_a_turns_record_says_what_its_draw_was() -> None:
    record = TokenRecord()
    record.add_environment(np.array([1]))
    turn = record.add_turn(generated(record, [3, 4]), Draw(temperature=0.7, filtered=True, shaped=True, forced_tokens=5))
    assert (turn.temperature, turn.filtered, turn.shaped, turn.forced_tokens, turn.stop_string) == (0.7, True, True, 2, None)
    assert not record.add_turn(generated(record, [5]), Draw()).filtered


def test_kept_sets_lie_at_their_places_and_a_row_without_any_has_none() -> None:
    record = TokenRecord()
    record.add_environment(np.array([1, 2]))
    record.add_turn(generated(record, [3, 4], kept=True), Draw(filtered=True))
    record.add_environment(np.array([5]))
    record.add_turn(generated(record, [6]), Draw())
    (row,) = record.rows()
    assert row.kept_counts is not None and row.kept_ids is not None
    assert row.kept_counts.tolist() == [0, 0, 2, 2, 0, 0] and row.kept_ids.tolist() == [3, 3, 4, 4]
    record.check_integrity()
    plain = TokenRecord()
    plain.add_environment(np.array([1]))
    plain.add_turn(generated(plain, [6]), Draw())
    assert plain.rows()[0].kept_counts is None and plain.rows()[0].kept_ids is None


def test_kept_sets_that_do_not_belong_to_the_tokens_are_refused() -> None:
    record = TokenRecord()
    record.add_environment(np.array([1]))
    broken = replace(generated(record, [3, 4], kept=True), kept_ids=np.array([3], np.int32))
    with pytest.raises(IncompleteGeneration, match="kept_counts"):
        record.add_turn(broken, Draw(filtered=True))
    assert record.num_turns == 0
