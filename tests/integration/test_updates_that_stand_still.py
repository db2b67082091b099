"""Trainer, engine host or front stand still in the middle of an update (SIGSTOP): it arrives whole or ends with a typed error.

Requests run all the while, and every token of theirs is what its tag promises; afterwards nothing holds the next update up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

import rollout
from rollout.errors import RolloutError, ServerUnavailable, UpdateBusy
from tests.fixtures_models import reference_logprobs, write_checkpoint
from tests.integration.test_updates_by_transport import gaps, prompt
from tests.integration.test_weight_transports import SMALL, assert_serves, at_bucket, model_of, pushed, trainer, wait_until
from trainer_bridge import GroupTask, RolloutSource, TrainingSample, TurnSpan, WeightPush, each_member

torch.set_num_threads(1)
TOLERANCE = 1e-4
PATIENT_S, HASTY_S = 120.0, 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", seed=0)


def serve(folder: Path, lease_s: float = 30.0) -> rollout.LocalService:
    """A service whose pages are too few for all requests at once, so that some are preempted."""
    return rollout.local(str(folder), dtype="float32", threads=1, max_rows=8, page_size=16, num_pages=40, lease_s=lease_s)


@contextlib.contextmanager
def standing_still(process: psutil.Process, seconds: float) -> Iterator[None]:
    """Stop a process from now on, and let it go on so many seconds later, whatever happens meanwhile."""
    process.suspend()
    resumed = threading.Timer(seconds, process.resume)
    resumed.start()
    try:
        yield
    finally:
        resumed.join()


def host_of(service: rollout.LocalService) -> psutil.Process:
    [host] = psutil.Process(service.pid).children()
    return host


class Traffic:
    """Requests that follow each other for the length of a block, on few prompts, so that prefixes are found again."""

    def __init__(self, client: Any) -> None:
        self._client, self._over = client, threading.Event()
        self._numbers = itertools.count()
        self.generations: list[tuple[str, rollout.Generation]] = []

    def _ask(self) -> None:
        while not self._over.is_set():
            number = next(self._numbers)
            policy = "recompute" if number % 2 else "keep"
            generation = self._client.generate(prompt(number % 3), max_new_tokens=60, ignore_eos=True, seed=number, kv_policy=policy)
            self.generations.append((policy, generation))

    def __enter__(self) -> Traffic:
        self._pool = ThreadPoolExecutor(6)
        self._asking = [self._pool.submit(self._ask) for _ in range(6)]
        wait_until(lambda: len(self.generations) > 3)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for one in self._asking:
            one.result(60)
        self._pool.shutdown()

    def check(self, models: dict[int, Any]) -> None:
        """Every token has the log-probability of the version in its tag; the later part of the requests is enough to look at."""
        torn = [(policy, one) for policy, one in self.generations if len(set(one.versions.tolist())) > 1]
        for policy, generation in [*torn[:20], *self.generations[-20:]]:
            assert set(generation.versions.tolist()) <= set(models) and (np.diff(generation.versions) >= 0).all()
            assert len(generation.ids) == 60 and gaps(generation, models, policy).max() < TOLERANCE


LONG = [
    (who, transport, patient) for who in ("engine", "trainer") for transport in ("memory", "frames", "file") for patient in (True, False)
]


@pytest.mark.parametrize(
    ("who", "transport", "patient", "still_s"),
    [("engine", "memory", True, 1.0), *(pytest.param(*one, 10.0, marks=pytest.mark.long) for one in LONG)],
)
def test_an_update_in_which_somebody_stands_still_is_whole_or_refused_and_never_mixed(
    folder: Path, tmp_path: Path, who: str, transport: str, patient: bool, still_s: float
) -> None:
    old, new = model_of(41), model_of(77)
    # A trainer that stands still for longer than its lease loses its update.
    service = serve(folder, lease_s=2.0 if who == "trainer" and not patient else 30.0)
    with service as client:
        before = WeightPush(client, old).push().version
        with Traffic(client) as traffic:
            if who == "engine":
                stopping = at_bucket(
                    WeightPush(client, new, transport=transport, bucket_bytes=SMALL, timeout_s=PATIENT_S if patient else HASTY_S),
                    3,
                    lambda: still.enter_context(standing_still(host_of(service), still_s)),
                )
                started = time.monotonic()
                with contextlib.ExitStack() as still:
                    if patient:
                        stopping.push()
                    else:
                        with pytest.raises(RolloutError) as refused:
                            stopping.push()
                        assert time.monotonic() - started < 8.0 and refused.value.remedy, "in time, while the engine still stands"
            else:
                save_file({name: tensor.detach() for name, tensor in new.named_parameters()}, tmp_path / "weights.safetensors")
                with trainer(service, tmp_path / "weights.safetensors", transport, 3, 0.2) as process:
                    with standing_still(psutil.Process(process.pid), still_s):
                        pass
                    told = process.communicate(timeout=60)[0].strip()
                assert told.startswith("version") if patient else told in ("no_update", "server_restarted", "no_session"), told
            version = client.info().version
            assert (version > before) == patient
            served = len(traffic.generations)
            wait_until(lambda: len(traffic.generations) > served + 12)
        traffic.check({before: old, version: new if patient else old})
        assert_serves(client, new if patient else old)
        wait_until(lambda: pushed(WeightPush(client, model_of(43))))
        assert_serves(client, model_of(43))


@pytest.mark.filterwarnings("ignore:version . was pushed by another trainer")
@pytest.mark.parametrize("call", ["weights_begin", "weights_commit"])
def test_a_front_that_stands_still_is_a_typed_error_in_time_and_the_update_is_whole_or_gone(
    folder: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = model_of(44), model_of(45)
    service = serve(folder)
    with service as operator, contextlib.ExitStack() as still:
        before = WeightPush(operator, old).push().version
        with rollout.connect(operator.address, timeout_s=1.0) as client:
            push, asked = WeightPush(client, new), getattr(client, call)

            def stopped(*arguments: Any, **fields: Any) -> Any:
                still.enter_context(standing_still(psutil.Process(service.pid), 6.0))
                return asked(*arguments, **fields)

            monkeypatch.setattr(client, call, stopped)
            started = time.monotonic()
            with pytest.raises(ServerUnavailable) as refused:
                push.push()
            assert time.monotonic() - started < 5.0 and refused.value.limit and refused.value.remedy
            still.close()
            monkeypatch.undo()
            if call == "weights_commit":
                # It was asked for, so it is made.
                wait_until(lambda: operator.info().version > before)
                assert_serves(operator, new)
            else:
                assert operator.info().version == before
                assert_serves(operator, old)
            # The client lives on: what it opened without knowing must not keep others away.
            wait_until(lambda: pushed(WeightPush(operator, model_of(46))), 5.0)
            assert_serves(operator, model_of(46))
            wait_until(lambda: pushed(push), 5.0)
            assert_serves(operator, new)
            assert push.version == operator.info().version > before + 1


def test_a_begin_that_an_engine_does_not_answer_ends_in_its_time_and_leaves_nothing_open(folder: Path) -> None:
    service = serve(folder)
    with service as client:
        before = client.info().version
        push = WeightPush(client, model_of(47), timeout_s=HASTY_S)
        with standing_still(host_of(service), 4.0):
            started = time.monotonic()
            with pytest.raises(ServerUnavailable, match=r"no answer to WEIGHTS_BEGIN within 0\.5 s") as refused:
                push.push()
            assert time.monotonic() - started < 3.0 and refused.value.field == "timeout_s"
            with pytest.raises(UpdateBusy):
                client.weights_begin(None, timeout_s=HASTY_S)
        assert client.info().version == before
        wait_until(lambda: pushed(push), 5.0)
        assert_serves(client, model_of(47))
        with standing_still(host_of(service), 1.5), pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(client.aio.weights_begin(None), 0.3))
        wait_until(lambda: pushed(WeightPush(client, model_of(50))), 5.0)


def test_a_trainer_resumes_from_its_checkpoint_while_the_engine_is_paused(folder: Path) -> None:
    def source_of(client: Any, push: WeightPush) -> RolloutSource[int]:
        async def play(task: GroupTask[int], member: int) -> TrainingSample:
            generation = await client.aio.generate(prompt(task.prompt), max_new_tokens=6, seed=task.index * 10 + member, ignore_eos=True)
            given, drawn = len(generation.prompt_ids), len(generation.ids)
            return TrainingSample(
                ids=[*generation.prompt_ids.tolist(), *generation.ids.tolist()],
                mask=[False] * given + [True] * drawn,
                logprobs=[np.nan] * given + generation.logprobs.tolist(),
                versions=[-1] * given + generation.versions.tolist(),
                turns=(TurnSpan(start=given, end=given + drawn, temperature=1.0, kv_spans=generation.kv_spans),),
                group_id=task.index,
                member=member,
                reward=float(member),
            )

        return RolloutSource(range(100), each_member(play), group_size=2, version=lambda: push.version, max_ahead=2, max_staleness=1)

    model = model_of(48)
    with serve(folder) as operator:
        with rollout.connect(operator.address) as client:
            push = WeightPush(client, model)
            push.push()
            with source_of(client, push) as source:
                taken = [group.index for _ in range(2) for group in source.next(2)]
                with torch.no_grad():
                    next(model.parameters()).add_(0.05)
                state, place = {name: tensor.clone() for name, tensor in model.state_dict().items()}, source.state_dict()
        operator.pause()
        model = model_of(49)
        model.load_state_dict(state)
        with rollout.connect(operator.address) as client, ThreadPoolExecutor(1) as pool:
            started = time.monotonic()
            push = WeightPush(client, model)
            version = push.push().version
            assert time.monotonic() - started < 10.0 and operator.info().paused_by, "the weights are in while the engine stands"
            with source_of(client, push) as source:
                source.load_state_dict(place)
                waiting = pool.submit(source.next, 2)
                time.sleep(0.5)
                assert not waiting.done()
                operator.resume()
                groups = waiting.result(30)
        assert sorted([*taken, *(group.index for group in groups)]) == list(range(6)), "no prompt is lost or played twice"
        for sample in (sample for group in groups for sample in group.samples):
            assert set(sample.versions[sample.mask].tolist()) == {version}
            expected = reference_logprobs(model, sample.ids)
            assert np.abs(sample.logprobs[sample.mask] - expected[sample.mask[1:]]).max() < TOLERANCE
