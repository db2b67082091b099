"""The peer of `agent_trace` on a CPU: transformers' continuous batching, driven by a loop of its own over the same load."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils.logging import disable_progress_bar

from tests.bench import agent_load

Trace = dict[str, Any]


class Continuous:
    """transformers' continuous batching over the same load; its thread runs only while it is timed."""

    def __init__(self, folder: Path, rows: int, threads: int) -> None:
        disable_progress_bar()
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._rows = rows

    def run(self, trace: Trace) -> dict[str, Any]:
        """Play all episodes at once and return their figures. Start and stop of the manager are not timed."""
        settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=128, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(
            # Of the page sizes 16, 32 and 256 the fastest for this load here.
            max_requests_per_batch=self._rows,
            page_size=32,
            num_blocks=4096,
            max_batch_tokens=512,
            return_logprobs=True,
            allow_block_sharing=True,
        )
        manager = self._model.init_continuous_batching(generation_config=settings, continuous_batching_config=batching)
        manager.start()
        try:
            self._play(manager, agent_load.make(groups=1, members=2, seed=5, vocab=200, scale=0.05, waits=0.0))
            started = time.perf_counter()
            tokens = self._play(manager, trace)
            wall_s = time.perf_counter() - started
        finally:
            manager.stop(block=True)
        assert tokens == trace["total_generated"], f"{tokens} tokens of {trace['total_generated']}"
        episodes = len(agent_load.episodes_of(trace))
        return {"episodes": episodes, "wall_s": wall_s, "episodes_per_s": episodes / wall_s, "tokens_per_s": tokens / wall_s}

    @staticmethod
    def _play(manager: Any, trace: Trace) -> int:
        """Feed the manager: a turn when its episode's last one is there and its tool's time is over."""
        histories, turns, due = [], [], []
        for prompt, plan in agent_load.episodes_of(trace):
            due.append((0.0, len(histories)))
            histories.append(prompt.tolist())
            turns.append(iter(plan))
        running: dict[str, tuple[int, dict[str, Any]]] = {}
        open_episodes, tokens = len(histories), 0
        while open_episodes:
            now = time.perf_counter()
            ready = [number for at, number in due if at <= now]
            due = [(at, number) for at, number in due if at > now]
            for number in ready:
                turn = next(turns[number])
                name = manager.add_request(list(histories[number]), max_new_tokens=turn["gen"], eos_token_id=-1)
                running[name] = (number, turn)
            wait_s = min((at for at, _ in due), default=now + 1.0) - now if not running else 0.002
            result = manager.get_result(timeout=max(0.0005, wait_s))
            if result is None or not result.is_finished():
                continue
            assert result.error is None, result.error
            number, turn = running.pop(result.request_id)
            assert len(result.logprobs) == len(result.generated_tokens)
            tokens += len(result.generated_tokens)
            histories[number] += [*result.generated_tokens, *turn["tool"]]
            if turn["tool"]:
                due.append((time.perf_counter() + turn["wait_s"], number))
            else:
                open_episodes -= 1
        return tokens
