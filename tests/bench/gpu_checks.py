"""What a CUDA device has to show beside speed: the cost of logprobs, memory beside weights and KV, growth, copies and waits.

    logprobs   decode tokens/s with both log-probabilities over without, steps timed as in `gpu_decode`, ways alternating
    footprint  bytes of tables, rings and graphs of all buckets and prompt sizes as a share of the card
    soak       memory over thousands of short requests, after the first 2,000
    window     copies and waits between two page top-ups of steady decode, from torch.profiler's trace

Not timed: loading, compiling, capture. The window's counter is tried on a copy and a wait of its own. Ends with status 1
where a limit is missed.

    python -m tests.bench.gpu_checks --json
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from areno import Engine, EngineConfig, Request, SamplingParams
from tests.bench import shapes
from tests.bench.gpu_decode import MODES, STEPS, _wall
from tests.bench.gpu_memory import drain, measure_footprint, measure_soak
from tests.bench.record import arguments, publish

CHECKS = ("logprobs", "footprint", "soak", "window")
BATCH = 64
RATIO_LIMIT = 0.98
WINDOW_STEPS = 40
SETTLE_STEPS = 8
# Room for a batch, but not for its whole budgets twice over, so that rows are topped up.
TIGHT_PAGES = 640
COPIES = ("Memcpy", "cudaMemcpy", "cuMemcpy")
STREAM_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize", "cuCtxSynchronize")
EVENT_WAITS = ("cudaEventSynchronize", "cuEventSynchronize")


def measure_logprobs(engine: Engine, model: str, *, repeats: int) -> dict[str, Any]:
    """Return the rate with logprobs over the rate without."""
    rng = np.random.default_rng(0)
    modes = ("sampled", "sampled-no-logprobs")
    for mode in modes:
        _wall(engine, BATCH, STEPS + 1, MODES[mode], rng)
    steps: dict[str, list[float]] = {mode: [] for mode in modes}
    for repeat in range(repeats):
        for mode in modes if repeat % 2 else reversed(modes):
            short, long = (_wall(engine, BATCH, outputs, MODES[mode], rng) for outputs in (1, STEPS + 1))
            steps[mode].append((long - short) / STEPS * 1e3)
    told, silent = (statistics.median(steps[mode]) for mode in modes)
    return {
        "check": "logprobs",
        "model": model,
        "batch": BATCH,
        "step_ms": told,
        "step_ms_without": silent,
        "ratio": silent / told,
        "limit": RATIO_LIMIT,
        "ok": silent / told >= RATIO_LIMIT,
    }


def _reach_top_up(engine: Engine) -> None:
    """Step until rows have just been given pages."""
    grown = engine.stats()["grown_pages"]
    for _ in range(200):
        engine.step()
        if engine.stats()["grown_pages"] != grown:
            return
    raise AssertionError("no row was given a page in 200 steps")


def _trace(engine: Engine) -> list[dict[str, Any]]:
    """Return the trace of steady steps, in a span "window", and of a copy and a wait, in a span "control"."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(SETTLE_STEPS):
            engine.step()
        with record_function("window"):
            for _ in range(WINDOW_STEPS):
                engine.step()
        with record_function("control"):
            torch.zeros(1).to("cuda")
            torch.cuda.current_stream().synchronize()
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def count_calls(events: list[dict[str, Any]], span: str) -> dict[str, int]:
    """Return the copies and waits that start inside a span of a trace."""
    [bounds] = [event for event in events if event.get("name") == span and event.get("cat") == "user_annotation"]
    start, end = float(bounds["ts"]), float(bounds["ts"]) + float(bounds["dur"])
    names = [event["name"] for event in events if event.get("ph") == "X" and start <= float(event["ts"]) <= end]
    kinds = {"copies": COPIES, "stream_waits": STREAM_WAITS, "event_waits": EVENT_WAITS}
    return {kind: sum(name.startswith(prefixes) for name in names) for kind, prefixes in kinds.items()}


def measure_window(engine: Engine, model: str) -> dict[str, Any]:
    """Return what happened between two page top-ups. The host may wait for the oldest launch, once a step: that bounds run-ahead."""
    rng = np.random.default_rng(1)
    for number in range(BATCH):
        prompt = rng.integers(1000, engine.info.num_valid_ids, size=254 + number % 4)
        sampling = SamplingParams(max_new_tokens=250, ignore_eos=True, seed=number)
        engine.submit(Request(request_id=number, prompt_ids=prompt, sampling=sampling))
    while engine.stats()["waiting"] or engine.stats()["running"] < BATCH:
        engine.step()
    _reach_top_up(engine)
    before = engine.stats()
    events = _trace(engine)
    after = engine.stats()
    drain(engine, [])
    assert after["grown_pages"] == before["grown_pages"], "a top-up fell into the window: it is longer than page growth allows"
    assert after["decode_launches"] - before["decode_launches"] == SETTLE_STEPS + WINDOW_STEPS, "decode was not steady"
    control, found = count_calls(events, "control"), count_calls(events, "window")
    assert all(control.values()), f"the trace does not show what was done on purpose: {control}"
    ok = not found["copies"] and not found["stream_waits"] and found["event_waits"] <= WINDOW_STEPS
    limit = f"copies 0, stream_waits 0, event_waits {WINDOW_STEPS}"
    return {"check": "window", "model": model, "batch": BATCH, "steps": WINDOW_STEPS, **found, "control": control, "limit": limit, "ok": ok}


def engine_of(model: str, **options: Any) -> Engine:
    """Return an engine of random weights."""
    return Engine(EngineConfig(model=shapes.write(model), load_format="dummy", seed=0, **options))


def _empty() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def run(wanted: list[str], models: list[str], *, requests: int, repeats: int, log: bool) -> list[dict[str, Any]]:
    """Make each engine once and return the rows of all checks."""
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        if log:
            print(row, flush=True)

    if "soak" in wanted:
        # A small pool, so that the prefix cache is full after few requests and evicts from then on.
        add(measure_soak(engine_of("qwen3-tiny", max_rows=256, num_pages=1024), "qwen3-tiny", requests=requests, settle=2_000))
        _empty()
    for model in models:
        widest, first = model == models[-1] and "footprint" in wanted, model == models[0] and "window" in wanted
        if widest:
            # The footprint needs an engine that captures only when told.
            engine = engine_of(model, prefix_cache=False, max_rows=256, graphs=False)
            add(measure_footprint(engine, model))
            if "logprobs" in wanted:
                add(measure_logprobs(engine, model, repeats=repeats))
            del engine
            _empty()
        if first or ("logprobs" in wanted and not widest):
            engine = engine_of(model, prefix_cache=False, max_rows=BATCH, num_pages=TIGHT_PAGES)
            if "logprobs" in wanted and not widest:
                add(measure_logprobs(engine, model, repeats=repeats))
            if first:
                add(measure_window(engine, model))
            del engine
            _empty()
    return rows


def main() -> None:
    """Check, print, and fail where a limit is missed."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--checks", nargs="+", default=list(CHECKS), choices=CHECKS)
    parser.add_argument(
        "--models", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], help="the last one gives the footprint, the first the window"
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = run(options.checks, options.models, requests=options.requests, repeats=options.repeats, log=not options.json)
    publish("gpu_checks", {"batch": BATCH, "steps": STEPS, "requests": options.requests, "repeats": options.repeats}, rows, options)
    missed = [f"{row['check']} of {row['model']}" for row in rows if not row["ok"]]
    if missed:
        raise SystemExit(f"limits missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
