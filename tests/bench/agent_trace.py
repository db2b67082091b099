"""The agentic trace through the real service and client: hundreds of multi-turn episodes at once; episodes per second.

The load is `agent_load.make`: turns with forced lengths, tool results, tool waits in real time; log-probabilities on, T = 1. Front and
engine host run as processes of their own; this process plays the episodes in one event loop, each as a `rollout.agent.Episode`
that says how long its tool takes. Timed: from the first turn to the end of the last episode. Not timed: start, loading, a warm-up
with other ids. `client_cpu_us_per_token` is the processor time of this process, all its threads, by generated token.

    python -m tests.bench.agent_trace --json                                     # CPU: embedded model, peer transformers
    python -m tests.bench.agent_trace --models qwen3-0.6b qwen3-8b --json        # one CUDA device, random weights
    python -m tests.bench.agent_trace --scripted --groups 250 --json             # 2,000 episodes on a scripted engine

On the CPU the peer is transformers' continuous batching in this process, driven by a loop of its own over the same load, with the same
number of threads. Both take turns; medians of repeats. A scripted
engine measures front and client alone; no figure of an engine is quoted from it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rollout
from rollout.agent import Episode
from tests.bench import agent_load, shapes
from tests.bench.record import arguments, publish
from tests.bench.scripted_engine import scripted_service
from tests.fakes import VOCABULARY

TINY_MODEL = Path(__file__).parents[2] / "examples" / "agentic" / "tiny_model"
TINY = "tiny_model"
SCRIPTED = "scripted"
MUST = {"qwen3-0.6b": 22.0, "qwen3-8b": 10.7}
"""Episodes per second on one H200, 256 episodes at once."""
MUST_RATIO = 3.0
MUST_CACHED_SHARE = 0.889
START_TIMEOUT_S = 400.0
CPU_ROWS = 64
# With fewer, the longest episode's tool waits (4.9 s) are most of the wall time, and the engines hardly differ.
CPU_GROUPS = 64
WARM_SEED = 5
Trace = dict[str, Any]


class Tally:
    """What the episodes of one run came to."""

    def __init__(self) -> None:
        self.tokens = 0
        self.prompt_tokens: dict[int, int] = defaultdict(int)
        self.cached_tokens: dict[int, int] = defaultdict(int)

    def add(self, episode: Episode) -> None:
        """Count an episode that ended."""
        for turn in episode.turns():
            self.tokens += turn.end - turn.start
            self.prompt_tokens[turn.index] += turn.prompt_tokens
            self.cached_tokens[turn.index] += turn.cached_tokens

    def figures(self, episodes: int, wall_s: float, cpu_s: float) -> dict[str, Any]:
        """Return rates and shares."""
        turns = sorted(self.prompt_tokens)
        return {
            "episodes": episodes,
            "wall_s": wall_s,
            "episodes_per_s": episodes / wall_s,
            "tokens_per_s": self.tokens / wall_s,
            "cached_share": sum(self.cached_tokens.values()) / sum(self.prompt_tokens.values()),
            "cached_share_by_turn": [round(self.cached_tokens[turn] / self.prompt_tokens[turn], 4) for turn in turns],
            "client_cpu_us_per_token": 1e6 * cpu_s / self.tokens,
        }


async def play(
    client: rollout.AsyncClient, info: Any, prompt: np.ndarray, turns: list[dict[str, Any]], seed: int, salt: str, tally: Tally
) -> None:
    """Play one episode of the trace. Raises: what the client raises; AssertionError for a turn of another length."""
    episode = Episode(client, info=info, prompt_ids=prompt, seed=seed, cache_salt=salt)
    for turn in turns:
        drawn = await episode.act(max_new_tokens=turn["gen"], ignore_eos=True)
        assert drawn.ids.size == turn["gen"], f"{drawn.ids.size} tokens of {turn['gen']}: {drawn.finish_reason}"
        if turn["wait_s"]:
            episode.tool_wait(turn["wait_s"])
            await asyncio.sleep(turn["wait_s"])
        if turn["tool"]:
            assert episode.observe_ids(np.array(turn["tool"], np.int32)), f"the episode ended as {episode.status}: {episode.limit}"
    episode.finish()
    tally.add(episode)


async def run_service(client: rollout.AsyncClient, trace: Trace, salt: str) -> dict[str, Any]:
    """Play all episodes at once and return their figures. Each run has a salt of its own, so that no other run's pages are hit."""
    episodes, tally, info = agent_load.episodes_of(trace), Tally(), await client.info()
    gc.collect()
    cpu_s, started = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as playing:
        for number, (prompt, turns) in enumerate(episodes):
            playing.create_task(play(client, info, prompt, turns, number, salt, tally))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    assert tally.tokens == trace["total_generated"]
    return tally.figures(len(episodes), wall_s, cpu_s)


def measure_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for the service with the embedded model and one for its peer, medians of repeats."""
    vocab = options.vocab or int(json.loads((TINY_MODEL / "config.json").read_text())["vocab_size"])
    trace = make_trace(options, vocab, options.scale or 0.1)
    ways: dict[str, Callable[[int], dict[str, Any]]] = {}
    with rollout.local(str(TINY_MODEL), **service_options(options, "cpu", dtype="float32", threads=options.threads)) as client:
        asyncio.run(run_service(client.aio, warm_trace(vocab, options.scale or 0.1), "warm"))
        ways["areno"] = lambda repeat: asyncio.run(run_service(client.aio, trace, f"run {repeat}"))
        if options.peer:
            from tests.bench.agent_trace_peer import Continuous

            peer = Continuous(TINY_MODEL, options.rows or CPU_ROWS, options.threads)
            ways["transformers_continuous"] = lambda repeat: peer.run(trace)
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for repeat in range(options.repeats):
            for way in list(ways) if repeat % 2 == 0 else list(reversed(ways)):
                runs[way].append(ways[way](repeat))
                if not options.json:
                    print(way, runs[way][-1], flush=True)
    rows = [{"model": TINY, "mode": way, **medians(found)} for way, found in runs.items()]
    if options.peer:
        ratios = [own["episodes_per_s"] / peers["episodes_per_s"] for own, peers in zip(*runs.values())]
        rows[0]["ratio_to_transformers_continuous"] = statistics.median(ratios)
    return rows


def measure_cuda(options: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Return one row for a model with random weights on a CUDA device."""
    vocab, scale = options.vocab or 150_000, options.scale or 1.0
    with rollout.local(
        shapes.write(model), start_timeout_s=START_TIMEOUT_S, **service_options(options, "cuda", load_format="dummy", seed=0)
    ) as client:
        asyncio.run(run_service(client.aio, warm_trace(vocab, scale), "warm"))
        runs = [
            asyncio.run(run_service(client.aio, make_trace(options, vocab, scale), f"run {repeat}")) for repeat in range(options.repeats)
        ]
    return [{"model": model, "mode": "areno", **medians(runs)}]


def measure_scripted(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for front and client over an engine that makes tokens up."""
    vocab, scale = options.vocab or VOCABULARY, options.scale or 1.0
    fixed = {name: int(value) for name, value in options.option}
    with tempfile.TemporaryDirectory() as folder, scripted_service(folder, max_rows=options.rows or 256, timeout_s=60.0, **fixed) as client:
        trace = make_trace(options, vocab, scale)
        runs = [asyncio.run(run_service(client.aio, trace, f"run {repeat}")) for repeat in range(options.repeats)]
    return [{"model": SCRIPTED, "mode": "areno", **medians(runs)}]


def make_trace(options: argparse.Namespace, vocab: int, scale: float) -> Trace:
    """Return the load of a run."""
    return agent_load.make(groups=options.groups, members=options.members, seed=options.seed, vocab=vocab, scale=scale, waits=options.waits)


def warm_trace(vocab: int, scale: float) -> Trace:
    """Return a few episodes with other ids."""
    return agent_load.make(groups=4, members=8, seed=WARM_SEED, vocab=vocab, scale=scale, waits=0.1)


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run of median rate, with the rates of all."""
    middle = sorted(runs, key=lambda run: run["episodes_per_s"])[(len(runs) - 1) // 2]
    return {**middle, "episodes_per_s_of_runs": [round(run["episodes_per_s"], 3) for run in runs]}


def service_options(options: argparse.Namespace, device: str, **fixed: Any) -> dict[str, Any]:
    """Return the service's options of a run."""
    rows = options.rows or (CPU_ROWS if device == "cpu" else None)
    return {
        "device": device,
        **({} if rows is None else {"max_rows": rows}),
        **fixed,
        **{name: int(value) for name, value in options.option},
    }


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Return what is below its figure."""
    found = []
    for row in rows:
        if row["mode"] != "areno":
            continue
        must = MUST.get(row["model"])
        if must is not None and row["episodes_per_s"] < must:
            found.append(f"{row['model']}: {row['episodes_per_s']:.1f} episodes/s of {must}")
        if must is not None and row["cached_share"] < MUST_CACHED_SHARE:
            found.append(f"{row['model']}: cached share {row['cached_share']:.3f} of {MUST_CACHED_SHARE}")
        ratio = row.get("ratio_to_transformers_continuous")
        if ratio is not None and ratio < MUST_RATIO:
            found.append(f"{row['model']}: {ratio:.2f} times the peer's episodes/s, of {MUST_RATIO}")
    return found


def main() -> None:
    """Measure, print, and fail if a figure is missed."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=[], choices=sorted(shapes.SHAPES), help="shapes to run on a CUDA device")
    parser.add_argument("--scripted", action="store_true", help="an engine that makes tokens up: front and client alone")
    parser.add_argument("--groups", type=int, help=f"groups of the load (default: {CPU_GROUPS} on the CPU, 32 on a card)")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab", type=int, help="ids of the load (default: the embedded model's, 150,000 for shapes)")
    parser.add_argument("--scale", type=float, help="shrinks lengths (default: 0.1 for the embedded model, 1 for shapes)")
    parser.add_argument("--waits", type=float, default=1.0, help="shrinks tool times")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, help=f"requests that run at once (default: {CPU_ROWS} on the CPU, the engine's on a card)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the engine, and of the peer")
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument(
        "--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="an integer option of the service"
    )
    options = parser.parse_args()
    options.groups = options.groups or (32 if options.models or options.scripted else CPU_GROUPS)
    if options.scripted:
        rows = measure_scripted(options)
    elif options.models:
        rows = [row for model in options.models for row in measure_cuda(options, model)]
    else:
        rows = measure_cpu(options)
    names = ("groups", "members", "seed", "vocab", "scale", "waits", "repeats", "rows", "threads", "scripted")
    publish("agent_trace", {**{name: getattr(options, name) for name in names}, "engine": dict(options.option)}, rows, options)
    short = missed(rows)
    if short:
        raise SystemExit("; ".join(short))


if __name__ == "__main__":
    main()
