"""What the service costs beside the engine: the same load in process and through ZeroMQ, tokens per second.

SmolLM2-135M, fp32, `loads.cpu_mix`, 16 rows, logprobs on, one engine thread in both. In process: from handing over all requests
to the last token. Through the service (front and engine host as processes of their own, local socket): from the first
`generate` to the last result in the client, which asks for all of them at once from one event loop. Not timed: start, loading, one
warm-up of each. The two take turns; medians.

    python -m tests.bench.service_overhead --json
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollout
from areno import Engine, EngineConfig
from examples.agentic.smollm2 import prepare
from tests.bench.cpu_rollout import ROWS, Load, run_areno
from tests.bench.loads import cpu_mix
from tests.bench.record import arguments, publish

LIMIT = 0.10


async def run_service(client: rollout.AsyncClient, load: Load) -> int:
    """Ask for all requests at once; return the tokens that came with a log-probability."""

    async def one(number: int, item: dict[str, Any]) -> int:
        result = await client.generate(item["prompt"], max_new_tokens=item["gen"], ignore_eos=True, seed=number)
        assert result.logprobs is not None and not np.isnan(result.logprobs).any()
        return int(result.ids.size)

    return sum(await asyncio.gather(*(one(number, item) for number, item in enumerate(load))))


def measure(folder: Path, load: Load, *, repeats: int) -> list[dict[str, Any]]:
    """Return one row per way; the service's has its cost as a share of the engine's own rate."""
    wanted = sum(item["gen"] for item in load)
    engine = Engine(EngineConfig(model=str(folder), device="cpu", max_rows=ROWS, seed=1, prefix_cache=False, max_prefill_tokens=512))
    seconds: dict[str, list[float]] = {"engine": [], "service": []}
    options = {"device": "cpu", "max_rows": ROWS, "seed": 1, "prefix_cache": False, "max_prefill_tokens": 512, "threads": 1}
    with rollout.local(str(folder), **options) as client:
        asyncio.run(run_service(client.aio, load[:ROWS]))
        run_areno(engine, load[:ROWS], 0)
        for number in range(repeats):
            for way in ("engine", "service") if number % 2 == 0 else ("service", "engine"):
                started = time.perf_counter()
                if way == "engine":
                    tokens = run_areno(engine, load, (number + 1) * 1000)
                else:
                    tokens = asyncio.run(run_service(client.aio, load))
                seconds[way].append(time.perf_counter() - started)
                assert tokens == wanted, f"{way} made {tokens} of {wanted} tokens"
    rows: list[dict[str, Any]] = [
        {"mode": way, "tokens_per_s": wanted / statistics.median(spent), "seconds": statistics.median(spent)}
        for way, spent in seconds.items()
    ]
    ratios = [service / own for own, service in zip(seconds["engine"], seconds["service"])]
    rows[1]["cost_share"] = 1.0 - 1.0 / statistics.median(ratios)
    return rows


def main() -> None:
    """Measure, print, and fail if the service costs more than its share."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(prepare().folder, cpu_mix(options.requests), repeats=options.repeats)
    config = {"model": "SmolLM2-135M-Instruct", "requests": options.requests, "rows": ROWS, "threads": 1, "repeats": options.repeats}
    publish("service_overhead", {**config, "limit": LIMIT}, rows, options)
    if rows[1]["cost_share"] > LIMIT:
        raise SystemExit(f"the service costs {rows[1]['cost_share']:.1%} of the engine's own rate, more than {LIMIT:.0%}")


if __name__ == "__main__":
    main()
