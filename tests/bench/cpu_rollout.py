"""Rollout tokens per second on a CPU against transformers, on a real model: SmolLM2-135M, fp32, logprobs on, same threads.

The load is `loads.cpu_mix`: prompts of 16-128 and outputs of 8-128 tokens, forced to their length. Timed: from handing over
all requests to the last token. Not timed: loading, one warm-up of each engine. Three ways, in turns, medians of repeats:
areno with 16 rows; transformers' `generate` in padded batches of 16 in arrival order (each batch runs to its longest
output; only wanted tokens count); transformers' continuous batching through `add_request`, 16 requests at once.

    python -m tests.bench.cpu_rollout --json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils.logging import disable_progress_bar

from areno import Engine, EngineConfig, Request, SamplingParams
from examples.agentic.smollm2 import prepare
from tests.bench.loads import cpu_mix
from tests.bench.record import arguments, publish

ROWS = 16
MUST = {"transformers_generate": 2.2, "transformers_continuous": 2.0}
Load = list[dict[str, Any]]


def run_areno(engine: Engine, load: Load, first_id: int) -> int:
    """Run the load in process; return the tokens produced."""
    for number, item in enumerate(load):
        sampling = SamplingParams(max_new_tokens=item["gen"], ignore_eos=True, seed=number)
        engine.submit(Request(request_id=first_id + number, prompt_ids=item["prompt"], sampling=sampling))
    tokens = 0
    while engine.has_work:
        output = engine.step()
        assert not np.isnan(output.logprobs).any()
        tokens += output.token_ids.size
    return tokens


def run_generate(model: Any, load: Load) -> int:
    """Run the load through `generate` in padded batches of 16; return the wanted tokens."""
    tokens = 0
    for start in range(0, len(load), ROWS):
        batch = load[start : start + ROWS]
        width, longest = max(len(item["prompt"]) for item in batch), max(item["gen"] for item in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(batch):
            ids[row, width - len(item["prompt"]) :] = torch.tensor(item["prompt"])
            mask[row, width - len(item["prompt"]) :] = 1
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        with torch.inference_mode():
            made = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
            for row, item in enumerate(batch):
                new = made.sequences[row, width : width + item["gen"]]
                logits = torch.stack([step[row] for step in made.logits[: item["gen"]]])
                torch.log_softmax(logits, dim=-1).gather(1, new[:, None])
                tokens += new.numel()
    return tokens


class Continuous:
    """transformers' continuous batching, running only while it is timed: its thread would poll beside the others otherwise."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, load: Load) -> tuple[int, float]:
        """Run the load through a manager that has been warmed up; return tokens and seconds. Start and stop are not timed."""
        settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=128, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(max_requests_per_batch=ROWS, num_blocks=64, max_batch_tokens=512, return_logprobs=True)
        manager = self._model.init_continuous_batching(generation_config=settings, continuous_batching_config=batching)
        manager.start()
        try:
            self._play(manager, [{"prompt": load[0]["prompt"], "gen": 2}])
            return _timed(lambda: self._play(manager, load))
        finally:
            manager.stop(block=True)

    @staticmethod
    def _play(manager: Any, load: Load) -> int:
        for item in load:
            manager.add_request(list(item["prompt"]), max_new_tokens=item["gen"], eos_token_id=-1)
        ended = tokens = 0
        while ended < len(load):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert result.error is None, result.error
                ended += 1
                tokens += len(result.generated_tokens)
        return tokens


def _timed(run: Callable[[], int]) -> tuple[int, float]:
    started = time.perf_counter()
    tokens = run()
    return tokens, time.perf_counter() - started


def measure(folder: Path, load: Load, *, repeats: int) -> list[dict[str, Any]]:
    """Return one row per way, with the ratio of areno to each peer in the same run."""
    wanted = sum(item["gen"] for item in load)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    engine = Engine(EngineConfig(model=str(folder), device="cpu", max_rows=ROWS, seed=1, prefix_cache=False, max_prefill_tokens=512))
    continuous = Continuous(peer)
    rounds = 0

    def areno() -> int:
        nonlocal rounds
        rounds += 1
        return run_areno(engine, load, rounds * 1000)

    ways: dict[str, Callable[[], tuple[int, float]]] = {
        "areno": lambda: _timed(areno),
        "transformers_generate": lambda: _timed(lambda: run_generate(model, load)),
        "transformers_continuous": lambda: continuous.run(load),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    warm = load[:ROWS]
    run_areno(engine, warm, 0)
    run_generate(model, warm)
    for number in range(repeats):
        for way in list(ways) if number % 2 == 0 else list(reversed(ways)):
            tokens, spent = ways[way]()
            assert tokens == wanted, f"{way} made {tokens} of {wanted} tokens"
            seconds[way].append(spent)
    rows = [
        {"mode": way, "tokens_per_s": wanted / statistics.median(spent), "seconds": statistics.median(spent)}
        for way, spent in seconds.items()
    ]
    for peer_way in MUST:
        ratios = [theirs / ours for ours, theirs in zip(seconds["areno"], seconds[peer_way])]
        rows[0][f"ratio_to_{peer_way}"] = statistics.median(ratios)
    return rows


def main() -> None:
    """Measure, print, and fail if a ratio is missed."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    rows = measure(prepare().folder, cpu_mix(options.requests), repeats=options.repeats)
    config = {
        "model": "SmolLM2-135M-Instruct",
        "requests": options.requests,
        "rows": ROWS,
        "threads": options.threads,
        "repeats": options.repeats,
        "must": MUST,
    }
    publish("cpu_rollout", config, rows, options)
    missed = [way for way, must in MUST.items() if rows[0][f"ratio_to_{way}"] < must]
    if missed:
        raise SystemExit(f"below the wanted ratio to {', '.join(missed)}")


if __name__ == "__main__":
    main()
