"""A host that dies again and again ends in a named failure after a bounded number of starts, however long each of them loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import pytest

import rollout.service.supervisor as module
from rollout.errors import HostFailed, RolloutError
from rollout.service.commit_gate import CommitGate
from rollout.service.control import ControlDesk
from rollout.service.host_link import HostLink
from rollout.service.host_probe import HostProbe
from rollout.service.metrics import FrontMetrics
from rollout.service.restart_budget import LONGEST_WAIT_S, WINDOW_S, RestartBudget
from rollout.service.supervisor import Supervisor
from rollout.wire.codec import NO_REQUEST, Packet, decode, encode
from rollout.wire.operations import HOST_REPLIES, Op
from tests.fakes import FakeInfo
from tests.unit.rollout.service.request_desk import Desk, KeepingLink


class PlayedLink(KeepingLink):
    """A host that the test plays: what it says, and when it dies."""

    def __init__(self) -> None:
        super().__init__()
        self.pid, self.starts = 7, 0
        self.inbound: list[Packet] = []
        self.status: int | None = None
        self.lives = False

    def start(self, initial_version: int, lost: object = None) -> None:
        self.starts, self.lives, self.status = self.starts + 1, True, None

    def receive(self) -> Packet | None:
        return self.inbound.pop(0) if self.inbound else None

    def exited(self) -> int | None:
        return self.status

    def last_words(self) -> list[Packet]:
        return []

    def clear(self) -> None:
        self.lives, self.status = False, None

    def kill(self) -> None:
        self.status = -9


class Clock:
    """The time as the supervisor sees it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Service:
    """A supervisor with a real request desk, a played host and a played clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, max_restarts: int = 3) -> None:
        self.clock, self.link = Clock(), PlayedLink()
        monkeypatch.setattr(module, "time", self.clock)
        self.desk = Desk(link=self.link)
        self.desk.admission.ready = False
        gate = CommitGate(self.desk.admission, self.desk.desk)
        link = cast(HostLink, self.link)
        control = ControlDesk(link, self.desk.calls, self.desk.admission, gate, lambda: 1, lambda version: None)
        self.events: list[str] = []
        self.supervisor = Supervisor(
            link,
            self.desk.calls,
            self.desk.desk,
            control,
            self.desk.admission,
            FrontMetrics(),
            initial_version=0,
            max_restarts=max_restarts,
            probe=HostProbe(self.desk.calls, timeout_s=120.0, start_timeout_s=1800.0),
            on_event=lambda event, fields: self.events.append(event),
        )
        self.supervisor.start()

    def says(self, op: Op, fields: Mapping[str, object], arrays: Any = None, call_id: bytes = NO_REQUEST) -> None:
        frames = [bytes(frame) for frame in encode(op, call_id, fields, arrays)]
        self.link.inbound.append(decode(frames, HOST_REPLIES))
        self.supervisor.drain()

    def gets_ready(self) -> None:
        facts = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(FakeInfo()).items()}
        self.says(Op.HOST_READY, {"engine": facts, "version": 0})

    def serves(self, engine_id: int, seconds: float) -> None:
        """Bring a token, then go on for some time."""
        one = np.ones(1, np.float32)
        ids = np.array([engine_id], np.int64)
        arrays = {
            "accepted": ids, "request_ids": ids, "token_ids": np.ones(1, np.int32), "logprobs": one, "raw_logprobs": one,
            "behaviour_logprobs": one, "versions": np.zeros(1, np.int64),
        }  # fmt: skip
        self.says(Op.STEP, {"seq": 1, "version": 0}, arrays)
        self.clock.now += seconds

    def dies(self, after_s: float = 0.0) -> None:
        assert self.link.lives
        self.clock.now += after_s
        self.link.status = 1
        self.supervisor.drain()

    def waits(self) -> float:
        """Wait until the next start; returns how long that took."""
        began = self.clock.now
        while not self.link.lives:
            again = self.supervisor.advance(self.clock.now)
            if self.link.lives or again is None:
                break
            self.clock.now = max(again, self.clock.now)
        return self.clock.now - began


def test_a_host_that_loads_for_long_and_dies_each_time_is_given_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch)
    service.gets_ready()
    service.dies()
    waited = []
    while service.supervisor.failure is None:
        assert service.link.starts < 50, "it is started for ever"
        held = service.desk.generate(max_new_tokens=3)
        service.dies(after_s=25.0)
        death = service.supervisor.death
        assert death is not None and "status 1" in death.what
        waited.append(service.waits())
    assert service.link.starts == 4, "the first, and max_restarts more"
    assert waited == [0.5, 1.0, 0.0], "each later than the one before, and then none"
    with pytest.raises(HostFailed, match=r"status 1.*4 engine hosts died within 60 s of service \(max_restarts\).*start it again"):
        raise service.supervisor.failure
    assert (held, "host_failed", "max_restarts") in service.desk.errors(), "what waited for a host is refused with the cause"
    assert not service.link.lives and service.events == ["ready"]


def test_hosts_that_get_ready_and_die_at_their_first_work_are_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch)
    while service.supervisor.failure is None:
        assert service.link.starts < 50
        service.clock.now += 40.0
        service.gets_ready()
        service.desk.generate(max_new_tokens=3)
        service.dies(after_s=100.0)
        service.waits()
    assert service.link.starts == 4


def test_hosts_that_die_after_real_service_are_replaced_at_once_and_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch)
    for number in range(20):
        service.gets_ready()
        service.serves(service.desk.record(service.desk.generate(max_new_tokens=5)).engine_id, WINDOW_S + 1)
        service.dies()
        assert service.waits() == 0.0 and service.link.starts == number + 2
    service.gets_ready()
    assert service.supervisor.death is None and service.supervisor.failure is None


def test_a_host_that_nobody_asked_anything_was_in_service(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch)
    for _ in range(20):
        service.gets_ready()
        service.dies(after_s=WINDOW_S + 1)
        assert service.waits() == 0.0
    assert service.supervisor.failure is None


def test_no_restarts_are_no_restarts_and_a_first_start_that_fails_says_why_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch, max_restarts=0)
    service.gets_ready()
    service.dies(after_s=1.0)
    assert service.link.starts == 1 and service.supervisor.failure is not None
    service = Service(monkeypatch)
    service.says(Op.HOST_FAILED, {"error": {"code": "manifest_mismatch", "what": "tensor x is missing"}})
    service.dies()
    failure = service.supervisor.failure
    assert isinstance(failure, RolloutError) and (failure.code, service.events) == ("manifest_mismatch", ["failed"])


def test_the_wait_is_bounded_and_service_sets_it_back() -> None:
    budget = RestartBudget(10**6)
    waits = [budget.after_death(None) for _ in range(40)]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0] and waits[-1] == LONGEST_WAIT_S
    assert budget.after_death(5.0) == 0.0 and budget.after_death(None) == 0.5
