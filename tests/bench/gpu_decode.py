"""Steady decode on a CUDA device: ms per step at batch 1, 8, 64 and 256, random weights of published shapes.

Timed: the wall of 257 outputs minus the wall of 1 output for the same prompts (254 to 257 tokens), over 256: prefill and
start-up cancel out, delivery of every token to the caller is in. Prefix cache off, ends ignored. `host_ms` is the time of
`Engine.step` outside waiting for the device, per step. Not timed: loading, capture. Medians of repeats.

    python -m tests.bench.gpu_decode --models qwen3-tiny qwen3-0.6b qwen3-8b --json
    python -m tests.bench.gpu_decode --models qwen3-8b --tp 1 2 --json           (cards of one host; `ratio_to_tp1` where 1 comes first)
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from areno import Engine, EngineConfig, Request, SamplingParams
from tests.bench import shapes
from tests.bench.record import arguments, publish

PROMPTS = (254, 255, 256, 257)
STEPS = 256
MODES = {
    "sampled": {"temperature": 1.0, "logprobs": True},
    "sampled-no-logprobs": {"temperature": 1.0, "logprobs": False},
    "greedy": {"temperature": 0.0, "logprobs": True},
}


def _wall(engine: Engine, batch: int, outputs: int, sampling: dict[str, Any], rng: np.random.Generator) -> float:
    vocab = engine.info.vocab_size
    for number in range(batch):
        prompt = rng.integers(1000, vocab, size=PROMPTS[number % len(PROMPTS)])
        params = SamplingParams(max_new_tokens=outputs, ignore_eos=True, seed=number, **sampling)
        engine.submit(Request(request_id=number, prompt_ids=prompt, sampling=params))
    torch.cuda.synchronize()
    started = time.perf_counter()
    tokens = 0
    while engine.has_work:
        tokens += engine.step().token_ids.size
    wall = time.perf_counter() - started
    assert tokens == batch * outputs, f"{tokens} tokens came, {batch * outputs} were asked for"
    return wall


def _host_s(engine: Engine) -> float:
    return float(engine.stats()["step_s"]) - engine._ring.waited_s


def measure(
    model: str, batches: list[int], *, modes: list[str], repeats: int, options: dict[str, Any], tp: int = 1, log: bool = False
) -> list[dict[str, Any]]:
    """Return one row per batch and mode."""
    engine = Engine(
        EngineConfig(model=shapes.write(model), load_format="dummy", seed=0, prefix_cache=False, max_rows=max(batches), tp=tp, **options)
    )
    rng = np.random.default_rng(0)
    rows = []
    for mode in modes:
        for batch in batches:
            _wall(engine, batch, STEPS + 1, MODES[mode], rng)
            steps = []
            host_before = _host_s(engine)
            steps_before = engine.stats()["steps"]
            for _ in range(repeats):
                short, long = (_wall(engine, batch, outputs, MODES[mode], rng) for outputs in (1, STEPS + 1))
                steps.append((long - short) / STEPS * 1e3)
            step = statistics.median(steps)
            host_ms = (_host_s(engine) - host_before) / (engine.stats()["steps"] - steps_before) * 1e3
            rows.append(
                {
                    "model": model,
                    "mode": mode,
                    "batch": batch,
                    "tp": tp,
                    "step_ms": step,
                    "min_step_ms": min(steps),
                    "max_step_ms": max(steps),
                    "host_ms": host_ms,
                    "tokens_per_s": batch / step * 1e3,
                }
            )
            if log:
                print({name: round(value, 4) if isinstance(value, float) else value for name, value in rows[-1].items()}, flush=True)
    engine.close()
    return rows


def main() -> None:
    """Measure every model, one engine at a time."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-tiny", "qwen3-0.6b", "qwen3-8b"], choices=sorted(shapes.SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--modes", nargs="+", default=["sampled"], choices=sorted(MODES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tp", nargs="+", type=int, default=[1], help="numbers of tensor-parallel ranks, one after the other")
    parser.add_argument(
        "--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="an integer option of EngineConfig"
    )
    options = parser.parse_args()
    engine_options = {name: int(value) for name, value in options.option}
    rows: list[dict[str, Any]] = []
    for model in options.models:
        for tp in options.tp:
            given = {"modes": options.modes, "repeats": options.repeats, "options": engine_options, "tp": tp, "log": not options.json}
            rows += measure(model, options.batches, **given)
            torch.cuda.empty_cache()
    alone = {(row["model"], row["mode"], row["batch"]): row["step_ms"] for row in rows if row["tp"] == 1}
    for row in rows:
        one = alone.get((row["model"], row["mode"], row["batch"]))
        row["ratio_to_tp1"] = row["step_ms"] / one if one is not None and row["tp"] > 1 else None
    config = {"prompts": PROMPTS, "steps": STEPS, "repeats": options.repeats, "engine": engine_options, "modes": MODES}
    publish("gpu_decode", config, rows, options)


if __name__ == "__main__":
    main()
