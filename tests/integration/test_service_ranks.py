"""A service whose engine is two processes: it serves and takes weights like one, and no rank's death or hanging goes unnoticed.

The ranks are real, over gloo. A new engine takes seconds to start, so few tests do it; the rest of the matrix of ranks, phases and
signals is in `test_rank_losses.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from areno import Engine, EngineConfig
from rollout.client.local import LocalService
from rollout.errors import InvalidConfig, RequestFailed
from tests.engine_runs import generate
from tests.fixtures_models import write_checkpoint
from trainer_bridge import WeightPush

PROMPT = [3, 7, 11, 5]
LONG = 400
RANK_TIMEOUT_S = 3.0


def wait_until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", seed=0, max_position_embeddings=512)


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[LocalService]:
    """One service for the tests of this file, in their order."""
    options = {"tp": 2, "device": "cpu", "max_rows": 4, "seed": 1, "threads": 1, "rank_timeout_s": RANK_TIMEOUT_S, "max_restarts": 20}
    made = LocalService(str(folder), start_timeout_s=90.0, timeout_s=40.0, options=options)
    with made:
        yield made


@pytest.fixture
def client(service: LocalService) -> Any:
    assert service.client is not None
    return service.client


def processes(service: LocalService) -> tuple[psutil.Process, psutil.Process, psutil.Process]:
    """Return the front, the host (rank 0) and rank 1."""
    front = psutil.Process(service.pid)
    [host] = front.children()
    [rank] = host.children()
    return front, host, rank


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def lose(client: Any, end: Callable[[], None]) -> RequestFailed:
    """Take one token of a long request, do something to its engine, and return the request's error."""
    stream = client.stream(PROMPT, max_new_tokens=LONG, ignore_eos=True, seed=1)
    next(stream)
    end()
    with pytest.raises(RequestFailed) as failed:
        for _ in stream:
            pass
    return failed.value


@pytest.mark.timeout(120)
def test_a_service_of_two_ranks_answers_as_one_engine_does(service: LocalService, client: Any, folder: Path) -> None:
    alone = Engine(EngineConfig(model=str(folder), device="cpu", max_rows=4))
    assert client.info().engine.tp == 2 and client.stats()["engine"]["tp"] == 2 and client.info().health == "ready"
    assert (
        client.generate(PROMPT, max_new_tokens=12, temperature=0.0).ids.tolist()
        == generate(alone, PROMPT, max_new_tokens=12, temperature=0.0).ids
    )
    ids = list(range(3, 40))
    assert np.allclose(client.score(ids).token_logprobs, alone.score(ids).token_logprobs, atol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = client.generate(PROMPT, max_new_tokens=12, temperature=0.0).ids.tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    WeightPush(client, model).push()
    assert client.generate(PROMPT, max_new_tokens=12, temperature=0.0).ids.tolist() != before
    client.sleep(level="weights")
    client.wake()
    assert client.info().health == "ready"
    assert client.generate(PROMPT, max_new_tokens=12, temperature=0.0).ids.tolist() != before


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    return [(one.laddr.ip, one.laddr.port) for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]


def test_strangers_get_nowhere_at_the_ports_of_ranks_while_they_decode(service: LocalService, client: Any) -> None:
    """Collectives need ports: they are on loopback only, and take nobody once the ranks have met."""
    expected = client.generate(PROMPT, max_new_tokens=100, ignore_eos=True, seed=3).ids.tolist()
    front, host, rank = processes(service)
    ports = [*listening(host), *listening(rank)]
    assert ports and not listening(front) and all(ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for ip, _ in ports), ports
    starts, files = client.stats()["host_starts"], [host.num_fds(), rank.num_fds()]
    stream = client.stream(PROMPT, max_new_tokens=100, ignore_eos=True, seed=3)
    next(stream)
    with contextlib.ExitStack() as stack:
        for number in range(60):
            raw = stack.enter_context(socket.socket())
            raw.setblocking(False)
            with pytest.raises(BlockingIOError):
                raw.connect(ports[number % len(ports)])
            with pytest.raises(OSError):
                raw.send(bytes(8))
        assert list(stream)[-1].finished.ids.tolist() == expected
        assert [host.num_fds(), rank.num_fds()] == files, "nobody is kept either"
    assert client.stats()["host_starts"] == starts and client.info().health == "ready"


@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_or_stopped_fails_live_requests_by_name_and_a_new_engine_takes_over(
    service: LocalService, client: Any, folder: Path
) -> None:
    push = WeightPush(client, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), allow_unchanged=True)
    _, host, rank = processes(service)
    error = lose(client, rank.kill)
    assert error.reason_code == "host_failed" and f"rank 1 (pid {rank.pid}) was killed by SIGKILL" in error.what
    assert error.remedy is not None and "push the trainer's weights" in error.remedy
    wait_until(lambda: gone(host) and gone(rank) and client.info().health == "needs_weights")
    version = push.push().version
    expected = client.generate(PROMPT, max_new_tokens=8, temperature=0.0).ids.tolist()
    _, host, rank = processes(service)
    started = time.monotonic()
    error = lose(client, lambda: os.kill(rank.pid, signal.SIGSTOP))
    assert f"rank 1 (pid {rank.pid}) has shown no sign of life" in error.what
    assert time.monotonic() - started < RANK_TIMEOUT_S + 10.0
    wait_until(lambda: gone(host) and gone(rank) and client.info().health == "needs_weights")
    # The digests of the lost version are those of whole tensors, however they are cut.
    report = push.push_if_needed()
    assert report is not None and report.version == version
    assert client.generate(PROMPT, max_new_tokens=8, temperature=0.0).ids.tolist() == expected


@pytest.mark.timeout(120)
def test_a_host_that_is_stopped_is_ended_by_its_other_rank_and_a_killed_front_leaves_no_process(service: LocalService, client: Any) -> None:
    front, host, rank = processes(service)
    error = lose(client, lambda: os.kill(host.pid, signal.SIGSTOP))
    assert f"the engine host (pid {host.pid}) was killed by SIGKILL" in error.what
    wait_until(lambda: gone(host) and gone(rank))
    wait_until(lambda: client.info().health == "needs_weights")
    front, host, rank = processes(service)
    front.kill()
    wait_until(lambda: gone(host) and gone(rank), 15.0)


def test_a_wrong_number_of_ranks_is_refused_before_anything_starts(folder: Path) -> None:
    service = LocalService(str(folder), start_timeout_s=60.0, timeout_s=10.0, options={"tp": 0, "device": "cpu"})
    with pytest.raises(InvalidConfig, match="tp=0 is not allowed"):
        service.start()
