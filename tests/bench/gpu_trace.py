"""The agentic trace on a CUDA device: 256 multi-turn episodes at once, driven in process by an asyncio loop; episodes per second.

The trace is `agent_load.make(groups=32, members=8, seed=1)`: turns with forced lengths, tool results, tool waits in real time. Prefix
cache on, logprobs on, T = 1. Timed: from the first turn to the end of the last episode. Not timed: loading, capture, a warm-up of a
few episodes with other ids.

    python -m tests.bench.gpu_trace --models qwen3-0.6b qwen3-8b --json
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import torch

from areno import Engine, EngineConfig, Request, SamplingParams
from tests.bench import agent_load, shapes
from tests.bench.record import arguments, publish

VLLM_EPISODES_PER_S = {"qwen3-0.6b": 14.5, "qwen3-8b": 10.7}
"""vLLM 0.26.0 on the same card with the same trace, 2026-11-29."""


class Driver:
    """Steps the engine inside the running loop and resolves a future per request."""

    def __init__(self, engine: Engine, max_requests: int, max_tokens: int) -> None:
        self._engine = engine
        self._ids = np.zeros((max_requests, max_tokens), dtype=np.int32)
        self._logprobs = np.zeros((max_requests, max_tokens), dtype=np.float32)
        self._counts = np.zeros(max_requests, dtype=np.int64)
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._wake = asyncio.Event()
        self._submitted = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0

    async def generate(self, prompt: np.ndarray, tokens: int) -> np.ndarray:
        """Return the ids of one turn."""
        number = self._submitted
        self._submitted += 1
        sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=1.0, seed=number)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._engine.submit(Request(request_id=number, prompt_ids=prompt, sampling=sampling))
        self._wake.set()
        await future
        return self._ids[number, : self._counts[number]]

    async def run(self) -> None:
        """Step for ever."""
        while True:
            if not self._engine.has_work:
                self._wake.clear()
                await self._wake.wait()
            output = self._engine.step()
            places = self._counts[output.request_ids]
            if output.request_ids.size > np.unique(output.request_ids).size:
                for request_id, token, logprob in zip(output.request_ids, output.token_ids, output.logprobs):
                    place = self._counts[request_id]
                    self._ids[request_id, place], self._logprobs[request_id, place] = token, logprob
                    self._counts[request_id] += 1
            else:
                self._ids[output.request_ids, places], self._logprobs[output.request_ids, places] = output.token_ids, output.logprobs
                self._counts[output.request_ids] = places + 1
            for finished in output.finished:
                self.cached_tokens += finished.cached_tokens
                self.prompt_tokens += finished.prompt_tokens
                self._waiting.pop(finished.request_id).set_result(finished.output_tokens)
            await asyncio.sleep(0)


async def play(driver: Driver, prompt: list[int], turns: list[dict[str, Any]]) -> int:
    """Play one episode; return its generated tokens."""
    history = np.array(prompt, dtype=np.int32)
    generated = 0
    for turn in turns:
        ids = await driver.generate(history, turn["gen"])
        assert ids.size == turn["gen"]
        generated += ids.size
        history = np.concatenate([history, ids, np.array(turn["tool"], dtype=np.int32)])
        if turn["wait_s"]:
            await asyncio.sleep(turn["wait_s"])
    return generated


async def run_trace(engine: Engine, trace: dict[str, Any]) -> dict[str, float]:
    """Play all episodes at once."""
    episodes = [(group["prompt"], member["turns"]) for group in trace["groups"] for member in group["members"]]
    turns = sum(len(turns) for _, turns in episodes)
    driver = Driver(engine, turns, max(turn["gen"] for _, turns in episodes for turn in turns))
    stepping = asyncio.create_task(driver.run())
    before, started = engine.stats(), time.perf_counter()
    generated = sum(await asyncio.gather(*(play(driver, *episode) for episode in episodes)))
    wall = time.perf_counter() - started
    stepping.cancel()
    after = engine.stats()
    counted = {
        name: after[name] - before[name] for name in ("steps", "decode_launches", "prefill_tokens", "step_s", "launch_s", "preemptions")
    }
    return {
        "episodes": len(episodes),
        "turns": turns,
        "wall_s": wall,
        "episodes_per_s": len(episodes) / wall,
        "tokens_per_s": generated / wall,
        "cached_share": driver.cached_tokens / driver.prompt_tokens,
        **counted,
    }


def measure(model: str, *, repeats: int, options: dict[str, Any], log: bool) -> list[dict[str, Any]]:
    """Return one row per run of the trace."""
    engine = Engine(EngineConfig(model=shapes.write(model), load_format="dummy", seed=0, **options))
    rows = []
    asyncio.run(run_trace(engine, agent_load.make(groups=4, members=8, seed=5, waits=0.1)))
    for repeat in range(repeats):
        engine.clear_prefix_cache()
        figures = asyncio.run(run_trace(engine, agent_load.make(groups=32, members=8, seed=1)))
        case: dict[str, Any] = {"model": model, "repeat": repeat, **figures}
        if model in VLLM_EPISODES_PER_S:
            case["ratio_to_vllm"] = figures["episodes_per_s"] / VLLM_EPISODES_PER_S[model]
        rows.append(case)
        if log:
            print({name: round(value, 3) if isinstance(value, float) else value for name, value in case.items()}, flush=True)
    engine.close()
    return rows


def main() -> None:
    """Measure every model, one engine at a time."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], choices=sorted(shapes.SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="an integer option of EngineConfig"
    )
    options = parser.parse_args()
    engine_options = {name: int(value) for name, value in options.option}
    rows = []
    for model in options.models:
        rows += measure(model, repeats=options.repeats, options=engine_options, log=not options.json)
        torch.cuda.empty_cache()
    publish("gpu_trace", {"groups": 32, "members": 8, "seed": 1, "engine": engine_options, "peer": "vLLM 0.26.0"}, rows, options)


if __name__ == "__main__":
    main()
