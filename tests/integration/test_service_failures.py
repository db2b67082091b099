"""What dies, hangs or is in the way: typed endings, clean starts, no orphan, no stale socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import rollout
from rollout.config import ServiceConfig
from rollout.errors import (
    AddressInUse,
    CheckpointError,
    HostFailed,
    InternalError,
    InvalidConfig,
    NoService,
    RequestFailed,
    RolloutError,
    ServerUnavailable,
)
from rollout.service.front import Front
from rollout.state import StateFolder
from tests.fakes import StreamReader, WireClient, fake_ids, fake_service
from tests.integration.looping_engine import STATUS, LoopingEngine
from tests.integration.unfit_engine import UNFIT

LONG = 20_000


def wait_until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def host_of(front_pid: int) -> psutil.Process:
    [host] = psutil.Process(front_pid).children()
    return host


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_killed_host_fails_its_requests_by_name_and_a_new_one_serves(tmp_path: Path) -> None:
    service = fake_service(tmp_path, engine_options={"step_s": 0.002})
    with service as client, ThreadPoolExecutor(4) as pool:
        stream = client.stream([1], max_new_tokens=LONG, seed=5)
        waiting = pool.submit(client.generate, [2], max_new_tokens=LONG)
        next(stream)
        assert service.pid is not None
        host_of(service.pid).kill()
        with pytest.raises(
            RequestFailed, match=r"engine host \(pid \d+\) was killed by SIGKILL.*want of memory.*submit the request again"
        ) as failed:
            for _ in stream:
                pass
        assert failed.value.reason_code == "host_failed"
        partial = failed.value.generation
        assert isinstance(partial, rollout.Generation)
        assert len(partial.ids) > 0
        assert partial.ids.tolist() == fake_ids(5, len(partial.ids)).tolist()
        with pytest.raises(RequestFailed):
            waiting.result(5)
        assert client.generate([1], max_new_tokens=3, seed=2).ids.tolist() == fake_ids(2, 3).tolist(), "waits for the new host"
        stats = client.stats()
        assert (stats["failed"], stats["host_starts"], stats["live"], stats["health"]) == (2, 2, 0, "ready")
        assert client.info().version == 0, "nobody ever updated the model: the same version serves on"


def test_a_host_that_breaks_in_every_step_is_given_up_with_its_cause(tmp_path: Path) -> None:
    with fake_service(tmp_path, engine_options={"fail_at_step": 1}, max_restarts=1) as client:
        for _ in range(2):
            with pytest.raises(RequestFailed, match="the fake engine fails as told"):
                client.generate([1], max_new_tokens=3)
        wait_until(lambda: client.info().health == "failed")
        with pytest.raises(HostFailed, match=r"the engine host cannot run.*fails as told"):
            client.generate([1], max_new_tokens=3)
        with pytest.raises(HostFailed):
            client.score([1, 2])
        stats = client.stats()
        assert stats["engine"] is None
        assert stats["received"] == stats["refused"] + stats["accepted"] == 3


def test_hosts_that_die_while_they_load_are_started_ever_later_and_then_given_up_in_sight_of_all(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    engine = {"engine": f"{LoopingEngine.__module__}:LoopingEngine", "engine_options": {"starts": str(starts)}}
    service = fake_service(tmp_path, max_restarts=3, timeout_s=20.0, **engine)
    with service as client, ThreadPoolExecutor(2) as pool:
        assert client.generate([1], max_new_tokens=3, seed=2).ids.tolist() == fake_ids(2, 3).tolist()
        assert client.stats()["host_failure"] == "" and service.pid is not None
        host_of(service.pid).kill()
        wait_until(lambda: client.info().health == "degraded")
        waiting = pool.submit(client.generate, [1], max_new_tokens=3)
        wait_until(lambda: f"status {STATUS}" in str(client.stats()["host_failure"]))
        assert client.info().health == "degraded" and not waiting.done(), "there are starts left"
        with pytest.raises(HostFailed, match=f"no engine host is ready; the last one: .*status {STATUS}"):
            client.score([1, 2])
        for refused in (lambda: waiting.result(20), lambda: client.generate([1], max_new_tokens=3), lambda: client.score([1, 2])):
            with pytest.raises(HostFailed, match=rf"status {STATUS}; 4 engine hosts died within 60 s of service \(max_restarts\)"):
                wait_until(lambda: client.info().health == "failed", 20.0)
                refused()
        stats = client.stats()
        assert (stats["host_starts"], stats["health"], stats["live"]) == (4, "failed", 0) and f"status {STATUS}" in stats["host_failure"]
        assert len(starts.read_text().splitlines()) == 4
        assert stats["received"] == stats["refused"] + stats["accepted"] == 3


@contextmanager
def loading_front(tmp_path: Path, *, load_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a front whose engine takes so long to load; yield it, announced, and its address."""
    config = ServiceConfig(
        model=str(tmp_path), state_dir=str(tmp_path / "s"), engine="tests.fakes:FakeEngine", engine_options={"load_s": load_s}
    )
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    front = subprocess.Popen([sys.executable, "-m", "rollout.service.front", "--config", str(path)], stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: bool(StateFolder(tmp_path / "s").running()) if (tmp_path / "s" / "services").is_dir() else False)
        yield front, config.state.find().address
    finally:
        front.kill()
        front.wait(10)
        assert front.stdout is not None
        front.stdout.close()


def test_a_service_whose_engine_loads_stops_at_once_and_says_so(tmp_path: Path) -> None:
    with loading_front(tmp_path, load_s=60.0) as (front, address):
        with rollout.connect(address) as client, ThreadPoolExecutor(1) as pool:
            wait_until(lambda: client.info().health == "loading", 20.0)
            waiting = pool.submit(client.generate, [1], max_new_tokens=3)
            [host] = psutil.Process(front.pid).children()
            wait_until(lambda: client.stats()["waiting_for_host_or_version"] == 1)
            started = time.monotonic()
            for _ in range(2):
                front.terminate()
                time.sleep(0.1)
            assert front.wait(10) == 0 and time.monotonic() - started < 3.0
            assert waiting.result(5).finish_reason.kind == "cancelled"
        assert not host.is_running()


def test_requests_that_come_while_the_engine_loads_wait_for_it(tmp_path: Path) -> None:
    with loading_front(tmp_path, load_s=1.0) as (front, address):
        with rollout.connect(address) as client, ThreadPoolExecutor(4) as pool:
            waiting = pool.submit(client.generate, [1], max_new_tokens=3, seed=4)
            expired = pool.submit(client.generate, [1], max_new_tokens=3, deadline_s=0.05)
            assert client.info().health in ("starting", "loading")
            assert client.info().engine is None
            assert client.stats()["engine"] is None
            assert expired.result(5).finish_reason.kind == "expired"
            cancelled = client.stream([1], max_new_tokens=3)
            assert client.cancel(cancelled.request_id).state == "waiting"
            assert [delta.finished.finish_reason.kind for delta in cancelled] == ["cancelled"]
            assert not waiting.done()
            assert waiting.result(10).ids.tolist() == fake_ids(4, 3).tolist()
        front.terminate()
        assert front.wait(10) == 0


def test_an_engine_that_cannot_load_names_the_cause_and_leaves_nothing(tmp_path: Path) -> None:
    service = fake_service(tmp_path, engine_options={"fail_at_load": "tensor x is missing"})
    with pytest.raises(RolloutError, match="tensor x is missing") as refused:
        service.start()
    assert refused.value.code == "manifest_mismatch"
    assert not [child for child in psutil.Process().children(recursive=True) if "rollout" in " ".join(child.cmdline())]


def test_the_real_engine_refuses_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        rollout.local(str(tmp_path)).start()
    with pytest.raises(InvalidConfig, match=r"is not a folder; .*pass the folder.s path"):
        rollout.local(str(tmp_path / "absent")).start()


def test_unknown_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="known: model"):
        rollout.local(str(tmp_path), max_row=3).start()
    with pytest.raises(InvalidConfig, match="only for JSON"):
        rollout.local(str(tmp_path), engine="os:system")


def test_a_killed_front_takes_its_host_and_sockets_with_it_and_clients_learn_it_in_time(tmp_path: Path) -> None:
    state = tmp_path / "state"
    service = fake_service(tmp_path, timeout_s=1.0, state_dir=str(state), engine_options={"step_s": 0.002})
    with service as client, ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(client.generate, [1], max_new_tokens=LONG)
        wait_until(lambda: client.stats()["live"] == 1)
        assert service.pid is not None
        host = host_of(service.pid)
        os.kill(service.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match="rollout check"):
            waiting.result(10)
        with pytest.raises(ServerUnavailable):
            client.info()
        assert time.monotonic() - began < 4.0
        wait_until(lambda: gone(host), timeout_s=5)
        left = [path.name for path in state.rglob("*") if path.is_socket() or (path.suffix == ".json" and path.parent != state)]
        assert left == []
        with pytest.raises(NoService):
            StateFolder(state).find()


def test_a_service_whose_starter_dies_ends_itself(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, '.')\n"
        "from tests.fakes import fake_service\n"
        f"service = fake_service({str(tmp_path)!r}); service.start(); print(service.pid, flush=True); time.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None
        front = psutil.Process(int(starter.stdout.readline()))
        host = host_of(front.pid)
    finally:
        starter.kill()
        starter.communicate(timeout=10)
    wait_until(lambda: gone(front) and gone(host), timeout_s=10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_cleanly_with_an_ending_for_every_request(number: int, tmp_path: Path) -> None:
    state = tmp_path / "state"
    service = fake_service(tmp_path, state_dir=str(state), engine_options={"step_s": 0.002})
    client = service.start()
    try:
        stream = client.stream([1], max_new_tokens=LONG, seed=1)
        next(stream)
        assert service.pid is not None
        host = host_of(service.pid)
        os.kill(service.pid, number)
        generation = list(stream)[-1].finished
        assert (generation.finish_reason.kind, generation.finish_reason.detail) == ("cancelled", "the service stops")
        assert generation.ids.tolist() == fake_ids(1, len(generation.ids)).tolist()
        process = service._process
        assert process is not None
        assert process.wait(10) == 0
        assert gone(host)
        assert not [path for path in state.rglob("*") if path.is_socket()]
        assert not list((state / "services").glob("*.json"))
    finally:
        service.stop()


def test_a_client_can_shut_the_service_down(tmp_path: Path) -> None:
    service = fake_service(tmp_path)
    client = service.start()
    try:
        client.shutdown()
        process = service._process
        assert process is not None
        assert process.wait(10) == 0
    finally:
        service.stop()


def test_an_occupied_address_is_refused_with_the_address_and_the_first_service_goes_on(tmp_path: Path) -> None:
    def never(event: str, fields: object) -> None:
        raise AssertionError("it must not start")

    with fake_service(tmp_path, engine_options={"step_s": 0.0}) as client:
        for state in (tmp_path / "other", Path(client.address.removeprefix("ipc://")).parent.parent):
            config = ServiceConfig(model=str(tmp_path), address=client.address, state_dir=str(state))
            with pytest.raises(AddressInUse, match=client.address):
                Front(config, never)
        assert client.generate([1], max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()


def test_tcp_without_keys_works_with_insecure(tmp_path: Path) -> None:
    with fake_service(tmp_path, address="tcp://127.0.0.1:0", insecure=True) as client:
        assert client.generate([1], max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()
        client.pause()
        client.resume()
        port = int(client.address.rsplit(":", 1)[1])
        config = ServiceConfig(model=str(tmp_path), address=f"tcp://127.0.0.1:{port}", state_dir=str(tmp_path / "o"), insecure=True)
        with pytest.warns(UserWarning, match="without encryption"), pytest.raises(AddressInUse, match=str(port)):
            Front(config, lambda event, fields: None)


def test_an_occupied_port_of_the_control_socket_is_said_to_be_that(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = ServiceConfig(model=str(tmp_path), address=f"tcp://127.0.0.1:{port - 1}", state_dir=str(tmp_path / "s"))
        with pytest.raises(AddressInUse, match=f"{port} is in use; the control socket .* choose another address, the next port of which"):
            Front(config, lambda event, fields: None)


def test_a_socket_file_left_by_a_dead_service_is_replaced(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state").make().root
    (state / "run").mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(state / "run" / "service"))
    with fake_service(tmp_path, state_dir=str(state)) as client:
        assert client.info().health == "ready"


def test_connect_without_an_address_finds_the_announced_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("ARENO_STATE_DIR", str(state))
    with pytest.raises(NoService, match="ARENO_STATE_DIR"):
        rollout.connect()
    with fake_service(tmp_path, state_dir=str(state)) as client:
        with rollout.connect() as found:
            assert found.info().incarnation == client.info().incarnation
    with pytest.raises(NoService):
        rollout.connect()


def test_a_restarted_service_hands_out_versions_that_were_never_used(tmp_path: Path) -> None:
    versions = []
    for _ in range(2):
        with fake_service(tmp_path, state_dir=str(tmp_path / "state")) as client:
            versions += [client.info().version, client.weights_begin(None).version]
    assert versions == [0, 1, 2, 3]


def test_a_host_that_stops_reading_loses_nothing(tmp_path: Path) -> None:
    service = fake_service(tmp_path, engine_options={"step_s": 0.0})
    with service as client:
        assert service.pid is not None
        host = host_of(service.pid)
        wire, reader = WireClient(client.address), StreamReader()
        host.suspend()
        try:
            wanted = [wire.generate(max_new_tokens=3, seed=seed) for seed in range(1500)]
            assert client.info().health == "ready", "the front goes on"
        finally:
            host.resume()
        reader.read(wire, wanted)
        assert [reader.ids[one] for one in wanted] == [fake_ids(seed, 3).tolist() for seed in range(1500)]
        wire.close()


def test_a_front_that_stands_still_ends_no_lease_and_loses_no_token(tmp_path: Path) -> None:
    service = fake_service(tmp_path, lease_s=0.8, timeout_s=10.0, host_credit_bytes=2**16, engine_options={"step_s": 0.001})
    with service as client:
        assert service.pid is not None
        stream = client.stream([1], max_new_tokens=1200, seed=6)
        next(stream)
        os.kill(service.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(service.pid, signal.SIGCONT)
        generation = list(stream)[-1].finished
        assert generation.ids.tolist() == fake_ids(6, 1200).tolist()
        stats: dict[str, Any] = client.stats()
        assert (stats["lapsed_leases"], stats["sessions"]) == (0, 1)


def test_the_front_never_loads_torch_or_the_engine(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "import rollout.service.front, rollout.client.blocking, rollout.client.local, rollout.cli\n"
        "heavy = [name for name in ('torch', 'transformers', 'areno', 'safetensors') if name in sys.modules]\n"
        "print(json.dumps(heavy))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(out) == []


@pytest.mark.parametrize(("how", "cause"), [("unread", "answer is broken.*waiting"), ("unsent", "STATS_RESULT cannot be sent.*set")])
def test_a_broken_answer_of_the_host_fails_only_its_call_and_is_not_the_callers_fault(how: str, cause: str, tmp_path: Path) -> None:
    with fake_service(tmp_path, engine_options={"broken_stats": how, "step_s": 0.002}) as client:
        stream = client.stream([1], max_new_tokens=200, seed=3)
        next(stream)
        with pytest.raises(InternalError, match=cause):
            client.stats()
        assert list(stream)[-1].finished.ids.tolist() == fake_ids(3, 200).tolist(), "nobody else notices"
        assert client.info().health == "ready"


def test_a_script_that_pauses_and_ends_without_a_close_holds_nobody_up(tmp_path: Path) -> None:
    with fake_service(tmp_path) as client:
        code = (
            f"import rollout; client = rollout.connect({client.address!r}, name='script'); client.pause(); print(client.info().paused_by)"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
        assert "script#2 for" in out
        wait_until(lambda: not client.stats()["paused"], timeout_s=3.0)
        assert client.stats()["paused_by"] == ""
        assert client.generate([1], max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()


def test_after_a_killed_front_no_call_waits_its_whole_time_out_again(tmp_path: Path) -> None:
    service = fake_service(tmp_path, timeout_s=1.5)
    with service as client:
        assert service.pid is not None
        os.kill(service.pid, signal.SIGKILL)
        with pytest.raises(ServerUnavailable):
            client.info()
        began = time.monotonic()
        for _ in range(3):
            with pytest.raises(ServerUnavailable, match="rollout check"):
                client.info()
        assert time.monotonic() - began < 1.0


def test_a_host_whose_step_does_not_fit_together_is_replaced_and_the_front_lives(tmp_path: Path) -> None:
    with fake_service(tmp_path, engine="tests.integration.unfit_engine:UnfitEngine") as client:
        for _ in range(2):
            with pytest.raises(RequestFailed, match=r"does not fit together.*logprobs") as failed:
                client.generate([UNFIT], max_new_tokens=3)
            partial = failed.value.generation
            assert isinstance(partial, rollout.Generation) and not len(partial.ids), "what comes behind a step not taken does not count"
        assert client.generate([1], max_new_tokens=2, seed=1).ids.tolist() == fake_ids(1, 2).tolist()
        assert client.stats()["host_starts"] == 3
