"""A device that fails under a real engine host: every request and call gets its typed error, then the right thing serves on."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rollout
from rollout.client.local import LocalService
from rollout.errors import HostFailed, NeedsWeights, RequestFailed, RequestTooLong, RolloutError, WeightUpdateError
from tests.fixtures_models import write_checkpoint
from trainer_bridge import PushWarning, WeightPush

PROMPT = [3, 7, 11, 5]
LONG = 3000


class Broken:
    """A service around an engine that breaks as told."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self._trigger = tmp_path / "trigger"
        options = {
            "engine": "tests.integration.breaking_engine:load_breaking_engine",
            "engine_options": {"trigger": str(self._trigger)},
            "max_rows": 2,
            "device": "cpu",
            "seed": 1,
            "max_restarts": 20,
        }
        self.service = LocalService(str(folder), start_timeout_s=60.0, timeout_s=20.0, options=options)

    def break_at(self, place: str, kind: str = "illegal") -> None:
        """Let the engine break when it next reaches a place."""
        written = self._trigger.with_suffix(".new")
        written.write_text(f"{place} {kind}")
        written.rename(self._trigger)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", seed=0, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def broken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    """One service for the tests of this file, in their order: only the last ones commit weights."""
    made = Broken(folder, tmp_path_factory.mktemp("broken"))
    with made.service:
        yield made


@pytest.fixture
def client(broken: Broken) -> Any:
    assert broken.service.client is not None
    return broken.service.client


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    """A trainer's model that generates other ids than the folder's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    return model


def wait_until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def greedy(client: Any) -> list[int]:
    return client.generate(PROMPT, max_new_tokens=12, temperature=0.0).ids.tolist()


def failures_of(waiting: list[Future[Any]]) -> list[RequestFailed]:
    errors = [one.exception(30) for one in waiting]
    assert all(isinstance(error, RequestFailed) for error in errors), errors
    return errors  # type: ignore[return-value]


def test_every_live_request_gets_the_cause_and_the_folders_weights_serve_on(broken: Broken, client: Any) -> None:
    expected = greedy(client)
    with ThreadPoolExecutor(8) as pool:
        stream = client.stream(PROMPT, max_new_tokens=LONG, ignore_eos=True, seed=1)
        waiting = [pool.submit(client.generate, PROMPT, max_new_tokens=LONG, ignore_eos=True) for _ in range(4)]
        waiting.append(pool.submit(client.generate_group, PROMPT, 3, max_new_tokens=LONG, ignore_eos=True))
        wait_until(lambda: client.stats()["live"] == 8)
        next(stream)
        broken.break_at("step")
        with pytest.raises(RequestFailed) as failed:
            for _ in stream:
                pass
        errors = [failed.value, *failures_of(waiting)]
    for error in errors:
        assert error.reason_code == "host_failed"
        assert "the device failed in the middle of a step: CUDA error: an illegal memory access was encountered" in error.what
        assert error.remedy is not None and error.remedy.startswith("submit the request again; the service starts a new engine host")
        assert "check the driver's log" in error.remedy
    partial = failed.value.generation
    assert isinstance(partial, rollout.Generation) and 0 < len(partial.ids) < LONG
    assert greedy(client) == expected, "asked while the new host loads, it waits for it"
    info, stats = client.info(), client.stats()
    assert (info.health, info.version, info.needs_weights) == ("ready", 0, None)
    assert (stats["host_starts"], stats["failed"], stats["live"]) == (2, 8, 0)
    assert stats["received"] == stats["refused"] + stats["attached"] + stats["accepted"]


def test_a_device_that_breaks_under_a_score_takes_the_requests_with_it_and_is_replaced(broken: Broken, client: Any) -> None:
    stream = client.stream(PROMPT, max_new_tokens=LONG, ignore_eos=True, seed=1)
    next(stream)
    broken.break_at("score")
    with pytest.raises(HostFailed, match="the device failed while ids were scored"):
        client.score(PROMPT)
    with pytest.raises(RequestFailed, match="while ids were scored"):
        for _ in stream:
            pass
    wait_until(lambda: client.info().health == "ready")
    assert client.score(PROMPT).token_logprobs.size == 3


def test_a_score_for_which_memory_runs_out_is_refused_and_nothing_else_ends(broken: Broken, client: Any) -> None:
    starts = client.stats()["host_starts"]
    stream = client.stream(PROMPT, max_new_tokens=60, ignore_eos=True, seed=1)
    next(stream)
    broken.break_at("score", "full")
    with pytest.raises(RequestTooLong, match="no memory to score 4 ids"):
        client.score(PROMPT)
    assert len(list(stream)[-1].finished.ids) == 60
    assert client.stats()["host_starts"] == starts


@pytest.mark.parametrize("transport", ["memory", "frames", "group"])
@pytest.mark.parametrize(("kind", "cause"), [("odd", "the lining of this engine is worn"), ("full", "no memory to stage")])
def test_a_bucket_at_which_the_engine_raises_is_refused_with_the_cause_and_the_next_push_works(
    broken: Broken, client: Any, trained: Any, transport: str, kind: str, cause: str
) -> None:
    expected, before = greedy(client), client.stats()
    assert before["version"] == 0
    push = WeightPush(client, trained, transport=transport, bucket_bytes=8192)
    send, sent = push._transport.send, []

    def breaking(bucket: Any) -> None:
        sent.append(1)
        if len(sent) == 2:
            broken.break_at("slice", kind)
        send(bucket)

    push._transport.send = breaking  # type: ignore[method-assign]
    stream = client.stream(PROMPT, max_new_tokens=60, ignore_eos=True, seed=1)
    next(stream)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=cause):
        push.push()
    assert time.monotonic() - started < 5.0, "a trainer that waits for a collective hears it in time"
    assert len(list(stream)[-1].finished.ids) == 60
    assert greedy(client) == expected
    ticket = client.weights_begin(None)
    client.weights_abort(ticket.update_id)
    after = client.stats()
    assert (after["host_starts"], after["version"], after["open_calls"]) == (before["host_starts"], 0, before["open_calls"])


def test_a_first_commit_that_breaks_the_device_leaves_the_folders_weights(broken: Broken, client: Any, trained: Any) -> None:
    expected, starts = greedy(client), client.stats()["host_starts"]
    push = WeightPush(client, trained)
    broken.break_at("proof", "full")
    with pytest.raises(WeightUpdateError, match="no memory to prove version"):
        push.push()
    assert greedy(client) == expected and client.stats()["host_starts"] == starts
    broken.break_at("proof")
    with pytest.raises(HostFailed, match="the device failed while weights were committed"):
        push.push()
    assert greedy(client) == expected
    assert client.info().needs_weights is None and client.info().version == 0
    assert push.push().version == client.info().version > 0
    assert greedy(client) != expected, "the push must show in what is generated"


def test_committed_weights_are_asked_for_until_they_come_however_often_hosts_break(broken: Broken, client: Any, trained: Any) -> None:
    push = WeightPush(client, trained, allow_unchanged=True)
    push.push()
    push = WeightPush(client, trained)
    with pytest.warns(PushWarning, match="equals the weights before it"):
        version = push.push().version
    expected, starts = greedy(client), client.stats()["host_starts"]
    # One push that changes nothing is counted already: the second one after it would be refused.
    for _ in range(2):
        stream = client.stream(PROMPT, max_new_tokens=LONG, ignore_eos=True, seed=1)
        next(stream)
        broken.break_at("step")
        with pytest.raises(RequestFailed, match=f"push the trainer's weights, since the new engine host waits for version {version}"):
            for _ in stream:
                pass
        # The announcement comes with the failure; the health tells when a host is there to take weights.
        assert client.info().needs_weights == version
        with pytest.raises(NeedsWeights, match=f"waits for weights of version {version}") as refused:
            client.generate(PROMPT, max_new_tokens=2)
        assert refused.value.value == version
        with pytest.raises(NeedsWeights):
            client.score(PROMPT)
        seen = {client.info().health}
        wait_until(lambda seen=seen: seen.add(client.info().health) or "needs_weights" in seen)  # type: ignore[func-returns-value, misc]
        assert seen <= {"degraded", "needs_weights"}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = push.push_if_needed()
        assert report is not None and report.version == version and report.changed_tensors > 0, "the same weights keep their version"
        assert client.info().health == "ready" and client.info().needs_weights is None
        assert greedy(client) == expected
    assert client.stats()["host_starts"] == starts + 2
