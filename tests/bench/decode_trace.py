"""Copies, waits and device idle gaps in the interior of a steady decode, per decode path, from a profiler's trace.

    python -m tests.bench.decode_trace resident=FILE rebuilt=FILE            read traces (formats: `device_trace`)
    python -m tests.bench.decode_trace --record FILE.json.gz --tiny --variant resident --batch 8       record one, then read it
    nsys profile -t cuda,nvtx --capture-range=cudaProfilerApi python -m tests.bench.decode_trace --play --tiny --variant resident

A recorded run follows the plan `steady` of `decode_metadata` on a warm engine, each `Engine.step` marked; the window is the middle
63 steps. The profiler slows the host down, so idle gaps compare paths and say nothing of speed. `long_waits` counts waits of more
than 1.5 steps: longer than the launch in flight. `--check` holds a trace named resident or rebuilt to what its path promises.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from areno import Engine, InvalidConfig
from tests.bench import shapes
from tests.bench.decode_engines import GREEDY, SCRIPTED, VARIANTS, Company
from tests.bench.decode_runs import run_plan
from tests.bench.decode_scenarios import Load, Plan, make_plan
from tests.bench.device_trace import MARKER, read_trace, summarise
from tests.bench.record import arguments, compose, keep

STEPS = 63
MARGIN = 33
CONTEXT = 1024
PROMPTS = (254, 255, 256, 257)
_COLUMNS = (
    "variant",
    "steps",
    "step_ms",
    "dtoh_copies",
    "htod_copies",
    "stream_syncs",
    "event_syncs",
    "device_syncs",
    "longest_wait_ms",
    "long_waits",
    "idle_ms",
    "largest_idle_ms",
)


@contextmanager
def marked(engine: Engine) -> Iterator[None]:
    """Mark every step of an engine for profilers: a range of torch.profiler and one of NVTX."""
    step = engine.step

    def marked_step() -> Any:
        with torch.profiler.record_function(MARKER), torch.cuda.nvtx.range(MARKER):
            return step()

    engine.step = marked_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.step


def record(engine: Engine, plan: Plan, path: Path) -> None:
    """Write a torch.profiler trace of one round of a plan, which a round before has warmed."""
    run_plan(engine, plan, rounds=1)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiled, marked(engine):
        run_plan(engine, plan, rounds=1)
    profiled.export_chrome_trace(str(path))


def play(engine: Engine, plan: Plan) -> None:
    """Follow a plan once between the start and the stop of a profiler that watches this process."""
    run_plan(engine, plan, rounds=1)
    torch.cuda.profiler.start()
    with marked(engine):
        run_plan(engine, plan, rounds=1)
    torch.cuda.profiler.stop()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| " + " | ".join(name.replace("_", " ") for name in _COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    for row in rows:
        lines.append("| " + " | ".join(f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name]) for name in _COLUMNS) + " |")
    return "\n".join(lines)


def problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return where a path does not keep its promise: resident rows ask nothing, rebuilt ones copy and wait once a step.

    Two copies more to the device are for pages that are handed out meanwhile.
    """
    wrong = []
    for row in rows:
        once = row["steps"]
        most = {
            "resident": {"dtoh_copies": 0, "htod_copies": 2, "stream_syncs": 0, "device_syncs": 0, "long_waits": 0},
            "rebuilt": {"dtoh_copies": once, "htod_copies": once + 2, "event_syncs": once, "stream_syncs": 0, "device_syncs": 0},
        }
        for name, limit in most.get(row["variant"], {}).items():
            if row[name] > limit:
                wrong.append(f"{row['variant']}: {name}={row[name]} in {row['steps']} steps, at most {limit} promised")
    return wrong


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Raises: InvalidConfig."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("traces", nargs="*", metavar="VARIANT=FILE", help="traces to read")
    parser.add_argument("--record", type=Path, metavar="FILE", help="record a run to this file (.json or .json.gz) and read it")
    parser.add_argument("--play", action="store_true", help="only run what would be recorded, for a profiler outside")
    parser.add_argument("--model", help="folder of a checkpoint")
    parser.add_argument("--tiny", action="store_true", help="a seeded four-layer Qwen3 shape")
    parser.add_argument("--variant", choices=VARIANTS, default="resident")
    parser.add_argument("--mode", choices=("eager", "graph"), default="graph")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the window")
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--marker", default=MARKER, help="name of the ranges that are steps")
    parser.add_argument("--check", action="store_true", help="fail where a path does not keep its promise")
    options = parser.parse_args(given)
    runs = options.record is not None or options.play
    _require(bool(options.traces) or runs, "traces", options.traces, "traces to read, or a run", "name VARIANT=FILE, or use --record FILE")
    _require(
        not runs or (options.tiny != bool(options.model)), "model", options.model, "a run needs one model", "use --tiny or --model PATH"
    )
    _require(not runs or torch.cuda.is_available(), "device", "cpu", "a run needs a CUDA device", "read a trace that was recorded on one")
    _require(options.steps >= 1, "steps", options.steps, "at least 1", "raise --steps")
    return options


def _require(ok: bool, name: str, value: object, limit: str, remedy: str) -> None:
    if not ok:
        raise InvalidConfig(f"{name}={value!r} is not allowed", field=name, value=value, limit=limit, remedy=remedy)


def _run(options: argparse.Namespace) -> None:
    """Record or play a steady run of the wanted path."""
    variant = GREEDY if options.greedy else SCRIPTED
    sizes = {"batch": options.batch, "prompts": PROMPTS, "tokens": options.steps + MARGIN, "greedy": options.greedy}
    longest = Load(vocab=1 << 16, **sizes).longest
    company = Company(
        shapes.write("qwen3-tiny") if options.tiny else options.model,
        load_format="dummy" if options.tiny else "auto",
        device="auto",
        max_rows=options.batch,
        longest=max(CONTEXT, longest),
        prompts=PROMPTS,
    )
    engine = company.pair(options.mode, options.batch, variant).engines[options.variant]
    plan = make_plan("steady", Load(vocab=company.info.num_valid_ids, **sizes))
    if options.play:
        play(engine, plan)
    else:
        record(engine, plan, options.record)
        options.traces.append(f"{options.variant}={options.record}")


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Record where asked, read, print, write; with --check exit with what is wrong."""
    options = parse(given)
    if options.record is not None or options.play:
        _run(options)
    rows = []
    for named in options.traces:
        variant, _, path = named.rpartition("=")
        figures = summarise(read_trace(path, marker=options.marker), steps=options.steps, source=path)
        rows.append({"variant": variant or Path(path).stem, "trace": Path(path).name, **figures})
    config = {"steps": options.steps, "mode": options.mode, "batch": options.batch, "marker": options.marker}
    result = compose("decode_trace", config, rows)
    keep(result, options.output)
    if not options.json and rows:
        print(table(rows))
    print(json.dumps(result))
    wrong = problems(rows) if options.check else []
    if wrong:
        raise SystemExit("\n".join(wrong))
    return result


if __name__ == "__main__":
    main()
