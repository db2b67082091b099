"""What front and client carry: 256 streams with ids and both log-probabilities through real processes, tokens per second.

Client (this process, 256 consumer coroutines), front and a scripted engine host, each a process of its own on a local socket.
Timed: from the first delta that a consumer sees to the last. `bulk`: 64 tokens per stream and flush, as fast as it goes.
`paced`: one token per stream and flush every `step_ms`; a token's delay is from its making in the engine to its consumer, of
every 16th delta behind a first sixteenth of each stream. `single`: one token per stream and step as fast as it goes, where tokens
join on their way while a reader is behind. Not timed: start, one warm-up each; what imports left is kept from the collector. The
peer sends the same content as server-sent events (uvicorn, starlette) to 256 connections of one event loop, one token or 64 per
event, as fast as it goes, and is compared with what goes as fast as it can as well. Medians of the repeats.
`--encrypted` measures TCP with CURVE in place of a local socket.

    python -m tests.bench.wire --json
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil

import rollout
from tests.bench.record import arguments, publish
from tests.bench.scripted_engine import scripted_service, stamp_age_s

STREAMS = 256
BULK_TOKENS = 64
STEP_MS = 2.45
SAMPLED_DELTAS = 16
LIMITS = {"bulk_tokens_per_s": 2_500_000, "paced_tokens_per_s": 100_000, "mean_delta": 1.5, "p99_ms": 10.0, "ratio_to_sse": 2.5}


class Tally:
    """What the consumers of one run saw."""

    def __init__(self) -> None:
        self.tokens = self.deltas = 0
        self.began = self.ended = 0.0
        self.samples: list[tuple[float, np.ndarray]] = []

    async def consume(self, client: rollout.AsyncClient, seed: int, tokens: int) -> None:
        """Read one stream to its end; every token must have come once, in order, with both log-probabilities."""
        expected = deltas = 0
        async for delta in client.stream([1, 2, 3], max_new_tokens=tokens, seed=seed, ignore_eos=True):
            assert delta.offset == expected, "a token came twice or never"
            count = len(delta.ids)
            assert delta.logprobs is not None and delta.raw_logprobs is not None
            expected += count
            deltas += 1
            if deltas == 1 and not self.began:
                self.began = time.monotonic()
            if deltas % SAMPLED_DELTAS == seed % SAMPLED_DELTAS and 16 * expected > tokens and count:
                self.samples.append((time.monotonic(), delta.raw_logprobs))
        assert expected == tokens, f"{expected} of {tokens} tokens came"
        self.ended = time.monotonic()
        self.tokens += expected
        self.deltas += deltas

    def delays_ms(self) -> np.ndarray:
        """Return the delays of the sampled deltas' first tokens."""
        return np.array([stamp_age_s(float(raw[0]), now) for now, raw in self.samples]) * 1e3


async def run_streams(client: rollout.AsyncClient, tokens: int) -> Tally:
    """Consume all streams of one run."""
    tally = Tally()
    await asyncio.gather(*(tally.consume(client, seed, tokens) for seed in range(STREAMS)))
    return tally


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure_service(
    folder: str, mode: str, *, tokens: int, repeats: int, step_ms: float = STEP_MS, address: str | None = None
) -> dict[str, Any]:
    """Return the medians of one mode; without an address on a local socket, over TCP encrypted."""
    bulk = mode == "bulk"
    engine_options = {
        "step_ms": step_ms if mode == "paced" else 0.0,
        "tokens_per_flush": BULK_TOKENS if bulk else 1,
        "stamped": True,
        "max_rows": STREAMS,
        "max_model_len": max(8192, 2 * tokens),
        "page_size": 64,
        # Room for all, so that pages are reserved at admission and the engine costs little.
        "num_pages": 2 * STREAMS * (tokens // 64 + 2),
        "max_prefill_tokens": 8192,
    }
    rates, rows = [], []
    with scripted_service(folder, engine_options=engine_options, timeout_s=30.0, address=address) as client:
        front = psutil.Process(front_pid())
        processes = (front, front.children()[0], psutil.Process())
        asyncio.run(run_streams(client.aio, min(tokens, 512)))
        gc.collect()
        gc.freeze()
        for _ in range(repeats):
            before = [cpu_s(one) for one in processes]
            sent = client.stats()["flushed_bytes"]
            tally = asyncio.run(run_streams(client.aio, tokens))
            million = tally.tokens / 1e6
            spent = [(cpu_s(one) - start) / million for one, start in zip(processes, before)]
            delays = tally.delays_ms()
            rates.append(tally.tokens / (tally.ended - tally.began))
            rows.append(
                {
                    "tokens_per_s": rates[-1],
                    "mean_delta": tally.tokens / tally.deltas,
                    "p50_ms": float(np.percentile(delays, 50)),
                    "p99_ms": float(np.percentile(delays, 99)),
                    "front_cpu_s_per_million": spent[0],
                    "engine_cpu_s_per_million": spent[1],
                    "client_cpu_s_per_million": spent[2],
                    "mb_per_million": (client.stats()["flushed_bytes"] - sent) / million / 1e6,
                }
            )
    return {"mode": mode, "by": "rollout", **{name: statistics.median(row[name] for row in rows) for name in rows[0]}}


def front_pid() -> int:
    """Return the front's process, a child of this one."""
    [front] = [one for one in psutil.Process().children() if any("rollout.service.front" in part for part in one.cmdline())]
    return front.pid


@contextmanager
def sse_server(tokens_per_flush: int) -> Iterator[tuple[int, int]]:
    """Run the peer; yields its port and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.bench.sse_server", "--port", str(port), "--tokens-per-flush", str(tokens_per_flush)]
    server = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 30.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise
                time.sleep(0.05)
        yield port, server.pid
    finally:
        server.terminate()
        server.wait(10)


async def read_events(port: int, seed: int, tokens: int, marks: list[float]) -> int:
    """Read one stream of events to its end; returns the bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    # HTTP/1.0: the body comes as it is, without chunk marks to take out.
    writer.write(f"GET /v1/completions?seed={seed}&tokens={tokens} HTTP/1.0\r\nHost: peer\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    seen = size = 0
    while True:
        event = await reader.readuntil(b"\n\n")
        size += len(event)
        if event == b"data: [DONE]\n\n":
            break
        logprobs = json.loads(event[6:])["choices"][0]["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["raw_logprobs"])
        ids = [int(name[9:]) for name in logprobs["tokens"]]
        if not seen:
            marks.append(time.monotonic())
        seen += len(ids)
    assert seen == tokens
    marks.append(time.monotonic())
    writer.close()
    return size


def measure_sse(mode: str, *, tokens: int, repeats: int) -> dict[str, Any]:
    """Return the medians of the peer at as many tokens per event."""
    rows = []

    async def run(port: int, count: int) -> tuple[list[float], int]:
        marks: list[float] = []
        return marks, sum(await asyncio.gather(*(read_events(port, seed, count, marks) for seed in range(STREAMS))))

    with sse_server(BULK_TOKENS if mode == "bulk" else 1) as (port, pid):
        asyncio.run(run(port, 64))
        server = psutil.Process(pid)
        for _ in range(repeats):
            before = cpu_s(server)
            marks, size = asyncio.run(run(port, tokens))
            million = STREAMS * tokens / 1e6
            rows.append(
                {
                    "tokens_per_s": STREAMS * tokens / (max(marks) - min(marks)),
                    "front_cpu_s_per_million": (cpu_s(server) - before) / million,
                    "mb_per_million": size / million / 1e6,
                }
            )
    return {"mode": mode, "by": "sse", **{name: statistics.median(row[name] for row in rows) for name in rows[0]}}


def measure(*, bulk_tokens: int, paced_tokens: int, repeats: int, sse: bool, address: str | None = None) -> list[dict[str, Any]]:
    """Return one row per mode and way."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for mode, tokens, peer_tokens in (
            # Delays first: what the others leave in this process's memory would cost them.
            ("paced", paced_tokens, 0),
            ("bulk", bulk_tokens, bulk_tokens // 16),
            ("single", bulk_tokens // 4, paced_tokens // 5),
        ):
            row = measure_service(folder, mode, tokens=tokens, repeats=repeats, address=address)
            if sse and peer_tokens:
                peer = measure_sse(mode, tokens=peer_tokens, repeats=repeats)
                row["ratio_to_sse"] = row["tokens_per_s"] / peer["tokens_per_s"]
                rows.append(peer)
            rows.append(row)
    return rows


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Return the limits that the figures miss."""
    own = {row["mode"]: row for row in rows if row["by"] == "rollout"}
    bulk, single, paced = own["bulk"], own["single"], own["paced"]
    failures = {
        f"bulk {bulk['tokens_per_s']:,.0f} tokens/s": bulk["tokens_per_s"] < LIMITS["bulk_tokens_per_s"],
        f"paced {paced['tokens_per_s']:,.0f} tokens/s": paced["tokens_per_s"] < LIMITS["paced_tokens_per_s"],
        f"mean delta {paced['mean_delta']:.2f} tokens": paced["mean_delta"] > LIMITS["mean_delta"],
        f"p99 {paced['p99_ms']:.1f} ms": paced["p99_ms"] > LIMITS["p99_ms"],
    }
    for row in (bulk, single):
        ratio = row.get("ratio_to_sse", LIMITS["ratio_to_sse"])
        failures[f"{row['mode']} {ratio:.1f} times the peer"] = ratio < LIMITS["ratio_to_sse"]
    return [what for what, is_missed in failures.items() if is_missed]


def main() -> None:
    """Measure, print, and fail if a limit is missed."""
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--bulk-tokens", type=int, default=16_384, help="tokens of a stream in bulk")
    parser.add_argument("--paced-tokens", type=int, default=1_024, help="tokens of a stream when paced")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-sse", action="store_true", help="leave the peer out")
    parser.add_argument("--encrypted", action="store_true", help="over TCP on loopback with CURVE, and not over a local socket")
    options = parser.parse_args()
    address = "tcp://127.0.0.1:0" if options.encrypted else None
    rows = measure(
        address=address, bulk_tokens=options.bulk_tokens, paced_tokens=options.paced_tokens, repeats=options.repeats, sse=not options.no_sse
    )
    config = {
        "streams": STREAMS,
        "tokens_per_flush": {"bulk": BULK_TOKENS, "paced": 1},
        "step_ms": STEP_MS,
        "limits": LIMITS,
        "encrypted": options.encrypted,
    }
    publish("wire", {**config, "repeats": options.repeats}, rows, options)
    failures = missed(rows)
    if failures:
        raise SystemExit("limits missed: " + ", ".join(failures))


if __name__ == "__main__":
    main()
