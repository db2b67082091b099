"""A network between client and service that carries nothing for a while: a short cut costs nothing, a long one ends the lease."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.errors import RolloutError
from rollout.wire.security import control_address_for
from tests.fakes import fake_ids, fake_service

LEASE_S = 2.0


class Network:
    """Carries TCP connections to a port; `carries` cleared holds every byte back, as a cut cable does, and closes nothing."""

    def __init__(self, port: int) -> None:
        self._target, self._ended, self._cuts = ("127.0.0.1", port), False, False
        self.carries = threading.Event()
        self.carries.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        others: dict[socket.socket, socket.socket] = {}
        while not self._ended:
            if self._cuts:
                self._cuts = False
                for end in others:
                    end.close()
                others.clear()
            ready, _, _ = select.select([self._listener, *others] if self.carries.is_set() else [], [], [], 0.01)
            for one in ready:
                if one is self._listener:
                    near, far = self._listener.accept()[0], socket.create_connection(self._target)
                    others |= {near: far, far: near}
                    continue
                if one not in others:
                    continue
                data = b""
                with contextlib.suppress(OSError):
                    data = one.recv(65_536)
                    others[one].sendall(data)
                if not data:
                    for end in (others.pop(one), one):
                        others.pop(end, None)
                        end.close()
        for end in [self._listener, *others]:
            end.close()

    def cut(self) -> None:
        """Close all connections; there may be others at once."""
        self._cuts = True

    def close(self) -> None:
        """End everything."""
        self._ended = True
        self._thread.join()


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Any, Any, Network]]:
    """A client beside the service, one behind a network, and the network."""
    service = fake_service(tmp_path, address="tcp://127.0.0.1:0", insecure=True, lease_s=LEASE_S, engine_options={"step_s": 0.002})
    with service as near:
        network = Network(int(near.address.rsplit(":", 1)[1]))
        try:
            with rollout.connect(f"tcp://127.0.0.1:{network.port}", insecure=True, timeout_s=20.0) as client:
                yield near, client, network
        finally:
            network.carries.set()
            network.close()


def wait_until(true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def test_a_cut_shorter_than_the_lease_costs_no_token(far: tuple[Any, Any, Network]) -> None:
    near, client, network = far
    stream = client.stream([1], max_new_tokens=900, seed=4)
    ids = next(stream).ids.tolist()
    network.carries.clear()
    time.sleep(LEASE_S / 2)
    network.carries.set()
    for delta in stream:
        assert delta.offset == len(ids)
        ids += delta.ids.tolist()
    assert ids == fake_ids(4, 900).tolist()
    assert near.stats()["lapsed_leases"] == 0


def test_a_cut_longer_than_the_lease_ends_the_work_there_and_is_told_when_the_network_is_back(far: tuple[Any, Any, Network]) -> None:
    near, client, network = far
    stream = client.stream([1], max_new_tokens=50_000, seed=5)
    ids = next(stream).ids.tolist()
    network.carries.clear()
    began = time.monotonic()
    wait_until(lambda: near.stats()["live"] == 0, LEASE_S + 3.0)
    assert time.monotonic() - began > LEASE_S / 2
    stats = near.stats()
    assert (stats["cancelled"], stats["lapsed_leases"], stats["record_pages"], stats["engine"]["running"]) == (1, 1, 0, 0)
    network.carries.set()
    with pytest.raises(RolloutError) as told:
        for delta in stream:
            ids += delta.ids.tolist()
    assert told.value.code == "server_restarted"
    assert ids == fake_ids(5, len(ids)).tolist()
    assert client.generate([1], max_new_tokens=3, seed=6).ids.tolist() == fake_ids(6, 3).tolist(), "the client goes on in a new session"


@pytest.mark.parametrize("timeout_s", [None, 15.0])
def test_a_call_whose_connection_alone_is_lost_gets_its_answer_by_the_next(
    far: tuple[Any, Any, Network], timeout_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control has a connection of its own: nothing else is lost with it, so nothing else tells that it is another one."""
    near, _, _ = far
    host, port = near.address.removeprefix("tcp://").rsplit(":", 1)
    networks: list[Network] = []

    def through_a_network(address: str, control_address: str) -> str:
        networks.append(Network(int(control_address_for(address, control_address).rsplit(":", 1)[1])))
        return f"tcp://{host}:{networks[-1].port}"

    monkeypatch.setattr("rollout.client.io_thread.control_address_for", through_a_network)
    try:
        with rollout.connect(f"tcp://{host}:{port}", insecure=True, timeout_s=20.0) as client:
            ticket = client.weights_begin(None, partial=True)
            stream = client.stream([1], max_new_tokens=700, seed=7)
            next(stream)
            told: list[Any] = []
            options = {"mode": "drain", "drain_s": 30.0, "timeout_s": timeout_s}
            commit = threading.Thread(target=lambda: told.append(client.weights_commit(ticket.update_id, **options)), daemon=True)
            commit.start()
            time.sleep(0.3)
            networks[0].cut()
            assert sum(delta.ids.size for delta in stream) > 600, "the stream goes on"
            commit.join(10.0)
            assert told and told[0].version == ticket.version == client.info().version
    finally:
        for network in networks:
            network.close()
