"""What ranks tell each other in a decode step: collectives and their bytes, and on a CPU the time beside one rank's.

Counted on rank 0 over steady decode of rows that do not end, as `TPGroup.counts` has it: a sum counts its tensor, a gather all that it
brings together. In a step the one gather (two with filters) is the sampler's, the sums are the layers' and the embedding's. On a CUDA
device collectives in captured steps are issued by the device alone, so steps run launch by launch here. Timed: `Engine.step`, engines
taking turns; prefill and start-up are not. CPU ranks share the cores that there are.

    python -m tests.bench.tp_comm --tp 2 4 --json
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from areno import Engine, EngineConfig, Request, SamplingParams
from areno.parallel import CollectiveCounts
from tests.bench.host_overhead import MODEL
from tests.bench.record import arguments, publish

LIMIT_BYTES = 48
"""Bytes that a rank may gather for a row on the default path."""

KINDS: dict[str, dict[str, Any]] = {
    "default": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.1},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
}


def enter(engine: Engine, rows: int, tokens: int, sampling: dict[str, Any]) -> None:
    """Let rows decode that do not end by themselves."""
    rng = np.random.default_rng(0)
    for number in range(rows):
        prompt = rng.integers(3, engine.info.num_valid_ids, size=16)
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=number, **sampling)
        engine.submit(Request(request_id=number, prompt_ids=prompt, sampling=params))
    for _ in range(rows):
        if engine.step().token_ids.size == rows:
            return
    raise AssertionError(f"{rows} rows do not decode together")


def leave(engine: Engine, rows: int) -> None:
    """End what runs."""
    for number in range(rows):
        engine.cancel(number)
    while engine.has_work:
        engine.step()


def counted(engine: Engine, steps: int, rows: int) -> tuple[list[float], dict[str, float]]:
    """Step, and return the seconds of each step and what was counted in one."""
    before, walls = dataclasses.asdict(engine._group.counts), []
    for _ in range(steps):
        started = time.perf_counter()
        output = engine.step()
        walls.append(time.perf_counter() - started)
        assert output.token_ids.size == rows, "the window holds steady decode alone"
    after = dataclasses.asdict(engine._group.counts)
    return walls, {field.name: (after[field.name] - before[field.name]) / steps for field in dataclasses.fields(CollectiveCounts)}


def measure(sizes: list[int], *, model: str, device: str, rows: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return one row per kind of sampling and number of ranks."""
    common: dict[str, Any] = {"model": model, "device": device, "seed": 0, "max_rows": rows, "prefix_cache": False, "graphs": False}
    engines = {size: Engine(EngineConfig(tp=size, **common)) for size in (1, *sizes)}
    found = []
    try:
        for kind, sampling in KINDS.items():
            walls: dict[int, list[float]] = {size: [] for size in engines}
            counts: dict[int, dict[str, float]] = {}
            for engine in engines.values():
                enter(engine, rows, rounds * steps + 64, sampling)
            for number in range(rounds):
                for size in sorted(engines, reverse=number % 2 == 1):
                    taken, counts[size] = counted(engines[size], steps, rows)
                    walls[size] += taken
            for engine in engines.values():
                leave(engine, rows)
            one = statistics.median(walls[1])
            for size in sizes:
                step, per_step = statistics.median(walls[size]), counts[size]
                found.append(
                    {
                        "mode": kind,
                        "tp": size,
                        "batch": rows,
                        "collectives": per_step["all_reduces"] + per_step["all_gathers"] + per_step["broadcasts"],
                        "sums": per_step["all_reduces"],
                        "sums_bytes": per_step["all_reduce_bytes"],
                        "sampling_gathers": per_step["all_gathers"],
                        "sampling_bytes": per_step["all_gather_bytes"],
                        "sampling_bytes_per_row_and_rank": per_step["all_gather_bytes"] / rows / size,
                        "step_ms": step * 1e3,
                        "tp1_step_ms": one * 1e3,
                        "ratio_to_tp1": step / one,
                    }
                )
    finally:
        for engine in engines.values():
            engine.close()
    return found


def main(given: list[str] | None = None) -> None:
    """Measure, print, and fail where the default path gathers more than it may."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--tp", nargs="+", type=int, default=[2, 4], help="numbers of ranks, each beside one rank")
    parser.add_argument("--model", default=str(MODEL), help="folder of a checkpoint (default: the embedded model)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args(given)
    rows = measure(options.tp, model=options.model, device=options.device, rows=options.rows, steps=options.steps, rounds=options.rounds)
    named = "examples/agentic/tiny_model" if options.model == str(MODEL) else options.model
    config = {"model": named, "device": options.device, "steps": options.steps, "rounds": options.rounds, "limit_bytes": LIMIT_BYTES}
    publish("tp_comm", config, rows, options)
    wrong = [
        f"tp={row['tp']}, {row['mode']}: {row['sampling_gathers']:g} of {row['sampling_bytes_per_row_and_rank']:g} bytes a row and rank"
        for row in rows
        if row["mode"] in ("default", "greedy", "temperature", "penalties")
        and (row["sampling_gathers"] != 1 or row["sampling_bytes_per_row_and_rank"] > LIMIT_BYTES)
    ]
    if wrong:
        raise SystemExit(f"one gather of at most {LIMIT_BYTES} bytes a row and rank is allowed, not " + "; ".join(wrong))


if __name__ == "__main__":
    main()
