"""What a decode step costs beside the model: the embedded tiny model with 64 rows, both decode paths.

Timed: `Engine.step` in steady decode (no admissions, no endings), the model's forward and head inside it, the draw, and
the launch as a whole. `host_ms` is everything outside the model (row state, sampler, result records, planning, reading
results); `plan_ms` is what happens outside the launch. Not timed: prefill. The variants alternate; medians of all steps.

    python -m tests.bench.host_overhead --json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areno import Engine, EngineConfig, Request, SamplingParams
from tests.bench.record import arguments, publish

MODEL = Path(__file__).resolve().parents[2] / "examples" / "agentic" / "tiny_model"
LIMIT_HOST_MS = 1.0


class Timed:
    """Wraps a callable and keeps the time of its last calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.spent_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.spent_s += time.perf_counter() - started


class TimedModel:
    """Stands before the model and times its two calls."""

    def __init__(self, model: Any) -> None:
        self.forward, self.logits = Timed(model.forward), Timed(model.logits)

    @property
    def spent_s(self) -> float:
        """Seconds in the model so far."""
        return self.forward.spent_s + self.logits.spent_s


def _prepare(path: str, rows: int, prompt_tokens: int, steps: int) -> tuple[Engine, TimedModel]:
    engine = Engine(EngineConfig(model=str(MODEL), max_rows=rows, decode_tables=path, seed=1, max_prefill_tokens=4096))
    model = TimedModel(engine._forward._model)
    engine._forward._model = model  # type: ignore[assignment]
    rng = np.random.default_rng(0)
    for number in range(rows):
        prompt = rng.integers(0, engine.info.vocab_size, size=prompt_tokens)
        engine.submit(Request(request_id=number, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=steps, ignore_eos=True)))
    return engine, model


def measure(*, rows: int = 64, prompt_tokens: int = 64, warmup: int = 10, steps: int = 120) -> list[dict[str, Any]]:
    """Return one row per decode path."""
    paths = ("resident", "rebuilt")
    made = {path: _prepare(path, rows, prompt_tokens, warmup + steps + 20) for path in paths}
    samples: dict[str, list[tuple[float, float, float]]] = {path: [] for path in paths}
    for number in range(warmup + steps):
        for path in paths if number % 2 else reversed(paths):
            engine, model = made[path]
            model_before, launch_before, started = model.spent_s, engine.stats()["launch_s"], time.perf_counter()
            output = engine.step()
            step_s = time.perf_counter() - started
            if number >= warmup:
                assert output.token_ids.size == rows, "the window holds only steady decode steps"
                samples[path].append((step_s, model.spent_s - model_before, engine.stats()["launch_s"] - launch_before))
    result = []
    for path in paths:
        step, in_model, in_launch = (np.array(column) * 1e3 for column in zip(*samples[path]))
        result.append(
            {
                "mode": path,
                "batch": rows,
                "step_ms": statistics.median(step),
                "model_ms": statistics.median(in_model),
                "host_ms": statistics.median(step - in_model),
                "plan_ms": statistics.median(step - in_launch),
                "tokens_per_s": rows / statistics.median(step) * 1e3,
            }
        )
    return result


def main() -> None:
    """Measure, print, and fail if the host's share is above its limit."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(rows=options.rows)
    publish("host_overhead", {"model": "examples/agentic/tiny_model", "threads": 1, "limit_host_ms": LIMIT_HOST_MS}, rows, options)
    slow = [row["mode"] for row in rows if row["host_ms"] >= LIMIT_HOST_MS]
    if slow:
        raise SystemExit(f"host time per step is at or above {LIMIT_HOST_MS} ms for {', '.join(slow)}")


if __name__ == "__main__":
    main()
