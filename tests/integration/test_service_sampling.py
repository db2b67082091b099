"""Every sampling field in process and over the wire, around one real engine whose pool is too small for everybody at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout
from areno import Engine, InvalidRequest
from rollout.agent import derive_seed
from tests.engine_runs import Output, make_engine, random_prompt, request, run
from tests.fixtures_models import write_checkpoint

FILTERS = {"top_k": 20, "top_p": 0.8, "min_p": 0.01}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "return_kept_ids": True, **PENALTIES},
    {"top_k": 5},
    {"top_p": 0.6, "temperature": 1.4},
    {"min_p": 0.2},
    {**FILTERS, "return_kept_ids": True, "temperature": 0.7},
    {**PENALTIES, "temperature": 0.9},
    {"repetition_penalty": 0.8},
    {"logit_bias": {5: 4.0, 6: -3.25, 200: 2.5}, "temperature": 1.3},
    {"logit_bias": {7: -1e4}, "forced_ids": [7, 9]},
    {**FILTERS, **PENALTIES, "logit_bias": {9: 3.0}, "return_kept_ids": True, "prompt_logprobs_from": 1, "temperature": 0.9},
    {"prompt_logprobs_from": 7, "temperature": 0.6},
    {"prompt_logprobs_from": 19, "logprobs": False},
    {"min_new_tokens": 20, "stop_ids": [3, 4, 5, 6, 7, 8], "top_k": 30, "return_kept_ids": True},
    {"stop_ids": list(range(3, 19 - 4)), "seed": 2**64 - 1},
    {"prior_output_tokens": 6, "frequency_penalty": 0.5, "min_new_tokens": 12, "seed": 77},
    {"prior_output_tokens": 6, "forced_ids": [5, 6, 7, 8, 9, 10, 11, 12], "top_k": 4, "return_kept_ids": True},
    {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True},
    {"top_k": 64, "return_kept_ids": True, "logprobs": False, "seed": 0},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def client(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rollout.Client]:
    options = {"state_dir": str(tmp_path_factory.mktemp("state")), "threads": 1, "seed": 1}
    with rollout.local(str(llama), max_rows=8, num_pages=30, sampling_slots=4, kept_ids=True, **options) as client:
        yield client
        stats = client.stats()
        assert stats["live"] == stats["reserved_bytes"] == stats["record_pages"] == stats["engine"]["used_pages"] == 0


@pytest.fixture(scope="module")
def engine(llama: Path) -> Engine:
    """An engine in this process with room for everybody."""
    return make_engine(llama, kept_ids=True, num_pages=400)


def prompts(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [random_prompt(rng, 20, 21) for _ in range(count)]


def assert_same(found: rollout.Generation, expected: Output) -> None:
    end = expected.end
    assert found.ids.tolist() == expected.ids
    assert (found.finish_reason.kind, found.finish_reason.stop_id) == (str(end.reason.kind), end.reason.stop_id)
    assert (found.seed, found.prompt_tokens) == (end.seed, end.prompt_tokens)
    if found.logprobs is None or found.raw_logprobs is None:
        assert np.isnan(expected.logprobs).all() and found.behaviour_logprobs is None
    else:
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
        np.testing.assert_allclose(found.raw_logprobs, expected.raw_logprobs, atol=1e-4)
        behaviour = np.where(np.isnan(expected.behaviour_logprobs), expected.logprobs, expected.behaviour_logprobs)
        np.testing.assert_allclose(found.logprobs if found.behaviour_logprobs is None else found.behaviour_logprobs, behaviour, atol=1e-4)
    if any(expected.kept):
        assert found.kept_counts is not None and found.kept_ids is not None
        kept = np.split(found.kept_ids, np.cumsum(found.kept_counts)[:-1])
        assert [sorted(one.tolist()) for one in kept] == [sorted(one) for one in expected.kept]
    else:
        assert found.kept_counts is None and found.kept_ids is None
    score = expected.prompt_score
    assert (found.prompt_logprobs is None) == (score is None)
    if found.prompt_logprobs is not None and score is not None:
        assert (found.prompt_logprobs.start, found.prompt_logprobs.version) == (score.start, score.version)
        np.testing.assert_allclose(found.prompt_logprobs.logprobs, score.logprobs, atol=1e-4)
        np.testing.assert_allclose(found.prompt_logprobs.raw_logprobs, score.raw_logprobs, atol=1e-4)


def test_the_same_request_gives_the_same_in_process_and_over_the_wire(client: rollout.Client, engine: Engine) -> None:
    texts = prompts(len(COMBINATIONS))
    options = [{"max_new_tokens": 30, "seed": number, **one} for number, one in enumerate(COMBINATIONS)]
    streams = [client.stream(text, **one) for text, one in zip(texts, options)]  # type: ignore[arg-type]
    inside = run(engine, [request(number, text, **one) for number, (text, one) in enumerate(zip(texts, options))], check=False)
    for number, stream in enumerate(streams):
        deltas = list(stream)
        whole = deltas[-1].finished
        assert whole is not None, COMBINATIONS[number]
        assert_same(whole, inside[number])
        for name in ("ids", "logprobs", "raw_logprobs", "kept_counts", "kept_ids"):
            column = getattr(whole, name)
            if column is not None:
                assert np.array_equal(np.concatenate([getattr(delta, name) for delta in deltas]), column), name
        scores = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
        assert [id(score) for score in scores] == ([] if whole.prompt_logprobs is None else [id(whole.prompt_logprobs)])
    assert client.info().engine.kept_ids and client.info().engine.sampling_slots == 4  # type: ignore[union-attr]


BAD: list[tuple[str, Any]] = [
    ("temperature", 1e-40), ("temperature", float("nan")), ("temperature", -1.0), ("top_k", -2), ("top_k", 1.5), ("top_k", True),
    ("top_p", 0.0), ("top_p", 1.1), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.5), ("repetition_penalty", 0.0),
    ("repetition_penalty", float("inf")), ("repetition_penalty", "1"), ("presence_penalty", float("nan")), ("frequency_penalty", 1e9),
    ("logit_bias", {3: float("nan")}), ("logit_bias", {3: 1e39}), ("logit_bias", {256: 5.0}), ("logit_bias", {-1: 5.0}),
    ("logit_bias", {True: 1.0}), ("logit_bias", {"a": 1.0}), ("logit_bias", {3: True}), ("logit_bias", [(3, 1.0)]),
    ("logit_bias", {n: 1.0 for n in range(257)}), ("prompt_logprobs_from", 0), ("prompt_logprobs_from", 3), ("return_kept_ids", 1),
    ("return_kept_ids", True), ("stop_ids", list(range(3, 20))), ("stop_ids", [256]), ("forced_ids", [3] * 9), ("forced_ids", [-1]),
    ("prior_output_tokens", -1), ("prior_output_tokens", 3), ("prior_output_tokens", True), ("max_new_tokens", 0),
    ("max_new_tokens", -1), ("min_new_tokens", 9), ("seed", -1), ("seed", 2**64), ("max_kv_lag", -1),
]  # fmt: skip


def test_every_bad_parameter_is_refused_by_the_engines_name_and_a_neighbour_notices_nothing(client: rollout.Client, engine: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 250, "seed": 5, "ignore_eos": True}
    alone = client.generate([9, 8, 7], **options)
    neighbour = client.stream([9, 8, 7], **options)
    seen = [next(neighbour)]
    for field, value in BAD:
        bad = {"max_new_tokens": 8, field: value}
        with pytest.raises(InvalidRequest) as inside:
            engine.submit(request(0, [3, 4, 5], **bad))
        with pytest.raises(rollout.RolloutError) as outside:
            client.generate([3, 4, 5], **bad)
        refused, own = outside.value, inside.value
        assert isinstance(refused, ValueError) and refused.code == own.code == "invalid_request", (field, value)
        assert refused.field == own.field or str(own.field).startswith(str(refused.field)), (field, value)
        assert str(refused.field).startswith(field) and refused.limit and refused.remedy
    for stop in (["x"], "x"):
        with pytest.raises(ValueError, match=r"no tokenizer\.json; save tokenizer\.json with the model .* or use stop_ids"):
            client.generate([3, 4, 5], stop=stop)
    with pytest.raises(rollout.RolloutError) as refused_group:
        client.generate_group([3, 4, 5], 3, top_p=0.0)
    assert refused_group.value.field == "top_p"
    seen += list(neighbour)
    assert np.concatenate([delta.ids for delta in seen]).tolist() == alone.ids.tolist()
    assert alone.logprobs is not None
    np.testing.assert_allclose(np.concatenate([delta.logprobs for delta in seen]), alone.logprobs, atol=1e-4)  # type: ignore[arg-type,misc]


def test_a_preempted_request_streams_each_token_once_and_says_where_its_cache_was_rebuilt(client: rollout.Client, engine: Engine) -> None:
    texts = prompts(4)
    options: dict[str, Any] = {"max_new_tokens": 110, "ignore_eos": True, "top_k": 30, "return_kept_ids": True, "presence_penalty": 0.5}
    before = client.stats()["engine"]["preemptions"]
    streams = [client.stream(text, seed=number, **options) for number, text in enumerate(texts[:3])]
    streams.append(client.stream(texts[3], seed=3, **{**options, "prompt_logprobs_from": 1}))
    with ThreadPoolExecutor(4) as pool:
        everything = [future.result(60) for future in [pool.submit(list, stream) for stream in streams]]
    assert client.stats()["engine"]["preemptions"] > before
    requests = [request(number, text, seed=number, **options) for number, text in enumerate(texts[:3])]
    requests.append(request(3, texts[3], seed=3, **options, prompt_logprobs_from=1))
    inside = run(engine, requests, check=False)
    rebuilt = []
    for number, deltas in enumerate(everything):
        offsets = np.cumsum([0, *(len(delta.ids) for delta in deltas)])
        assert [delta.offset for delta in deltas] == offsets[:-1].tolist()
        assert deltas[-1].finished is not None
        assert_same(deltas[-1].finished, inside[number])
        rebuilt += deltas[-1].finished.kv_rebuilt_at
    assert rebuilt and all(20 < place < 130 for place in rebuilt)


def test_a_group_shares_its_prefill_and_each_member_is_the_request_with_its_seed(client: rollout.Client) -> None:
    prompt = random_prompt(np.random.default_rng(5), 40, 41)
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "top_k": 50, "return_kept_ids": True}
    before = client.stats()
    members = client.generate_group(prompt, 5, seed=21, cache_salt="group", **options)
    after = client.stats()
    assert after["engine"]["forks"] - before["engine"]["forks"] == 4
    assert after["engine"]["prefill_tokens"] - before["engine"]["prefill_tokens"] == 40
    assert after["accepted"] - before["accepted"] == 5
    for number, member in enumerate(members):
        assert member.seed == derive_seed(21, number)
        alone = client.generate(prompt, seed=member.seed, **options)
        assert member.ids.tolist() == alone.ids.tolist() and member.kept_ids.tolist() == alone.kept_ids.tolist()  # type: ignore[union-attr]
    assert len({tuple(member.ids.tolist()) for member in members}) == 5

    async def awaited() -> list[rollout.Generation]:
        return await client.aio.generate_group(prompt, 5, seed=21, **options)

    assert [one.ids.tolist() for one in asyncio.run(awaited())] == [one.ids.tolist() for one in members]
    drawn = client.generate_group(prompt, 2, max_new_tokens=3)
    assert drawn[0].seed != drawn[1].seed


def test_members_are_cancelled_one_by_one_and_their_ids_are_idempotent(client: rollout.Client) -> None:
    ids = [bytes([90 + member] * 16) for member in range(3)]
    options: dict[str, Any] = {"max_new_tokens": 140, "ignore_eos": True, "request_ids": ids, "seed": 4}
    streams = client.stream_group([5, 6, 7], 3, **options)
    assert [stream.request_id for stream in streams] == ids
    next(streams[0])
    again = client.stream_group([5, 6, 7], 3, **options)
    assert client.cancel(ids[1]).cancelled
    ends = [list(stream)[-1].finished for stream in (streams[0], streams[1], again[2])]
    assert [end.finish_reason.kind for end in ends if end is not None] == ["length", "cancelled", "length"]
    assert ends[1] is not None and len(ends[1].ids) < 140
    with pytest.raises(rollout.RolloutError, match="draw a new request id"):
        client.generate_group([5, 6, 7], 3, **options)
    left = client.stream_group([5, 6, 7], 2, max_new_tokens=140, ignore_eos=True)
    next(left[0])
    left[0].close()
    assert list(left[1])[-1].finished.finish_reason.kind == "length"  # type: ignore[union-attr]
    assert client.stats()["live"] == 0


def test_a_group_has_at_least_one_member(client: rollout.Client) -> None:
    for n in (0, -1, True, 1.0):
        with pytest.raises(rollout.RolloutError) as refused:
            client.generate_group([1], n)  # type: ignore[arg-type]
        assert refused.value.field == "n" and isinstance(refused.value, ValueError)
