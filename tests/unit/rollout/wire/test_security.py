"""Which addresses a service may bind, and why not."""

from __future__ import annotations

import pytest

from rollout.errors import InsecureAddress, InvalidConfig
from rollout.wire.security import check_bind_address, new_token, parse_address


def test_a_local_socket_is_taken() -> None:
    address = check_bind_address("ipc:///run/x/service", insecure=False)
    assert (address.path, address.control) == ("/run/x/service", "ipc:///run/x/service.control")


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:5000", "tcp://localhost:0", "tcp://[::1]:5000"])
def test_loopback_tcp_without_encryption_needs_insecure_and_warns(text: str) -> None:
    with pytest.raises(InsecureAddress, match="--insecure"):
        check_bind_address(text, insecure=False)
    with pytest.warns(UserWarning, match="without encryption"):
        assert check_bind_address(text, insecure=True).scheme == "tcp"


@pytest.mark.parametrize("text", ["tcp://0.0.0.0:5000", "tcp://192.168.1.2:5000", "tcp://*:5000", "tcp://example.org:5000"])
def test_an_address_that_the_network_reaches_is_refused_even_with_insecure(text: str) -> None:
    with pytest.raises(InsecureAddress, match="reachable from the network"):
        check_bind_address(text, insecure=True)


@pytest.mark.parametrize(
    "text", ["", "ipc://relative", "ipc://", "tcp://127.0.0.1", "tcp://:5", "tcp://h:65535", "tcp://h:x", "http://x", "inproc://x"]
)
def test_an_address_that_is_not_understood_lists_the_known_forms(text: str) -> None:
    with pytest.raises(InvalidConfig, match="ipc:///absolute/path"):
        parse_address(text)


def test_a_socket_path_that_the_system_cannot_hold_is_refused_with_the_limit() -> None:
    assert parse_address("ipc:///" + "a" * 98).path
    with pytest.raises(InvalidConfig, match="99 bytes") as refused:
        parse_address("ipc:///" + "a" * 99)
    assert "ARENO_STATE_DIR" in str(refused.value.remedy)


def test_tokens_are_sixteen_bytes_and_differ() -> None:
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) == 16
