"""Forms of addresses, and who reaches them."""

from __future__ import annotations

import pytest

from rollout.errors import InvalidConfig
from rollout.wire.security import control_address_for, is_loopback, is_own_machine, new_token, parse_address, warn_of_clear_tcp


def test_an_address_names_its_control_socket() -> None:
    address = parse_address("ipc:///run/x/service")
    assert (address.path, address.control) == ("/run/x/service", "ipc:///run/x/service.control")
    assert parse_address("tcp://[::1]:5000").control == "tcp://[::1]:5001"
    assert parse_address("tcp://127.0.0.1:0").control == "tcp://127.0.0.1:0"


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("10.0.0.1", False), ("*", False)]
)
def test_clear_tcp_is_warned_of_with_who_reaches_it(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    with pytest.warns(UserWarning, match="every user of this machine" if loopback else "every machine that reaches it"):
        warn_of_clear_tcp(parse_address(f"tcp://{host}:5000"))


@pytest.mark.parametrize(
    ("used", "announced", "control"),
    [
        ("tcp://node7:5000", "tcp://0.0.0.0:5001", "tcp://node7:5001"),
        ("tcp://[fe80::1]:5000", "tcp://[::]:5001", "tcp://[fe80::1]:5001"),
        ("tcp://10.0.0.1:5000", "tcp://10.0.0.1:5001", "tcp://10.0.0.1:5001"),
        ("ipc:///a", "ipc:///a.control", "ipc:///a.control"),
    ],
)
def test_a_client_reaches_the_control_socket_by_the_host_that_it_used(used: str, announced: str, control: str) -> None:
    assert control_address_for(used, announced) == control


@pytest.mark.parametrize(
    "text",
    ["", "ipc://relative", "ipc://", "tcp://127.0.0.1", "tcp://:5", "tcp://h:65535", "tcp://h:x", "http://x", "inproc://x", "tcp://::1:5"],
)
def test_an_address_that_is_not_understood_lists_the_known_forms(text: str) -> None:
    with pytest.raises(InvalidConfig, match="ipc:///absolute/path"):
        parse_address(text)


def test_a_port_without_a_next_one_is_refused_with_the_reason() -> None:
    assert parse_address("tcp://h:65534").control == "tcp://h:65535"
    with pytest.raises(InvalidConfig, match="65534 at most, control takes the next"):
        parse_address("tcp://h:65535")


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("[::1]", True),
        ("0.0.0.0", True),
        ("[::]", True),
        ("*", False),
        ("10.0.0.1", False),
        ("h", False),
    ],
)
def test_a_client_of_the_wildcard_stays_on_its_machine(host: str, own: bool) -> None:
    assert is_own_machine(host) is own


def test_a_socket_path_that_the_system_cannot_hold_is_refused_with_the_limit() -> None:
    assert parse_address("ipc:///" + "a" * 98).path
    with pytest.raises(InvalidConfig, match="99 bytes") as refused:
        parse_address("ipc:///" + "a" * 99)
    assert "ARENO_STATE_DIR" in str(refused.value.remedy)


def test_tokens_are_sixteen_bytes_and_differ() -> None:
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) == 16
