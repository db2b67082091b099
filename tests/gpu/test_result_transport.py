"""Results through mapped memory and through copies: the same bits, in churn too, and a probe that finds what works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno import Canary, Engine, Request, SamplingParams
from areno.decode.mapped import CudaProbe, probe_mapped
from tests.gpu.test_engine import Told, engine_of, prompts, requests_of, run

pytestmark = pytest.mark.gpu
Maker = Callable[..., Path]
WAYS = ("mapped", "copy")


def test_the_probe_passes_and_auto_follows_it(checkpoint: Maker) -> None:
    found = probe_mapped(CudaProbe(torch.device("cuda", torch.cuda.current_device())))
    engine = engine_of(checkpoint("qwen3"))
    assert engine.info.result_transport == ("mapped" if found.works else "copy")
    assert engine.info.result_transport_reason == found.reason
    assert found.works, found.reason


def test_a_copy_that_is_asked_for_is_taken_and_told(checkpoint: Maker) -> None:
    engine = engine_of(checkpoint("qwen3"), result_transport="copy")
    assert engine.info.result_transport == engine.stats()["result_transport"] == "copy"
    assert "asks for it" in engine.info.result_transport_reason
    ring = engine._ring
    assert ring.launch_words.device.type == "cuda" and ring.words.is_pinned()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_both_ways_give_the_same_bits(checkpoint: Maker, dtype: str, run_ahead: int) -> None:
    asked = requests_of(24, seed=3, tokens=40, temperature=0.9)
    told = [run(engine_of(checkpoint("wide"), dtype=dtype, run_ahead=run_ahead, result_transport=way), asked) for way in WAYS]
    assert_same(*told)


def test_both_ways_give_the_same_kept_sets_and_prompt_scores(checkpoint: Maker) -> None:
    def collect(way: str) -> list[tuple[Any, ...]]:
        engine = engine_of(checkpoint("qwen3"), dtype="float32", kept_ids=True, result_transport=way)
        for n, prompt in enumerate(prompts(12, 21)):
            sampling = SamplingParams(max_new_tokens=12, seed=n, top_k=20 if n % 2 else 0, top_p=0.9 if n % 2 else 1.0)
            asked = {"return_kept_ids": True} if n % 2 else {"prompt_logprobs_from": 1}
            fields = {name: getattr(sampling, name) for name in ("max_new_tokens", "seed", "top_k", "top_p")}
            engine.submit(Request(request_id=n, prompt_ids=np.append(prompt, [5, 6]), sampling=SamplingParams(**fields, **asked)))
        seen = []
        while engine.has_work:
            output = engine.step()
            kept = None if output.kept_ids is None else output.kept_ids.tolist()
            counts = None if output.kept_counts is None else output.kept_counts.tolist()
            scores = [(score.request_id, score.logprobs.tolist()) for score in output.prompt_scores]
            if output.token_ids.size or scores:
                seen.append((output.request_ids.tolist(), output.token_ids.tolist(), output.logprobs.tolist(), counts, kept, scores))
        return seen

    mapped, copied = (collect(way) for way in WAYS)
    by_request = [_by_request(seen) for seen in (mapped, copied)]
    assert by_request[0] == by_request[1]
    assert any(kept for *_, kept in by_request[0]["tokens"]), "no kept set was returned"
    assert by_request[0]["scores"], "no prompt was scored"


def _by_request(seen: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Return tokens with logprob and kept set in the order of requests, whatever step they came with."""
    tokens: list[tuple[Any, ...]] = []
    scores: list[tuple[Any, ...]] = []
    for ids, drawn, logprobs, counts, kept, scored in seen:
        at = 0
        for place, request_id in enumerate(ids):
            count = 0 if counts is None else counts[place]
            tokens.append((request_id, drawn[place], logprobs[place], [] if kept is None else kept[at : at + count]))
            at += count
        scores += scored
    return {"tokens": sorted(tokens, key=lambda one: one[0]), "scores": sorted(scores)}


@pytest.mark.parametrize("way", WAYS)
def test_canaries_prove_weights_either_way(checkpoint: Maker, way: str) -> None:
    engine: Engine = engine_of(checkpoint("llama"), dtype="float32", result_transport=way)
    ids = np.random.default_rng(2).integers(3, 512, size=40)
    expected = engine.score(ids).token_logprobs
    engine.begin_update(None, version=1, partial=True)
    engine.stage("model.norm.weight", engine._table.views["model.norm.weight"].cpu().clone())
    report = engine.commit_update(canaries=[Canary(ids=ids, expected_logprobs=expected, temperature=1.0)])
    assert report.decode_canary_gap is not None and report.decode_canary_gap < 1e-4


def assert_same(first: dict[int, Told], second: dict[int, Told]) -> None:
    """Compare ids and bits of log-probabilities."""
    for number, value in first.items():
        other = second[number]
        assert value.ids == other.ids and value.logprobs == other.logprobs and value.raw == other.raw, f"request {number}"
