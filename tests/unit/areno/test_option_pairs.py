"""Two options together, each at the edge of what it takes: both are kept, or the pair is refused by name; nothing hangs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import areno
from areno import EngineConfig, FinishKind, Request, SamplingParams
from areno.config import DeviceLimits, resolve
from areno.request import RequestLimits, check_request
from areno.sampling.kept import MAX_KEPT
from tests.engine_runs import Output, make_engine, random_prompt, request, run
from tests.fixtures_models import write_checkpoint
from tests.hostile_values import check_refusal
from tests.option_pairs import ENGINE_EDGES, pairs

LIMITS = RequestLimits(vocab_size=256, num_valid_ids=250, max_model_len=200, pool_tokens=300, eos_ids=(2,), sampling_slots=4, kept_ids=True)
SAMPLING = tuple(SamplingParams.__dataclass_fields__)
OF_REQUEST = tuple(name for name in Request.__dataclass_fields__ if name != "sampling")
EDGES: dict[str, list[Any]] = {
    "max_new_tokens": [1, 2, 197, 2**31 - 1],
    "min_new_tokens": [0, 1, 2, 197],
    "temperature": [0, 1e-6, 1e4],
    "top_k": [-1, 1, 64, 65, 255, 256, 2**31 - 1],
    "top_p": [1e-40, 1e-300, 1.0],
    "min_p": [0, 1],
    "repetition_penalty": [0.01, 100],
    "presence_penalty": [-100, 100],
    "frequency_penalty": [-100, 100.0],
    "logit_bias": [{one: -1e4 for one in range(256)}, {249: 1e4}, {255: 1e4}],
    "seed": [0, 2**64 - 1],
    "stop_ids": [range(2, 16), [255], [2]],
    "forced_ids": [[1], [2], [255], [3] * 8],
    "prompt_logprobs_from": [1, 2, 3],
    "prompt_ids": [[0], [255], [256], range(200), [3] * 300],
    "prior_output_tokens": [1, 2, 199],
    "max_kv_lag": [0, 2**31 - 1],
    "group": [0, 2**63 - 1],
    "request_id": [2**63 - 1],
    "lineage": ["x" * 256],
}


def made(given: Mapping[str, Any]) -> Request:
    of_sampling = {name: value for name, value in given.items() if name in SAMPLING}
    of_request = {"request_id": 0, "prompt_ids": [3, 4, 5], **{name: value for name, value in given.items() if name in OF_REQUEST}}
    return Request(sampling=SamplingParams(**of_sampling), **of_request)


def admitted(given: Mapping[str, Any]) -> Request | None:
    """Return the request that the pair makes, None where it is refused by name; anything else that comes out fails the test."""
    try:
        asked = made(given)
        check_request(asked, LIMITS)
    except areno.InvalidRequest as error:
        check_refusal(error, given)
        return None
    return asked


def test_no_two_fields_of_a_request_raise_what_is_no_refusal_and_both_values_are_kept() -> None:
    taken = 0
    for given in pairs([*SAMPLING, *OF_REQUEST], made, edges=EDGES, refusal=areno.InvalidRequest, each=6):
        asked = admitted(given)
        for name, value in given.items() if asked is not None else ():
            kept = getattr(asked.sampling if name in SAMPLING else asked, name)
            assert is_kept(name, value, kept), (given, name, kept)
            taken += 1
    assert taken > 1000


def is_kept(name: str, value: Any, kept: Any) -> bool:
    if name == "top_k":
        return bool(kept == max(int(value), 0))
    if name == "stop_ids":
        return bool(np.array_equal(kept, np.unique(np.asarray(value, np.int64))))
    if name in ("prompt_ids", "forced_ids") and value is not None:
        return (kept is None and not len(value)) or bool(np.array_equal(kept, np.asarray(value, np.int64)))
    return bool(kept == value)


def check_promises(asked: Request, output: Output, limits: RequestLimits, given: object) -> None:
    """Assert that an output is what its request asked for, field by field."""
    asks, prior, count = asked.sampling, asked.prior_output_tokens, len(output.ids)
    forced = [] if asks.forced_ids is None else list(asks.forced_ids)[prior:]
    assert output.ids[: len(forced)] == forced[:count], given
    assert all(one < limits.num_valid_ids for one in output.ids[len(forced) :]), given
    kind, stops = output.end.reason.kind, {*map(int, asks.stop_ids), *(() if asks.ignore_eos else limits.eos_ids)}
    assert kind in (FinishKind.STOP, FinishKind.LENGTH), (given, output.end)
    assert (kind is FinishKind.STOP) == (output.ids[-1] in stops) == (output.end.reason.stop_id in stops), given
    assert not set(output.ids[:-1]) & stops, given
    assert count + prior == asks.max_new_tokens or (kind is FinishKind.STOP and count + prior <= asks.max_new_tokens), given
    assert kind is FinishKind.LENGTH or count + prior > asks.min_new_tokens or count <= len(forced), given
    assert np.isfinite(output.logprobs).all() == asks.logprobs and np.isnan(output.logprobs).all() != asks.logprobs, given
    assert not asks.logprobs or max(output.logprobs) <= 1e-5, given
    assert asks.seed is None or output.end.seed == asks.seed, given
    drawn = list(zip(output.ids, output.kept))[len(forced) :]
    assert all((one in kept and len(kept) <= MAX_KEPT) if asks.return_kept_ids else not kept for one, kept in drawn), given
    start = asks.prompt_logprobs_from
    score = output.prompt_score
    assert (start is None) == (score is None), given
    assert score is None or (np.isfinite(score.logprobs).all() and score.logprobs.size == len(asked.prompt_ids) - score.start), given


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


RUNNABLE = {**EDGES, "max_new_tokens": [1, 2, 9], "min_new_tokens": [0, 1, 2, 9], "prompt_ids": [[0], [255], range(30)]}


@pytest.mark.parametrize("path", ["resident", "rebuilt"])
def test_every_pair_that_is_taken_gives_what_both_ask_for(llama: Path, path: str) -> None:
    engine = make_engine(llama, decode_tables=path, kept_ids=True, sampling_slots=4, max_rows=32, max_model_len=200)
    names = [name for name in (*SAMPLING, *OF_REQUEST) if name not in ("request_id", "group")]
    limits = engine_limits(engine)
    asked: dict[int, tuple[Request, Any]] = {}
    # What has no bound of its own is bounded, so that a request that is taken ends after a few steps.
    bounded = {"max_new_tokens": 9}
    for given in pairs(names, lambda given: made({**bounded, **given}), edges=RUNNABLE, refusal=areno.InvalidRequest, each=2, seed=1):
        try:
            one = made({**bounded, **given, "request_id": len(asked)})
            check_request(one, limits)
        except areno.InvalidRequest:
            continue
        if one.sampling.max_new_tokens <= 9:
            asked[len(asked)] = one, given
    assert len(asked) > 200
    outputs = run(engine, [one for one, _ in asked.values()], check=False)
    for number, (one, given) in asked.items():
        check_promises(one, outputs[number], limits, given)


def engine_limits(engine: areno.Engine) -> RequestLimits:
    info = engine.info
    return RequestLimits(
        vocab_size=info.vocab_size,
        num_valid_ids=info.num_valid_ids,
        max_model_len=info.max_model_len,
        pool_tokens=info.pool_tokens,
        eos_ids=info.eos_ids,
        sampling_slots=info.sampling_slots,
        kept_ids=info.kept_ids,
    )


ENGINE = tuple(EngineConfig.__dataclass_fields__)
DEVICES = (
    DeviceLimits(name="cpu", kind="cpu", kv_bytes=1 << 30),
    DeviceLimits(name="cuda:0", kind="cuda", kv_bytes=1 << 30),
    DeviceLimits(name="cuda:0", kind="cuda", kv_bytes=0),
)


def config(given: Mapping[str, Any]) -> EngineConfig:
    return EngineConfig(**{"model": "m", **given})


def test_no_two_options_of_an_engine_raise_what_is_no_refusal_and_sizes_follow_from_both() -> None:
    for given in pairs(ENGINE, config, edges=ENGINE_EDGES, refusal=areno.InvalidConfig, each=8):
        for device in DEVICES:
            try:
                sizes = resolve(config(given), device, model_max_len=512, token_kv_elements=256)
            except areno.InvalidConfig as error:
                check_refusal(error, given)
                continue
            wanted = {name: value for name, value in given.items() if value is not None and hasattr(sizes, name) and name != "device"}
            assert {name: getattr(sizes, name) for name in wanted} == wanted, given
            assert sizes.buckets[-1] >= sizes.max_rows and list(sizes.buckets) == sorted(set(sizes.buckets)), given
            assert sizes.num_pages >= 1 and sizes.canary_pages >= 1, given
            assert sizes.pages_per_row * sizes.page_size >= sizes.max_model_len, given


SMALL_EDGES = {
    **{name: ENGINE_EDGES[name] for name in ("dtype", "page_size", "run_ahead", "decode_tables", "compaction_steps", "load_format")},
    "max_rows": [1, 3, 70],
    "num_pages": [1, 2, 2**31 - 1],
    "max_model_len": [2, 3, 64],
    "max_prefill_tokens": [1, 7],
    "ring_slots": [2, 3, 64],
    "sampling_slots": [0, 1],
    "hint_share": [0, 1],
    "prefix_cache": [False],
    "result_transport": ["mapped", "copy"],
}


def test_an_engine_of_any_two_edges_serves_requests_to_their_end_or_is_refused(llama: Path) -> None:
    draw, rng = random.Random(2), np.random.default_rng(2)
    built = 0
    for _ in range(14):
        one, other = draw.sample(sorted(SMALL_EDGES), 2)
        given = {name: draw.choice(SMALL_EDGES[name]) for name in (one, other)}  # type: ignore[arg-type]
        try:
            engine = make_engine(llama, **given)
        except areno.InvalidConfig as error:
            check_refusal(error, given)
            continue
        built += 1
        room = min(engine.info.max_model_len, engine.info.pool_tokens)
        budget = max(1, min(5, room - 1))
        length = max(1, min(20, room - budget))
        asked = [request(number, random_prompt(rng, length, length + 1), max_new_tokens=budget, ignore_eos=True) for number in range(4)]
        for number, output in run(engine, asked).items():
            assert (len(output.ids), output.end.reason.kind) == (budget, FinishKind.LENGTH), (given, number)
    assert built >= 7
