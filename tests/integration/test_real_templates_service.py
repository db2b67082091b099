"""Episodes with real models' templates over a running service: rows are what the engine was given and what it sampled, joined.

One service serves one tokenizer; which template its prompts are written with is the client's to say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout
from rollout.agent import Episode
from tests.fixtures_models import reference_logprobs, reference_model, write_checkpoint
from tests.unit.rollout.agent.real_templates import byte_tokenizer, chat_format, end_of_turn, files, spelled

ENDS = {text: byte_tokenizer().token_to_id(text) for text in ("<|im_end|>", "<|eot_id|>", "<|role_end|>")}
NAMES = ["qwen2.5", "qwen3", "qwen3.5", "llama3.1", "llama3.2", "smollm2", "ling", "ling keeping thinking"]
TOOL = [{"role": "tool", "name": "add", "content": "42 <|im_end|><|eot_id|><|role_end|>"}]
USER = [{"role": "user", "content": "hello again"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    size = -(-byte_tokenizer().get_vocab_size() // 16) * 16
    write_checkpoint(path, "llama", vocab_size=size, max_position_embeddings=2048, eos_token_id=ENDS["<|role_end|>"])
    # Three files name an end each; all of them count.
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [ENDS["<|eot_id|>"]]}))
    for name, content in files("smollm2").items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return reference_model(folder)


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rollout.Client]:
    with rollout.local(str(folder), state_dir=str(tmp_path_factory.mktemp("state")), max_rows=8, threads=1) as client:
        yield client


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("history", ["template", "append"])
def test_a_record_equals_the_engines_own_prompts_and_outputs(client: rollout.Client, model: Any, name: str, history: str) -> None:
    chat = chat_format(name, history=history)
    opened = chat.renderer is not None and "<think>" in chat.renderer.generation_prompt
    end = ENDS[end_of_turn(name)]
    said = [*spelled(("" if opened else "<think>\n") + "hmm hello\n</think>\n\nhello"), end]

    async def run() -> tuple[Episode, list[Any]]:
        episode = Episode(client.aio, info=await client.aio.info(), format=chat, messages=USER, seed=5)
        turns = [await episode.act(forced_ids=said, max_new_tokens=len(said), temperature=0.7)]
        for number, observation in enumerate([TOOL, USER, TOOL + USER]):
            assert episode.observe(observation)
            forced = said if number == 1 else None
            turns.append(await episode.act(max_new_tokens=len(said) if forced else 12, forced_ids=forced))
        return episode, turns

    episode, turns = asyncio.run(run())
    rows = episode.rows()
    of_turn = {record.index: (row, record) for row in rows for record in row.turns}
    for turn in turns:
        row, record = of_turn[turn.index]
        assert row.ids[: record.start].tolist() == turn.generation.prompt_ids.tolist()
        assert turn.generation.prompt_tokens == record.start
        assert row.ids[record.start : record.end].tolist() == turn.generation.ids.tolist()
        assert np.array_equal(row.logprobs[record.start : record.end], turn.generation.logprobs)
    assert turns[0].ids.tolist() == turns[2].ids.tolist() == said
    assert len(rows) == 1 or history == "template"
    for row in rows:
        for record in row.turns:
            wanted = reference_logprobs(model, row.ids[: record.end], record.temperature)[record.start - 1 :]
            assert np.abs(wanted - row.logprobs[record.start : record.end]).max() < 1e-4
    episode.check_integrity()


def test_ids_that_no_encoder_gives_arrive_as_they_were_sent_in_groups_too(client: rollout.Client) -> None:
    ids = spelled("hello")
    assert len(ids) == 5 and chat_format("smollm2").rendered_ids("hello").size == 1
    alone = client.generate(ids, max_new_tokens=3, ignore_eos=True, seed=1)
    group = client.generate_group(ids, 3, max_new_tokens=3, ignore_eos=True, seed=1)
    for generation in [alone, *group]:
        assert generation.prompt_ids.tolist() == ids and generation.prompt_tokens == 5


@pytest.mark.parametrize("end", sorted(ENDS.values()))
def test_every_end_id_that_any_file_names_ends_a_turn_over_the_wire(client: rollout.Client, end: int) -> None:
    assert set(client.info().engine.eos_ids) == set(ENDS.values())
    forced = [5, 6, end, 7, 8]
    stopped = client.generate([1, 2, 3], forced_ids=forced, max_new_tokens=5)
    assert stopped.ids.tolist() == forced[:3] and (stopped.finish_reason.kind, stopped.finish_reason.stop_id) == ("stop", end)
    going_on = client.generate([1, 2, 3], forced_ids=forced, max_new_tokens=5, ignore_eos=True)
    assert going_on.ids.tolist() == forced and going_on.finish_reason.kind == "length"


def test_no_end_id_is_drawn_before_min_new_tokens_over_the_wire(client: rollout.Client) -> None:
    drawn = [client.generate([1, 2, 3], seed=seed, temperature=2.0, min_new_tokens=5, max_new_tokens=8) for seed in range(12)]
    for generation in drawn:
        assert len(generation.ids) >= 5 and not set(generation.ids[:5].tolist()) & set(ENDS.values())
        assert generation.behaviour_logprobs is not None
        assert (generation.behaviour_logprobs[:5] >= generation.logprobs[:5] - 1e-5).all()


def test_branches_of_every_kind_over_the_service_have_the_references_log_probabilities_once_each(
    client: rollout.Client, model: Any
) -> None:
    end = ENDS["<|im_end|>"]
    thought = [*spelled("<think>\nhmm\n</think>\n\nhello"), end]

    async def run() -> tuple[Episode, list[Any]]:
        chat = chat_format("qwen3")
        episode = Episode(client.aio, info=await client.aio.info(), format=chat, messages=USER, seed=6)
        turns = [await episode.act(forced_ids=thought, max_new_tokens=len(thought))]
        episode.observe(USER)  # drops the thinking
        turns.append(await episode.act(max_new_tokens=10))
        episode.retry()
        turns.append(await episode.act(max_new_tokens=10))
        agents = [episode.subagent(messages=[{"role": "user", "content": f"part {part}"}]) for part in range(3)]
        turns += await asyncio.gather(*(agent.act(max_new_tokens=10) for agent in agents))
        episode.compact([*USER, turns[0], *TOOL])
        turns.append(await episode.act(max_new_tokens=10))
        return episode, turns

    episode, turns = asyncio.run(run())
    episode.check_integrity()
    rows = episode.rows()
    assert [row.branch.kind for row in rows] == ["start", "rewrite", "retry", *["subagent"] * 3, "compaction"]
    assert turns[1].ids.tolist() != turns[2].ids.tolist()
    found = {turn.request_id: row.ids[turn.start : turn.end].tolist() for row in rows for turn in row.turns}
    assert found == {turn.record.request_id: turn.ids.tolist() for turn in turns}
    for row in rows:
        wanted = reference_logprobs(model, row.ids, 1.0)
        assert np.abs(wanted[row.mask[1:]] - row.logprobs[row.mask]).max() < 1e-4
