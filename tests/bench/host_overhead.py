"""What a decode step costs beside the model: the embedded tiny model with 64 rows, both decode paths.

Timed: `Engine.step` in steady decode (no admissions, no endings), and inside it the model's numeric work: forward and head
(`model_ms`) and the draw from the logits (`draw_ms`), which all belong to the launch on a device. `host_ms` is the rest
(planning, row state, result records, reading results), `outside_forward_ms` the rest with the draw, `plan_ms` what
happens outside the launch. Not timed: prefill. The variants alternate; medians of all steps.

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


class TimedSampler:
    """Stands before the sampler and times its draw."""

    def __init__(self, sampler: Any) -> None:
        self.draw = Timed(sampler.draw)


def _prepare(path: str, rows: int, prompt_tokens: int, steps: int) -> tuple[Engine, TimedModel, TimedSampler]:
    engine = Engine(EngineConfig(model=str(MODEL), device="cpu", max_rows=rows, decode_tables=path, seed=1, max_prefill_tokens=4096))
    model = TimedModel(engine._forward._model)
    engine._forward._model = model  # type: ignore[assignment]
    sampler = TimedSampler(engine._forward._sampler)
    engine._forward._sampler = sampler  # type: ignore[assignment]
    rng = np.random.default_rng(0)
    for number in range(rows):
        prompt = rng.integers(0, engine.info.vocab_size, size=prompt_tokens)
        engine.submit(Request(request_id=number, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=steps, ignore_eos=True)))
    return engine, model, sampler


def measure(*, rows: int = 64, prompt_tokens: int = 64, warmup: int = 10, steps: int = 120) -> list[dict[str, Any]]:
    """Return one row per decode path."""
    paths = ("resident", "rebuilt")
    made = {path: _prepare(path, rows, prompt_tokens, warmup + steps + 20) for path in paths}
    samples: dict[str, list[tuple[float, float, float, float]]] = {path: [] for path in paths}
    for number in range(warmup + steps):
        for path in paths if number % 2 else reversed(paths):
            engine, model, sampler = made[path]
            launch_before, model_before, draw_before = engine.stats()["launch_s"], model.spent_s, sampler.draw.spent_s
            started = time.perf_counter()
            output = engine.step()
            step_s = time.perf_counter() - started
            if number >= warmup:
                assert output.token_ids.size == rows, "the window holds only steady decode steps"
                launch_s = engine.stats()["launch_s"] - launch_before
                samples[path].append((step_s, model.spent_s - model_before, sampler.draw.spent_s - draw_before, launch_s))
    result = []
    for path in paths:
        step, in_model, in_draw, in_launch = (np.array(column) * 1e3 for column in zip(*samples[path]))
        result.append(
            {
                "mode": path,
                "batch": rows,
                "step_ms": statistics.median(step),
                "model_ms": statistics.median(in_model),
                "draw_ms": statistics.median(in_draw),
                "host_ms": statistics.median(step - in_model - in_draw),
                "outside_forward_ms": statistics.median(step - in_model),
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
