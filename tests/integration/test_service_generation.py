"""Generations through real processes: front, engine host with a fake engine, clients over local sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import rollout
from rollout.errors import Gone, InvalidRequest, RequestTooLong
from tests.fakes import EOS_ID, VOCABULARY, fake_ids, fake_logprobs, fake_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with fake_service(tmp_path_factory.mktemp("model"), engine_options={"step_s": 0.001}, max_rows=16) as client:
        yield client
        assert client.stats()["malformed"] == 0


@pytest.fixture
def client(service: Any) -> Any:
    return service


def assert_reconciled(stats: dict[str, Any]) -> None:
    assert stats["received"] == stats["refused"] + stats["attached"] + stats["accepted"]
    ended = sum(stats[kind] for kind in ("stop", "length", "cancelled", "expired", "failed"))
    assert stats["accepted"] == stats["live"] + ended


def test_a_generation_is_whole_and_exact(client: Any) -> None:
    generation = client.generate([5, 6, 7], max_new_tokens=300, seed=9)
    assert generation.ids.tolist() == fake_ids(9, 300).tolist()
    assert generation.prompt_ids.tolist() == [5, 6, 7]
    assert generation.prompt_ids.dtype == generation.ids.dtype == np.int32
    assert np.array_equal(generation.logprobs, fake_logprobs(generation.ids, 0))
    assert np.array_equal(generation.raw_logprobs, fake_logprobs(generation.ids, 0) - np.float32(0.5))
    assert generation.behaviour_logprobs is None
    assert generation.versions.tolist() == [0] * 300
    assert generation.kv_spans == ((0, 0),)
    assert (generation.finish_reason.kind, generation.finish_reason.stop_id) == ("length", None)
    assert (generation.seed, generation.prompt_tokens, generation.cached_tokens) == (9, 3, 0)


def test_the_stop_id_is_the_last_id_and_is_named(client: Any) -> None:
    forced = [50, 51, EOS_ID, 52]
    generation = client.generate([1], max_new_tokens=8, forced_ids=forced)
    assert generation.ids.tolist() == [50, 51, EOS_ID]
    assert (generation.finish_reason.kind, generation.finish_reason.stop_id) == ("stop", EOS_ID)
    assert len(generation.ids) == len(generation.logprobs) == len(generation.versions) == 3
    ignored = client.generate([1], max_new_tokens=5, forced_ids=forced, ignore_eos=True, stop_ids=[52])
    assert (ignored.ids.tolist(), ignored.finish_reason.stop_id) == ([50, 51, EOS_ID, 52], 52)
    late = client.generate([1], max_new_tokens=6, forced_ids=[EOS_ID, EOS_ID, 50, EOS_ID], min_new_tokens=3)
    assert late.ids.tolist() == [EOS_ID, EOS_ID, 50, EOS_ID]


def test_logprobs_that_are_not_wanted_are_none(client: Any) -> None:
    generation = client.generate([1], max_new_tokens=3, logprobs=False)
    assert (generation.logprobs, generation.raw_logprobs, generation.behaviour_logprobs) == (None, None, None)
    assert len(generation.ids) == 3


def test_a_missing_seed_is_drawn_and_reported(client: Any) -> None:
    first, second = (client.generate([1], max_new_tokens=4) for _ in range(2))
    assert first.seed != second.seed
    assert first.ids.tolist() == fake_ids(first.seed, 4).tolist()


def test_a_stream_joins_to_the_generation(client: Any) -> None:
    stream = client.stream([1, 2], max_new_tokens=200, seed=3)
    assert len(stream.request_id) == 16
    deltas = list(stream)
    assert [delta.offset for delta in deltas] == np.cumsum([0, *(len(delta.ids) for delta in deltas)])[:-1].tolist()
    assert np.concatenate([delta.ids for delta in deltas]).tolist() == fake_ids(3, 200).tolist()
    assert all(delta.finished is None for delta in deltas[:-1])
    assert deltas[-1].finished.request_id == stream.request_id
    assert deltas[-1].finished.ids.tolist() == fake_ids(3, 200).tolist()
    assert len(deltas) > 3, "it came in pieces"
    with pytest.raises(StopIteration):
        next(stream)


def test_the_async_facade_streams_and_generates_many_at_once(client: Any) -> None:
    async def one(seed: int) -> list[int]:
        ids: list[int] = []
        async for delta in client.aio.stream([1], max_new_tokens=40, seed=seed):
            ids.extend(delta.ids.tolist())
        return ids

    async def everything() -> list[list[int]]:
        generations = asyncio.gather(*(client.aio.generate([1], max_new_tokens=20, seed=seed) for seed in range(60)))
        streams = await asyncio.gather(*(one(seed) for seed in range(60)))
        assert [generation.ids.tolist() for generation in await generations] == [fake_ids(seed, 20).tolist() for seed in range(60)]
        return streams

    assert asyncio.run(everything()) == [fake_ids(seed, 40).tolist() for seed in range(60)]


def test_both_facades_work_inside_a_running_loop(client: Any) -> None:
    async def cell() -> tuple[list[int], list[int], float]:
        blocking = client.generate([1], max_new_tokens=3, seed=1)
        awaited = await client.aio.generate([1], max_new_tokens=3, seed=1)
        async with await rollout.connect_async(client.address) as other:
            info = await other.info()
        return blocking.ids.tolist(), awaited.ids.tolist(), info.lease_s

    assert asyncio.run(cell()) == (fake_ids(1, 3).tolist(), fake_ids(1, 3).tolist(), 30.0)


def test_one_client_serves_eight_threads(client: Any) -> None:
    def work(thread: int) -> None:
        for turn in range(15):
            seed = thread * 100 + turn
            assert client.generate([thread], max_new_tokens=1 + turn, seed=seed).ids.tolist() == fake_ids(seed, 1 + turn).tolist()
            client.score([1, 2, turn])

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, thread) for thread in range(8)]:
            future.result(60)
    assert_reconciled(client.stats())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt_ids": [-1]}, "prompt_ids"),
        ({"prompt_ids": [VOCABULARY]}, "prompt_ids"),
        ({"prompt_ids": [2**31]}, "prompt_ids"),
        ({"prompt_ids": [True]}, "prompt_ids"),
        ({"prompt_ids": [1.5]}, "prompt_ids"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"stop_ids": [VOCABULARY]}, "stop_ids"),
        ({"stop_ids": [-1]}, "stop_ids"),
        ({"stop_ids": list(range(20, 40))}, "stop_ids"),
        ({"forced_ids": [999]}, "forced_ids"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": 2**70}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": {1}}, "seed"),
        ({"kv_policy": "forget"}, "kv_policy"),
        ({"lineage": "\ud800"}, "lineage"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"top_q": 1}, "top_q"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_its_neighbour_notices_nothing(client: Any, arguments: dict[str, Any], field: str) -> None:
    neighbour = client.stream([9], max_new_tokens=60, seed=77)
    first = next(neighbour)
    with pytest.raises(InvalidRequest) as refused:
        client.generate(**{"prompt_ids": [1, 2], "max_new_tokens": 4, **arguments})
    assert refused.value.field == field
    assert refused.value.limit
    assert refused.value.remedy
    ids = [*first.ids.tolist(), *(token for delta in neighbour for token in delta.ids.tolist())]
    assert ids == fake_ids(77, 60).tolist()


def test_a_request_that_can_never_fit_is_refused_at_the_door(client: Any) -> None:
    with pytest.raises(RequestTooLong, match="the context holds 100000; shorten the prompt or lower max_new_tokens"):
        client.generate([1, 2], max_new_tokens=100_000)
    with pytest.raises(RequestTooLong):
        client.generate([1, 2], max_new_tokens=2**31 - 1)


def test_ids_of_requests_are_not_run_twice(client: Any) -> None:
    request_id = bytes(range(100, 116))
    before = client.stats()
    first = client.generate([1], max_new_tokens=5, seed=4, request_id=request_id)
    with pytest.raises(Gone, match="draw a new request id"):
        client.generate([1], max_new_tokens=5, seed=4, request_id=request_id)
    after = client.stats()
    assert first.request_id == request_id
    assert after["accepted"] == before["accepted"] + 1
    assert after["refused"] == before["refused"] + 1
    assert_reconciled(after)


def test_the_longest_lineage_and_salt_reach_the_engine(client: Any) -> None:
    generation = client.generate([1], max_new_tokens=2, seed=1, lineage="x" * 200, cache_salt="y" * 256, max_kv_lag=0)
    assert generation.ids.tolist() == fake_ids(1, 2).tolist()


def test_score_gives_the_engine_quantities_and_its_version(client: Any) -> None:
    score = client.score([1, 5, 9], temperature=1.0)
    assert np.array_equal(score.token_logprobs, fake_logprobs(np.array([5, 9]), 0))
    assert score.version == 0
    with pytest.raises(InvalidRequest):
        client.score([1, 2], temperature=float("nan"))


def test_info_says_what_the_service_is(client: Any) -> None:
    info = client.info()
    assert (info.protocol_version, info.health, info.version, info.needs_weights) == (1, "ready", 0, None)
    assert (info.engine.vocab_size, info.engine.eos_ids, info.engine.max_rows) == (VOCABULARY, (EOS_ID,), 16)
    assert info.address == client.address
    assert len(info.incarnation) == 32
    assert info.tokenizer_digest is None


def test_a_deadline_ends_a_request_and_keeps_its_tokens(client: Any) -> None:
    began = time.monotonic()
    generation = client.generate([1], max_new_tokens=50_000, seed=8, deadline_s=0.3)
    assert generation.finish_reason.kind == "expired"
    assert 0 < len(generation.ids) < 50_000
    assert generation.ids.tolist() == fake_ids(8, len(generation.ids)).tolist()
    assert 0.25 < time.monotonic() - began < 3.0


def test_an_idle_service_and_an_idle_client_do_not_spin(client: Any) -> None:
    import psutil

    front = psutil.Process(client.stats() and _front_pid(client))
    processes = [front, *front.children()]
    client.info()
    before = [sum(process.cpu_times()[:2]) for process in processes]
    own = time.thread_time()
    mine = time.process_time()
    time.sleep(1.0)
    used = [sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before)]
    assert max(used) < 0.1, f"idle processes used {used} s of CPU in a second"
    assert time.process_time() - mine - (time.thread_time() - own) < 0.1
    assert len(processes) == 2


def _front_pid(client: Any) -> int:
    import psutil

    for child in psutil.Process().children():
        if "rollout.service.front" in " ".join(child.cmdline()) and client.address.split("/")[2] in " ".join(child.cmdline()):
            return child.pid
    raise AssertionError("the front is not a child of this process")


def test_the_counters_reconcile_at_any_moment(client: Any) -> None:
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            client.generate([1], max_new_tokens=3)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(load) for _ in range(4)]
        for _ in range(50):
            assert_reconciled(client.stats())
        stop.set()
        for future in futures:
            future.result(10)
    final = client.stats()
    assert_reconciled(final)
    assert (final["live"], final["deciding"], final["record_pages"], final["reserved_bytes"]) == (0, 0, 0, 0)
