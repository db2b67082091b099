"""Episodes over a running service: what a trainer would train on is what the engine computed, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout
from rollout.agent import (
    ChatFormat,
    Episode,
    EpisodeGroup,
    EpisodeStatus,
    EpisodeTask,
    FailureKind,
    InfrastructureFailure,
    NoToolCalls,
    PhaseTimeouts,
    Start,
    Step,
    TokenizerMismatch,
    Tool,
    TurnSampling,
    derive_seed,
    group_tasks,
    run_episodes,
    run_group,
)
from tests.fixtures_models import reference_logprobs, reference_model, write_checkpoint
from tests.unit.rollout.agent.byte_tokenizer import CHATML, THINKING, control_id, files, spelled

END = control_id("<|im_end|>")
USER = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, "llama", vocab_size=288, eos_token_id=END, bos_token_id=control_id("<s>"))
    for name, content in files(THINKING).items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rollout.Client]:
    with rollout.local(str(folder), state_dir=str(tmp_path_factory.mktemp("state")), max_rows=16, threads=1) as client:
        yield client


def check_against_reference(folder: Path, rows: Any) -> int:
    """Compare every sampled token's log-probability and return how many there were."""
    model, count = reference_model(folder), 0
    for row in rows:
        for temperature in {turn.temperature for turn in row.turns}:
            own = row.mask & (row.temperatures == np.float32(temperature))
            wanted = reference_logprobs(model, row.ids, temperature)[own[1:]]
            assert np.abs(wanted - row.logprobs[own]).max() < 1e-4
            count += int(own.sum())
    return count


def test_sampled_ids_go_round_the_service_untouched(client: rollout.Client, folder: Path) -> None:
    said = spelled("hello")

    async def play() -> Episode:
        episode = await client.aio.episode(messages=USER)
        await episode.act(forced_ids=[*said, END], temperature=0.7)
        episode.observe([{"role": "tool", "content": "42 <|im_end|>"}])
        await episode.act(max_new_tokens=20, ignore_eos=True)
        return episode

    episode = asyncio.run(play())
    (row,) = episode.rows()
    first, second = row.turns
    assert row.ids[first.start : first.end].tolist() == [*said, END]
    assert second.prompt_tokens == second.start and second.cached_tokens > 0
    assert (first.kv_spans[0], second.kv_spans[0]) == ((0, 0), (0, 0))
    assert check_against_reference(folder, [row]) == 26


def test_an_episode_made_by_the_blocking_client_is_the_same(client: rollout.Client) -> None:
    episodes = [client.episode(messages=USER, seed=3), asyncio.run(client.aio.episode(messages=USER, seed=3))]
    for episode in episodes:
        asyncio.run(episode.act(max_new_tokens=8))
    assert episodes[0].rows()[0].ids.tolist() == episodes[1].rows()[0].ids.tolist()
    assert episodes[0].lineage != episodes[1].lineage


def test_another_tokenizer_is_refused(client: rollout.Client) -> None:
    with pytest.raises(TokenizerMismatch):
        client.episode(messages=USER, format=ChatFormat(files(CHATML, lowercase=True)))


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


class Talk:
    """Three turns, the first of which is made to call a tool well and badly."""

    async def reset(self, seed: int) -> Start:
        return Start(messages=[{"role": "user", "content": f"hello {seed}"}], tools=(Tool.from_function(double),))

    async def step(self, turn: Any) -> Step:
        return Step(messages=[{"role": "user", "content": "more"}], done=turn.index >= 2)

    async def score(self, episode: Any) -> float:
        return float(episode.num_turns)


def test_rows_of_a_run_have_the_references_log_probabilities(client: rollout.Client, folder: Path) -> None:
    tasks = [task for seed in range(4) for task in group_tasks(Talk, seed=seed, members=4, group=seed)]
    with pytest.warns(NoToolCalls):  # the model is random
        results = asyncio.run(run_episodes(client.aio, tasks, concurrency=16, sampling=TurnSampling(temperature=1.2, max_new_tokens=12)))
    assert [result.reward for result in results] == [3.0] * 16
    assert check_against_reference(folder, [row for result in results for row in result.rows]) > 300
    again = asyncio.run(run_episodes(client.aio, tasks[5:6], sampling=TurnSampling(temperature=1.2, max_new_tokens=12)))
    assert again[0].rows[0].ids.tolist() == results[5].rows[0].ids.tolist()


def test_tool_calls_good_and_bad_over_the_service(client: rollout.Client, folder: Path) -> None:
    said = (
        '<tool_call>{"name": "double", "arguments": null}</tool_call><tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>'
    )

    async def play() -> Episode:
        episode = await client.aio.episode(messages=USER, tools=[double])
        turn = await episode.act(forced_ids=[*spelled(said), END], max_new_tokens=200)
        assert (len(turn.tool_calls), len(turn.bad_calls)) == (1, 1)
        episode.observe(await episode.run_tools(turn))
        await episode.act(max_new_tokens=4)
        return episode

    episode = asyncio.run(play())
    (row,) = episode.rows()
    assert [message["content"] for message in episode.messages if message["role"] == "tool"][1] == "8"
    assert row.mask[row.turns[0].start : row.turns[0].end].all() and row.turns[0].end - row.turns[0].start == len(spelled(said)) + 1
    check_against_reference(folder, [row])


def is_idle(client: rollout.Client) -> bool:
    """Wait until nothing runs; False after some seconds."""
    for _ in range(100):
        engine = client.stats()["engine"]
        if engine["running"] == 0 and engine["waiting"] == 0:
            return True
        time.sleep(0.05)
    return False


def test_a_cancelled_run_leaves_nothing_running(client: rollout.Client) -> None:
    async def cancel() -> None:
        tasks = [EpisodeTask(make_environment=Talk, seed=seed) for seed in range(12)]
        sampling = TurnSampling(max_new_tokens=300, ignore_eos=True)
        run = asyncio.create_task(run_episodes(client.aio, tasks, sampling=sampling))
        await asyncio.sleep(0.2)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(cancel())
    assert is_idle(client)


def test_an_act_that_takes_too_long_is_cancelled_at_the_service(client: rollout.Client) -> None:
    (result,) = asyncio.run(
        run_episodes(
            client.aio,
            [EpisodeTask(make_environment=Talk)],
            sampling=TurnSampling(max_new_tokens=400, ignore_eos=True),
            timeouts=PhaseTimeouts(act_s=0.05),
        )
    )
    assert result.status is EpisodeStatus.FAILED and result.failure.kind is FailureKind.INFRASTRUCTURE and result.reward is None
    assert is_idle(client)


def test_an_episode_cancelled_in_the_middle_keeps_what_was_sampled(client: rollout.Client, folder: Path) -> None:
    async def play() -> Episode:
        episode = await client.aio.episode(messages=USER)
        before = (await client.aio.stats())["engine"]["sampled_tokens"]
        acting = asyncio.create_task(episode.act(max_new_tokens=400, ignore_eos=True))
        while (await client.aio.stats())["engine"]["sampled_tokens"] < before + 3:
            await asyncio.sleep(0.005)
        await episode.cancel()
        turn = await acting
        assert turn.finish_reason == "cancelled" and 0 < len(turn.ids) < 400
        return episode

    episode = asyncio.run(play())
    assert episode.status is EpisodeStatus.CANCELLED
    check_against_reference(folder, episode.rows())


class Question:
    """One long question; the second member to ask fails its first attempt for reasons that are not its own."""

    failures: list[int] = []

    async def reset(self, seed: int) -> Any:
        return [{"role": "user", "content": "a long question " * 12}]

    async def step(self, turn: Any) -> Step:
        if not self.failures:
            self.failures.append(1)
            raise InfrastructureFailure("the sandbox is away", remedy="wait")
        return Step(done=True)

    async def score(self, episode: Any) -> float:
        return float(len(self.failures))


def test_a_group_computes_its_prompt_once_and_plays_a_failed_member_again(client: rollout.Client, folder: Path) -> None:
    before = client.stats()["engine"]
    group = EpisodeGroup(make_environment=Question, members=6, seed=3, group="talk")
    result = asyncio.run(run_group(client.aio, group, sampling=TurnSampling(max_new_tokens=4, ignore_eos=True)))
    after = client.stats()["engine"]
    assert len(result.kept) == 6 and result.mean_reward == 1.0 and result.reward_spread == 0.0
    (again,) = result.superseded
    assert again.failure is not None and again.failure.kind is FailureKind.INFRASTRUCTURE
    member = result.results[again.task.member]
    assert member.task.attempt == 1 and member.task.episode_seed == derive_seed(3, again.task.member, 1)
    turns = [one.rows[0].turns[0] for one in (*result.results, again)]
    prompt = turns[0].prompt_tokens
    # The first computes all, the others nothing where they come with it, and the last token where they come later.
    assert prompt % client.info().engine.page_size != 0  # type: ignore[union-attr]
    assert after["prefill_tokens"] - before["prefill_tokens"] <= prompt + 6
    assert sorted(turn.cached_tokens for turn in turns) == [0, *[prompt - 1] * 6]
    assert result.statistics.cached_share > 0.7
    check_against_reference(folder, [row for one in result.results for row in one.rows])


def test_what_preempted_episodes_sent_and_sampled_stays_as_it_was(folder: Path, tmp_path: Path) -> None:
    """A pool too small for all rows to end in: what waits again is computed again from ids, never from text."""
    words = spelled("hello" * 3)
    assert len(words) == 15 and ChatFormat.from_folder(folder).rendered_ids("hello" * 3).size == 3

    async def play(client: Any) -> list[Episode]:
        info, chat = await client.info(), await ChatFormat.of(client)
        starts: list[dict[str, Any]] = [{"prompt_ids": [*words, number]} for number in range(2)] + [{"messages": USER}] * 2
        episodes = [Episode(client, info=info, format=chat, seed=seed, **start) for seed, start in enumerate(starts)]
        said = [*words, *words, END]
        await asyncio.gather(*(episode.act(forced_ids=said, max_new_tokens=len(said)) for episode in episodes))
        for episode in episodes:
            assert episode.observe_ids(words) if not episode.messages else episode.observe(USER)
        await asyncio.gather(*(episode.act(max_new_tokens=160, ignore_eos=True) for episode in episodes))
        return episodes

    options: dict[str, Any] = {"max_rows": 4, "threads": 1, "num_pages": 24, "prefix_cache": False}
    with rollout.local(str(folder), state_dir=str(tmp_path), **options) as client:
        episodes = asyncio.run(play(client.aio))
        assert client.stats()["engine"]["preemptions"] >= 2
    said = [*words, *words, END]
    for number, episode in enumerate(episodes):
        (row,) = episode.rows()
        first, second = row.turns
        assert row.ids[first.start : first.end].tolist() == said
        if not episode.messages:
            assert row.ids[: second.start].tolist() == [*words, number, *said, *words]
        assert (first.prompt_tokens, second.prompt_tokens) == (first.start, second.start)
        assert row.num_sampled == len(said) + 160
    assert check_against_reference(folder, [row for episode in episodes for row in episode.rows()]) == 4 * (len(said) + 160)
