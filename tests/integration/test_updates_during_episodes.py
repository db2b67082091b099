"""Episodes on the real engine while a trainer pushes in every mode: they notice nothing, and every token is what its tag promises."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollout
from areno.kv.prefix import expand_spans
from rollout.agent import ChatFormat, Episode
from tests.fixtures_models import reference_keep_logprobs, reference_logprobs, reference_model, write_checkpoint
from tests.unit.rollout.agent.byte_tokenizer import CHATML, control_id, files
from trainer_bridge import WeightPush

torch.set_num_threads(1)
MODES = ("inflight", "drain", "abort_requests")
TURN_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, "llama", vocab_size=288, eos_token_id=control_id("<|im_end|>"), bos_token_id=control_id("<s>"))
    for name, content in files(CHATML).items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rollout.Client]:
    with rollout.local(str(folder), state_dir=str(tmp_path_factory.mktemp("state")), max_rows=16, threads=1) as client:
        yield client


async def play(client: rollout.Client, format: ChatFormat, number: int, policy: str, turns: int) -> Episode:
    episode = await client.aio.episode(
        format=format, messages=[{"role": "user", "content": "go" * (1 + number)}], seed=number, kv_policy=policy, max_kv_lag=20
    )
    for turn in range(turns):
        await episode.act(max_new_tokens=TURN_TOKENS, ignore_eos=True)
        if turn + 1 < turns:
            episode.observe([{"role": "user", "content": "more"}])
    return episode


@pytest.mark.parametrize("mode", MODES)
def test_an_agent_loop_notices_nothing_of_an_update(client: rollout.Client, folder: Path, mode: str) -> None:
    model = reference_model(folder)
    push, format = WeightPush(client, model, allow_unchanged=True), ChatFormat(client.tokenizer_files())
    push.push()
    models: dict[int, Any] = {push.version: model}
    first = push.version
    policies = ["keep", "recompute"] * 3
    over = threading.Event()
    failures: list[BaseException] = []

    def train() -> None:
        number = 0
        try:
            while not over.wait(0.05) and number < 12:
                number += 1
                newer = copy.deepcopy(model)
                with torch.no_grad():
                    for parameter in newer.parameters():
                        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.02)
                one = WeightPush(client, newer)
                models[one.push(mode=mode, drain_s=30.0).version] = newer
        except BaseException as error:
            failures.append(error)

    async def everything() -> list[Episode]:
        return await asyncio.gather(*(play(client, format, n, policy, 4) for n, policy in enumerate(policies)))

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        episodes = asyncio.run(everything())
    finally:
        over.set()
        trainer.join()
    assert not failures
    seen: set[int] = set()
    cuts = 0
    for episode, policy in zip(episodes, policies):
        (row,) = episode.rows()
        assert [turn.end - turn.start for turn in row.turns] == [TURN_TOKENS] * 4
        for turn in row.turns:
            ids, versions = row.ids[: turn.end], row.versions[turn.start : turn.end]
            seen.update(versions.tolist())
            logprobs = row.logprobs[turn.start : turn.end]
            if policy == "recompute":
                for version in np.unique(versions):
                    expected = reference_logprobs(models[int(version)], ids)[turn.start - 1 :]
                    assert np.abs(expected - logprobs)[versions == version].max() < 1e-4
                continue
            expected = reference_keep_logprobs(models, ids, expand_spans(turn.kv_spans, turn.end - 1))[turn.start - 1 :]
            if mode != "abort_requests":
                assert np.abs(expected - logprobs).max() < 1e-4
                continue
            # The spans are of the last request that a cut turn became; before its first cut a first turn had one version's cache.
            last = versions == versions[-1]
            cuts += int(not last.all())
            assert np.abs(expected - logprobs)[last].max() < 1e-4
            if turn is row.turns[0]:
                expected = reference_logprobs(models[int(versions[0])], ids)[turn.start - 1 :]
                assert np.abs(expected - logprobs)[versions == versions[0]].max() < 1e-4
    assert len(models) >= 3 and len(seen) >= 2 and min(seen) >= first
    assert (cuts > 0) == (mode == "abort_requests"), "turns of both policies are cut"
    assert client.stats()["failed"] == 0
