"""What running requests see of an update: they go on, are waited for, or are cut and go on by themselves as new ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout
from rollout.agent import derive_seed
from rollout.errors import Busy, DrainTimeout, ServerUnavailable, VersionChanged
from tests.fakes import fake_ids, fake_logprobs, fake_service
from tests.integration.test_service_weights import MANIFEST, digests_of, stage, tensors_of, wait_until, written


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with fake_service(tmp_path_factory.mktemp("model"), engine_options={"step_s": 0.002, "kept_ids": True}, kept_ids=True) as client:
        yield client


def push(client: Any, value: float, **commit: Any) -> rollout.UpdateReport:
    tensors = tensors_of(value)
    ticket = client.weights_begin(MANIFEST)
    stage(client, ticket.update_id, written(client, tensors))
    return client.weights_commit(ticket.update_id, digests=digests_of(tensors), **commit)


def running(client: Any) -> bool:
    return bool(client.stats()["engine"]["running"])


def test_a_drain_lets_requests_end_under_the_old_version_and_queues_new_ones(client: Any) -> None:
    version = client.info().version
    with ThreadPoolExecutor(3) as pool:
        before = pool.submit(client.generate, [1], max_new_tokens=150, seed=1)
        wait_until(lambda: running(client))
        pushed = pool.submit(push, client, time.monotonic(), mode="drain", drain_s=20.0)
        wait_until(lambda: client.stats()["held_for_update"])
        after = client.generate([1], max_new_tokens=3, seed=2)
        assert before.result(5).versions.tolist() == [version] * 150
        assert after.versions.tolist() == [pushed.result(5).version] * 3


def test_a_drain_that_takes_too_long_is_refused_and_everything_goes_on(client: Any) -> None:
    version = client.info().version
    with client.stream([1], max_new_tokens=20_000) as stream:
        next(stream)
        tensors = tensors_of(time.monotonic())
        ticket = client.weights_begin(MANIFEST)
        stage(client, ticket.update_id, written(client, tensors))
        with pytest.raises(DrainTimeout, match=r"1 requests were still running after 0.1 s.*mode='inflight'"):
            client.weights_commit(ticket.update_id, mode="drain", drain_s=0.1)
        assert client.info().version == version and not client.stats()["held_for_update"]
        next(stream)
        assert client.weights_commit(ticket.update_id).version == version + 1


def test_a_cut_request_goes_on_by_itself_and_its_caller_sees_one_generation(client: Any) -> None:
    version = client.info().version
    with ThreadPoolExecutor(4) as pool:
        stream = client.stream([1, 2, 3], max_new_tokens=300, seed=7, top_k=4, return_kept_ids=True, prompt_logprobs_from=1)
        group = pool.submit(client.generate_group, [4, 5], 3, max_new_tokens=300, seed=9)
        deltas = [next(stream)]
        wait_until(lambda: client.stats()["engine"]["running"] == 4)
        for number in range(3):
            push(client, 100.0 + number, mode="abort_requests")
        deltas += list(stream)
        members = group.result(20)
    generation = deltas[-1].finished
    assert generation is not None
    assert generation.request_id == stream.request_id
    assert generation.ids.tolist() == fake_ids(7, 300).tolist()
    assert np.concatenate([delta.ids for delta in deltas]).tolist() == generation.ids.tolist()
    assert generation.finish_reason.kind == "length" and generation.prompt_tokens == 3 and generation.prompt_ids.tolist() == [1, 2, 3]
    assert generation.kept_counts is not None and generation.kept_counts.size == 300
    assert generation.prompt_logprobs is not None and generation.prompt_logprobs.logprobs.size == 2
    assert 1 <= len(generation.kv_rebuilt_at) <= 3
    versions = generation.versions
    assert versions[0] == version and versions[-1] == version + 3 and (np.diff(versions) >= 0).all()
    for one in (generation, *members):
        assert np.array_equal(one.logprobs, np.concatenate([fake_logprobs(one.ids[one.versions == v], v) for v in np.unique(one.versions)]))
    assert [member.ids.tolist() for member in members] == [fake_ids(derive_seed(9, index), 300).tolist() for index in range(3)]
    counts = client.stats()
    assert counts["received"] == counts["refused"] + counts["attached"] + counts["accepted"]


def test_a_cut_requests_text_and_stop_string_are_those_of_the_whole(client: Any) -> None:
    ids = fake_ids(11, 400)
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(client.generate, [1], max_new_tokens=400, seed=11, forced_ids=[*ids[:250].tolist(), 5])
        wait_until(lambda: running(client))
        push(client, 200.0, mode="abort_requests")
        generation = cut.result(10)
    assert generation.ids[:251].tolist() == [*ids[:250].tolist(), 5], "forced ids count from the beginning"


def test_cancelling_a_cut_request_by_its_own_id_ends_it(client: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        stream = client.stream([1], max_new_tokens=50_000, seed=3)
        next(stream)
        push(client, 300.0, mode="abort_requests")
        wait_until(lambda: running(client))
        assert client.cancel(stream.request_id).cancelled
        last = pool.submit(lambda: list(stream)[-1].finished).result(5)
    assert last is not None and last.finish_reason.kind == "cancelled" and last.finish_reason.detail is None
    wait_until(lambda: not running(client))


def test_a_cut_requests_deadline_counts_from_its_first_receipt(client: Any) -> None:
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(client.generate, [1], max_new_tokens=50_000, deadline_s=1.0)
        wait_until(lambda: running(client))
        time.sleep(0.4)
        push(client, 400.0, mode="abort_requests")
        assert cut.result(5).finish_reason.kind == "expired"
    assert time.monotonic() - started < 1.35


def test_an_evaluation_sees_one_version_and_a_commit_waits_for_it(client: Any) -> None:
    version = client.info().version
    with ThreadPoolExecutor(2) as pool:
        evaluation = pool.submit(client.evaluate, [[1], [2], [3]], max_new_tokens=100, seed=5)
        wait_until(lambda: running(client))
        pushed = pool.submit(push, client, 500.0)
        generations = evaluation.result(10)
        assert not {v for one in generations for v in one.versions.tolist()} - {version}
        assert pushed.result(10).version == version + 1
    assert [one.ids.tolist() for one in generations] == [fake_ids(derive_seed(5, index), 100).tolist() for index in range(3)]


def test_an_evaluation_past_its_deadline_lets_the_commit_in_and_says_so(client: Any) -> None:
    version = client.info().version
    with ThreadPoolExecutor(2) as pool:
        evaluation = pool.submit(client.evaluate, [[1]], max_new_tokens=50_000, deadline_s=0.5)
        wait_until(lambda: running(client))
        time.sleep(0.05)
        assert push(client, 600.0).version == version + 1
        try:
            # The deadline of its request and that of its hold are a moment apart.
            assert evaluation.result(10)[0].finish_reason.kind == "expired"
        except VersionChanged as error:
            assert "larger deadline_s" in str(error)


def test_a_commit_that_an_evaluation_holds_is_waited_for_as_long_as_asked_and_goes_on(client: Any) -> None:
    version = client.info().version
    with ThreadPoolExecutor(1) as pool:
        evaluation = pool.submit(client.evaluate, [[1]], max_new_tokens=1000, seed=5)
        wait_until(lambda: running(client))
        with pytest.raises(ServerUnavailable, match=r"no answer to WEIGHTS_COMMIT within 0\.1 s") as refused:
            push(client, 700.0, timeout_s=0.1)
        assert (
            refused.value.field == "timeout_s"
            and "evaluations" in str(refused.value.limit)
            and "larger timeout_s" in str(refused.value.remedy)
        )
        assert not evaluation.done() and client.info().version == version
        assert set(evaluation.result(60)[0].versions.tolist()) == {version}
    wait_until(lambda: client.info().version == version + 1)


@pytest.mark.parametrize("wait", ["cancelled", "interrupted"])
def test_an_evaluation_whose_caller_left_before_it_began_keeps_no_commit_away(client: Any, wait: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        stream = client.stream([1], max_new_tokens=20_000)
        next(stream)
        pushed = pool.submit(push, client, time.monotonic(), mode="drain", drain_s=20.0)
        wait_until(lambda: client.stats()["held_for_update"])
        if wait == "cancelled":
            with pytest.raises(asyncio.TimeoutError):
                asyncio.run(asyncio.wait_for(client.aio.evaluate([[1, 2]], max_new_tokens=3), 0.2))
        else:
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                client.evaluate([[1, 2]], max_new_tokens=3)
        stream.close()
        assert pushed.result(10).version == client.info().version
    assert push(client, time.monotonic(), mode="inflight").version == client.info().version


def test_generations_that_an_update_cut_at_the_admission_limit_all_go_on(tmp_path: Path) -> None:
    with fake_service(tmp_path, max_rows=8, max_requests=8, engine_options={"step_s": 0.003}) as service_client:
        other, ended = rollout.connect(service_client.address), threading.Event()

        def take_every_room() -> None:
            while not ended.is_set():
                with contextlib.suppress(Busy):
                    other.generate([1], max_new_tokens=3)

        with ThreadPoolExecutor(16) as pool:
            longs = [pool.submit(service_client.generate, [1], max_new_tokens=300, seed=seed) for seed in range(8)]
            wait_until(lambda: service_client.stats()["live"] == 8)
            others = [pool.submit(take_every_room) for _ in range(8)]
            push(service_client, 1.0, mode="abort_requests", drain_s=10.0)
            push(service_client, 2.0, mode="abort_requests", drain_s=10.0)
            for seed, long in enumerate(longs):
                generation = long.result(20)
                assert generation.ids.tolist() == fake_ids(seed, 300).tolist() and generation.kv_rebuilt_at
                expected = [fake_logprobs(np.array([one]), int(version))[0] for one, version in zip(generation.ids, generation.versions)]
                assert np.allclose(generation.logprobs, expected)
            ended.set()
            for one in others:
                one.result(10)
        other.close()
