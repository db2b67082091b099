"""Every ending of an episode becomes samples: scored, cut, cancelled or failed with its cause, and never nothing."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.trainer_bridge.fakes import make_sample
from trainer_bridge.batch import collate, sample_advantages
from trainer_bridge.episodes import samples_of, samples_of_group
from trainer_bridge.errors import InvalidSample
from trainer_bridge.groups import GroupTask, check_members
from trainer_bridge.samples import SampleStatus


def make_result(status: str, reward: float | None, *, num_rows: int = 1, failure: Any = None) -> Any:
    return SimpleNamespace(status=status, reward=reward, rows=[make_sample(seed=row) for row in range(num_rows)], failure=failure)


@pytest.mark.parametrize(
    ("status", "expected"), [("done", SampleStatus.FINISHED), ("truncated", SampleStatus.TRUNCATED), ("bad_calls", SampleStatus.TRUNCATED)]
)
def test_scored_endings_are_trained_with_their_reward(status: str, expected: SampleStatus) -> None:
    (sample,) = samples_of(make_result(status, -0.5), group_id=4, member=2, info={"outcome": "loss"})
    assert (sample.status, sample.reward, sample.group_id, sample.member, sample.info) == (expected, -0.5, 4, 2, {"outcome": "loss"})
    assert sample.is_trainable


def test_every_row_of_a_forked_episode_carries_its_reward() -> None:
    rows = samples_of(make_result("done", 1.0, num_rows=3), group_id=0, member=0)
    assert [sample.reward for sample in rows] == [1.0] * 3 and sample_advantages(rows).tolist() == [0.0] * 3


@pytest.mark.parametrize("num_rows", [0, 2])
def test_a_failed_episode_keeps_its_rows_and_its_cause_and_has_no_reward(num_rows: int) -> None:
    failure = SimpleNamespace(kind="environment", phase="step", text="InvalidEnvironment: no Step")
    samples = samples_of(make_result("failed", None, num_rows=num_rows, failure=failure), member=1)
    assert len(samples) == max(1, num_rows)
    assert all(sample.status is SampleStatus.FAILED and sample.reward is None for sample in samples)
    assert {(sample.info["cause"], sample.info["error"]) for sample in samples} == {("environment_step", "InvalidEnvironment: no Step")}
    batch = collate([*samples, make_sample(member=0)])
    assert batch.num_left_out == len(samples) and batch.ids_ST.shape[0] == 1


def test_a_cancelled_episode_is_not_trained_even_with_a_reward() -> None:
    (sample,) = samples_of(make_result("cancelled", 0.0))
    assert sample.status is SampleStatus.CANCELLED and not sample.is_trainable


def test_an_ending_without_a_score_counts_as_failed_and_not_as_zero() -> None:
    (sample,) = samples_of(make_result("done", None))
    assert sample.status is SampleStatus.FAILED and sample.info["cause"] == "not_scored"


@pytest.mark.parametrize("limit", ["context", "deadline_s", None])
def test_an_episode_that_ended_before_it_sampled_a_token_fails_alone_and_not_its_group(limit: str | None) -> None:
    failure = SimpleNamespace(kind="limit", phase="act", text=limit) if limit else None
    result = make_result("truncated" if limit else "done", 0.0, num_rows=0, failure=failure)
    (sample,) = samples_of(result, group_id=3, member=1)
    assert (sample.status, sample.reward, sample.num_sampled) == (SampleStatus.FAILED, None, 0)
    assert sample.info["cause"] == ("limit_act" if limit else "nothing_sampled")
    assert sample.info["error"] == (limit or "the episode ended as done without a token of the policy")
    others = [make_sample(group_id=3, member=member, reward=float(member)) for member in (0, 2)]
    check_members(GroupTask(index=3, prompt=0, group_size=3, seed=0), [*others, sample])
    assert collate([*others, sample]).num_left_out == 1
    assert sample_advantages([*others, sample]).tolist()[2] == 0.0


def test_members_that_were_let_go_may_have_a_reward_of_ones_own() -> None:
    group = make_group(("done", 1.0), ("done", 2.0), ("cancelled", None), ("cancelled", None), kept=[0, 1])
    samples = samples_of_group(group, group_id=0, cancelled_reward=-1.0)
    check_members(GroupTask(index=0, prompt=0, group_size=2, seed=0), samples)
    assert [(str(sample.status), sample.reward) for sample in samples[2:]] == [("truncated", -1.0)] * 2
    assert collate(samples).num_left_out == 0 and (sample_advantages(samples)[2:] < 0).all()


def test_a_running_episode_is_refused() -> None:
    with pytest.raises(InvalidSample, match="wait until the episode has ended"):
        samples_of(make_result("running", None))


def test_the_code_of_what_was_raised_goes_into_the_failed_sample() -> None:
    failure = SimpleNamespace(kind="infrastructure", phase="act", text="HostFailed: gone", code="host_failed")
    (sample,) = samples_of(make_result("failed", None, num_rows=0, failure=failure))
    assert sample.info == {"cause": "infrastructure_act", "error": "HostFailed: gone", "code": "host_failed"}


def test_a_cancelled_episode_is_trained_only_when_asked() -> None:
    result = make_result("cancelled", None)
    (left,) = samples_of(result, group_id=1)
    (asked,) = samples_of(result, group_id=1, cancelled_reward=-0.25)
    assert left.status is SampleStatus.CANCELLED and not left.is_trainable and left.num_sampled > 0
    assert (asked.status, asked.reward, asked.is_trainable) == (SampleStatus.TRUNCATED, -0.25, True)
    (empty,) = samples_of(make_result("cancelled", None, num_rows=0), cancelled_reward=1.0)
    assert empty.status is SampleStatus.CANCELLED


def make_group(*endings: tuple[str, float | None], kept: Sequence[int]) -> Any:
    results = [make_result(status, reward) for status, reward in endings]
    return SimpleNamespace(results=results, kept=[results[place] for place in kept])


def test_a_group_gives_its_counting_members_first_and_the_rest_as_what_it_is() -> None:
    group = make_group(("failed", None), ("done", 1.0), ("cancelled", None), ("done", 2.0), ("done", 3.0), kept=[3, 1])
    samples = samples_of_group(group, group_id="g")
    assert [(sample.member, str(sample.status), sample.reward) for sample in samples] == [
        (0, "finished", 2.0),
        (1, "finished", 1.0),
        (2, "failed", None),
        (3, "cancelled", None),
        (4, "cancelled", None),
    ]
    batch = collate(samples)
    assert (batch.num_left_out, batch.num_cancelled) == (3, 2)
    assert batch.mean_kept_tokens == batch.mean_cancelled_tokens == float(samples[0].num_sampled)
    check_members(GroupTask(index="g", prompt=0, group_size=2, seed=0), samples)  # type: ignore[arg-type]
    with pytest.raises(InvalidSample, match="foreign members"):
        check_members(GroupTask(index="g", prompt=0, group_size=1, seed=0), samples)  # type: ignore[arg-type]
