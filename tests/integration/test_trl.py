"""TRL's own trainers on the service: some GRPO steps on a CPU with the embedded model; their protocols as the adapters see them."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollout
from examples.agentic.tictactoe.env import TicTacToe
from examples.agentic.tiny_model import MODEL_DIR
from rollout.agent import ChatFormat, EpisodeTask, TurnSampling, run_episode
from trainer_bridge import WeightPush, samples_of
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
                assert list(inspect.signature(getattr(ours, name)).parameters) == list(inspect.signature(method).parameters), name
    queues = set(module.RolloutWorkerProtocol.__annotations__)
    assert queues == {"rollout_buffer", "metrics_queue"}, "EpisodeWorker has these"
    asked = {field.name for field in dataclasses.fields(RolloutSample)}
    assert asked <= {field.name for field in dataclasses.fields(ScoredRow)}
