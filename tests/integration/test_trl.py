"""TRL's own trainers on the service: some GRPO steps on a CPU with the embedded model; their protocols as the adapters see them."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib.util
import inspect
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollout
from examples.agentic.tictactoe.env import TicTacToe
from examples.agentic.tiny_model import MODEL_DIR
from rollout.agent import ChatFormat, EpisodeTask, TurnSampling, run_episode
from tests.unit.trainer_bridge.fakes import FakeWeightService, TinyNet, make_sample
from trainer_bridge import GroupTask, RolloutSource, TrainingSample, WeightPush, each_member, samples_of
from trainer_bridge.adapters.trl import EpisodeRequest, EpisodeRollouts, EpisodeWorker, ScoredRow, ServiceWeightTransfer, episode_reward

HAS_TRL = importlib.util.find_spec("trl") is not None and importlib.util.find_spec("datasets") is not None
pytestmark = [
    pytest.mark.skipif(not HAS_TRL, reason="needs TRL: pip install 'areno-rollout[trl]'"),
    # TRL's own notices (experimental parts, deprecations of what it imports) are not this repository's.
    pytest.mark.filterwarnings("ignore"),
]


def test_some_steps_of_grpo_train_on_episodes_whose_ratio_is_one(tmp_path: Path) -> None:
    import trl
    from datasets import Dataset

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    with rollout.local(str(MODEL_DIR), dtype="float32", threads=1, max_rows=16, state_dir=str(tmp_path / "state")) as client:
        format, info = ChatFormat(client.tokenizer_files()), client.info()
        push = WeightPush(client, model)

        async def play(request: EpisodeRequest) -> Any:
            episode = EpisodeTask(make_environment=TicTacToe, seed=request.seed)
            result = await run_episode(client.aio, episode, format=format, info=info, sampling=TurnSampling(max_new_tokens=4))
            return samples_of(result)

        gaps: list[float] = []
        rollouts = EpisodeRollouts(play, push)

        def watched(prompts: Any, trainer: Any) -> dict[str, list[Any]]:
            rows = rollouts(prompts, trainer)
            for prompt, completion, logprobs, mask in zip(rows["prompt_ids"], rows["completion_ids"], rows["logprobs"], rows["env_mask"]):
                ids = torch.tensor([prompt + completion])
                with torch.no_grad():
                    own = torch.log_softmax(trainer.model(input_ids=ids).logits[0, :-1].float(), -1).gather(-1, ids[0, 1:, None])[:, 0]
                drawn = np.array(mask, bool)
                gaps.append(float(np.abs(own[len(prompt) - 1 :].numpy()[drawn] - np.array(logprobs)[drawn]).max()))
            return rows

        config = trl.GRPOConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=64,
            max_steps=3,
            learning_rate=1e-3,
            temperature=1.0,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            beta=0.0,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=episode_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [f"game {n}" for n in range(16)]}),
            rollout_func=watched,
        )
        first = push.version
        trainer.train()
        assert push.version == first + 3, "one push for each step that rollouts were asked for"
        assert gaps and max(gaps) < 1e-4


def test_the_async_trainers_protocols_are_those_that_the_adapters_speak() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer as module
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    for protocol, ours in ((module.RolloutWorkerProtocol, EpisodeWorker), (module.WeightTransferProtocol, ServiceWeightTransfer)):
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                asked, given = (list(inspect.signature(one).parameters.values()) for one in (method, getattr(ours, name)))
                assert [(one.name, one.kind, one.default) for one in given] == [(one.name, one.kind, one.default) for one in asked], name
    queues = set(module.RolloutWorkerProtocol.__annotations__)
    assert queues == {"rollout_buffer", "metrics_queue"}, "EpisodeWorker has these"
    fields = {field.name: field for field in dataclasses.fields(ScoredRow)}
    for field in dataclasses.fields(RolloutSample):
        assert field.default is dataclasses.MISSING or fields[field.name].default == field.default, field.name
    # What the trainer does beyond its protocols is behind a check for its own worker.
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Attribute)]
    used = {(node.value.attr, node.attr) for node in calls if isinstance(node.value, ast.Attribute)}
    assert {name for owner, name in used if owner == "rollout_worker"} - {"_loop_kwargs"} <= set(dir(EpisodeWorker)) | queues
    assert {name for owner, name in used if owner == "weight_transfer"} <= set(dir(ServiceWeightTransfer))


def test_the_async_trainers_own_begin_sync_queue_and_end_run_on_the_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the trainer's code between worker, transfer and model but the forward, for which the CPU lacks a kernel."""
    from accelerate import PartialState
    from trl.experimental.async_grpo import async_grpo_trainer as module

    PartialState(cpu=True)  # its logger asks for it
    model = TinyNet()
    service = FakeWeightService(tmp_path)
    push = WeightPush(service, model, allow_unchanged=True)

    async def member(task: GroupTask[int], number: int) -> TrainingSample:
        await asyncio.sleep(0.001)
        return make_sample(version=push.version, group_id=task.index, member=number, reward=float(number))

    source = RolloutSource(
        range(10_000), each_member(member), group_size=2, version=lambda: push.version, max_ahead=2, poll_s=0.02, max_staleness=1
    )
    worker, transfer = EpisodeWorker(source, push, queue_size=4), ServiceWeightTransfer(push)
    trainer: Any = object.__new__(module.AsyncGRPOTrainer)
    trainer.accelerator = SimpleNamespace(
        is_main_process=True, device=torch.device("cpu"), unwrap_model=lambda wrapped: wrapped, wait_for_everyone=lambda: None
    )
    trainer.model, trainer.rollout_worker, trainer.weight_transfer = model, worker, transfer
    trainer.model_version, trainer._lora_sync, trainer._metrics = 0, False, {"train": defaultdict(list)}
    rows: list[Any] = []

    def loop(self: Any) -> str:
        module._TrainBeginCallback(self).on_train_begin(None, None, None)
        queued = module.RolloutQueueDataset(
            worker.rollout_buffer, lambda: self.model_version, worker.check_health, 30.0, self._metrics["train"], 2, 0.05
        )
        batches = iter(module.FixedCountBatcher(queued, num_processes=2, microbatch_size=4))
        for step in range(4):
            if step == 2:
                service.lose_weights()
                assert worker.rollout_buffer.qsize() <= 4
            rows.append([sample for row in next(batches) for sample in row.samples])
            with torch.no_grad():
                next(model.parameters()).add_(0.01)
            self._sync_weight()
        return "trained"

    monkeypatch.setattr(module._BaseTrainer, "_inner_training_loop", loop)
    assert trainer._inner_training_loop() == "trained"
    assert trainer.model_version == 5 and push.version == 5, "one push at the start and one for each step"
    sample = make_sample(version=1)
    for batch in rows:
        assert len(batch) == 4
        for row in batch:
            assert row["input_ids"].tolist() == sample.ids.tolist()
            assert row["completion_mask"].tolist() == sample.mask.astype(int).tolist()
            assert np.isfinite(row["old_log_probs"]).all() and len(row["old_log_probs"]) == len(sample.ids)
            assert abs(row["advantage"]) == pytest.approx(0.7071, abs=1e-3)
    staleness = trainer._metrics["train"]["sample/staleness_mean"]
    assert len(staleness) >= 16 and all(0 <= one <= 2 for one in staleness), "rows carry the trainer's own version numbers"
    assert len(trainer._metrics["train"]["perf/weight_sync_s"]) == 5
    assert not any(thread.name == "episode-worker" for thread in threading.enumerate()), "the trainer's end stops the worker"
