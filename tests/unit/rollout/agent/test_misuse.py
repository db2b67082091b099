"""What a newcomer gets wrong is refused by name before anything is played, and an object that is no environment fails alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.agent import (
    Environment,
    Episode,
    EpisodeGroup,
    EpisodeStatus,
    EpisodeTask,
    FailureKind,
    InvalidEpisode,
    Step,
    group_tasks,
    run_episode,
    run_episodes,
    run_group,
    run_groups,
)
from tests.hostile_values import HOSTILE_VALUES, check_refusal
from tests.unit.rollout.agent.byte_tokenizer import control_id, spelled
from tests.unit.rollout.agent.fake_client import FakeClient


class Once:
    """One turn, and a reward of 1."""

    async def reset(self, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"say {seed}"}]

    async def step(self, turn: Any) -> Step:
        return Step(done=True)

    async def score(self, episode: Any) -> float:
        return 1.0


class Backed:
    """Looks attributes up in a dictionary, as proxies do, and forgets what a missing one must raise."""

    def __getattr__(self, name: str) -> Any:
        return {"reset": Once().reset, "step": Once().step, "score": Once().score}[name]


def client() -> FakeClient:
    return FakeClient(lambda prompt, options: [*spelled("ok"), control_id("<|im_end|>")])


def without(*lacking: str, **others: Any) -> type:
    """Return a kind of environment without some methods."""
    kept = {name: value for name, value in vars(Once).items() if name in ("reset", "step", "score") and name not in lacking}
    return type("Partial", (), {**kept, **others})


async def _player(call: str, given: Any, **options: Any) -> Any:
    """Call one of those that play, with a good task unless `options` has another."""
    task = EpisodeTask(make_environment=Once)
    group = EpisodeGroup(make_environment=Once, members=2)
    if call == "open":
        return await Episode.open(given, messages=[{"role": "user", "content": "x"}], **options)
    if call == "run_episode":
        return await run_episode(given, options.pop("task", task), **options)
    if call == "run_episodes":
        return await run_episodes(given, [task, options.pop("task", task)], **options)
    if call == "run_group":
        return await run_group(given, options.pop("task", group), **options)
    return await run_groups(given, [group, options.pop("task", group)], **options)


RUNNERS = ("run_episode", "run_episodes", "run_group", "run_groups")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (without("score"), "make_environment returned a Partial without score; "),
        (without("step"), "make_environment returned a Partial without step; "),
        (without("reset", "score"), "make_environment returned a Partial without reset, score; "),
        (without("score", score=1.0), "make_environment returned a Partial without score; "),
        (lambda: None, "make_environment returned a NoneType without reset, step, score; "),
        (Backed, "KeyError: 'attach'"),
    ],
)
def test_what_lacks_an_environments_method_fails_its_own_episodes_at_their_start_and_no_other(kind: Any, text: str) -> None:
    tasks = [*group_tasks(Once, seed=1, members=2), *group_tasks(kind, seed=2, members=2), *group_tasks(Once, seed=3, members=1)]
    served = client()
    results = asyncio.run(run_episodes(served, tasks))
    assert [result.reward for result in results] == [1.0, 1.0, None, None, 1.0] and len(served.requests) == 3
    for result in results[2:4]:
        assert result.status is EpisodeStatus.FAILED and result.rows == () and result.failure is not None
        assert (result.failure.kind, result.failure.phase, result.failure.passing) == (FailureKind.ENVIRONMENT, "make", False)
        assert text in result.failure.text
    groups = [EpisodeGroup(make_environment=maker, members=2) for maker in (Once, kind)]
    good, broken = asyncio.run(run_groups(client(), groups))
    assert good.rewards == [1.0, 1.0] and broken.statistics.failures == {"environment_make": 2} and broken.superseded == ()


def test_the_refusal_of_an_environment_says_what_to_write() -> None:
    (result,) = asyncio.run(run_episodes(client(), group_tasks(without("score"), seed=1, members=1)))
    assert result.failure is not None and result.failure.code == "invalid_environment"
    assert "reset(seed), step(turn) and score(episode); write score" in result.failure.text


@pytest.mark.parametrize("call", ["open", *RUNNERS])
def test_a_blocking_client_is_refused_with_the_one_to_pass(call: str) -> None:
    good = client()
    blocking = SimpleNamespace(
        aio=good, info=lambda: None, tokenizer_files=lambda: {}, generate=lambda: None, cancel=lambda: None, tool_wait=lambda: None
    )
    with pytest.raises(InvalidEpisode, match=r"which blocks; .*pass client\.aio") as refusal:
        asyncio.run(_player(call, blocking))
    check_refusal(refusal.value, call)
    assert refusal.value.field == "client"


@pytest.mark.parametrize("call", ["open", *RUNNERS])
def test_what_is_no_client_is_refused(call: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        with pytest.raises(InvalidEpisode, match=r"rollout\.connect\(\.\.\.\)\.aio") as refusal:
            asyncio.run(_player(call, value))
        check_refusal(refusal.value, (call, number))


@pytest.mark.parametrize("call", RUNNERS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("sampling", "TurnSampling"), ("limits", "EpisodeLimits"), ("timeouts", "PhaseTimeouts"), ("format", "ChatFormat")],
)
def test_options_of_another_kind_are_refused_before_anything_is_played(call: str, name: str, kind: str) -> None:
    for number, value in enumerate(value for value in HOSTILE_VALUES if value is not None):
        served = client()
        with pytest.raises(InvalidEpisode, match=f"pass {kind}") as refusal:
            asyncio.run(_player(call, served, **{name: value}))
        check_refusal(refusal.value, (call, number))
        assert refusal.value.field == name and served.requests == []


@pytest.mark.parametrize(("name", "kind"), [("sampling", "TurnSampling"), ("limits", "EpisodeLimits")])
def test_an_episode_refuses_options_of_another_kind_when_it_is_opened(name: str, kind: str) -> None:
    for number, value in enumerate(value for value in HOSTILE_VALUES if value is not None):
        with pytest.raises(InvalidEpisode, match=f"pass {kind}") as refusal:
            asyncio.run(_player("open", client(), **{name: value}))
        check_refusal(refusal.value, number)


def test_a_dictionary_of_options_is_refused_with_the_class_to_unpack_it_into() -> None:
    with pytest.raises(InvalidEpisode, match=r"sampling is a dict; a TurnSampling is needed; pass TurnSampling\(\*\*that\)"):
        asyncio.run(_player("run_episode", client(), sampling={"max_new_tokens": 4}))


@pytest.mark.parametrize("call", RUNNERS)
def test_what_is_no_task_is_refused_before_anything_is_played(call: str) -> None:
    for number, value in enumerate((*HOSTILE_VALUES, Once, Once())):
        served = client()
        with pytest.raises(InvalidEpisode, match=r"pass Episode(Task|Group)\(") as refusal:
            asyncio.run(_player(call, served, task=value))
        check_refusal(refusal.value, (call, number))
        assert served.requests == []


@pytest.mark.parametrize("call", RUNNERS)
def test_an_option_of_a_turn_is_an_unknown_name_to_those_that_play(call: str) -> None:
    with pytest.raises(InvalidEpisode, match=r"unknown option 'max_new_tokens'; known: .*sampling") as refusal:
        asyncio.run(_player(call, client(), max_new_tokens=4))
    check_refusal(refusal.value, call)


@pytest.mark.parametrize(
    "make",
    [
        lambda maker: EpisodeTask(make_environment=maker),
        lambda maker: EpisodeGroup(make_environment=maker, members=2),
        lambda maker: group_tasks(maker, seed=1, members=2),
    ],
)
def test_an_environment_in_place_of_its_class_is_refused_when_the_task_is_made(make: Any) -> None:
    environments: tuple[Any, ...] = (Once(), *(value for value in HOSTILE_VALUES if not callable(value)))
    for number, environment in enumerate(environments):
        with pytest.raises(InvalidEpisode, match="pass the class itself") as refusal:
            make(environment)
        check_refusal(refusal.value, number)
        assert refusal.value.field == "make_environment"


def test_the_protocol_names_the_methods_that_are_looked_for() -> None:
    assert {name for name in vars(Environment) if not name.startswith("_")} == {"reset", "step", "score"}
