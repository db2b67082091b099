"""The scripted engine behaves as a real one: its ids are what a reference says, through chunks, pages, preemption and a service."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from areno.request import Request, SamplingParams
from tests.bench.scripted_engine import ScriptedEngine, scripted_ids, scripted_service
from tests.fakes import fake_logprobs


def run(engine: ScriptedEngine, requests: list[Request]) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        output = engine.step()
        for request_id, token in zip(output.request_ids.tolist(), output.token_ids.tolist()):
            ids[request_id].append(token)
        engine.check_integrity()
    return ids


def test_every_row_gets_its_seeds_ids_however_small_the_pool_is_and_however_many_steps_are_told_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    requests = [
        Request(
            request_id=number,
            prompt_ids=rng.integers(10, 250, size=int(rng.integers(1, 30))),
            sampling=SamplingParams(max_new_tokens=int(rng.integers(1, 150)), seed=number, ignore_eos=True),
        )
        for number in range(40)
    ]
    wanted = {one.request_id: scripted_ids(one.request_id, one.sampling.max_new_tokens, len(one.prompt_ids)).tolist() for one in requests}
    for options in ({"num_pages": 12}, {"tokens_per_flush": 7}, {"max_prefill_tokens": 16}):
        engine = ScriptedEngine(model=str(tmp_path), max_rows=8, **options)
        assert run(engine, requests) == wanted, options
        stats = engine.stats()
        assert stats["free_pages"] + stats["cached_pages"] == engine.info.num_pages
        assert "num_pages" not in options or stats.get("preemptions", 0) > 0


def test_forced_and_stop_ids_count_as_in_an_engine(tmp_path: Path) -> None:
    engine = ScriptedEngine(model=str(tmp_path), max_rows=4)
    forced = SamplingParams(max_new_tokens=9, seed=1, forced_ids=[11, 12, 13], stop_ids=[13])
    late = SamplingParams(max_new_tokens=9, seed=1, forced_ids=[11, 12, 13], stop_ids=[11], min_new_tokens=2)
    ids = run(engine, [Request(request_id=1, prompt_ids=[5], sampling=forced), Request(request_id=2, prompt_ids=[5], sampling=late)])
    assert ids[1] == [11, 12, 13]
    assert ids[2] == [11, 12, 13, *scripted_ids(1, 9, 1)[3:].tolist()]


def test_behind_a_service_it_streams_the_same_ids(tmp_path: Path) -> None:
    service = scripted_service(tmp_path, engine_options={"tokens_per_flush": 5, "max_rows": 8})
    with service as client, ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(client.generate, [3, 4, 5], max_new_tokens=50 + seed, seed=seed, ignore_eos=True) for seed in range(16)]
        for seed, job in enumerate(jobs):
            generation = job.result(20)
            assert generation.ids.tolist() == scripted_ids(seed, 50 + seed, 3).tolist()
            assert generation.logprobs is not None
            assert generation.logprobs.tolist() == fake_logprobs(generation.ids, 0).tolist()
        stats = client.stats()
        assert stats["engine"]["running"] == 0
        assert stats["length"] == 16
