"""Thousands of short requests through one engine: memory stays flat and nothing is lost.

Run in process over a tiny random model: short prompts and budgets, a fifth of the requests cancelled at a random moment, a
pool small enough to evict and preempt. Measured: resident memory (psutil) after the first tenth and at the end; counted:
pages, rows and slots at the end. Not timed.

    python -m tests.bench.soak --json
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from areno import Engine, EngineConfig, Request, SamplingParams
from tests.bench.record import arguments, publish
from tests.fixtures_models import write_checkpoint

LIMIT_MB_PER_1000 = 1.0
LIVE = 24
LONG_SHARE = 0.03


def _request(rng: np.random.Generator, number: int) -> Request:
    group = number // 4 if number // 4 % 3 == 0 else None
    source = rng if group is None else np.random.default_rng(group)
    prompt = source.integers(3, 256, size=int(source.integers(1, 40)))
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 8}, {"repetition_penalty": 1.2}, {"forced_ids": [5, 6]}]
    budget = int(rng.integers(80, 160)) if rng.random() < LONG_SHARE else int(rng.integers(2, 10))
    sampling = SamplingParams(max_new_tokens=budget, seed=number, **kinds[int(rng.integers(len(kinds)))])
    lineage = f"l{number % 50}" if rng.random() < 0.2 else None
    return Request(request_id=number, prompt_ids=prompt, sampling=sampling, lineage=lineage, group=group)


def measure(folder: Path, *, requests: int, settle: int, run_ahead: int = 1) -> dict[str, Any]:
    """Run the load; return memory and what is left. `settle` requests pass before memory counts."""
    rng = np.random.default_rng(0)
    engine = Engine(EngineConfig(model=str(folder), device="cpu", max_rows=16, num_pages=20, run_ahead=run_ahead, seed=1, sampling_slots=8))
    process = psutil.Process()
    live: set[int] = set()
    ended = number = 0
    settled_mb = peak_mb = 0.0
    while ended < requests:
        while number < requests and len(live) < LIVE:
            engine.submit(_request(rng, number))
            live.add(number)
            number += 1
        if live and rng.random() < 0.2:
            engine.cancel(int(rng.choice(list(live))))
        for finished in engine.step().finished:
            live.discard(finished.request_id)
            ended += 1
            if ended % 500 == 0 or ended == settle:
                gc.collect()
                resident_mb = process.memory_info().rss / 2**20
                if ended == settle:
                    settled_mb = resident_mb
                peak_mb = max(peak_mb, resident_mb)
                engine.check_integrity()
    gc.collect()
    engine.check_integrity()
    stats = engine.stats()
    return {
        "mode": "soak",
        "requests": requests,
        "cancelled": stats["cancelled"],
        "preemptions": stats["preemptions"],
        "forks": stats["forks"],
        "settled_mb": settled_mb,
        "end_mb": process.memory_info().rss / 2**20,
        "mb_per_1000": (process.memory_info().rss / 2**20 - settled_mb) / max((requests - settle) / 1000, 1e-9),
        "leaked_pages": engine.info.num_pages - stats["free_pages"] - stats["cached_pages"],
        "leaked_rows": stats["rows_used"],
        "leaked_slots": engine.info.sampling_slots - stats["free_sampling_slots"],
    }


def main() -> None:
    """Measure, print, and fail on a leak."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        row = measure(write_checkpoint(Path(folder) / "model", "llama"), requests=options.requests, settle=2_000)
    publish("soak", {"model": "tiny random llama", "live": LIVE, "threads": 1, "limit_mb_per_1000": LIMIT_MB_PER_1000}, [row], options)
    if row["leaked_pages"] or row["leaked_rows"] or row["leaked_slots"] or row["mb_per_1000"] >= LIMIT_MB_PER_1000:
        raise SystemExit("memory grows or something leaks")


if __name__ == "__main__":
    main()
