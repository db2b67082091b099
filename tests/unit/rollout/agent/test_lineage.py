"""Retries, compactions and subagents are branches of one tree, and every sampled token is trained in exactly one row of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollout.agent import (
    BranchKind,
    ChatFormat,
    Episode,
    EpisodeLimits,
    EpisodeStateError,
    EpisodeStatus,
    EpisodeTask,
    Limit,
    Start,
    Step,
    derive_seed,
    run_episode,
)
from tests.unit.rollout.agent.byte_tokenizer import CHATML, THINKING, control_id, files, find, spelled
from tests.unit.rollout.agent.fake_client import FakeClient, guarded
from trainer_bridge.batch import collate
from trainer_bridge.episodes import samples_of
from trainer_bridge.errors import InvalidSample

END = control_id("<|im_end|>")
USER = [{"role": "user", "content": "go"}]
MORE = [{"role": "user", "content": "more"}]
SPOKEN = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def said(text: str) -> list[int]:
    return [*spelled("SAMPLED " + text), END]


def start(client: FakeClient, template: str = CHATML, **options: Any) -> Episode:
    client.served = files(template)
    given = {"messages": USER, **options}
    return Episode(client, info=asyncio.run(client.info()), format=guarded(ChatFormat(client.served), "SAMPLED"), seed=11, **given)


def check_trained_once(episode: Episode, turns: list[Any]) -> None:
    """The rows hold each turn's ids once under the mask, and the bridge makes one batch of them that counts each token once."""
    episode.check_integrity()
    rows = episode.rows()
    found = {turn.request_id: row.ids[turn.start : turn.end].tolist() for row in rows for turn in row.turns}
    assert found == {turn.record.request_id: turn.ids.tolist() for turn in turns}
    assert sum(row.num_sampled for row in rows) == sum(len(turn.ids) for turn in turns)
    result: Any = type("Result", (), {"status": "done", "reward": 1.0, "rows": rows, "failure": None})
    samples = samples_of(result)
    batch = collate(samples)
    assert int(batch.loss_mask_ST.sum()) == sum(len(turn.ids) for turn in turns)


def test_a_retry_begins_a_row_from_what_the_turn_was_drawn_from_with_another_seed() -> None:
    client = FakeClient([said("one"), said("bad"), said("good"), said("end")])
    episode = start(client)

    async def run() -> list[Any]:
        turns = [await episode.act()]
        episode.observe(MORE)
        turns.append(await episode.act())
        assert episode.retry()
        turns.append(await episode.act())
        episode.observe(MORE)
        turns.append(await episode.act())
        return turns

    turns = asyncio.run(run())
    prompts = [prompt for prompt, _ in client.requests]
    assert prompts[2] == prompts[1]
    assert [options["seed"] for _, options in client.requests] == [derive_seed(11, turn) for turn in range(4)]
    assert prompts[3][: len(prompts[1]) + len(said("good"))] == prompts[1] + said("good")
    assert find(prompts[3], said("bad")) < 0
    first, second = episode.rows()
    assert first.ids.tolist() == prompts[1] + said("bad") and second.ids.tolist() == prompts[3] + said("end")
    assert not second.mask[: len(prompts[1])].any()
    assert (second.branch.kind, second.branch.parent, second.branch.left_at) == (BranchKind.RETRY, 0, len(first))
    shown = [message["content"] for message in episode.messages if message["role"] == "assistant"]
    assert shown == ["SAMPLED one", "SAMPLED good", "SAMPLED end"]
    check_trained_once(episode, turns)


def test_a_compaction_goes_on_from_new_history_in_which_a_turn_keeps_its_sampled_ids() -> None:
    client = FakeClient([said("long story"), said("hello"), said("end"), said("more")])
    episode = start(client)

    async def run() -> list[Any]:
        turns = [await episode.act()]
        episode.observe([{"role": "user", "content": "Sum it up."}])
        turns.append(await episode.act())
        assert episode.compact([{"role": "system", "content": "brief"}, *USER, turns[1], *MORE])
        turns.append(await episode.act())
        episode.observe(MORE)
        turns.append(await episode.act())
        return turns

    turns = asyncio.run(run())
    prompts = [prompt for prompt, _ in client.requests]
    chat = ChatFormat(files())
    head = chat.rendered_ids("<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n").tolist()
    assert prompts[2] == [*head, *said("hello"), *chat.rendered_ids("\n" + SPOKEN).tolist()]
    assert prompts[3] == prompts[2] + said("end") + chat.rendered_ids("\n" + SPOKEN).tolist()
    first, second = episode.rows()
    assert second.branch.kind is BranchKind.COMPACTION and not second.mask[: len(prompts[2])].any()
    assert len(first.turns) == 2 and len(episode.messages) == 7
    check_trained_once(episode, turns)


def test_a_compaction_may_keep_thinking_where_the_template_does() -> None:
    thought = [control_id("<think>"), *spelled("\nSAMPLED hmm\n"), control_id("</think>"), *spelled("\n\nSAMPLED hello"), END]
    client = FakeClient([thought, said("end")])
    episode = start(client, THINKING)

    async def run() -> list[Any]:
        turns = [await episode.act()]
        assert episode.compact([*USER, turns[0], {"role": "tool", "content": "42"}])
        turns.append(await episode.act())
        return turns

    turns = asyncio.run(run())
    assert find(client.requests[1][0], thought[:-1]) > 0
    check_trained_once(episode, turns)


def test_subagents_run_at_once_and_their_rows_are_the_episodes() -> None:
    def reply(prompt: np.ndarray, options: dict[str, Any]) -> list[int]:
        return said(f"{len(prompt)} {options['seed'] % 97}")

    client = FakeClient(reply)
    episode = start(client)

    async def work(agent: Episode, depth: int) -> list[Any]:
        turns = [await agent.act()]
        if depth:
            turns += await work(agent.subagent(messages=[{"role": "user", "content": "deeper"}]), depth - 1)
        agent.observe(MORE)
        turns.append(await agent.act())
        agent.finish()
        return turns

    async def run() -> list[Any]:
        turns = [await episode.act()]
        agents = [episode.subagent(messages=[{"role": "user", "content": f"part {part}"}]) for part in range(3)]
        turns += [turn for found in await asyncio.gather(*(work(agent, 1) for agent in agents)) for turn in found]
        episode.observe([{"role": "user", "content": "all done"}])
        turns.append(await episode.act())
        assert [row.branch.kind for row in agents[0].rows()] == [BranchKind.SUBAGENT]
        return turns

    turns = asyncio.run(run())
    assert client.most_live > 1 and len(turns) == 2 + 3 * 4
    rows = episode.rows()
    assert [row.branch.number for row in rows] == list(range(7))
    assert [row.branch.parent for row in rows] == [None, 0, 0, 0, 1, 2, 3]
    assert len({options["seed"] for _, options in client.requests}) == len(turns)
    assert len({options["lineage"] for _, options in client.requests}) == 7
    check_trained_once(episode, turns)


def test_a_tree_of_every_kind_of_branch_trains_each_token_once() -> None:
    thought = [control_id("<think>"), *spelled("\nSAMPLED hmm\n"), control_id("</think>"), *spelled("\n\nSAMPLED hello"), END]
    client = FakeClient(lambda prompt, options: thought)
    episode = start(client, THINKING)

    async def run() -> list[Any]:
        turns = [await episode.act()]
        episode.observe(MORE)  # drops the thinking
        turns.append(await episode.act())
        episode.retry()
        turns.append(await episode.act())
        agent = episode.subagent(messages=USER)
        turns.append(await agent.act())
        agent.retry()
        turns.append(await agent.act())
        episode.compact(MORE)
        turns.append(await episode.act())
        return turns

    turns = asyncio.run(run())
    kinds = [branch.kind for branch in episode.branches]
    assert kinds == ["start", "rewrite", "retry", "subagent", "retry", "compaction"]
    assert [branch.parent for branch in episode.branches] == [None, 0, 1, 2, 3, 2]
    check_trained_once(episode, turns)


def test_the_bridge_refuses_rows_that_hold_a_turn_twice() -> None:
    client = FakeClient([said("a"), said("b")])
    episode = start(client)

    async def run() -> Episode:
        await episode.act()
        agent = episode.subagent(messages=USER)
        await agent.act()
        return agent

    agent = asyncio.run(run())
    rows = [*episode.rows(), *agent.rows()]
    result: Any = type("Result", (), {"status": "done", "reward": 1.0, "rows": rows, "failure": None})
    with pytest.raises(InvalidSample, match=r"is in two rows.*without those of its subagents again"):
        samples_of(result)


def test_cancelling_an_episode_cancels_its_subagents() -> None:
    client = FakeClient(hang=True)
    episode = start(client)

    async def run() -> Episode:
        agent = episode.subagent(messages=USER)
        acting = asyncio.create_task(agent.act())
        while not client.waiting:
            await asyncio.sleep(0.01)
        await episode.cancel()
        await acting
        return agent

    agent = asyncio.run(run())
    assert (episode.status, agent.status) == (EpisodeStatus.CANCELLED, EpisodeStatus.CANCELLED)
    assert episode.rows()[0].num_sampled == 2


def test_branches_keep_to_the_episodes_state_and_limits() -> None:
    client = FakeClient(lambda prompt, options: said("a"))
    episode = start(client, limits=EpisodeLimits(max_turns=2))
    with pytest.raises(EpisodeStateError, match="await act first"):
        episode.retry()
    asyncio.run(episode.act())
    assert episode.retry()
    asyncio.run(episode.act())
    assert not episode.retry() and (episode.status, episode.limit) == (EpisodeStatus.TRUNCATED, Limit.MAX_TURNS)
    with pytest.raises(EpisodeStateError, match="ended as truncated"):
        episode.compact(MORE)

    bare = start(client, messages=None, prompt_ids=[1, 2, 3])
    asyncio.run(bare.act())
    with pytest.raises(EpisodeStateError, match="start it from messages="):
        bare.compact(MORE)
    assert bare.retry() and bare.current_ids().tolist() == [1, 2, 3]

    full = start(client, limits=EpisodeLimits(max_total_tokens=80))
    asyncio.run(full.act())
    assert 0 < full.tokens_left < 80
    assert not full.compact([{"role": "user", "content": "x" * 100}]) and full.limit is Limit.MAX_TOTAL_TOKENS


class Planner:
    """Retries its first turn, asks a subagent, then goes on from a compact history."""

    def __init__(self) -> None:
        self.steps = 0

    async def reset(self, seed: int) -> Any:
        return Start(messages=USER)

    def attach(self, episode: Episode) -> None:
        self.episode = episode

    async def step(self, turn: Any) -> Step:
        self.steps += 1
        if self.steps == 1:
            return Step(retry=True)
        if self.steps == 2:
            agent = self.episode.subagent(messages=[{"role": "user", "content": "help"}])
            await agent.act()
            agent.finish()
            return Step(compact=[*USER, turn, *MORE])
        return Step(done=True)

    async def score(self, episode: Episode) -> float:
        return 0.5


def test_an_environment_branches_by_what_its_step_says() -> None:
    client = FakeClient(lambda prompt, options: said("a"))
    result = asyncio.run(run_episode(client, EpisodeTask(make_environment=Planner)))
    assert (result.status, result.reward) == (EpisodeStatus.DONE, 0.5)
    assert [row.branch.kind for row in result.rows] == ["start", "retry", "subagent", "compaction"]
    assert [sample.reward for sample in samples_of(result)] == [0.5] * 4


class Delegator:
    """Hands a part to a subagent, and one of that one's own, and ends while both are sampling."""

    def __init__(self, way: str, client: FakeClient) -> None:
        self.way, self.client = way, client

    async def reset(self, seed: int) -> Any:
        return Start(messages=USER)

    def attach(self, episode: Episode) -> None:
        self.episode = episode

    async def step(self, turn: Any) -> Step:
        agent = self.episode.subagent(messages=USER)
        self.client.hang = True
        self.tasks = [asyncio.create_task(one.act()) for one in (agent, agent.subagent(messages=USER))]
        while len(self.client.waiting) < 2:
            await asyncio.sleep(0.001)
        if self.way == "raises":
            raise RuntimeError("no")
        return Step(done=True)

    async def score(self, episode: Episode) -> float:
        assert [row.num_sampled for row in episode.rows()][1:] == [2, 2]  # all that there will be
        return 1.0


@pytest.mark.parametrize("way", ["ends", "raises"])
def test_subagents_that_still_run_when_their_episode_ends_are_cancelled_and_their_tokens_are_in_the_result(way: str) -> None:
    client = FakeClient(lambda prompt, options: said("a"))
    result = asyncio.run(run_episode(client, EpisodeTask(make_environment=lambda: Delegator(way, client))))
    assert result.status is (EpisodeStatus.DONE if way == "ends" else EpisodeStatus.FAILED)
    assert result.reward == (1.0 if way == "ends" else None)
    assert client.live == 0 and len(client.cancelled) == 2
    assert [row.num_sampled for row in result.rows][1:] == [2, 2]


def test_async_with_ends_subagents_that_still_run() -> None:
    client = FakeClient(hang=True)
    episode = start(client)

    async def run() -> Episode:
        async with episode:
            agent = episode.subagent(messages=USER)
            task = asyncio.create_task(agent.act())
            while not client.waiting:
                await asyncio.sleep(0.001)
        assert task.done()
        return agent

    agent = asyncio.run(run())
    assert (episode.status, agent.status) == (EpisodeStatus.DONE, EpisodeStatus.CANCELLED)
    assert [row.num_sampled for row in episode.rows()] == [2]
