"""Hosts that hang, services that drain, limits that say when to come back: typed, in time, and nothing left behind."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import rollout
from rollout.errors import Busy, HostFailed, RequestFailed, RolloutError, ServiceStopping
from tests.fakes import FakeEngine, FakeReport, FakeScore, fake_ids, fake_service
from tests.integration.test_service_failures import gone, host_of, wait_until

LONG = 20_000
HANG_ID = 66


class HangingEngine(FakeEngine):
    """A fake that stops for ever in the phase that a prompt's or a score's first id, or an update's digests, name."""

    def submit(self, request: Any) -> None:
        super().submit(request)
        self._hangs = getattr(self, "_hangs", False) or list(request.prompt_ids) == [HANG_ID]

    def step(self) -> Any:
        if getattr(self, "_hangs", False):
            time.sleep(3600)
        return super().step()

    def score(self, ids: Any, *, temperature: float = 1.0) -> FakeScore:
        if int(ids[0]) == HANG_ID:
            time.sleep(3600)
        return super().score(ids, temperature=temperature)

    def commit_update(self, **options: Any) -> FakeReport:
        time.sleep(3600)
        return super().commit_update(**options)


def line_of_hang(phase: str) -> int:
    """Return the line in which `HangingEngine` sleeps for ever."""
    lines, first = inspect.getsourcelines(getattr(HangingEngine, phase))
    return first + next(number for number, line in enumerate(lines) if "time.sleep" in line)


def test_a_host_that_hangs_in_any_phase_is_replaced_in_time_and_says_so(tmp_path: Path) -> None:
    service = fake_service(tmp_path, host_timeout_s=0.6, max_restarts=10, timeout_s=20.0)
    service._options["engine"] = "tests.integration.test_service_lifecycle:HangingEngine"

    def hang_in_step(client: rollout.Client) -> None:
        client.generate([HANG_ID], max_new_tokens=3)

    def hang_in_score(client: rollout.Client) -> None:
        client.score([HANG_ID, 1])

    def hang_in_commit(client: rollout.Client) -> None:
        client.weights_commit(client.weights_begin(None, partial=True).update_id)

    def stopped_process(client: rollout.Client) -> None:
        assert service.pid is not None
        host_of(service.pid).suspend()
        client.generate([1], max_new_tokens=3)

    with service as client:
        for number, hang in enumerate((hang_in_step, hang_in_score, hang_in_commit, stopped_process)):
            neighbour = client.stream([1], max_new_tokens=LONG, seed=5)
            began = time.monotonic()
            with pytest.raises((RequestFailed, HostFailed), match=r"gave no sign of life for .*host_timeout_s") as failed:
                hang(client)
            assert time.monotonic() - began < 4.0
            assert "raise host_timeout_s" in str(failed.value)
            with pytest.raises(RequestFailed):
                list(neighbour)
            assert client.generate([1], max_new_tokens=3, seed=2).ids.tolist() == fake_ids(2, 3).tolist(), "a new host serves"
            stats = client.stats()
            assert (stats["host_starts"], stats["live"], stats["accounting_errors"]) == (number + 2, 0, 0)
            assert stats["failed"] == stats["failed_host_failed"]
        said = (service.folder / "service.log").read_text()
    for phase in ("step", "score", "commit_update"):
        assert f'test_service_lifecycle.py", line {line_of_hang(phase)} in {phase}' in said, "the stacks name the place"


def test_a_host_that_never_gets_ready_is_given_up_by_name(tmp_path: Path) -> None:
    service = fake_service(tmp_path, host_start_timeout_s=0.8, engine_options={"load_s": 3600.0})
    with pytest.raises(RolloutError, match=r"was not ready for .*host_start_timeout_s"):
        service.start()


def test_a_host_that_is_paused_idle_or_slow_is_left_alone(tmp_path: Path) -> None:
    with fake_service(tmp_path, host_timeout_s=0.5, engine_options={"step_s": 0.3}) as client, ThreadPoolExecutor(1) as pool:
        time.sleep(0.8)
        client.pause()
        waiting = pool.submit(client.generate, [1], max_new_tokens=3, seed=4)
        time.sleep(1.2)
        stats = client.stats()
        assert stats["oldest_stall_s"] > 0.5
        assert "in the engine" in stats["oldest_stall"] and "the engine is paused" in stats["oldest_stall"]
        client.resume()
        assert waiting.result(10).ids.tolist() == fake_ids(4, 3).tolist()
        assert client.stats()["host_starts"] == 1


def test_health_says_degraded_until_a_dead_host_is_replaced(tmp_path: Path) -> None:
    service = fake_service(tmp_path, engine_options={"load_s": 0.5})
    with service as client:
        assert client.info().health == "ready"
        assert service.pid is not None
        host_of(service.pid).kill()
        seen: set[str] = set()
        wait_until(lambda: seen.add(client.info().health) or ("degraded" in seen and client.info().health == "ready"))  # type: ignore[func-returns-value]


def test_a_first_sigterm_lets_requests_end_and_refuses_new_ones(tmp_path: Path) -> None:
    service = fake_service(tmp_path, drain_s=20.0, engine_options={"step_s": 0.01})
    client = service.start()
    try:
        stream = client.stream([1], max_new_tokens=60, seed=3)
        next(stream)
        assert service.pid is not None and service._process is not None
        began = time.monotonic()
        os.kill(service.pid, signal.SIGTERM)
        wait_until(lambda: client.info().health == "stopping")
        with pytest.raises(ServiceStopping):
            client.generate([1], max_new_tokens=3)
        generation = list(stream)[-1].finished
        assert (generation.finish_reason.kind, generation.ids.tolist()) == ("length", fake_ids(3, 60).tolist())
        assert service._process.wait(10) == 0
        assert time.monotonic() - began < 8.0, "it ends with its last request"
    finally:
        service.stop()


@pytest.mark.parametrize("how", ["second signal", "deadline"])
def test_a_drain_ends_at_its_deadline_or_with_a_second_signal(how: str, tmp_path: Path) -> None:
    service = fake_service(tmp_path, drain_s=1.0 if how == "deadline" else 60.0, engine_options={"step_s": 0.005})
    client = service.start()
    try:
        stream = client.stream([1], max_new_tokens=LONG, seed=3)
        next(stream)
        assert service.pid is not None and service._process is not None
        host = host_of(service.pid)
        os.kill(service.pid, signal.SIGTERM)
        wait_until(lambda: client.info().health == "stopping")
        if how == "second signal":
            os.kill(service.pid, signal.SIGTERM)
        generation = list(stream)[-1].finished
        assert (generation.finish_reason.kind, generation.finish_reason.detail) == ("cancelled", "the service stops")
        assert service._process.wait(10) == 0
        wait_until(lambda: gone(host))
    finally:
        service.stop()


def test_files_of_a_service_that_was_killed_whole_are_gone_with_the_next_start(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = fake_service(tmp_path, state_dir=str(state), timeout_s=2.0)
    first.start()
    assert first.pid is not None
    host = host_of(first.pid)
    # Both stopped first, so that neither can clean up after the other.
    for pid in (first.pid, host.pid):
        os.kill(pid, signal.SIGSTOP)
    for pid in (host.pid, first.pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gone(host))
    left = set((state / "run").iterdir())
    assert any(".h0" in path.name for path in left), "the test leaves what it is about"
    with fake_service(tmp_path, state_dir=str(state)) as client:
        assert client.info().health == "ready"
        assert not {path for path in left if ".h0" in path.name} & set((state / "run").iterdir())
    first.stop()
    assert not [path for path in (state / "run").iterdir() if path.is_socket() or ".h0" in path.name]


def test_a_clients_share_is_bounded_and_the_refusal_says_when_to_come_back(tmp_path: Path) -> None:
    service = fake_service(tmp_path, max_requests=5, max_client_requests=3, engine_options={"step_s": 0.005})
    with service as client, rollout.connect(client.address) as other, ThreadPoolExecutor(4) as pool:
        streams = [client.stream([1], max_new_tokens=LONG, seed=seed) for seed in range(3)]
        for stream in streams:
            next(stream)
        with pytest.raises(Busy, match=r"3 requests of this client.*client's admission limit.*max_client_requests") as refused:
            client.generate([1], max_new_tokens=3)
        assert refused.value.retry_after_s is not None and 0 < refused.value.retry_after_s <= 30
        held = other.stream([1], max_new_tokens=LONG)
        next(held)
        assert pool.submit(other.generate, [1], max_new_tokens=3, seed=1).result(10).ids.tolist() == fake_ids(1, 3).tolist()
        more = other.stream([1], max_new_tokens=LONG)
        next(more)
        with pytest.raises(Busy, match=r"5 requests reserve .*service's admission limit"):
            other.generate([1], max_new_tokens=3)
        for stream in (*streams, held, more):
            stream.close()
        wait_until(lambda: client.stats()["live"] == 0)
        assert client.generate([1], max_new_tokens=3, seed=1).ids.tolist() == fake_ids(1, 3).tolist()
        stats = client.stats()
        assert (stats["refused"], stats["accounting_errors"]) == (2, 0)


def test_every_thread_of_a_client_hears_of_a_killed_host_once_and_goes_on(tmp_path: Path) -> None:
    service = fake_service(tmp_path, engine_options={"step_s": 0.002}, max_restarts=10)
    outcomes: list[str] = []

    def work(client: rollout.Client, seed: int) -> None:
        for number in range(6):
            try:
                ids = client.generate([1], max_new_tokens=40, seed=seed * 100 + number).ids.tolist()
                assert ids == fake_ids(seed * 100 + number, 40).tolist()
                outcomes.append("length")
            except RequestFailed as failed:
                assert failed.reason_code == "host_failed"
                outcomes.append("failed")

    with service as client:
        threads = [threading.Thread(target=work, args=(client, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert service.pid is not None
        for child in psutil.Process(service.pid).children():
            child.kill()
        for thread in threads:
            thread.join(20)
        stats = client.stats()
        assert len(outcomes) == 48
        assert (stats["length"], stats["failed"], stats["accepted"]) == (outcomes.count("length"), outcomes.count("failed"), 48)
