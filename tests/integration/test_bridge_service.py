"""The bridge on the real service: a trainer that is fed, trains and pushes while episodes go on."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import rollout
from examples.agentic.tictactoe.env import TicTacToe
from examples.agentic.tiny_model import MODEL_DIR
from rollout.agent import ChatFormat, Episode, EpisodeTask, TurnSampling, run_episode
from tests.fixtures_models import tiny_model, write_checkpoint
from trainer_bridge import (
    GroupTask,
    RolloutSource,
    SampleStatus,
    TrainingSample,
    WeightPush,
    after_step_hook,
    collate,
    each_member,
    logprob_gap,
    policy_loss,
    samples_of,
    token_logprobs,
)

torch.set_num_threads(1)
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def client() -> Iterator[rollout.Client]:
    with rollout.local(str(MODEL_DIR), dtype="float32", threads=1, max_rows=16) as client:
        yield client


@pytest.fixture
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, local_files_only=True)


def forward(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch.ids_ST, attention_mask=batch.attention_mask_ST, position_ids=batch.positions_ST, use_cache=False).logits
    return token_logprobs(logits, batch)


class Games:
    """Plays tic-tac-toe over a client; `broken` members get an environment that fails in its first step."""

    def __init__(self, client: rollout.Client, *, broken: int = 0, temperature: float = 1.0) -> None:
        self.client, self.broken = client.aio, broken
        self.format, self.info = ChatFormat(client.tokenizer_files()), client.info()
        self.sampling = TurnSampling(temperature=temperature, max_new_tokens=4)

    async def play(self, task: GroupTask[int], member: int) -> list[TrainingSample]:
        class Broken(TicTacToe):
            async def step(self, turn: Any) -> Any:
                raise OSError("the board caught fire")

        made = Broken if member < self.broken else TicTacToe
        episode = EpisodeTask(make_environment=made, seed=task.prompt, member=member, attempt=task.attempt)
        result = await run_episode(self.client, episode, format=self.format, info=self.info, sampling=self.sampling)
        return samples_of(result, group_id=task.index, member=member)


def test_training_goes_on_while_episodes_do_and_every_version_is_proven(client: rollout.Client, model: Any) -> None:
    push = WeightPush(client, model)
    first_version = push.version
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    staleness, gaps = [], []
    options = {"group_size": 4, "version": lambda: push.version, "max_staleness": 1, "max_ahead": 4, "fresh_groups": 1}
    with RolloutSource(range(1000), each_member(Games(client).play), **options) as source:
        for _ in range(4):
            groups = source.next(4)
            staleness += [group.staleness for group in groups]
            batch = collate([sample for group in groups for sample in group.samples], version=push.version)
            new = forward(model, batch)
            gaps.append(logprob_gap(new, batch))
            policy_loss(new, batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = push.push()
            assert report.canary_gap is not None and report.canary_gap < 1e-3 and report.changed_tensors > 0
        assert source.stats().failures == {}
    assert push.version == client.info().version == first_version + 4
    assert set(staleness) <= {0, 1}
    assert all(gap.num_exact > 0 and gap.max_exact < 1e-4 for gap in gaps)
    assert all(gap.mean_other > 1e-4 for gap in gaps if gap.num_other)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
def test_the_trainers_own_recompute_gives_ratio_one_at_the_turns_temperature(
    client: rollout.Client, model: Any, temperature: float
) -> None:
    push = WeightPush(client, model, allow_unchanged=True)
    push.push()
    with RolloutSource(
        range(100), each_member(Games(client, temperature=temperature).play), group_size=4, version=lambda: push.version
    ) as source:
        batch = collate([sample for group in source.next(2) for sample in group.samples], version=push.version)
    with torch.no_grad():
        new = forward(model, batch)
    ratio = (new - batch.behaviour_logprobs_ST)[batch.loss_mask_ST].exp()
    assert batch.num_loss_tokens > 20 and bool(batch.exact_ST.any())
    assert (ratio - 1).abs().max() < 1e-4


def test_tokens_drawn_before_a_cache_was_built_anew_are_no_tokens_of_the_trainers_version_alone(tmp_path: Path) -> None:
    """Some tokens of the new version attend to what the old one computed; then a sleep builds everything anew, and the spans say so."""
    model = tiny_model("llama", seed=1)
    with rollout.local(str(write_checkpoint(tmp_path / "tiny", "llama")), dtype="float32", threads=1, max_rows=2) as client:
        push = WeightPush(client, model)

        def stand_still(stream: Any) -> None:
            push.push()
            next(delta for delta in stream if push.version in delta.versions)
            client.sleep("kv")
            client.wake()

        class Streaming:
            async def generate(self, prompt_ids: Any, **options: Any) -> Any:
                stream = client.stream(prompt_ids, **options)
                next(stream)
                stand_still(stream)
                return list(stream)[-1].finished

        episode = Episode(Streaming(), info=client.info(), prompt_ids=list(range(3, 40)), seed=2)  # type: ignore[arg-type]
        turn = asyncio.run(episode.act(max_new_tokens=400, ignore_eos=True))
        version = push.version
    (at,) = turn.record.kv_rebuilt_at
    (row,) = episode.rows()
    assert turn.record.kv_spans == ((0, version),) and (row.versions[turn.record.start : at] == version).any(), "the case is there"
    batch = collate([TrainingSample.from_row(row, reward=1.0)], [1.0], version=version)
    with torch.no_grad():
        gap = logprob_gap(forward(model, batch), batch)
    assert (gap.num_exact, gap.num_other) == (turn.record.end - at, at - turn.record.start)
    assert gap.max_exact < 1e-4 < gap.mean_other


def test_members_whose_environment_breaks_are_left_out_and_counted(client: rollout.Client) -> None:
    with RolloutSource(
        range(100), each_member(Games(client, broken=1).play), group_size=4, version=lambda: client.info().version
    ) as source:
        groups = source.next(3)
        stats = source.stats()
    for group in groups:
        failed = [sample for sample in group.samples if not sample.is_trainable]
        assert [sample.member for sample in failed] == [0]
        assert failed[0].status is SampleStatus.FAILED and failed[0].reward is None and failed[0].info["cause"] == "environment_step"
    assert stats.failed_members["environment_step"] >= 3 and stats.failures == {}
    assert collate([sample for group in groups for sample in group.samples]).num_left_out == 3


def test_a_long_optimizer_step_cancels_nothing(client: rollout.Client) -> None:
    version = client.info().version
    with RolloutSource(range(100), each_member(Games(client).play), group_size=4, version=lambda: version, max_ahead=4) as source:
        source.next(1)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            torch.randn(300, 300) @ torch.randn(300, 300)
        assert source.stats().ready == 4 and source.stats().failures == {}
        assert all(sample.is_trainable for group in source.next(4) for sample in group.samples)


def test_closing_the_source_leaves_no_request_behind(client: rollout.Client) -> None:
    async def endless(task: GroupTask[int]) -> list[TrainingSample]:
        await client.aio.generate(np.arange(65, 80), max_new_tokens=1500, ignore_eos=True)
        raise AssertionError("it was to be cancelled")

    with RolloutSource(range(10), endless, group_size=1, version=lambda: client.info().version, max_ahead=3) as source:
        source.start()
        wait_until(lambda: client.stats()["engine"]["running"] == 3)
    wait_until(lambda: client.stats()["engine"]["running"] == 0 and client.stats()["engine"]["waiting"] == 0)


def wait_until(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def test_the_hook_keeps_the_service_at_the_optimizers_weights(client: rollout.Client, model: Any) -> None:
    push = WeightPush(client, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    after_step_hook(optimizer, push)
    ids = torch.randint(3, 200, (1, 24))
    before = client.score(ids[0].numpy())
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    after = client.score(ids[0].numpy())
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].double()
    expected = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    assert after.version == push.version == before.version + 1
    assert np.abs(after.raw_logprobs - expected).max() < 1e-4 < np.abs(before.raw_logprobs - expected).max()


def test_the_loop_in_the_readme_runs_as_printed(tmp_path: Path) -> None:
    readme = (REPOSITORY / "trainer_bridge" / "README.md").read_text(encoding="utf-8")
    environment_code, loop = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    lines = [line for line in loop.splitlines() if line.strip()]
    assert len(lines) <= 22
    script = tmp_path / "loop.py"
    smaller = {"range(50)": "range(2)", ".next(16)": ".next(4)", "max_ahead=16": "max_ahead=4", "group_size=8": "group_size=4"}
    for printed_part, small in smaller.items():
        assert printed_part in loop
        loop = loop.replace(printed_part, small)
    script.write_text(environment_code + loop)
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    printed = result.stdout.splitlines()
    assert len(printed) == 2
    for step, line in enumerate(printed):
        version = rf"step {step}: reward 0\.\d\d, version {step + 1}, pause \d+\.\d ms, canary gap \d\.\de-\d\d"
        assert re.fullmatch(version + r", gap \d\.\de-0[5-9] over \d+ tokens", line), line


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}
