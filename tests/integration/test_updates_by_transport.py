"""Updates that trickle in by every transport while requests decode, are preempted, cut and new: every token is what its tag promises."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import rollout
from areno.kv.prefix import expand_spans
from rollout.errors import UpdateBusy
from tests.fixtures_models import reference_keep_logprobs, reference_logprobs, tiny_model, write_checkpoint
from trainer_bridge import WeightPush

torch.set_num_threads(1)
TRANSPORTS = ("memory", "file", "frames", "group")
# Many enough to outlast an update on a fast machine.
NEW_TOKENS = 450
TOLERANCE = 1e-4
BUCKET_BYTES = 32_768


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rollout.Client]:
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", seed=0)
    # Eight requests of 33 + 150 tokens need 96 pages.
    with rollout.local(str(folder), dtype="float32", threads=1, max_rows=8, page_size=16, num_pages=160) as client:
        yield client


def prompt(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(3, 250, 33)


def begin(pool: ThreadPoolExecutor, client: rollout.Client, number: int) -> Future[rollout.Generation]:
    policy = "recompute" if number % 2 else "keep"
    return pool.submit(client.generate, prompt(number), max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=number, kv_policy=policy)


def slowly(push: WeightPush, wait_s: float, sent: list[float]) -> WeightPush:
    """Let the trainer pause after each bucket, and write down when it sent one."""
    send = push._transport.send

    def slow(bucket: Any) -> None:
        send(bucket)
        sent.append(time.monotonic())
        time.sleep(wait_s)

    push._transport.send = slow  # type: ignore[method-assign]
    return push


def gaps(generation: rollout.Generation, models: dict[int, Any], policy: str) -> np.ndarray:
    """Return |logprob - reference| of each token, by the version in its tag and what its KV held then."""
    ids, first = np.concatenate([generation.prompt_ids, generation.ids]), len(generation.prompt_ids) - 1
    whole = {version: reference_logprobs(model, ids)[first:] for version, model in models.items()}
    expected = np.array([whole[int(version)][index] for index, version in enumerate(generation.versions)])
    new = generation.versions == generation.versions[-1]
    if policy == "keep" and not new.all():
        number, commit = np.arange(len(generation.ids)), int(np.argmax(new))
        rebuilt = np.array([0, *generation.kv_rebuilt_at]) - len(generation.prompt_ids)
        # Since its last rebuild the row holds what `kv_spans` says; before its first one after the commit, what the commit found.
        spans = reference_keep_logprobs(models, ids, expand_spans(generation.kv_spans, len(ids) - 1))[first:]
        found = np.where(np.arange(len(ids) - 1) < first + commit, generation.versions[0], generation.versions[-1])
        kept = reference_keep_logprobs(models, ids, found)[first:]
        untouched = new & (number < min([len(number), *rebuilt[rebuilt >= commit]]))
        expected = np.where(untouched, kept, expected)
        expected = np.where(new & (number >= rebuilt.max()), spans, expected)
    return np.abs(generation.logprobs - expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_running_preempted_and_new_requests_are_computed_by_the_version_in_their_tags(client: rollout.Client, transport: str) -> None:
    seed = 10 * (1 + TRANSPORTS.index(transport))
    old, new = tiny_model("llama", seed=seed), tiny_model("llama", seed=seed + 1)
    before = WeightPush(client, old).push().version
    preemptions = client.stats()["engine"]["preemptions"]
    sent: list[float] = []
    push = slowly(WeightPush(client, new, transport=transport, bucket_bytes=BUCKET_BYTES), 0.02, sent)
    with ThreadPoolExecutor(20) as pool:
        update = pool.submit(push.push)
        while len(sent) < 3:
            time.sleep(0.005)
        with pytest.raises(UpdateBusy):
            WeightPush(client, old).push()
        running = [begin(pool, client, number) for number in range(10)]
        report = update.result(60)
        running += [begin(pool, client, number) for number in range(10, 14)]
        generations = [one.result(60) for one in running]
    assert report.transport == transport and len(sent) >= 8, "the update came in parts"
    after = report.version
    models = {before: old, after: new}
    for number, generation in enumerate(generations):
        assert len(generation.ids) == NEW_TOKENS and (np.diff(generation.versions) >= 0).all()
        assert gaps(generation, models, "recompute" if number % 2 else "keep").max() < TOLERANCE, number
        if number >= 10:
            assert set(generation.versions.tolist()) == {after}
    assert any(len(set(generation.versions.tolist())) == 2 for generation in generations), "the commit came while some were running"
    assert client.stats()["engine"]["preemptions"] > preemptions


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cut_request_ends_with_its_budget_and_computes_its_rest_by_the_new_weights(client: rollout.Client, transport: str) -> None:
    seed = 100 + 10 * TRANSPORTS.index(transport)
    old, new = tiny_model("llama", seed=seed), tiny_model("llama", seed=seed + 1)
    before = WeightPush(client, old).push().version
    with ThreadPoolExecutor(4) as pool:
        stream = client.stream(prompt(0), max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=1)
        deltas = [next(stream)]
        others = [begin(pool, client, number) for number in (1, 2)]
        after = WeightPush(client, new, transport=transport, bucket_bytes=BUCKET_BYTES).push(mode="abort_requests").version
        deltas += list(stream)
        generations = [one.result(60) for one in others]
    cut = deltas[-1].finished
    assert cut is not None and set(cut.versions.tolist()) == {before, after}, "the commit came in its middle"
    assert np.array_equal(np.concatenate([delta.ids for delta in deltas]), cut.ids), "each token comes once"
    for generation in (cut, *generations):
        assert len(generation.ids) == len(generation.logprobs) == NEW_TOKENS and generation.finish_reason.kind == "length"
        assert gaps(generation, {before: old, after: new}, "recompute").max() < TOLERANCE
