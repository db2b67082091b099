"""Sleep through the service: a lease; requests wait in front and engine, go on in a new epoch; what cannot wait is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import rollout
from rollout.errors import Asleep, UpdateBusy
from tests.fixtures_models import reference_logprobs, reference_model, write_checkpoint
from tests.integration.test_service_weights import wait_until

PROMPT = list(range(10, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rollout.Client]:
    state = tmp_path_factory.mktemp("state")
    with rollout.local(str(folder), state_dir=str(state), max_rows=4, threads=1, lease_s=1.0) as client:
        yield client


@pytest.mark.parametrize("level", ["kv", "weights"])
def test_requests_wait_while_the_engine_sleeps_and_then_go_on(client: rollout.Client, folder: Path, level: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        stream = client.stream(PROMPT, max_new_tokens=400, seed=1, ignore_eos=True)
        next(stream)
        client.sleep(level)
        client.sleep(level)
        assert client.info().asleep == level
        late = pool.submit(client.generate, PROMPT, max_new_tokens=4, seed=2)
        expired = client.generate(PROMPT, max_new_tokens=4, deadline_s=0.2)
        assert expired.finish_reason.kind == "expired"
        tokens = client.stats()["tokens"]
        time.sleep(0.1)
        assert client.stats()["tokens"] == tokens and not late.done()
        with pytest.raises(Asleep, match=r"a score is refused.*wake it first"):
            client.score(PROMPT)
        with pytest.raises(Asleep, match="a weight update is refused"):
            client.weights_begin(None)
        client.wake()
        client.wake()
        generation = list(stream)[-1].finished
        assert generation is not None and generation.kv_rebuilt_at and generation.ids.size == 400
        assert late.result(10).ids.size == 4
    expected = reference_logprobs(reference_model(folder), np.concatenate([PROMPT, generation.ids]))[len(PROMPT) - 1 :]
    assert np.abs(expected - generation.logprobs).max() < 1e-4
    assert client.info().asleep is None and client.score(PROMPT).version == 0


def test_a_sleep_ends_with_its_last_holder_and_no_update_is_open_in_it(client: rollout.Client) -> None:
    with rollout.connect(client.address) as trainer:
        trainer.sleep("weights")
        client.sleep("kv")
        waiting = ThreadPoolExecutor(1).submit(client.generate, PROMPT, max_new_tokens=3)
    wait_until(lambda: client.stats()["sessions"] == 1)
    assert client.info().asleep is not None and not waiting.done()
    client.wake()
    assert waiting.result(10).ids.size == 3
    with rollout.connect(client.address) as trainer:
        trainer.sleep()
        trainer_gone = ThreadPoolExecutor(1).submit(client.generate, PROMPT, max_new_tokens=3)
    assert trainer_gone.result(10).ids.size == 3, "a sleep ends with its holder"
    ticket = client.weights_begin(None)
    with pytest.raises(UpdateBusy, match="can prove no weights"):
        client.sleep()
    client.weights_abort(ticket.update_id)
