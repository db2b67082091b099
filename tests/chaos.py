"""A service under load whose clients, engine host, front and trainer are killed and stopped at random, and the proof that nothing is lost.

    driver (this process) --starts--> service: front + scripted engine host
       |                  --starts--> loads: client processes that check every token against what a reference run gives
       |                  --starts--> trainer: pushes versions by file, in every commit mode
       +--kills (SIGKILL) and stops (SIGSTOP, SIGCONT) one of them every second or so

Each load checks that each of its requests has one outcome, that offsets have no gap and no overlap, that ids, log-probabilities
and versions are the reference's. When the killing is over the driver checks the service: no live request, counters that
reconcile, no page or row held, no session of a dead client, memory back at its level.

A killed front takes its books with it, so of its requests only this is proven: until the kill its counters reconciled; its host,
sockets and files go by themselves; each client is told `server_restarted` or `server_unavailable` within its time-out, and of no
kill that did not happen; the front that is started anew at the address counts from nothing and serves under a version that was
never used before. The books of the last front are proven whole.

    python -m tests.chaos --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import xxhash
from safetensors.numpy import save_file

import rollout
from rollout.errors import Busy, RequestFailed, RolloutError, Unavailable
from rollout.seeds import derive_seed
from rollout.wire.operations import Op
from tests.bench.scripted_engine import scripted_ids, scripted_service
from tests.fakes import TENSORS, StreamReader, WireClient

T = TypeVar("T")
LEASE_S = 1.5
HOST_TIMEOUT_S = 4.0
STREAMS = 12
ROWS, PAGES = 16, 600
LOADS = ("async", "async", "wire")
MEMORY_MB = 40.0
SETTLE_S = 20.0
ORPHAN_S = 8.0
CONNECT_S = 25.0
CLIENT_S = 10.0
# A load may itself be stopped when it would learn of a kill, on a machine that has other things to do.
LATE_S = 2 * LEASE_S + 5.0
# A new host takes seconds on a busy machine: seldom enough that there is something to lose, and mostly not before it serves.
SPARED = 0.75
HARM = (*["kill load"] * 4, "stop load", "kill host", "stop host", "hang host", "kill front", *["kill trainer"] * 2)
# A front's numbers die with it: the proof is made of the last one's, which gets the rest of the time.
FRONTS_UNTIL, SETTLED_AT = 0.45, 0.5
# What a client says while a killed front is not back, and then; without such a kill it is wrong.
AWAY = {"server_restarted": "restarted", "server_unavailable": "unavailable"}
GONE = ("no_session", "server_restarted")
MODES = ("inflight", "inflight", "abort_requests", "drain")


# The loads: each runs in a process of its own until its time is over.


def check_tokens(ids: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, *, seed: int, prompt: int, at: int) -> None:
    """Assert that a stretch of a stream is the reference run's."""
    expected = scripted_ids(seed, len(ids), prompt + at)
    assert ids.tolist() == expected.tolist(), f"seed {seed} has other ids from {at} on than the reference run"
    wanted = (-1.0 - ids.astype(np.float32) / 256 - versions / 16).astype(np.float32)
    assert np.allclose(logprobs, wanted, atol=1e-5), f"seed {seed} has other log-probabilities from {at} on than the reference run"
    assert (np.diff(versions) >= 0).all(), "versions go back"


@dataclass(slots=True)
class AsyncLoad:
    """Streams, generations, groups, cancels and deadlines through the client."""

    client: rollout.AsyncClient
    draw: random.Random
    ends_at: float
    kills: Path
    outcomes: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Play until the time is over."""
        await asyncio.gather(*(self._play(random.Random(self.draw.random())) for _ in range(STREAMS)))

    async def _play(self, draw: random.Random) -> None:
        plays = (self._stream, self._stream, self._left, self._generate, self._group, self._cancelled, self._late)
        while time.monotonic() < self.ends_at:
            prompt = [draw.randrange(10, 250) for _ in range(draw.randrange(1, 40))]
            seed, tokens = draw.randrange(2**31), draw.choice((3, 20, 60, 150))
            self.outcomes["submitted"] += 1
            began = time.monotonic()
            try:
                outcome = await draw.choice(plays)(prompt, seed, tokens)
            except RequestFailed as failed:
                assert failed.reason_code == "host_failed", failed
                generation: Any = failed.generation
                assert generation.seed in (seed, *(derive_seed(seed, number) for number in range(3)))
                self._check(generation, generation.seed, len(prompt), 10**9)
                outcome = "failed"
            except Busy as busy:
                assert busy.retry_after_s is not None
                outcome = "refused"
                await asyncio.sleep(busy.retry_after_s)
            except Unavailable as error:
                outcome = AWAY.get(error.code, "refused")
                assert error.code in ("needs_weights", "host_failed", *AWAY), error
                if error.code in AWAY:
                    self._was_told_in_time(began, error)
                await asyncio.sleep(0.05)
            self.outcomes[outcome] += 1

    def _was_told_in_time(self, began: float, error: Unavailable) -> None:
        """Assert that a front was killed, and that a request of then, or a later one, has waited for its time-out at most."""
        assert self.kills.exists(), f"nobody killed the front: {error}"
        waited_s = time.monotonic() - max(began, float(self.kills.read_text()))
        assert waited_s < CLIENT_S + LATE_S, f"it took {waited_s:.1f} s to say: {error}"

    def _check(self, generation: rollout.Generation, seed: int, prompt: int, tokens: int) -> str:
        assert generation.logprobs is not None
        check_tokens(generation.ids, generation.logprobs, generation.versions, seed=seed, prompt=prompt, at=0)
        kind = generation.finish_reason.kind
        assert kind != "length" or len(generation.ids) == tokens, "an end by length has all tokens"
        return kind

    async def _generate(self, prompt: list[int], seed: int, tokens: int) -> str:
        generation = await self.client.generate(prompt, max_new_tokens=tokens, seed=seed, ignore_eos=True)
        return self._check(generation, seed, len(prompt), tokens)

    async def _stream(self, prompt: list[int], seed: int, tokens: int) -> str:
        seen, endings = 0, []
        async for delta in self.client.stream(prompt, max_new_tokens=tokens, seed=seed, ignore_eos=True):
            assert delta.offset == seen, f"a delta begins at {delta.offset}, {seen} tokens came before"
            assert delta.logprobs is not None
            check_tokens(delta.ids, delta.logprobs, delta.versions, seed=seed, prompt=len(prompt), at=seen)
            seen += len(delta.ids)
            if delta.finished is not None:
                endings.append(delta.finished)
        assert len(endings) == 1, f"{len(endings)} endings"
        assert len(endings[0].ids) == seen, "the generation has other tokens than its deltas"
        return self._check(endings[0], seed, len(prompt), tokens)

    async def _left(self, prompt: list[int], seed: int, tokens: int) -> str:
        async with self.client.stream(prompt, max_new_tokens=400, seed=seed, ignore_eos=True) as stream:
            async for delta in stream:
                if delta.offset + len(delta.ids) >= 5:
                    break
        return "left"

    async def _group(self, prompt: list[int], seed: int, tokens: int) -> str:
        members = await self.client.generate_group(prompt, 3, max_new_tokens=tokens, seed=seed, ignore_eos=True)
        for number, member in enumerate(members):
            self._check(member, derive_seed(seed, number), len(prompt), tokens)
        self.outcomes["members"] += len(members)
        return "group"

    async def _cancelled(self, prompt: list[int], seed: int, tokens: int) -> str:
        waiting = asyncio.create_task(self.client.generate(prompt, max_new_tokens=400, seed=seed, ignore_eos=True))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        return "cancelled await"

    async def _late(self, prompt: list[int], seed: int, tokens: int) -> str:
        generation = await self.client.generate(prompt, max_new_tokens=4000, seed=seed, ignore_eos=True, deadline_s=0.1)
        return self._check(generation, seed, len(prompt), 4000)


def patiently(connect: Callable[[], T]) -> T:
    """Connect, also while a killed front is not back yet."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return connect()
        except (Unavailable, AssertionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


async def async_load(address: str, seed: int, seconds: float, kills: Path) -> dict[str, int]:
    """Run an `AsyncLoad`; return its outcomes."""
    deadline, client = time.monotonic() + CONNECT_S, None
    while client is None:
        try:
            client = await rollout.connect_async(address, timeout_s=CLIENT_S, name=f"load {seed}")
        except Unavailable:
            assert time.monotonic() < deadline, "the service does not come back"
            await asyncio.sleep(0.1)
    async with client:
        load = AsyncLoad(client, random.Random(seed), time.monotonic() + seconds, kills)
        await load.run()
    return dict(load.outcomes)


def wire_load(address: str, seed: int, seconds: float) -> dict[str, int]:
    """Speak the protocol itself: every request gets one ERROR or one ending, offsets have no gap. Return the outcomes."""
    draw, ends_at, outcomes = random.Random(seed), time.monotonic() + seconds, Counter[str]()
    wire, reader = patiently(lambda: WireClient(address)), StreamReader()
    while time.monotonic() < ends_at:
        wanted: dict[bytes, int] = {}
        refused: set[bytes] = set()
        for _ in range(8):
            own = draw.randrange(2**31)
            wanted[wire.generate(prompt=[5] * 7, max_new_tokens=40, seed=own, ignore_eos=True)] = own
        deadline = time.monotonic() + 30.0
        while not all(one in reader.endings or one in refused for one in wanted):
            assert time.monotonic() < deadline, "a request has no end"
            packet = wire.receive(0.3)
            if packet is None:
                wire.send(Op.HEARTBEAT, {})
            elif packet.op is Op.DELTAS:
                time.sleep(draw.choice((0, 0, 0.01)))
                wire.acknowledge(packet, reader.take(packet))
            elif packet.op is Op.ERROR and packet.request_id in wanted:
                assert packet.request_id not in reader.endings and packet.request_id not in refused, "a second answer"
                refused.add(packet.request_id)
            elif packet.op is Op.ERROR and packet.body.code in GONE:  # type: ignore[attr-defined]
                # Stopped for longer than the lease, or the front was killed: the session is gone, and with it what was under way.
                wire.vanish()
                wire, reader, wanted = patiently(lambda: WireClient(address)), StreamReader(), {}
                outcomes["lapsed"] += 1
        for request_id, own in wanted.items():
            if request_id not in refused:
                ids = reader.ids[request_id]
                assert ids == scripted_ids(own, len(ids), 7).tolist(), "other ids than the reference run"
                kind = reader.endings[request_id].kind
                assert kind != "length" or len(ids) == 40
                outcomes[kind] += 1
        outcomes["refused"] += len(refused)
        if refused:
            time.sleep(0.1)
    wire.close()
    return dict(outcomes)


def push(client: rollout.Client, draw: random.Random, mode: str) -> None:
    """Push a version by file. Raises: what the service says; then nothing of it is open."""
    ticket = client.weights_begin({name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in TENSORS.items()})
    path = Path(client.info().weights_dir) / f"{secrets.token_hex(4)}.safetensors"
    try:
        save_file({name: np.full(shape, draw.random(), np.float32) for name, (_, shape) in TENSORS.items()}, path)
        data = path.read_bytes()
        client.weights_stage_file(ticket.update_id, str(path), size=len(data), xxh3=xxhash.xxh3_64_hexdigest(data))
        client.weights_commit(ticket.update_id, mode=mode, drain_s=0.5)
    except RolloutError:
        with contextlib.suppress(RolloutError):
            client.weights_abort(ticket.update_id)
        raise
    finally:
        path.unlink()


def trainer(address: str, seed: int, seconds: float) -> dict[str, int]:
    """Push versions until the time is over; return how pushes ended."""
    draw, ends_at, outcomes = random.Random(seed), time.monotonic() + seconds, Counter[str]()
    client = patiently(lambda: rollout.connect(address, timeout_s=20.0, name="trainer"))
    while time.monotonic() < ends_at:
        try:
            push(client, draw, draw.choice(MODES))
            outcomes["pushed"] += 1
        except RolloutError as error:
            # A dead host, a drain that took too long, the update of a trainer that was killed: all say so by code.
            outcomes[error.code] += 1
            assert error.code in ("host_failed", "drain_timeout", "update_busy", "no_update", *AWAY), error
        time.sleep(draw.uniform(0.1, 0.5))
    client.close()
    return dict(outcomes)


# The driver


class Worker:
    """A load or the trainer as a process; `finish` gives what it counted."""

    def __init__(self, kind: str, address: str, seed: int, seconds: float, kills: Path) -> None:
        self.kind = kind
        command = [sys.executable, "-m", "tests.chaos", "--worker", kind, "--address", address, "--seed", str(seed)]
        command += ["--seconds", str(seconds), "--kills", str(kills)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.communicate()

    def finish(self, timeout_s: float) -> dict[str, int]:
        """Wait for its end. Raises: AssertionError with what it saw."""
        out, err = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, f"{self.kind} found something wrong:\n{err[-3000:]}"
        return dict(json.loads(out))


class Chaos:
    """One run; see the module."""

    def __init__(self, seconds: float, seed: int) -> None:
        self._seconds, self._draw = seconds, random.Random(seed)
        self._done: Counter[str] = Counter()
        self._ends_at = 0.0
        # What fronts that are gone had counted.
        self._before: Counter[str] = Counter()

    def run(self) -> dict[str, Any]:
        """Run, prove, and return what happened. Raises: AssertionError."""
        with tempfile.TemporaryDirectory() as folder:
            # Every other run has hosts that bring the newest weights back by themselves; else the trainer has to.
            keeps = self._draw.random() < 0.5
            self._kills = Path(folder) / "kills"
            self._service = self._made(folder, str(Path(folder) / "last.safetensors") if keeps else None)
            try:
                self._service.start()
                return self._break()
            finally:
                self._service.stop()

    @staticmethod
    def _made(folder: str, keep_last: str | None) -> rollout.LocalService:
        return scripted_service(
            folder,
            engine_options={"step_ms": 1.0, "max_rows": ROWS, "num_pages": PAGES, "max_model_len": 8192},
            timeout_s=20.0,
            state_dir=str(Path(folder) / "state"),
            lease_s=LEASE_S,
            host_timeout_s=HOST_TIMEOUT_S,
            max_restarts=10**6,
            keep_last=keep_last,
            max_requests=64,
            stall_s=5.0,
        )

    @property
    def _client(self) -> rollout.Client:
        assert self._service.client is not None
        return self._service.client

    @property
    def _front(self) -> psutil.Process:
        assert self._service.pid is not None
        return psutil.Process(self._service.pid)

    def _start(self, kind: str) -> Worker:
        left = self._ends_at - time.monotonic()
        return Worker(kind, self._client.address, self._draw.randrange(2**31), left, self._kills)

    def _elapsed(self) -> float:
        """Return the part of the time that is over."""
        return 1.0 - (self._ends_at - time.monotonic()) / self._seconds

    def _break(self) -> dict[str, Any]:
        push(self._client, self._draw, "inflight")
        self._ends_at = time.monotonic() + self._seconds
        workers = [self._start(kind) for kind in (*LOADS, "trainer")]
        settled_mb = 0.0
        try:
            while time.monotonic() < self._ends_at - 3.0:
                time.sleep(self._draw.uniform(0.5, 1.5))
                self._harm(workers)
                if not settled_mb and self._elapsed() > SETTLED_AT:
                    settled_mb = self._front.memory_info().rss / 2**20
            counted: Counter[str] = Counter()
            for worker in workers:
                counted.update({f"{worker.kind}_{name}": count for name, count in worker.finish(60.0).items()})
        finally:
            for worker in workers:
                if worker.process.poll() is None:
                    worker.process.send_signal(signal.SIGCONT)
                    worker.kill()
        stats = self._settled(self._client)
        grown_mb = self._front.memory_info().rss / 2**20 - settled_mb
        self._prove(stats, counted, grown_mb)
        away = {name: count for name, count in counted.items() if name.endswith((*AWAY, *AWAY.values()))}
        assert self._done["kill front"] or not any(away.values()), f"the service was away though nobody killed its front: {away}"
        return {
            **self._done,
            **counted,
            **{name: self._before[name] + stats[name] for name in ("accepted", "length", "host_starts")},
            "version": stats["version"],
            "grown_mb": round(grown_mb, 1),
        }

    def _harm(self, workers: list[Worker]) -> None:
        """Do one bad thing."""
        what, elapsed = self._draw.choice(HARM), self._elapsed()
        if elapsed > FRONTS_UNTIL and what == "kill front":
            what = "kill host"
        elif FRONTS_UNTIL / 2 < elapsed < FRONTS_UNTIL and not self._done["kill front"]:
            what = "kill front"
        if what.endswith("host") and self._draw.random() < SPARED and self._client.info().health not in ("ready", "updating"):
            what = "kill load"
        self._done[what] += 1
        if what == "kill front":
            self._replace_front()
            return
        if what.endswith("host"):
            for host in self._front.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if what == "kill host":
                        host.kill()
                    else:
                        host.suspend()
                        time.sleep(0.4 if what == "stop host" else HOST_TIMEOUT_S + 0.8)
                        host.resume()
            return
        index = self._draw.randrange(len(LOADS)) if what.endswith("load") else len(LOADS)
        if what == "stop load":
            process = workers[index].process
            process.send_signal(signal.SIGSTOP)
            time.sleep(self._draw.choice((LEASE_S / 3, LEASE_S * 2)))
            process.send_signal(signal.SIGCONT)
        else:
            workers[index].kill()
            workers[index] = self._start(workers[index].kind)

    def _replace_front(self) -> None:
        """Kill the front; its host ends by itself and nothing of either stays; then start another at the same address."""
        stats = self._client.stats()
        assert stats["accounting_errors"] == 0 and stats["received"] == stats["refused"] + stats["attached"] + stats["accepted"], stats
        self._before.update({name: stats[name] for name in ("accepted", "length", "host_starts")})
        front, address, incarnation = self._front, self._client.address, self._client.info().incarnation
        hosts = front.children()
        # Loads read it: renamed into place, so that they see all of it.
        self._kills.with_suffix(".new").write_text(str(time.monotonic()))
        self._kills.with_suffix(".new").rename(self._kills)
        front.kill()
        _, alive = psutil.wait_procs(hosts, timeout=ORPHAN_S)
        assert not alive, f"engine hosts outlive their front: {alive}"
        run = Path(address.removeprefix("ipc://")).parent
        left = [path.name for path in run.iterdir() if path.is_socket() or ".h" in path.name]
        assert not left, f"files of a killed front stay: {left}"
        self._service.stop()
        self._service.start()
        assert self._client.address == address, "clients find the new front where the old one was"
        assert self._client.info().incarnation != incarnation, "clients can tell it from the old one"
        fresh = self._client.stats()
        assert fresh["host_starts"] == 1 and fresh["version"] > stats["version"], f"it begins anew: {fresh}"

    @staticmethod
    def _settled(client: rollout.Client) -> dict[str, Any]:
        """Return the numbers once everything that may still end has ended."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            stats: dict[str, Any] = client.stats()
            engine = stats["engine"]
            if (
                engine is not None
                and stats["sessions"] == 1
                and not (stats["live"] or stats["deciding"] or engine["running"] or engine["waiting"])
            ):
                return stats
            assert time.monotonic() < deadline, f"something never ends: {stats}"
            time.sleep(0.1)

    @staticmethod
    def _prove(stats: dict[str, Any], counted: Counter[str], grown_mb: float) -> None:
        ended = sum(stats[kind] for kind in ("stop", "length", "cancelled", "expired", "failed"))
        assert stats["received"] == stats["refused"] + stats["attached"] + stats["accepted"], stats
        assert stats["accepted"] == ended, f"{stats['accepted']} accepted, {ended} ended: {stats}"
        assert stats["accounting_errors"] == 0 and stats["failed"] == stats.get("failed_host_failed", 0), stats
        held = {
            name: stats[name]
            for name in ("reserved_bytes", "record_pages", "unacknowledged_endings", "open_calls", "due_bytes", "unsent_bytes")
        }
        # The call that asks is open itself.
        assert held == {**dict.fromkeys(held, 0), "open_calls": held["open_calls"]} and held["open_calls"] <= 1, held
        engine = stats["engine"]
        assert engine["free_pages"] + engine["cached_pages"] == PAGES and engine["rows_used"] == 0, engine
        assert stats["length"] >= 20, f"too little went on to prove anything: {stats}, {counted}"
        assert grown_mb < MEMORY_MB, f"the front grew by {grown_mb:.0f} MB"


def main() -> None:
    """Run the driver, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, help="of the killing; the loads' timing is never the same twice")
    parser.add_argument("--worker", choices=("async", "wire", "trainer"))
    parser.add_argument("--address")
    parser.add_argument("--kills", type=Path, help="file with the time at which the front was killed last")
    given = parser.parse_args()
    if given.worker == "async":
        print(json.dumps(asyncio.run(async_load(given.address, given.seed, given.seconds, given.kills))))
    elif given.worker is not None:
        print(json.dumps({"wire": wire_load, "trainer": trainer}[given.worker](given.address, given.seed, given.seconds)))
    else:
        seed = int.from_bytes(os.urandom(4)) if given.seed is None else given.seed
        print(json.dumps({"seed": seed, "seconds": given.seconds, **Chaos(given.seconds, seed).run()}))


if __name__ == "__main__":
    main()
