"""A sample that exists is complete: lengths agree, every sampled token has its values, turns and mask are one record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.trainer_bridge.fakes import make_sample
from trainer_bridge.batch import collate
from trainer_bridge.errors import InvalidSample
from trainer_bridge.samples import SampleStatus, TrainingSample, oldest_version
from trainer_bridge.turns import TurnSpan


def fields_of(sample: TrainingSample, **changed: Any) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in sample.__dataclass_fields__} | changed


@pytest.mark.parametrize("name", ["mask", "logprobs", "versions", "behaviour_logprobs"])
def test_arrays_of_another_length_are_refused_by_name(name: str) -> None:
    sample = make_sample()
    longer = {
        "mask": np.append(sample.mask, True),
        "logprobs": np.append(sample.logprobs, 0.0),
        "versions": np.append(sample.versions, 0),
        "behaviour_logprobs": np.append(sample.logprobs, 0.0),
    }
    with pytest.raises(InvalidSample, match=f"{name} has 6 entries; ids has 5") as caught:
        TrainingSample(**fields_of(sample, **{name: longer[name]}))
    assert caught.value.field == name


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
@pytest.mark.parametrize("name", ["logprobs", "behaviour_logprobs"])
def test_a_missing_log_probability_is_an_error_and_never_zero(name: str, value: float) -> None:
    sample = make_sample()
    broken = sample.logprobs.copy()
    broken[4] = value
    with pytest.raises(InvalidSample, match=rf"{name}\[4\].*logprobs=True"):
        TrainingSample(**fields_of(sample, **{name: broken}))


def test_a_reply_of_one_end_token_is_a_sample_with_its_own_log_probability() -> None:
    sample = TrainingSample(
        ids=[5, 6, 2],
        mask=[False, False, True],
        logprobs=[np.nan, np.nan, -4.60517],
        versions=[-1, -1, 3],
        turns=(TurnSpan(start=2, end=3),),
        reward=0.0,
    )
    assert len(sample.ids) == len(sample.mask) == len(sample.logprobs) == len(sample.versions) == 3
    assert sample.num_sampled == 1 and sample.logprobs[2] == np.float32(-4.60517)


def test_a_forced_token_of_certainty_keeps_its_true_zero() -> None:
    sample = make_sample()
    certain = sample.logprobs.copy()
    certain[3] = 0.0
    assert TrainingSample(**fields_of(sample, logprobs=certain)).logprobs[3] == 0.0


@pytest.mark.parametrize(
    "turns",
    [
        (),
        (TurnSpan(start=3, end=4),),
        (TurnSpan(start=2, end=5),),
        (TurnSpan(start=3, end=6),),
        (TurnSpan(start=4, end=5), TurnSpan(start=3, end=4)),
    ],
    ids=["none", "short", "long", "beyond", "disordered"],
)
def test_turns_that_are_not_the_mask_are_refused(turns: tuple[TurnSpan, ...]) -> None:
    with pytest.raises(InvalidSample):
        TrainingSample(**fields_of(make_sample(), turns=turns))


def test_a_first_token_cannot_be_sampled() -> None:
    with pytest.raises(InvalidSample, match="put the prompt's ids into the row"):
        make_sample(((3, True),))


@pytest.mark.parametrize("reward", [np.nan, np.inf, True])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(InvalidSample, match="give a broken score the status failed"):
        make_sample(reward=reward)


def test_a_finished_sample_needs_a_reward_and_a_failed_one_does_not() -> None:
    with pytest.raises(InvalidSample, match="no reward"):
        make_sample(reward=None)
    assert not make_sample(reward=None, status=SampleStatus.FAILED).is_trainable


def test_a_sampled_token_needs_a_version() -> None:
    sample = make_sample()
    with pytest.raises(InvalidSample, match=r"versions\[3\]=-1"):
        TrainingSample(**fields_of(sample, versions=np.full(5, -1)))


def test_the_oldest_version_is_that_of_sampled_tokens_only() -> None:
    sample = make_sample(version=4)
    young = TrainingSample(**fields_of(sample, versions=np.array([-1, -1, -1, 4, 6])))
    assert young.oldest_version == 4
    assert oldest_version([make_sample(version=9), young]) == 4
    assert oldest_version([]) is None


def test_arrays_are_copies_that_nobody_can_edit() -> None:
    source = np.array([1, 2, 3])
    sample = TrainingSample(
        ids=source,
        mask=[False, False, True],
        logprobs=[0, 0, -1.0],
        versions=[-1, -1, 0],
        turns=(TurnSpan(start=2, end=3),),
        reward=1,
    )
    source[0] = 9
    assert sample.ids[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        sample.ids[0] = 4


def test_greedy_turns_divide_by_one_and_others_by_their_temperature() -> None:
    sample = make_sample(((2, False), (1, True), (1, False), (2, True)))
    cold = TrainingSample(**fields_of(sample, turns=(TurnSpan(start=2, end=3, temperature=0.0), TurnSpan(start=4, end=6, temperature=0.5))))
    assert cold.temperatures().tolist() == [1, 1, 1, 1, 0.5, 0.5]


def test_exact_tokens_have_the_version_and_nothing_older_in_their_whole_cache() -> None:
    """Places 0-5 were computed by version 1, the rest by version 2; the token at place 6 was predicted at place 5."""
    sample = TrainingSample(
        ids=np.arange(10),
        mask=[False, False, True, True, False, False, True, True, True, True],
        logprobs=np.full(10, -1.0),
        versions=[-1, -1, 1, 1, -1, -1, 1, 2, 2, 2],
        turns=(TurnSpan(start=2, end=4, kv_spans=((0, 1),)), TurnSpan(start=6, end=10, kv_spans=((0, 1), (6, 2)))),
        reward=1.0,
    )
    assert np.flatnonzero(sample.exact_mask(1)).tolist() == [2, 3, 6]
    assert np.flatnonzero(sample.exact_mask(2)).tolist() == []


def test_a_turn_rebuilt_under_new_weights_is_exact_again() -> None:
    sample = TrainingSample(
        ids=np.arange(6),
        mask=[False, True, False, False, True, True],
        logprobs=np.full(6, -1.0),
        versions=[-1, 1, -1, -1, 2, 2],
        turns=(TurnSpan(start=1, end=2, kv_spans=((0, 1),)), TurnSpan(start=4, end=6, kv_spans=((0, 2),))),
        reward=1.0,
    )
    assert np.flatnonzero(sample.exact_mask(2)).tolist() == [4, 5]


@pytest.mark.parametrize(("rebuilt", "exact"), [((), [2, 3, 4, 5]), ((2,), [2, 3, 4, 5]), ((4,), [4, 5]), ((3, 5), [5]), ((6,), [])])
def test_tokens_drawn_before_their_cache_was_rebuilt_are_never_called_exact(rebuilt: tuple[int, ...], exact: list[int]) -> None:
    """The spans tell of the cache that was built last; the tokens before attended to another one."""
    sample = TrainingSample(
        ids=np.arange(6),
        mask=[False, False, True, True, True, True],
        logprobs=np.full(6, -1.0),
        versions=[-1, -1, 2, 2, 2, 2],
        turns=(TurnSpan(start=2, end=6, kv_spans=((0, 2),), kv_rebuilt_at=rebuilt),),
        reward=1.0,
    )
    assert np.flatnonzero(sample.exact_mask(2)).tolist() == exact
    assert np.flatnonzero(collate([sample], version=2).exact_ST[0].numpy()).tolist() == exact
    row = SimpleNamespace(**fields_of(sample), temperatures=None)
    assert np.flatnonzero(TrainingSample.from_row(row, reward=1.0).exact_mask(2)).tolist() == exact


def test_a_turn_without_spans_is_never_called_exact() -> None:
    sample = make_sample()
    unknown = TrainingSample(**fields_of(sample, turns=(TurnSpan(start=3, end=5),)))
    assert not unknown.exact_mask(0).any()


def test_a_sample_is_made_from_an_episodes_row_as_it_is() -> None:
    drawn = {"start": 3, "end": 5, "temperature": 0.7, "seed": 9, "filtered": True, "shaped": False, "forced_tokens": 1}
    turn = SimpleNamespace(**drawn, kv_spans=((0, 2),), kv_rebuilt_at=())
    row = SimpleNamespace(**fields_of(make_sample(version=2), turns=(turn,)), temperatures=None)
    sample = TrainingSample.from_row(row, reward=0.5, group_id="g", member=3)
    assert (sample.reward, sample.group_id, sample.member, sample.turns[0].temperature) == (0.5, "g", 3, 0.7)
    assert np.array_equal(sample.ids, row.ids) and sample.exact_mask(2).sum() == 2
    assert np.flatnonzero(sample.filtered_mask()).tolist() == [4] and not sample.shaped_mask().any()
    row.logprobs = None
    with pytest.raises(InvalidSample, match="generate with logprobs=True"):
        TrainingSample.from_row(row, reward=0.5)


FILTERED = (TurnSpan(start=3, end=5, filtered=True),)


def test_kept_sets_belong_to_filtered_tokens_and_forced_ones_have_none() -> None:
    sample = make_sample()
    sets = [[7], [], [], [sample.ids[3], 1], [2, sample.ids[4], 3]]
    kept = {"kept_counts": [len(one) for one in sets], "kept_ids": [token for one in sets for token in one]}
    whole = TrainingSample(**fields_of(sample, turns=FILTERED, **kept))
    counts, ids = whole.kept_sets()
    assert counts.tolist() == [0, 0, 0, 2, 3] and ids.tolist() == sets[3] + sets[4]
    forced = TrainingSample(**fields_of(sample, turns=(TurnSpan(start=3, end=5, filtered=True, forced_tokens=1),), **kept))
    assert forced.kept_sets()[0].tolist() == [0, 0, 0, 0, 3] and forced.kept_sets()[1].tolist() == sets[4]
    plain = TrainingSample(**fields_of(sample, **kept))
    assert not plain.kept_sets()[0].any() and not plain.kept_sets()[1].size
    assert not TrainingSample(**fields_of(sample, turns=FILTERED)).kept_sets()[0].any()


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"kept_counts": [0, 0, 0, 1, 1], "kept_ids": [1]}, "kept_ids has 1 entries"),
        ({"kept_counts": [0, 0, 0, 1, 1], "kept_ids": None}, "kept_ids has 0 entries"),
        ({"kept_counts": None, "kept_ids": [1]}, "kept_counts has 0 entries"),
        ({"kept_counts": [0, 0, 0, -1, 2], "kept_ids": [1]}, "kept_ids has 1 entries"),
        ({"kept_counts": [0, 0, 0, 1, 1], "kept_ids": [99, 99]}, "kept set of place 3 lacks its id"),
    ],
)
def test_kept_sets_that_cannot_be_are_refused(kept: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSample, match=said):
        TrainingSample(**fields_of(make_sample(), turns=FILTERED, **kept))


@pytest.mark.parametrize("ids", [[1, 2**40 + 7], [1, 2**31], [-(2**31) - 1, 1], np.array([1, 2**63], np.uint64)])
def test_ids_that_do_not_fit_are_refused_and_never_wrapped(ids: Any) -> None:
    sample = make_sample(((1, False), (1, True)))
    fields = {name: getattr(sample, name) for name in sample.__dataclass_fields__}
    with pytest.raises(InvalidSample, match=r"ids holds .*int32") as caught:
        TrainingSample(**fields | {"ids": ids})
    assert caught.value.field == "ids"
    assert TrainingSample(**fields | {"ids": [1, 2**31 - 1]}).ids.tolist() == [1, 2**31 - 1]
