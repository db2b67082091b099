"""Updates at random moments by trainers that are killed, stopped and replaced, while requests stream: every token is what its tag promises.

    driver --"push N"--> trainer process (or a spare one, once it was killed) --weights--> service <--streams-- requests

The driver knows which weights each version may hold, since one trainer pushes at a time, and asks the service once a killed one's
update is over. The oracle runs each request's ids with the weights that its versions and rebuilds say, position by position.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import rollout
from rollout.errors import UpdateBusy
from tests.fixtures_models import reference_keep_logprobs, reference_logprobs, tiny_model, write_checkpoint
from tests.integration.test_service_weights import wait_until
from trainer_bridge import WeightPush

torch.set_num_threads(1)
REPOSITORY = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
LEASE_S = 2.0
NUM_MODELS = 6
TRAINER = """
import sys, time, warnings
import torch
import rollout
from rollout.errors import RolloutError
from safetensors.torch import load_file
from trainer_bridge import PushError, WeightPush
torch.set_num_threads(1)
warnings.simplefilter("ignore")
address, folder, transport = sys.argv[1:]
client, push = rollout.connect(address), None
print("ready", flush=True)
for line in sys.stdin:
    number, bucket_bytes, pause_s, mode = line.split()
    try:
        if push is None:
            push = WeightPush(client, transport=transport, bucket_bytes=int(bucket_bytes), allow_unchanged=True)
            send = push._transport.send
        def slow(bucket):
            send(bucket)
            time.sleep(float(pause_s))
        push._transport.send = slow
        print("version", push.push(list(load_file(f"{folder}/{number}").items()), mode=mode).version, flush=True)
    except (RolloutError, PushError) as error:
        print("refused", error.code, flush=True)
"""


class Trainers:
    """A trainer process, and a spare one that takes its place where it is killed."""

    def __init__(self, address: Any, folder: Path, transport: str) -> None:
        self._command = [sys.executable, "-c", TRAINER, str(address), str(folder), transport]
        self._environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self._processes = [self._start(), self._start()]
        self._ready: set[int] = set()
        self._await(self._processes[0])

    def _await(self, process: subprocess.Popen[str]) -> None:
        if process.pid not in self._ready:
            assert self._line(process) == ["ready"]
            self._ready.add(process.pid)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment)

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> list[str]:
        assert process.stdout is not None
        return process.stdout.readline().split()

    def ask(self, *given: Any) -> None:
        """Let the trainer push."""
        process = self._processes[0]
        self._await(process)
        assert process.stdin is not None
        process.stdin.write(" ".join(map(str, given)) + "\n")
        process.stdin.flush()

    def answer(self) -> list[str]:
        """Return how the push ended."""
        return self._line(self._processes[0])

    def stand_still(self, seconds: float) -> None:
        """Stop the trainer for a while."""
        self._processes[0].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._processes[0].send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the trainer; the spare one takes over, and a new one starts."""
        killed = self._processes.pop(0)
        killed.kill()
        killed.communicate()
        self._processes.append(self._start())

    def close(self) -> None:
        """End all."""
        for process in self._processes:
            process.kill()
            process.communicate()


class Streams:
    """Requests that stream for the length of a block: prompts share their beginnings, some are given up in the middle."""

    def __init__(self, client: rollout.Client, seed: int) -> None:
        self._client, self._over, self._random = client, threading.Event(), random.Random(seed)
        self._numbers = itertools.count()
        self.generations: list[tuple[str, rollout.Generation]] = []
        self.given_up = 0

    def _ask(self, draw: random.Random) -> None:
        beginning = np.random.default_rng(draw.randrange(3)).integers(3, 250, 40)
        prompt = np.concatenate([beginning[: draw.randrange(1, 41)], np.random.default_rng(draw.randrange(10**6)).integers(3, 250, 3)])
        policy, gives_up = draw.choice(["keep", "recompute"]), draw.random() < 0.15
        stream = self._client.stream(
            prompt, max_new_tokens=draw.choice([1, 20, 60, 150]), ignore_eos=True, seed=draw.randrange(2**32), kv_policy=policy
        )
        parts: list[Any] = []
        for delta in stream:
            parts.append(delta)
            if gives_up and len(parts) > 3:
                stream.close()
                self.given_up += 1
                return
        finished = parts[-1].finished
        assert finished is not None
        assert np.array_equal(np.concatenate([delta.ids for delta in parts]), finished.ids), "each token comes once"
        self.generations.append((policy, finished))

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._over.is_set():
            self._ask(draw)

    def __enter__(self) -> Streams:
        self._pool = ThreadPoolExecutor(10)
        self._asking = [self._pool.submit(self._run, self._random.randrange(2**32)) for _ in range(10)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for one in self._asking:
            one.result(60)
        self._pool.shutdown()


def expected_logprobs(generation: rollout.Generation, policy: str, models: dict[int, Any]) -> np.ndarray:
    """Return each token's log-probability by what its tag promises."""
    ids, prompt, versions = np.concatenate([generation.prompt_ids, generation.ids]), len(generation.prompt_ids), generation.versions
    if policy == "recompute":
        whole = {int(version): reference_logprobs(models[int(version)], ids)[prompt - 1 :] for version in set(versions.tolist())}
        return np.array([whole[int(version)][place] for place, version in enumerate(versions)])
    rebuilt = [0, *(int(place) - prompt for place in generation.kv_rebuilt_at), len(versions)]
    expected = np.full(len(versions), np.nan)
    for start, end in itertools.pairwise(rebuilt):
        if start == end:
            continue
        # A rebuild runs all there is by one version; every later token is run by the version of the one that follows it.
        ran_by = np.concatenate([np.full(prompt + start, versions[start]), versions[start + 1 :]])
        expected[start:end] = reference_keep_logprobs(models, ids, ran_by)[prompt - 1 :][start:end]
    return expected


def settled_version(client: rollout.Client) -> int:
    """Return the version that is served once no update is open; the lease of a trainer that was killed ends first."""
    deadline = time.monotonic() + 15.0
    while True:
        try:
            ticket = client.weights_begin(None)
        except UpdateBusy:
            assert time.monotonic() < deadline, "an update outlives its trainer's lease"
            time.sleep(0.05)
        else:
            client.weights_abort(ticket.update_id)
            return client.info().version


def test_a_request_that_was_preempted_before_an_update_cut_it_says_where_its_cache_was_rebuilt(tmp_path: Path) -> None:
    made = {number: tiny_model("llama", seed=number) for number in range(3)}
    tensors = {number: list(model.named_parameters()) for number, model in made.items()}
    folder = write_checkpoint(tmp_path / "tiny", "llama", seed=0)
    # Two requests of 33 + 450 tokens need 62 pages.
    with rollout.local(str(folder), dtype="float32", threads=1, max_rows=2, page_size=16, num_pages=34) as client:
        push = WeightPush(client, transport="memory", process_group=None)
        prompts = [np.random.default_rng(number).integers(3, 250, 33) for number in range(2)]
        with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
            warnings.simplefilter("ignore")
            options: dict[str, Any] = {"max_new_tokens": 450, "ignore_eos": True}
            asked = [pool.submit(client.generate, prompt, seed=number, **options) for number, prompt in enumerate(prompts)]
            wait_until(lambda: client.stats()["engine"]["running"] == 2)
            models = {0: made[0], push.push(tensors[1]).version: made[1]}
            close = push._transport.close

            def closing() -> None:
                # The one that lost its pages runs again when the other has ended.
                wait_until(lambda: client.stats()["engine"]["preemptions"] > 0 and client.stats()["live"] == 1)
                close()

            push._transport.close = closing  # type: ignore[method-assign]
            models[push.push(tensors[2], mode="abort_requests").version] = made[2]
            generations = [one.result(30) for one in asked]
    for generation in generations:
        assert np.abs(generation.logprobs - expected_logprobs(generation, "keep", models)).max() < TOLERANCE
    assert {int(version) for one in generations for version in one.versions} == set(models), "one was cut"
    assert max(len(one.kv_rebuilt_at) for one in generations) == 2, "rebuilt when it had pages again, and when it was cut"


LONG = [
    pytest.param(transport, 75.0, seed, marks=pytest.mark.long) for transport in ("memory", "file", "frames", "group") for seed in (1, 2)
]


@pytest.mark.parametrize(("transport", "seconds", "seed"), [("group", 2.0, 0), *LONG])
def test_every_token_is_computed_by_the_weights_in_its_tag_whatever_becomes_of_the_trainers(
    transport: str, seconds: float, seed: int, tmp_path: Path
) -> None:
    draw, made = random.Random(seed), {number: tiny_model("llama", seed=number) for number in range(NUM_MODELS)}
    for number, model in made.items():
        save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, tmp_path / str(number))
    folder, outcomes = write_checkpoint(tmp_path / "tiny", "llama", seed=0), Counter[str]()
    service = rollout.local(str(folder), dtype="float32", threads=1, max_rows=8, page_size=16, num_pages=60, lease_s=LEASE_S)
    with service as client, contextlib.closing(Trainers(service.address, tmp_path, transport)) as trainers:
        models = {client.info().version: made[0]}
        with Streams(client, seed) as streams:
            end = time.monotonic() + seconds
            while time.monotonic() < end or not outcomes["let go, version"]:
                number, what = draw.randrange(NUM_MODELS), draw.choice(["let go", "let go", "kill", "stop"])
                mode = draw.choice(["inflight", "inflight", "abort_requests", "drain"])
                before = settled_version(client)
                trainers.ask(number, draw.choice([4096, 40_000, 10**8]), draw.choice([0, 0, 0.01]), mode)
                time.sleep(draw.choice([0.0, 0.05, 0.15, 0.4, 1.0]) * draw.random())
                if what == "kill":
                    trainers.kill()
                    after = settled_version(client)
                    outcomes["killed, " + ("published" if after > before else "nothing")] += 1
                else:
                    if what == "stop":
                        trainers.stand_still(draw.choice([0.1, 0.5, 1.5 * LEASE_S]))
                    told, *rest = trainers.answer()
                    outcomes[f"{what}, {told if told == 'version' else rest[0]}"] += 1
                    after = settled_version(client)
                    assert told == "refused" or after == int(rest[0]) > before
                if after > before:
                    models[after] = made[number]
                time.sleep(draw.choice([0.0, 0.1]))
        preemptions = client.stats()["engine"]["preemptions"]
        print(transport, dict(outcomes), len(streams.generations), "requests", preemptions, "preemptions")
        final = client.score(list(range(3, 30))).token_logprobs
        last = models[settled_version(client)]
    assert np.abs(final - reference_logprobs(last, list(range(3, 30)))).max() < TOLERANCE
    several = [one for one in streams.generations if len(set(one[1].versions.tolist())) > 1]
    looked_at = [
        *several[: int(60 * seconds)],
        *streams.generations[-100:],
        *draw.sample(streams.generations, min(20, len(streams.generations))),
    ]
    for policy, generation in looked_at:
        assert set(generation.versions.tolist()) <= set(models) and (np.diff(generation.versions) >= 0).all()
        gaps = np.abs(generation.logprobs - expected_logprobs(generation, policy, models))
        assert gaps.max() < TOLERANCE, (policy, generation.versions, generation.kv_rebuilt_at, len(generation.prompt_ids), gaps)
    assert several, (dict(outcomes), len(streams.generations), preemptions)
