"""Episodes whose engine host is killed under them: they go on at the new one from the very ids, in every phase of a turn.

The prompts are letters spelled one by one, which no tokenizer would give for their text: a prompt that went through text on its way
to the other host would come back shorter.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import rollout
from rollout.agent import ChatFormat, Episode, EpisodeGroup, Step, TurnSampling, run_group
from rollout.errors import RequestFailed
from tests.fixtures_models import reference_logprobs, reference_model, write_checkpoint
from tests.unit.rollout.agent.byte_tokenizer import THINKING, control_id, files, spelled

END = control_id("<|im_end|>")
HELLO = spelled("hello")
PAGE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, "llama", vocab_size=288, eos_token_id=END, bos_token_id=control_id("<s>"))
    for name, content in files(THINKING).items():
        (path / name).write_bytes(content)
    assert ChatFormat.from_folder(path).rendered_ids("hello").size == 1 and len(HELLO) == 5
    return path


def serve(folder: Path, tmp_path: Path, **options: Any) -> Any:
    return rollout.local(str(folder), state_dir=str(tmp_path), max_rows=16, threads=1, page_size=PAGE, **options)


def kill_host(service: Any) -> None:
    assert service.pid is not None
    [host] = psutil.Process(service.pid).children()
    host.kill()


def check_reference(folder: Path, episode: Episode) -> None:
    for row in episode.rows():
        wanted = reference_logprobs(reference_model(folder), row.ids)[row.mask[1:]]
        assert np.abs(wanted - row.logprobs[row.mask]).max() < 1e-4


async def sampled(client: Any) -> int:
    return int((await client.stats())["engine"]["sampled_tokens"])


def test_a_turn_in_flight_is_drawn_again_elsewhere_from_the_very_ids(folder: Path, tmp_path: Path) -> None:
    service = serve(folder, tmp_path)

    async def play(client: Any) -> Episode:
        episode = await client.episode(prompt_ids=HELLO, seed=7)
        for last in (False, True):
            sent, before = episode.current_ids(), await sampled(client)
            turn = asyncio.create_task(episode.act(max_new_tokens=200, ignore_eos=True))
            async with asyncio.timeout(60):
                while await sampled(client) < before + 5:
                    await asyncio.sleep(0.01)
            kill_host(service)
            with pytest.raises(RequestFailed) as failed:
                await turn
            assert failed.value.reason_code == "host_failed"
            assert episode.running and np.array_equal(episode.current_ids(), sent), "the record is as it was"
            drawn = await episode.act(max_new_tokens=200, ignore_eos=True)
            partial = failed.value.generation.ids
            assert 0 < partial.size < 200 and drawn.ids[: partial.size].tolist() == partial.tolist(), "one seed, one version, the same ids"
            assert drawn.record.prompt_tokens == sent.size and drawn.record.cached_tokens == 0
            assert last or episode.observe_ids(HELLO)
        return episode

    with service as client:
        episode = asyncio.run(play(client.aio))
        assert client.stats()["host_starts"] == 3
    (row,) = episode.rows()
    first, second = row.turns
    assert row.ids[:5].tolist() == HELLO and row.ids[first.end : second.start].tolist() == HELLO
    assert (first.prompt_tokens, second.prompt_tokens) == (5, 5 + 200 + 5)
    check_reference(folder, episode)


def test_a_host_that_dies_during_a_tool_wait_takes_no_token_with_it(folder: Path, tmp_path: Path) -> None:
    service = serve(folder, tmp_path)

    async def play(client: Any) -> Episode:
        episode = await client.episode(prompt_ids=HELLO, seed=1)
        await episode.act(forced_ids=[*HELLO, END])
        episode.tool_wait(0.2)
        kill_host(service)
        assert episode.observe_ids(HELLO)
        # A turn that reaches the service before it knows of the death fails too, and may be asked for again.
        async with asyncio.timeout(60):
            while episode.num_turns == 1:
                with contextlib.suppress(RequestFailed):
                    await episode.act(max_new_tokens=3, ignore_eos=True)
        return episode

    with service as client:
        episode = asyncio.run(play(client.aio))
        engine = client.stats()["engine"]
        # The new host computed 16 ids that it was sent, and the KV of two of the three that it drew: two pages.
        assert engine["prefill_tokens"] == 16 and engine["cached_pages"] == 2
    (row,) = episode.rows()
    assert row.ids[:16].tolist() == [*HELLO, *HELLO, END, *HELLO] and row.turns[1].prompt_tokens == 16
    check_reference(folder, episode)


class Talk:
    """Two turns."""

    async def reset(self, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"hello {seed}"}]

    async def step(self, turn: Any) -> Step:
        return Step(messages=[{"role": "tool", "content": "hello"}], done=turn.index == 1)

    async def score(self, episode: Any) -> float:
        return 1.0


def test_a_group_whose_host_dies_is_played_to_its_end_from_the_same_ids(folder: Path, tmp_path: Path) -> None:
    service = serve(folder, tmp_path)

    async def play(client: Any) -> Any:
        group = EpisodeGroup(make_environment=Talk, members=6, seed=3)
        sampling = TurnSampling(forced_ids=HELLO, max_new_tokens=150, ignore_eos=True)
        playing = asyncio.create_task(run_group(client, group, sampling=sampling, max_attempts=5))
        async with asyncio.timeout(60):
            while await sampled(client) < 30:
                await asyncio.sleep(0.01)
        kill_host(service)
        return await playing

    with service as client:
        result = asyncio.run(play(client.aio))
        assert client.stats()["host_starts"] == 2
    assert len(result.kept) == 6 and result.mean_reward == 1.0
    assert all(one.failure is not None and one.failure.passing for one in result.superseded)
    prompts = set()
    for member in (*result.results, *result.superseded):
        for row in member.rows:
            # A row that begins later is one whose template wrote history anew.
            prompts |= {row.ids[: turn.start].tobytes() for turn in row.turns if turn.index == 0}
            for turn in row.turns:
                assert turn.prompt_tokens == turn.start and row.ids[turn.start : turn.start + 5].tolist() == HELLO
    assert len(prompts) == 1 and result.superseded
