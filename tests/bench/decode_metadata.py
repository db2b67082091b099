"""Resident decode tables against per-step rebuilt ones: same weights, same K/V memory, same buckets, one process.

For each batch, mode and scenario: (1) both paths in lock step, results of both exactly `LAG` launches late: everything they say must
be equal to the last bit; (2) one free run of each, not timed; (3) pairs of free runs in alternating order, each path reading its
results as early as it can. Timed: from the first submit to the last terminal record, prefill and delivery included, garbage
collection off; a short plan is followed several times in one run; `--budget-s` lets a case whose interval is wide go on. `speedup`
is the Hodges-Lehmann estimate over the pairs of resident by rebuilt in tokens/s, with its 95 % interval by signed ranks (`paired`);
a cancelled request's late tokens count for nobody.
`host_ms` is a step's time outside launches and waits for the device. Not timed: loading, capture, and what `decode_engines.warm` says.

    python -m tests.bench.decode_metadata --tiny --json --output FILE            (scripted tokens: equal work)
    python -m tests.bench.decode_metadata --model PATH --greedy                  (the production sampler)
    python -m tests.bench.decode_metadata --tiny --profile resident              (traces of one path in place of the comparison)
    python -m tests.bench.decode_metadata --tiny --tp 2                          (several ranks)

With `--tp`, ranks that are called side by side make the comparison in lock step (`rank_runs`), for only they can share memory between
paths; timed are two engines with ranks of their own, as anybody uses them, each with rows for the largest batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areno import Engine, InvalidConfig
from tests.bench import decode_trace, rank_runs, shapes
from tests.bench.decode_engines import GREEDY, SCRIPTED, VARIANTS, Company, OwnRanks, Pair, graph_ms, step_name
from tests.bench.decode_report import problems, table
from tests.bench.decode_runs import CONTRACT, Gap, Run, compare, lock_step, recorded, run_plan
from tests.bench.decode_scenarios import SCENARIOS, Load, Plan, make_plan
from tests.bench.device_trace import read_trace, summarise
from tests.bench.paired import interval
from tests.bench.rank_runs import agree
from tests.bench.record import arguments, compose, keep

LAG = 2
PROMPTS = {"cuda": (62, 63, 64, 65), "cpu": (14, 15, 16, 17)}
MIN_STEPS = {"cuda": {"graph": 192, "eager": 64}, "cpu": {"eager": 0}}
"""Steps of one timed run, at least. Launched one by one they take several times as long; many short pairs say more than few long ones."""

CONTEXT = 1024
MAX_PAIRS = 101
NARROW = 1.04


def lock_case(pair: Pair, plan: Plan) -> dict[str, Any]:
    """Run one scenario on both engines in lock step and return how they differ."""
    locked: dict[str, Run] = {}
    for name, engine in pair.engines.items():
        with lock_step(engine, LAG):
            locked[name] = run_plan(engine, plan, rounds=1)
    gap = compare(locked["resident"], locked["rebuilt"], plan, lock_step=True)
    return {
        "lock_step_ids_differ": gap.ids,
        "lock_step_reasons_differ": gap.reasons,
        "lock_step_steps_differ": gap.steps,
        "lock_step_max_logprob_diff": gap.largest,
    }


def run_case(pair: Pair, plan: Plan, *, pairs: int, budget_s: float, company: Company | OwnRanks) -> dict[str, Any]:
    """Run one scenario freely on both engines and return its figures.

    Timed are at least `pairs` pairs of runs, and more while their interval is wide and `budget_s` not spent.
    """
    gc.collect()
    steps: dict[str, str] = {}
    for name, engine in pair.engines.items():
        for _ in range(company.warm_runs):
            run_plan(engine, plan, rounds=1)
        with recorded(engine) as launches:
            run_plan(engine, plan, rounds=1)
        steps[name] = step_name(engine, launches)
    runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
    started, number = time.perf_counter(), 0

    def goes_on() -> bool:
        if number < pairs or budget_s <= 0:
            return number < pairs
        more = time.perf_counter() - started < budget_s and number < MAX_PAIRS and not _is_narrow(_ratios(runs, plan))
        return agree(company.group, more)

    while goes_on():
        for name in VARIANTS if number % 2 else reversed(VARIANTS):
            runs[name].append(run_plan(pair.engines[name], plan))
        number += 1
    free = [compare(resident, rebuilt, plan, lock_step=False) for resident, rebuilt in zip(runs["resident"], runs["rebuilt"])]
    return {
        **_parity(free),
        **_speed(runs, plan),
        **{f"{name}_step": step for name, step in steps.items()},
        **_memory(pair, runs, company.shared_bytes),
    }


def _parity(free: Sequence[Gap]) -> dict[str, Any]:
    return {
        "free_ids_differ": max(gap.ids for gap in free),
        "free_reasons_differ": max(gap.reasons for gap in free),
        "free_max_logprob_diff": max(gap.largest for gap in free),
        "free_mean_logprob_diff": max(gap.mean for gap in free),
    }


def _ratios(runs: dict[str, list[Run]], plan: Plan) -> list[float]:
    """Return each pair's resident by rebuilt."""
    # Where a plan is followed to its end, both do the same work: its wall says all, tokens that a late cancel let through do not.
    by_wall = plan.target_tokens is None
    rates = {name: [1.0 / run.wall_s if by_wall else run.tokens_per_s for run in of_one] for name, of_one in runs.items()}
    return [resident / rebuilt for resident, rebuilt in zip(rates["resident"], rates["rebuilt"])]


def _is_narrow(ratios: Sequence[float]) -> bool:
    """Tell whether the interval is small enough to say on which side of a limit a case lies."""
    _, low, high = interval(ratios)
    return low is not None and high is not None and high / low < NARROW


def _speed(runs: dict[str, list[Run]], plan: Plan) -> dict[str, Any]:
    """Return times in ms per step, tokens/s and the speed-up with its interval."""
    speedup, low, high = interval(_ratios(runs, plan))
    step = {name: float(np.median(np.concatenate([run.steps_s for run in of_one]))) * 1e3 for name, of_one in runs.items()}
    figures: dict[str, Any] = {"speedup": speedup, "speedup_low": low, "speedup_high": high, "pairs": len(runs["resident"])}
    figures["step_speedup"] = step["rebuilt"] / step["resident"]
    for name, of_one in runs.items():
        count = sum(run.steps_s.size for run in of_one)
        figures[f"{name}_step_ms"] = step[name]
        figures[f"{name}_tokens_per_s"] = float(np.median([run.tokens_per_s for run in of_one]))
        figures[f"{name}_host_ms"] = sum(run.host_s for run in of_one) / count * 1e3
        figures[f"{name}_launch_ms"] = sum(run.launch_s for run in of_one) / count * 1e3
        figures[f"{name}_wait_ms"] = sum(run.waited_s for run in of_one) / count * 1e3
        figures[f"{name}_steps"] = count // len(of_one)
    return figures


def _memory(pair: Pair, runs: dict[str, list[Run]], shared_bytes: int) -> dict[str, Any]:
    """Return the device memory at its highest as if each path were alone: what all share, its own, and what a run adds."""
    if not shared_bytes:
        return {}
    peaks = {name: shared_bytes + pair.own_bytes[name] + max(run.peak_bytes for run in of_one) for name, of_one in runs.items()}
    return {f"{name}_peak_mib": peak / 2**20 for name, peak in peaks.items()}


def _delay(pair: Pair, row: dict[str, Any], load: Load) -> dict[str, float]:
    """Return what a rebuilt step costs beside its graph: all of the step, and its launch alone."""
    alone = graph_ms(pair.engines["rebuilt"], load.batch, max(load.prompts) + load.tokens // 2, GREEDY if load.greedy else SCRIPTED)
    return {"graph_ms": alone, "rebuilt_delay_ms": row["rebuilt_step_ms"] - alone, "resident_delay_ms": row["resident_step_ms"] - alone}


def profile_case(engine: Engine, plan: Plan, case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Record one round of a case and return what its trace shows of the middle steps, at most those of `decode_trace`."""
    beside = options.output or Path("decode_metadata.json")
    name = f"{beside.stem}-{options.profile}-{case['mode']}-{case['batch']}-{case['scenario']}-{case['choice']}.trace.json.gz"
    path = beside.with_name(name)
    decode_trace.record(engine, plan, path)
    trace = read_trace(path)
    steps = min(decode_trace.STEPS, len(trace.step_starts) - 1)
    return {"variant": options.profile, "trace": path.name, **summarise(trace, steps=steps, source=path.name)}


def parse(arguments_given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; what depends on the device is None until `settle`."""
    parser = arguments(__doc__.split("\n")[0])
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="folder of a checkpoint")
    model.add_argument("--tiny", action="store_true", help="a seeded four-layer Qwen3 shape")
    parser.add_argument("--batches", nargs="+", type=int, help="rows (default 1 8 64; on a CPU 1 8)")
    parser.add_argument("--tokens", type=int, help="output tokens of a fixed-length request (default 64; on a CPU 8)")
    parser.add_argument(
        "--modes", nargs="+", choices=("eager", "graph"), help="launch by launch, or captured (default both; on a CPU eager)"
    )
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--greedy", action="store_true", help="the production sampler at temperature 0 in place of scripted tokens")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of timed runs of each case, at least")
    parser.add_argument("--budget-s", type=float, default=0.0, help="seconds for further pairs of a case whose interval is wide")
    rank_runs.add_options(parser)
    parser.add_argument("--locked-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", choices=VARIANTS, help="record each case of this path with torch.profiler; traces lie beside --output")
    parser.add_argument("--prompts", nargs="+", type=int, help="prompt lengths, taken in turn")
    parser.add_argument("--check", action="store_true", help="fail where a figure of --tiny on a device misses what is promised of it")
    return parser.parse_args(arguments_given)


def settle(options: argparse.Namespace) -> None:
    """Fill in what the device decides, and refuse what it has not. Mutates: options. Raises: InvalidConfig."""
    kind = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    options.kind, on_card = kind, kind == "cuda"
    options.batches = options.batches or ([1, 8, 64] if on_card else [1, 8])
    options.tokens = options.tokens or (8 if not on_card else decode_trace.STEPS + decode_trace.MARGIN if options.profile else 64)
    options.modes = options.modes or (["eager", "graph"] if on_card else ["eager"])
    options.prompts = tuple(options.prompts or PROMPTS[kind])
    for name in ("tokens", "repeats"):
        _require(getattr(options, name) >= 1, name, getattr(options, name), "at least 1", f"raise --{name}")
    _require(0 <= options.budget_s < math.inf, "budget_s", options.budget_s, "a number of seconds, not negative", "use --budget-s 6")
    _require(min(options.batches) >= 1, "batches", options.batches, "at least 1 row", "raise --batches")
    _require(min(options.prompts) >= 1, "prompts", options.prompts, "at least 1 token", "raise --prompts")
    devices = torch.cuda.device_count() if on_card else rank_runs.MOST_ON_CPU
    _require(1 <= options.tp <= devices, "tp", options.tp, f"a device for each rank; {devices} are there", "lower --tp")
    _require(options.tp == 1 or not options.profile, "profile", options.profile, "traces are of one rank", "leave --tp out")
    if options.rank is not None:
        options.device = f"cuda:{options.rank}" if on_card else "cpu"
        options.output = options.output if options.rank == 0 else None
    _require(on_card or not options.profile, "profile", options.profile, "a device is profiled", "run this where a CUDA device is")
    _require(on_card or "graph" not in options.modes, "modes", options.modes, "graphs are of a CUDA device", "use --modes eager")


def _require(ok: bool, name: str, value: object, limit: str, remedy: str) -> None:
    if not ok:
        raise InvalidConfig(f"{name}={value!r} is not allowed", field=name, value=value, limit=limit, remedy=remedy)


def measure(options: argparse.Namespace, locked: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Run the matrix; keep the file up to date after every case; return the result.

    `locked` is what ranks side by side found in lock step, case by case; engines of their own ranks are timed then.
    """
    model = shapes.write("qwen3-tiny") if options.tiny else options.model
    rounds = {mode: max(-(-steps // options.tokens), 1) for mode, steps in MIN_STEPS[options.kind].items()}
    sizes = {"prompts": options.prompts, "tokens": options.tokens, "greedy": options.greedy}
    longest = Load(batch=1, vocab=1 << 16, **sizes).longest
    sized: dict[str, Any] = {
        "load_format": "dummy" if options.tiny else "auto",
        "device": options.device,
        "max_rows": max(options.batches),
        "longest": max(CONTEXT, longest) if options.kind == "cuda" else longest,
    }
    company = (
        Company(model, **sized, prompts=options.prompts, group=rank_runs.join(options, options.kind))
        if locked is None
        else OwnRanks(model, **sized, tp=options.tp)
    )
    info, rows = company.info, []
    config = {
        "model": "qwen3-tiny" if options.tiny else options.model,
        "dtype": info.dtype,
        "device": info.device,
        "lock_step_run_ahead": LAG,
        "page_size": info.page_size,
        "num_pages": info.num_pages,
        "pairs_at_least": options.repeats,
        "budget_s": options.budget_s,
        "tp": options.tp,
        **sizes,
        "rounds": rounds,
    }
    for batch in options.batches:
        for mode in options.modes:
            load = Load(batch=batch, vocab=info.num_valid_ids, rounds=rounds[mode], **sizes)
            pair = company.pair(mode, batch, GREEDY if options.greedy else SCRIPTED)
            config["run_ahead"] = {name: engine.info.run_ahead for name, engine in pair.engines.items()}
            for scenario in options.scenarios:
                case = {"batch": batch, "mode": mode, "scenario": scenario, "choice": "greedy" if options.greedy else "scripted"}
                plan = make_plan(scenario, load)
                if options.profile:
                    rows.append({**case, **profile_case(pair.engines[options.profile], plan, case, options)})
                else:
                    rows.append(case | (lock_case(pair, plan) if locked is None else locked[len(rows)]))
                    if not options.locked_only:
                        rows[-1] |= run_case(pair, plan, pairs=options.repeats, budget_s=options.budget_s, company=company)
                    if mode == "graph" and scenario == "steady" and options.tp == 1:
                        rows[-1] |= _delay(pair, rows[-1], load)
                keep(compose("decode_metadata", config, rows), options.output)
                progress = decode_trace.table(rows[-1:]) if options.profile else table(rows[-1:], heading=len(rows) == 1)
                if not options.locked_only:
                    print(progress, file=sys.stderr, flush=True)
    company.close()
    return compose("decode_metadata", config, rows)


def lock_ranks(given: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare both paths in lock step by ranks side by side; return what they found, case by case. Raises: SystemExit."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "locked.json"
        status = rank_runs.start("tests.bench.decode_metadata", [*given, "--locked-only", "--output", str(found)], options.tp)
        if status:
            raise SystemExit(status)
        return [
            {name: value for name, value in row.items() if name.startswith("lock_step")} for row in json.loads(found.read_text())["rows"]
        ]


def main(arguments_given: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write; exit with what is wrong where the paths differ, or with --check where a promise is missed."""
    options = parse(arguments_given)
    settle(options)
    several = options.tp > 1 and options.rank is None
    result = measure(options, lock_ranks(arguments_given or sys.argv[1:], options) if several else None)
    if options.locked_only:
        return result
    if not options.json:
        print(decode_trace.table(result["rows"]) if options.profile else table(result["rows"], heading=True))
    print(json.dumps(result))
    if options.profile:
        return result
    wrong = problems(result["rows"], CONTRACT[result["config"]["dtype"]], promises=options.check)
    if wrong:
        raise SystemExit("\n".join(wrong))
    return result


if __name__ == "__main__":
    main()
