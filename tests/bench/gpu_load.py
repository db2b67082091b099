"""Tail and refill on a CUDA device: N requests submitted at once through up to 256 rows, output tokens per second.

The load is `loads.tail_refill(N)`: prompts of 254 to 257 tokens, outputs of 4 to 128, lengths forced, logprobs on, T = 1. Timed:
from the first submit to the last terminal record. Prefix cache off. Not timed: loading, capture, one warm-up run. Medians.

    python -m tests.bench.gpu_load --models qwen3-tiny qwen3-0.6b qwen3-8b --json
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from areno import Engine, EngineConfig, Request, SamplingParams
from tests.bench import loads, shapes
from tests.bench.record import arguments, publish

VLLM_TOKENS_PER_S = {
    "qwen3-tiny": {8: 1008, 64: 5756, 512: 18017},
    "qwen3-0.6b": {8: 793, 64: 5136, 512: 11335},
    "qwen3-8b": {8: 467, 64: 2200, 512: 4761},
}
"""vLLM 0.26.0 on the same card with the same load, 2026-11-29."""


def run_load(engine: Engine, load: list[dict[str, Any]]) -> tuple[float, dict[str, float]]:
    """Return the wall in seconds and what the engine counted."""
    before = engine.stats()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for number, item in enumerate(load):
        sampling = SamplingParams(max_new_tokens=item["gen"], ignore_eos=True, temperature=1.0, seed=number)
        engine.submit(Request(request_id=number, prompt_ids=np.array(item["prompt"]), sampling=sampling))
    tokens = 0
    while engine.has_work:
        tokens += engine.step().token_ids.size
    wall = time.perf_counter() - started
    assert tokens == sum(item["gen"] for item in load)
    after = engine.stats()
    return wall, {name: after[name] - before[name] for name in ("steps", "decode_launches", "prefill_tokens")}


def measure(model: str, sizes: list[int], *, repeats: int, options: dict[str, Any], log: bool) -> list[dict[str, Any]]:
    """Return one row per N."""
    engine = Engine(EngineConfig(model=shapes.write(model), load_format="dummy", seed=0, prefix_cache=False, **options))
    rows = []
    for size in sizes:
        load = loads.tail_refill(size)
        tokens = sum(item["gen"] for item in load)
        run_load(engine, load)
        runs = [run_load(engine, load) for _ in range(repeats)]
        wall = statistics.median(run[0] for run in runs)
        peer = VLLM_TOKENS_PER_S.get(model, {}).get(size)
        case: dict[str, Any] = {"model": model, "requests": size, "output_tokens": tokens, "wall_s": wall, "tokens_per_s": tokens / wall}
        case |= {"ratio_to_vllm": tokens / wall / peer if peer else None, **runs[-1][1]}
        rows.append(case)
        if log:
            print({name: round(value, 3) if isinstance(value, float) else value for name, value in case.items()}, flush=True)
    engine.close()
    return rows


def main() -> None:
    """Measure every model, one engine at a time."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-tiny", "qwen3-0.6b", "qwen3-8b"], choices=sorted(shapes.SHAPES))
    parser.add_argument("--sizes", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="an integer option of EngineConfig"
    )
    options = parser.parse_args()
    engine_options = {name: int(value) for name, value in options.option}
    rows = []
    for model in options.models:
        rows += measure(model, options.sizes, repeats=options.repeats, options=engine_options, log=not options.json)
        torch.cuda.empty_cache()
    publish("gpu_load", {"repeats": options.repeats, "engine": engine_options, "peer": "vLLM 0.26.0"}, rows, options)


if __name__ == "__main__":
    main()
