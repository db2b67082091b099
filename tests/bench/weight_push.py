"""What a weight update costs, beside a plain copy of the same bytes in the same run.

Timed: `staging_s` from the first tensor handed to a transport until the service has answered the last bucket; the tensors are cast,
checked and fingerprinted before (`digest_gb_per_s`). `inspect_s` is what the service took of that time to prove staged tensors,
`derive_s` to put them into the layout that it multiplies, and `ratio_to_copy` leaves both out. `copy_s`: the same tensors copied by one
thread into memory (on a card: within the card, or over the link to the engine's first one; and from pinned host memory as
`bus_copy_s`). `swap_ms`, `proof_ms` and `pause_ms` are the service's own. With `--rows N`, N requests decode meanwhile and
`decode_cost_ms` is how much longer their tokens took than without an update (Hodges-Lehmann, over all pairs but the first). Not
timed: start of the processes and one first update of each transport; `open_s` is what a transport needs before the first tensor.
Copies and updates alternate; figures are medians.

    python -m tests.bench.weight_push --json
    python -m tests.bench.weight_push --model qwen3-8b --device cuda --transports cuda memory --rows 64 --json
    python -m tests.bench.weight_push --model qwen3-8b --device cuda:0 --tp 2 --trainer-device cuda:2 --transports group cuda --json
"""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import rollout
from areno.models.model_config import read_model_config
from areno.models.registry import build_model
from areno.weights.digest import digest
from tests.bench import shapes
from tests.bench.paired import middle_of_averages
from tests.bench.record import arguments, publish
from trainer_bridge.weights.names import DTYPE_NAMES, DTYPES
from trainer_bridge.weights.staging import in_buckets
from trainer_bridge.weights.transport import Transport, make_transport

Tensors = dict[str, torch.Tensor]
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 384
# Prompts are new in each run: none is found computed, with or without an update before it.
_SEEDS = itertools.count()


def random_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Return random weights of a model's names and shapes on a device."""
    model = build_model(read_model_config(folder), dtype=dtype, device=torch.device("meta"), num_positions=8)
    generator = torch.Generator(device).manual_seed(1)
    return {
        name: torch.empty(view.shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)
        for name, view in model.table.views.items()
    }


def timed_copy(tensors: Tensors, places: Tensors, device: torch.device) -> float:
    """Copy every tensor to its place once; return the seconds."""
    _finish(device)
    started = time.perf_counter()
    for name, tensor in tensors.items():
        places[name].copy_(tensor)
    for used in {device, *(place.device for place in places.values())}:
        _finish(used)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Pushed(NamedTuple):
    """One update: the seconds until its transport was open, those of its staging, and the service's report."""

    open_s: float
    staging_s: float
    report: Any


def update(client: Any, transport: Transport, tensors: Tensors, digests: dict[str, int]) -> Pushed:
    """Make one update."""
    manifest = {name: {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)} for name, tensor in tensors.items()}
    ticket = client.weights_begin(manifest)
    info, begun = client.info(), time.perf_counter()
    transport.open(info, ticket.update_id)
    started = time.perf_counter()
    for bucket in in_buckets(tensors.items(), transport.bucket_bytes):
        transport.send(bucket)
    transport.close()
    staging_s = time.perf_counter() - started
    return Pushed(started - begun, staging_s, client.weights_commit(ticket.update_id, digests=digests))


def decoding(client: Any, rows: int, meanwhile: Any = None) -> float:
    """Let `rows` requests decode, run `meanwhile` once they do, and return the seconds until all have ended."""
    draws = np.random.default_rng(next(_SEEDS))
    prompts = [draws.integers(100, 1000, PROMPT_TOKENS) for _ in range(rows)]
    started = time.perf_counter()
    streams = [client.stream(prompt, max_new_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=index) for index, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(1) as pool:
        next(streams[-1])
        under_way = pool.submit(meanwhile) if meanwhile is not None else None
        for stream in streams:
            for _ in stream:
                pass
        wall = time.perf_counter() - started
        if under_way is not None:
            under_way.result()
    return wall


def measure(client: Any, name: str, tensors: Tensors, digests: dict[str, int], options: Any) -> dict[str, Any]:
    """Return the row of one transport."""
    device = next(iter(tensors.values())).device
    transport = make_transport(name, client, bucket_bytes=None, timeout_s=300.0, device=device)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    # A trainer's card of its own: what a copy takes over the link between the cards.
    places = {name: torch.empty_like(tensor, device=options.device) for name, tensor in tensors.items()}
    update(client, transport, tensors, digests)
    timed_copy(tensors, places, device)
    copies, runs = [], []
    for _ in range(options.repeats):
        copies.append(timed_copy(tensors, places, device))
        runs.append(update(client, transport, tensors, digests))
    del places
    copy_s, staging_s = statistics.median(copies), statistics.median(run.staging_s for run in runs)
    reports = [run.report for run in runs]
    # On a card the proof runs beside the staging and not within it.
    own = device.type == "cpu"
    moving_s = statistics.median(run.staging_s - own * (run.report.inspect_s + run.report.derive_s) for run in runs)
    inspect_s, derive_s = (statistics.median(getattr(report, figure) for report in reports) for figure in ("inspect_s", "derive_s"))
    row: dict[str, Any] = {
        "model": options.model,
        "transport": name,
        "reason": transport.reason,
        "num_bytes": num_bytes,
        "num_tensors": len(tensors),
        "copy_s": copy_s,
        "open_s": statistics.median(run.open_s for run in runs),
        "staging_s": staging_s,
        "staging_gb_per_s": num_bytes / staging_s / 1e9,
        "inspect_s": inspect_s,
        "derive_s": derive_s,
        "ratio_to_copy": moving_s / copy_s,
        **{figure: statistics.median(getattr(report, figure) for report in reports) for figure in ("swap_ms", "proof_ms", "pause_ms")},
    }
    row |= {"staging_s_per_gb": staging_s / num_bytes * 1e9, "pause_ms_per_gb": row["pause_ms"] / num_bytes * 1e9}
    row["pause_beside_swap_ms"] = statistics.median(report.pause_ms - report.swap_ms for report in reports)
    if device.type == "cuda":
        row["bus_copy_s"] = bus_copy(tensors, device)
        row["share_of_bus_rate"] = row["bus_copy_s"] / staging_s
        row["share_of_copy_rate"] = copy_s / staging_s
    if options.rows:
        costs = []
        # The first pair compiles and captures what comes up in it.
        for number in range(options.repeats + 1):
            walls = {}
            for busy in (False, True) if number % 2 else (True, False):
                meanwhile = (lambda: update(client, transport, tensors, digests)) if busy else None
                walls[busy] = decoding(client, options.rows, meanwhile)
            costs.append((walls[True] - walls[False]) * 1e3)
        row |= {"rows": options.rows, "decode_cost_ms": middle_of_averages(costs[1:]), "decode_cost_ms_of_runs": costs}
    transport.abort()
    return row


def bus_copy(tensors: Tensors, device: torch.device) -> float:
    """Return the seconds that these bytes take from pinned host memory to the device, by blocks of 64 MiB."""
    block = 64 * 2**20
    host, there = torch.empty(block, dtype=torch.uint8, pin_memory=True), torch.empty(block, dtype=torch.uint8, device=device)
    there.copy_(host)
    count = -(-sum(tensor.nbytes for tensor in tensors.values()) // block)
    _finish(device)
    started = time.perf_counter()
    for _ in range(count):
        there.copy_(host, non_blocking=True)
    _finish(device)
    return time.perf_counter() - started


def main() -> None:
    """Run every transport asked for on one service."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default="qwen3-tiny", choices=sorted(shapes.SHAPES))
    parser.add_argument("--device", default="cpu", help="the engine's device; with --tp the first rank's")
    parser.add_argument("--trainer-device", help="the device that the weights come from (default: the engine's)")
    parser.add_argument("--tp", type=int, default=1, help="the engine's tensor-parallel ranks")
    parser.add_argument("--transports", nargs="+", default=["memory", "frames", "file"])
    parser.add_argument("--rows", type=int, default=0, help="requests that decode during an update")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, device = Path(shapes.write(options.model)), torch.device(options.device)
    served: dict[str, Any] = {
        "device": options.device,
        "load_format": "dummy",
        "max_rows": max(options.rows, 8),
        "max_model_len": 1024,
        "threads": 1,
        "tp": options.tp,
    }
    source = torch.device(options.trainer_device or options.device)
    if device.type == "cuda" and source.index in (None, device.index):
        served["gpu_memory_fraction"] = 0.5  # the trainer's weights and their copy lie on the same card
    with rollout.local(str(folder), start_timeout_s=300.0, timeout_s=300.0, **served) as client:
        tensors = random_weights(folder, DTYPES[client.info().engine.dtype], source)
        started = time.perf_counter()
        digests = {name: digest(tensor) for name, tensor in tensors.items()}
        rate = sum(tensor.nbytes for tensor in tensors.values()) / (time.perf_counter() - started) / 1e9
        rows = [measure(client, name, tensors, digests, options) | {"digest_gb_per_s": rate} for name in options.transports]
    publish(
        "weight_push", {"repeats": options.repeats, "output_tokens": OUTPUT_TOKENS, "trainer_device": str(source), **served}, rows, options
    )


if __name__ == "__main__":
    main()
