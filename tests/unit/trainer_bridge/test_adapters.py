"""The adapters for other trainers, against loops that a test plays: what they push, what they hand over, what they refuse."""

from __future__ import annotations

import asyncio
import queue
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.trainer_bridge.fakes import FakeWeightService, TinyNet, failed_sample, make_sample
from trainer_bridge.adapters.hf_trainer import PushCallback
from trainer_bridge.adapters.trl import EpisodeRequest, EpisodeRollouts, EpisodeWorker, ServiceWeightTransfer, episode_reward
from trainer_bridge.errors import InvalidBatch, InvalidOption, RolloutShortfall
from trainer_bridge.groups import GroupTask, each_member
from trainer_bridge.samples import TrainingSample
from trainer_bridge.source import RolloutSource
from trainer_bridge.weights.push import WeightPush


@pytest.fixture
def service(tmp_path: Path) -> FakeWeightService:
    return FakeWeightService(tmp_path)


@pytest.fixture
def push(service: FakeWeightService) -> WeightPush:
    return WeightPush(service, TinyNet(), allow_unchanged=True)


def trainer_at(step: int, temperature: float = 1.0) -> Any:
    return SimpleNamespace(state=SimpleNamespace(global_step=step), args=SimpleNamespace(temperature=temperature))


def played(push: WeightPush, **fields: Any) -> Any:
    async def play(request: EpisodeRequest) -> list[TrainingSample]:
        await asyncio.sleep(0)
        return [make_sample(**{"version": push.version, "reward": float(request.index), **fields})]

    return play


def test_a_rollout_pushes_once_for_each_step_and_masks_what_the_environment_wrote(push: WeightPush) -> None:
    rollouts = EpisodeRollouts(played(push), push)
    first = rollouts(["a", "b", "c"], trainer_at(0))
    rollouts(["a"], trainer_at(0))
    assert push.version == 1
    rollouts(["a"], trainer_at(1))
    assert push.version == 2
    assert set(first) == {"prompt_ids", "completion_ids", "logprobs", "env_mask", "episode_reward"}
    sample = make_sample(version=1)
    start = int(np.argmax(sample.mask))
    for place in range(3):
        assert first["prompt_ids"][place] + first["completion_ids"][place] == sample.ids.tolist()
        assert len(first["prompt_ids"][place]) == start and first["env_mask"][place] == sample.mask[start:].astype(int).tolist()
        drawn = np.array(first["env_mask"][place], bool)
        assert np.isfinite(first["logprobs"][place]).all() and (np.array(first["logprobs"][place])[~drawn] == 0).all()
        assert np.allclose(np.array(first["logprobs"][place])[drawn], sample.logprobs[sample.mask])
    assert episode_reward(["x"] * 3, **{"episode_reward": first["episode_reward"]}, prompts=[]) == [0.0, 1.0, 2.0]


def test_it_works_inside_a_running_event_loop(push: WeightPush) -> None:
    async def notebook() -> int:
        return len(EpisodeRollouts(played(push), push)(["a"], trainer_at(0))["prompt_ids"])

    assert asyncio.run(notebook()) == 1


@pytest.mark.parametrize(
    ("fields", "trainer", "match"),
    [
        ({"version": 0}, trainer_at(0), r"versions 0; version 1 was just pushed and staleness must be 0"),
        ({"temperature": 0.5}, trainer_at(0), r"temperature 0.5; the trainer's is 1.0"),
        ({"temperature": 0.0}, trainer_at(0), r"temperature 0.0; the trainer's is 1.0"),
        ({"filtered": True}, trainer_at(0), "sample without top_k"),
        ({"shaped": True}, trainer_at(0), "without .* min_new_tokens"),
    ],
)
def test_rows_that_this_trainer_would_misread_are_refused(push: WeightPush, fields: Any, trainer: Any, match: str) -> None:
    with pytest.raises(InvalidBatch, match=match):
        EpisodeRollouts(played(push, **fields), push)(["a"], trainer)


def test_a_failed_episode_is_played_again_with_another_seed_and_never_becomes_a_reward_of_zero(push: WeightPush) -> None:
    seeds: list[int] = []

    async def play(request: EpisodeRequest) -> list[TrainingSample]:
        seeds.append(request.seed)
        return [make_sample(version=push.version) if request.attempt == 2 else failed_sample(info={"cause": "environment_step"})]

    assert len(EpisodeRollouts(play, push)(["a"], trainer_at(0))["prompt_ids"]) == 1
    assert len(set(seeds)) == 3
    with pytest.raises(RolloutShortfall, match=r"failed 2 times; causes: environment_step 2 times; .*max_attempts"):
        EpisodeRollouts(play, push, max_attempts=2)(["a"], trainer_at(0))

    async def forked(request: EpisodeRequest) -> list[TrainingSample]:
        return [make_sample(version=push.version)] * 2

    with pytest.raises(InvalidBatch, match="one row for each prompt"):
        EpisodeRollouts(forked, push)(["a"], trainer_at(0))
    with pytest.raises(InvalidOption, match="at least 1"):
        EpisodeRollouts(play, push, max_attempts=0)


def test_a_trainers_callback_pushes_at_the_start_on_its_steps_and_at_the_end(service: FakeWeightService, push: WeightPush) -> None:
    labels: list[int | None] = []
    callback = PushCallback(push, every=2, mode="drain", on_report=lambda report: labels.append(report.trainer_step))
    state = SimpleNamespace(global_step=0)
    callback.on_train_begin(None, state, None)
    for step in range(1, 6):
        state.global_step = step
        callback.on_step_end(None, state, None)
    callback.on_train_end(None, state, None)
    callback.on_train_end(None, state, None)
    assert labels == [0, 2, 4, 5] and service.commit_mode == ("drain", 60.0)
    assert PushCallback(push, first=False).on_train_begin(None, state, None) is None and len(labels) == 4
    with pytest.raises(InvalidOption, match="every=1 pushes after each step"):
        PushCallback(push, every=0)


class FakeAsyncTrainer:
    """AsyncGRPOTrainer's loop as its protocols describe it: sync, start the worker, drain the queue, step, sync."""

    def __init__(self, worker: EpisodeWorker, transfer: ServiceWeightTransfer, model: torch.nn.Module, max_staleness: int) -> None:
        self.worker, self.transfer, self.model, self.max_staleness = worker, transfer, model, max_staleness
        self.model_version = 0
        self.dropped = 0

    def sync(self) -> None:
        self.transfer.pause()
        self.transfer.send_weights((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        self.transfer.resume()
        self.model_version += 1
        self.worker.update_model_version(self.model_version)

    def batch(self, size: int, timeout_s: float = 10.0) -> list[Any]:
        rows: list[Any] = []
        deadline = time.monotonic() + timeout_s
        while len(rows) < size:
            assert time.monotonic() < deadline, "no rows came"
            try:
                row = self.worker.rollout_buffer.get(timeout=0.1)
            except queue.Empty:
                self.worker.check_health(30.0)
                continue
            if self.model_version - row.model_version > self.max_staleness:
                self.dropped += 1
                continue
            rows.append(row)
        return rows

    def train(self, steps: int) -> list[list[Any]]:
        self.transfer.init_weight_transfer()
        self.sync()
        self.worker.start()
        batches = []
        for _ in range(steps):
            batches.append(self.batch(4))
            with torch.no_grad():
                next(self.model.parameters()).add_(0.01)
            self.sync()
        self.worker.stop()
        self.transfer.destroy()
        return batches


def source_of(push: WeightPush, play: Any = None, **options: Any) -> RolloutSource[int]:
    async def member(task: GroupTask[int], number: int) -> TrainingSample:
        await asyncio.sleep(0.001)
        return make_sample(version=push.version, group_id=task.index, member=number, reward=float(number))

    made: dict[str, Any] = {"group_size": 2, "version": lambda: push.version, "max_ahead": 2, "poll_s": 0.02, "max_staleness": 1}
    return RolloutSource(range(10_000), play or each_member(member), **(made | options))


def test_worker_and_transfer_serve_an_async_trainers_loop(push: WeightPush) -> None:
    model = TinyNet()
    worker = EpisodeWorker(source_of(push), push, queue_size=4)
    batches = FakeAsyncTrainer(worker, ServiceWeightTransfer(push), model, max_staleness=2).train(5)
    assert push.version == 6 and [len(batch) for batch in batches] == [4] * 5
    sample = make_sample(version=1)
    for number, batch in enumerate(batches, start=1):
        for row in batch:
            assert row.input_ids.tolist() == sample.ids.tolist() and row.completion_mask.tolist() == sample.mask.astype(int).tolist()
            assert len(row.old_log_probs) == len(row.input_ids) and np.isfinite(row.old_log_probs).all()
            assert number - 2 <= row.model_version <= number and abs(row.advantage) == pytest.approx(0.7071, abs=1e-3)
            assert row.metrics["reward"] in (0.0, 1.0)
    assert batches[-1][0].model_version > batches[0][0].model_version
    worker.stop()


def assert_ends(worker: EpisodeWorker, match: str) -> None:
    """Look at a worker's health until it tells what ended it, and stop it."""
    deadline = time.monotonic() + 5
    with pytest.raises(RolloutShortfall, match=match):
        while time.monotonic() < deadline:
            worker.check_health(30.0)
            time.sleep(0.01)
    worker.stop()


def test_filtered_tokens_end_a_worker_whose_trainer_would_weigh_them_by_the_whole_distribution(push: WeightPush) -> None:
    async def member(task: GroupTask[int], number: int) -> TrainingSample:
        return make_sample(group_id=task.index, member=number, reward=float(number), filtered=number == 1)

    worker = EpisodeWorker(source_of(push, each_member(member)), push)
    worker.start()
    assert_ends(worker, "sample without top_k, top_p and min_p")
    assert all(row.advantage < 0 for row in list(worker.rollout_buffer.queue)), "only the member before it came"


def test_a_worker_tells_what_ended_it_or_that_nothing_comes_and_gives_lost_weights_back(
    service: FakeWeightService, push: WeightPush
) -> None:
    push.push()

    async def broken(task: GroupTask[int]) -> list[TrainingSample]:
        raise ValueError("the game is broken")

    worker = EpisodeWorker(source_of(push, broken, max_attempts=1), push)
    worker.start()
    worker.start()
    assert_ends(worker, "the game is broken")

    async def endless(task: GroupTask[int]) -> list[TrainingSample]:
        await asyncio.sleep(60)
        raise AssertionError

    worker = EpisodeWorker(source_of(push, endless), push)
    worker.start()
    service.lose_weights()
    worker.check_health(30.0)
    assert service.needs_weights is None and push.version == 1
    time.sleep(0.05)
    with pytest.raises(RolloutShortfall, match=r"no row came for .*stale_after_s=0.01; \d groups are in flight"):
        worker.check_health(0.01)
    worker.stop()
