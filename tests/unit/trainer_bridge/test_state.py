"""A state that does not fit is refused before anything runs, and a group must be whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.trainer_bridge.fakes import failed_sample, make_sample
from trainer_bridge.errors import InvalidSample, InvalidState, RolloutShortfall
from trainer_bridge.groups import GroupTask
from trainer_bridge.samples import TrainingSample
from trainer_bridge.source import RolloutSource

PROMPTS = ["a", "b", "c", "d", "e"]


async def play(task: GroupTask[Any]) -> Sequence[TrainingSample]:
    return [make_sample(group_id=task.index, member=member) for member in range(2)]


def make_source(prompts: Any, **options: Any) -> RolloutSource[Any]:
    made: dict[str, Any] = {"group_size": 2, "version": lambda: 0, "max_ahead": 2} | options
    return RolloutSource(prompts, play, **made)


def saved(prompts: Any, **options: Any) -> dict[str, Any]:
    with make_source(prompts, **options) as source:
        source.next(2)
        state = json.loads(json.dumps(source.state_dict()))
    assert isinstance(state, dict)
    return state


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cursor", "x"),
        ("cursor", -3),
        ("cursor", True),
        ("cursor", 4.0),
        ("pending", None),
        ("pending", [[10**9, 0]]),
        ("pending", [[2, 0], [2, 0]]),
        ("pending", [[2, 0], [3, -1]]),
        ("pending", [[2, 0], 3]),
        ("pending", []),
        ("delivered", 1),
        ("delivered", None),
        ("seed", "0"),
        ("prompts", None),
        ("format", 1),
    ],
)
def test_a_state_with_an_impossible_value_is_refused(field: str, value: Any) -> None:
    state = saved(PROMPTS)
    with make_source(PROMPTS) as source:
        with pytest.raises(InvalidState):
            source.load_state_dict(state | {field: value})
        source.load_state_dict(state)
        assert [group.prompt for group in source.next(2)] == ["c", "d"]


def test_a_state_that_is_no_dictionary_is_refused() -> None:
    with make_source(PROMPTS) as source, pytest.raises(InvalidState):
        source.load_state_dict([1])  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [["x", *PROMPTS], ["a", "b"], ["a", "b", "c", "e", "d"], range(5), iter(PROMPTS)])
def test_other_prompts_are_refused(prompts: Any) -> None:
    state = saved(PROMPTS)
    with make_source(prompts) as source, pytest.raises(InvalidState, match="other prompts") as caught:
        source.load_state_dict(state)
    assert caught.value.field == "prompts"


def test_an_iterator_over_other_prompts_is_refused_at_the_saved_place() -> None:
    state = saved(iter(PROMPTS))
    with make_source(iter("xbcdefg")) as source, pytest.raises(InvalidState, match="other prompts"):
        source.load_state_dict(state)
    with make_source(iter(PROMPTS)) as source:
        source.load_state_dict(state)
        assert source.next(1)[0].prompt == "c"


def test_fewer_epochs_than_were_read_are_refused() -> None:
    with make_source("ab", epochs=3, max_ahead=4) as source:
        source.next(4)
        state = source.state_dict()
    with make_source("ab", epochs=1) as source, pytest.raises(InvalidState, match="end at 2"):
        source.load_state_dict(state)


def test_prompts_whose_text_names_an_address_are_told_apart_by_their_count_only() -> None:
    class Opaque:
        pass

    state = saved([Opaque() for _ in range(5)])
    assert state["prompts"] == {"count": 5, "digest": None}
    with make_source([Opaque() for _ in range(5)]) as source:
        source.load_state_dict(state)
    with make_source([Opaque() for _ in range(6)]) as source, pytest.raises(InvalidState, match="other prompts"):
        source.load_state_dict(state)


@pytest.mark.parametrize(
    ("members", "said"), [((0, 1), r"without members \[2, 3\]"), ((0, 0, 0, 99), r"foreign members \[99\]"), ((0, 1, 2, 3, 4), r"\[4\]")]
)
def test_a_group_without_exactly_its_members_is_a_failure(members: tuple[int, ...], said: str) -> None:
    async def wrong(task: GroupTask[Any]) -> list[TrainingSample]:
        return [make_sample(group_id=task.index, member=member) for member in members]

    with RolloutSource(range(2), wrong, group_size=4, version=lambda: 0, max_attempts=1) as source:
        with pytest.raises(RolloutShortfall, match=said) as caught:
            source.next(1)
        assert set(source.stats().failures) == {"sample_invalid"}
    assert isinstance(caught.value.__cause__, InvalidSample) and caught.value.__cause__.field == "member"


def test_a_forked_member_and_a_failed_one_make_a_whole_group() -> None:
    async def whole(task: GroupTask[Any]) -> list[TrainingSample]:
        rows = [make_sample(group_id=task.index, member=member) for member in (0, 0, 1)]
        return [*rows, failed_sample(group_id=task.index, member=2)]

    with RolloutSource(range(1), whole, group_size=3, version=lambda: 0) as source:
        assert len(source.next(1)[0].samples) == 4
