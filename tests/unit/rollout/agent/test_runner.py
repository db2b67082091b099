"""Many episodes at once: every task has a result, every failure an owner, and one that fails leaves the others alone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from rollout.agent import (
    CallCounts,
    ChatFormat,
    EpisodeLimits,
    EpisodeStatistics,
    EpisodeStatus,
    EpisodeTask,
    FailureKind,
    InvalidEpisode,
    NoToolCalls,
    PhaseTimeouts,
    Start,
    Step,
    TokenizerMismatch,
    Tool,
    derive_seed,
    group_tasks,
    run_episode,
    run_episodes,
)
from tests.unit.rollout.agent.byte_tokenizer import CHATML, control_id, files, spelled
from tests.unit.rollout.agent.fake_client import FakeClient

END = control_id("<|im_end|>")
FAST = PhaseTimeouts(reset_s=0.2, act_s=0.2, step_s=0.2, score_s=0.2)


class Guess:
    """Two turns of talk; the reward is the number of turns. `trouble` maps a phase to what happens there."""

    def __init__(self, trouble: dict[str, Any] | None = None, tools: tuple[Tool, ...] = ()):
        self.trouble, self.tools = trouble or {}, tools
        self.seed: int | None = None
        self.closed = 0

    async def _meet(self, phase: str, value: Any) -> Any:
        what = self.trouble.get(phase)
        if isinstance(what, BaseException):
            raise what
        if what == "hang":
            await asyncio.sleep(60)
        return value if what is None else what

    async def reset(self, seed: int) -> Any:
        self.seed = seed
        messages = [{"role": "user", "content": f"guess {seed}"}]
        return await self._meet("reset", Start(messages=messages, tools=self.tools) if self.tools else messages)

    async def step(self, turn: Any) -> Any:
        return await self._meet("step", Step(messages=[{"role": "user", "content": "again"}], done=turn.index >= 1))

    async def score(self, episode: Any) -> Any:
        return await self._meet("score", float(episode.num_turns))

    def close(self) -> None:
        self.closed += 1


def always(text: str = "ok") -> FakeClient:
    return FakeClient(lambda prompt, options: [*spelled(text), END])


def run(tasks: list[EpisodeTask], client: FakeClient | None = None, **options: Any) -> list[Any]:
    return asyncio.run(run_episodes(client or always(), tasks, **options))


def tasks_of(count: int, environment: Any = Guess) -> list[EpisodeTask]:
    return [EpisodeTask(make_environment=environment, seed=number) for number in range(count)]


def test_every_task_has_its_result_in_order_and_concurrency_is_bounded() -> None:
    client = always()
    progress: list[Any] = []
    results = run(tasks_of(20), client, concurrency=5, on_progress=progress.append)
    assert [result.task.seed for result in results] == list(range(20))
    assert {(result.status, result.reward, result.num_turns) for result in results} == {(EpisodeStatus.DONE, 2.0, 2)}
    assert all(result.rows[0].num_sampled == 6 and result.failure is None for result in results)
    assert 1 < client.most_live <= 5
    assert [one.finished for one in progress] == list(range(1, 21))
    assert progress[-1].running == 0 and progress[-1].total == 20 and progress[-1].sampled_tokens == 120 and progress[-1].failed == 0


def test_tasks_may_come_from_an_endless_looking_iterator() -> None:
    progress: list[Any] = []
    results = run((task for task in tasks_of(7)), concurrency=3, on_progress=progress.append)  # type: ignore[arg-type]
    assert len(results) == 7 and progress[-1].total is None


def test_no_tasks_give_no_results() -> None:
    assert run([]) == []


TROUBLE = {
    "reset raises": ({"reset": ValueError("boom")}, "reset", "ValueError: boom"),
    "step raises": ({"step": ValueError("boom")}, "step", "ValueError: boom"),
    "score raises": ({"score": ValueError("boom")}, "score", "ValueError: boom"),
    "reset hangs": ({"reset": "hang"}, "reset", "PhaseTimeout"),
    "step hangs": ({"step": "hang"}, "step", "PhaseTimeout"),
    "score hangs": ({"score": "hang"}, "score", "PhaseTimeout"),
    "score is NaN": ({"score": float("nan")}, "score", "a finite number is needed"),
    "score is infinite": ({"score": float("inf")}, "score", "a finite number is needed"),
    "score is text": ({"score": "1"}, "score", "a finite number is needed"),
    "score is a bool": ({"score": True}, "score", "a finite number is needed"),
    "score cancels": ({"score": asyncio.CancelledError()}, "score", "cancelled itself"),
    "reset cancels": ({"reset": asyncio.CancelledError()}, "reset", "cancelled itself"),
    "step cancels": ({"step": asyncio.CancelledError()}, "step", "cancelled itself"),
    "step exits": ({"step": SystemExit(1)}, "step", "interpreter's end"),
    "reset is text": ({"reset": "hello"}, "reset", "a sequence of messages is needed"),
    "reset is empty": ({"reset": []}, "reset", "ChatFormatError"),
    "step is no Step": ({"step": {"done": True}}, "step", "a Step is needed"),
    "step's messages are text": ({"step": Step(messages="hi")}, "step", "a sequence of messages is needed"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", TROUBLE)
def test_a_broken_environment_fails_its_episode_without_a_reward_and_no_other(name: str) -> None:
    trouble, phase, text = TROUBLE[name]
    broken = EpisodeTask(make_environment=lambda: Guess(trouble), seed=1)
    results = run([*tasks_of(1), broken, *tasks_of(1)], timeouts=FAST)
    assert [result.status for result in results] == [EpisodeStatus.DONE, EpisodeStatus.FAILED, EpisodeStatus.DONE]
    failed = results[1]
    assert failed.reward is None and failed.failure is not None
    assert (failed.failure.kind, failed.failure.phase) == (FailureKind.ENVIRONMENT, phase)
    assert text in failed.failure.text
    assert phase not in ("step", "score") or failed.rows[0].num_sampled >= 3


def test_an_environment_that_cannot_be_made_fails_its_episode() -> None:
    def refuse() -> Guess:
        raise RuntimeError("no such task")

    (result,) = run([EpisodeTask(make_environment=refuse)])
    assert result.failure.phase == "make" and result.failure.kind is FailureKind.ENVIRONMENT and result.rows == ()


def test_plain_functions_serve_as_environments_too_and_may_hang() -> None:
    class Plain:
        def reset(self, seed: int) -> list[dict[str, str]]:
            return [{"role": "user", "content": "go"}]

        def step(self, turn: Any) -> Step:
            time.sleep(1.0 if turn.text == "slow" else 0)
            return Step(done=True)

        def score(self, episode: Any) -> np.float32:
            return np.float32(0.5)

    client = FakeClient([[*spelled("ok"), END], [*spelled("slow"), END]])
    good, slow = run([EpisodeTask(make_environment=Plain)] * 2, client, concurrency=1, timeouts=FAST)
    assert good.reward == 0.5 and good.seconds["score"] > 0
    assert slow.failure.kind is FailureKind.ENVIRONMENT and "longer than 0.2 s" in slow.failure.text


def test_an_error_of_the_service_is_the_infrastructures() -> None:
    client = always()
    client.error = ConnectionError("gone")
    (result,) = run(tasks_of(1), client)
    assert result.status is EpisodeStatus.FAILED and result.reward is None
    assert (result.failure.kind, result.failure.phase) == (FailureKind.INFRASTRUCTURE, "act")


def test_a_generation_that_takes_too_long_is_cancelled_and_is_the_infrastructures() -> None:
    client = FakeClient(hang=True)
    (result,) = run(tasks_of(1), client, timeouts=FAST)
    assert result.failure.kind is FailureKind.INFRASTRUCTURE and "act took longer" in result.failure.text
    assert client.cancelled == [client.requests[0][1]["request_id"]]


def echo(text: str) -> str:
    """Say it again."""
    if text == "break":
        raise OSError("no echo today")
    return text


CALL = '<tool_call>{"name": "echo", "arguments": {"text": "TEXT"}}</tool_call>'


def test_tools_answer_their_calls_and_the_environment_the_rest() -> None:
    client = FakeClient([[*spelled(CALL), END], [*spelled("a"), END], [*spelled("b"), END]])
    task = EpisodeTask(make_environment=lambda: Guess(tools=(Tool.from_function(echo),)))
    (result,) = run([task], client)
    assert (result.status, result.num_turns, result.good_calls, result.bad_calls, result.call_turns) == (EpisodeStatus.DONE, 2, 1, 0, 1)
    assert [message["content"] for message in result.messages if message["role"] == "tool"] == ["TEXT"]


def test_an_essential_tool_that_breaks_is_the_tools_failure() -> None:
    client = FakeClient([[*spelled(CALL.replace("TEXT", "break")), END]])
    task = EpisodeTask(make_environment=lambda: Guess(tools=(Tool.from_function(echo, essential=True),)))
    (result,) = run([task], client)
    assert (result.failure.kind, result.failure.code, result.reward) == (FailureKind.TOOL, "tool_failed", None)


def test_bad_calls_are_the_policys_failure_and_are_scored() -> None:
    client = always("<tool_call>{</tool_call>")
    task = EpisodeTask(make_environment=lambda: Guess(tools=(Tool.from_function(echo),)))
    (result,) = run([task], client, limits=EpisodeLimits(max_bad_turns=2))
    assert result.status is EpisodeStatus.BAD_CALLS and result.failure.kind is FailureKind.POLICY
    assert result.reward == 2.0 and result.bad_calls == 2


def test_turns_without_calls_are_counted_where_tools_are_on_offer_and_a_run_that_parses_none_warns() -> None:
    tasks = [EpisodeTask(make_environment=lambda: Guess(tools=(Tool.from_function(echo),))) for _ in range(8)]
    with pytest.warns(NoToolCalls, match="0 failed to parse, 16 turns held none"):
        results = run(tasks)
    assert [(result.good_calls, result.turns_without_calls) for result in results] == [(0, result.num_turns) for result in results]
    assert EpisodeStatistics.of(results).calls == CallCounts(0, 0, sum(result.num_turns for result in results))
    assert all(result.turns_without_calls == 0 for result in run(tasks_of(8)))


def test_a_limit_is_named_and_the_episode_is_scored() -> None:
    (result,) = run(tasks_of(1), limits=EpisodeLimits(max_turns=1))
    assert (result.status, result.limit, result.failure.kind, result.failure.text) == (
        "truncated",
        "max_turns",
        FailureKind.LIMIT,
        "max_turns",
    )
    assert result.reward == 1.0


def test_members_of_a_group_begin_equally_and_draw_their_own() -> None:
    client = always()
    tasks = group_tasks(Guess, seed=9, members=3, group="g")
    results = run(tasks, client, concurrency=1)
    assert [(result.task.group, result.task.member) for result in results] == [("g", 0), ("g", 1), ("g", 2)]
    first_turns = [request for request in client.requests if len(request[0]) == len(client.requests[0][0])]
    assert len({tuple(prompt) for prompt, _ in first_turns}) == 1
    assert [options["seed"] for _, options in first_turns] == [derive_seed(derive_seed(9, member), 0) for member in range(3)]
    again = EpisodeTask(make_environment=Guess, seed=9, member=1, attempt=1)
    assert again.episode_seed == derive_seed(9, 1, 1) != tasks[1].episode_seed


def test_environments_are_closed_whatever_happened() -> None:
    made: list[Guess] = []

    def make(trouble: dict[str, Any]) -> Any:
        def build() -> Guess:
            made.append(Guess(trouble))
            return made[-1]

        return build

    run([EpisodeTask(make_environment=make(trouble)) for trouble in ({}, {"reset": ValueError()}, {"score": ValueError()})])
    assert [environment.closed for environment in made] == [1, 1, 1]


def test_cancelling_the_run_cancels_every_running_request() -> None:
    client = FakeClient(hang=True)

    async def cancel() -> None:
        task = asyncio.create_task(run_episodes(client, tasks_of(6), concurrency=4))
        while len(client.waiting) < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert len(client.requests) == 4
    assert sorted(client.cancelled) == sorted(options["request_id"] for _, options in client.requests)
    assert client.live == 0


def test_an_error_in_a_callback_ends_the_run() -> None:
    def refuse(result: Any) -> None:
        raise LookupError("my bug")

    with pytest.raises(ExceptionGroup) as caught:
        run(tasks_of(3), on_result=refuse)
    assert isinstance(caught.value.exceptions[0], LookupError)


def test_a_foreign_tokenizer_is_refused_before_any_episode() -> None:
    client = always()
    with pytest.raises(TokenizerMismatch):
        run(tasks_of(1), client, format=ChatFormat(files(CHATML, lowercase=True)))
    assert client.requests == []


@pytest.mark.parametrize("concurrency", [0, True, 1.5])
def test_concurrency_is_checked(concurrency: Any) -> None:
    with pytest.raises(InvalidEpisode, match="set concurrency"):
        run(tasks_of(1), concurrency=concurrency)


def test_time_outs_are_checked() -> None:
    with pytest.raises(InvalidEpisode, match="set act_s"):
        PhaseTimeouts(act_s=0)


def test_one_episode_alone_fetches_what_it_needs() -> None:
    result = asyncio.run(run_episode(always(), EpisodeTask(make_environment=Guess)))
    assert result.reward == 2.0 and set(result.seconds) >= {"make", "reset", "act", "step", "score"}


def test_a_cancelled_generation_gives_a_cancelled_episode_without_a_reward() -> None:
    client = FakeClient(hang=True)

    async def cancel_first() -> Any:
        task = asyncio.create_task(run_episode(client, EpisodeTask(make_environment=Guess)))
        while not client.waiting:
            await asyncio.sleep(0.01)
        await client.cancel(next(iter(client.waiting)))
        return await task

    result = asyncio.run(cancel_first())
    assert (result.status, result.reward, result.failure) == (EpisodeStatus.CANCELLED, None, None)
    assert result.rows[0].num_sampled == 2


class Slow(Guess):
    """Takes its time for each step."""

    async def step(self, turn: Any) -> Step:
        await asyncio.sleep(0.08)
        return await super().step(turn)


def test_the_service_hears_how_long_answers_take_once_that_is_known() -> None:
    client = always()
    first, second = run([EpisodeTask(make_environment=Slow, seed=number) for number in range(2)], client, concurrency=1)
    assert (first.reward, second.reward) == (2.0, 2.0)
    lineages = [options["lineage"] for _, options in client.requests]
    assert [lineage for lineage, _, _ in client.waits] == [lineages[1], lineages[2], lineages[3]]
    assert all(0.07 < expect_s < 0.5 and salt is None for _, expect_s, salt in client.waits)


def test_quick_answers_are_not_announced() -> None:
    client = always()
    run(tasks_of(3), client)
    assert client.waits == []


class Chatty(Guess):
    """Answers each turn at length."""

    async def step(self, turn: Any) -> Step:
        return Step(messages=[{"role": "user", "content": "blah " * 50}], done=turn.index >= 1)


def beginning() -> int:
    """Return the length of `Guess`'s first prompt."""
    client = always()
    run(tasks_of(1), client)
    return len(client.requests[0][0])


@pytest.mark.parametrize(
    ("name", "environment", "limits", "context", "turns"),
    [
        ("max_turns", Guess, {"max_turns": 1}, 0, 1),
        ("max_total_tokens", Guess, {"max_total_tokens": 2}, 0, 1),  # in the first turn
        ("max_total_tokens", Chatty, {"max_total_tokens": 60}, 0, 1),  # what the environment said has no room
        ("context", Guess, {}, 2, 1),
        ("context", Chatty, {}, 60, 1),
        ("max_total_tokens", Guess, {"max_total_tokens": 0}, 0, 0),  # the prompt fills it
    ],
)
def test_a_limit_of_any_kind_is_named_and_the_episode_is_scored(name: str, environment: Any, limits: Any, context: int, turns: int) -> None:
    prompt = beginning()
    bounds = {key: value + prompt if key == "max_total_tokens" else value for key, value in limits.items()}
    client = always("okay")
    client.max_model_len = prompt + context if context else 4096
    (result,) = run(tasks_of(1, environment), client, limits=EpisodeLimits(**bounds))
    assert (str(result.status), str(result.limit), result.failure.kind) == ("truncated", name, FailureKind.LIMIT)
    assert (result.reward, result.num_turns) == (float(turns), turns)
    most = bounds.get("max_total_tokens", client.max_model_len)
    assert all(len(row) <= most for row in result.rows)


@pytest.mark.parametrize("limit", ["max_total_tokens", "context"])
def test_an_episode_that_ends_exactly_at_a_limit_is_done(limit: str) -> None:
    class Once(Guess):
        async def step(self, turn: Any) -> Step:
            return Step(done=True)

    prompt, client = beginning(), always("ok")
    whole = prompt + 3
    client.max_model_len = whole if limit == "context" else 4096
    bounds = EpisodeLimits(max_total_tokens=whole) if limit == "max_total_tokens" else EpisodeLimits()
    (result,) = run(tasks_of(1, Once), client, limits=bounds)
    assert (result.status, result.limit, result.failure, result.reward) == (EpisodeStatus.DONE, None, None, 1.0)
    assert len(result.rows[0]) == whole


def test_a_turn_cut_by_its_own_limit_goes_on_and_says_so() -> None:
    (result,) = run(tasks_of(1), always("okay"), limits=EpisodeLimits(max_new_tokens=2))
    assert (result.status, result.num_turns, result.reward) == (EpisodeStatus.DONE, 2, 2.0)
    assert [turn.finish_kind for turn in result.rows[0].turns] == ["length", "length"]
