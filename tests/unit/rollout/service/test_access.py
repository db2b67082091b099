"""Who may connect to a service, as its options and its key folder say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.errors import AccessDenied, InsecureAddress
from rollout.keys import KeyFolder, read_client_key
from rollout.service.access import DOMAINS, Access
from rollout.service.sessions import Channel
from rollout.wire.security import parse_address
from rollout.wire.transport import Context

TCP = parse_address("tcp://127.0.0.1:0")


@pytest.fixture
def context() -> Iterator[Context]:
    context = Context()
    yield context
    context.close()


def plain(domain: bytes, peer: bytes = b"127.0.0.1") -> list[bytes]:
    return [b"1.0", b"q", domain, peer, b"", b"NULL"]


def test_tcp_without_curve_in_libzmq_is_refused_unless_it_is_to_be_in_clear(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.wire.curve.has_curve", lambda: False)
    with pytest.raises(InsecureAddress, match="--insecure"):
        Access(context, TCP, KeyFolder(tmp_path / "keys"), insecure=False)


def test_tcp_in_clear_takes_anybody_makes_no_keys_and_warns(context: Context, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="without encryption"):
        access = Access(context, TCP, KeyFolder(tmp_path / "keys"), insecure=True)
    assert access.pair is None and not (tmp_path / "keys").exists()
    assert access._gate.judge(plain(DOMAINS[Channel.DATA]))[2] == b"200"
    access.check("anyone", Channel.CONTROL)


def test_encrypted_tcp_takes_no_plain_connection_and_follows_the_list(context: Context, tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "keys")
    access = Access(context, TCP, keys, insecure=False)
    assert access._gate.judge(plain(DOMAINS[Channel.DATA]))[2] == b"400"
    public = read_client_key(keys.new("actor", control=False)).pair.public
    assert access.advance(0.0, needed=True) == (True, 1.0)
    access.check(public, Channel.DATA)
    with pytest.raises(AccessDenied, match="keys list"):
        access.check(public, Channel.CONTROL)
    keys.revoke("actor")
    assert access.advance(0.5, needed=True) == (False, 1.0), "it looks once a second"
    assert access.advance(1.0, needed=False) == (False, None), "and only for sessions"
    assert access.advance(1.0, needed=True)[0]
    with pytest.raises(AccessDenied):
        access.check(public, Channel.DATA)


@pytest.mark.parametrize("told", [True, False])
def test_a_host_link_takes_its_process_only_where_the_kernel_names_it(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    monkeypatch.setattr("rollout.service.access._kernel_tells_pids", lambda: told)
    access = Access(context, parse_address(f"ipc://{tmp_path}/s"), KeyFolder(tmp_path / "keys"), insecure=False)
    domain = access.host_domain()
    assert access._gate.judge(plain(domain, b"localhost:0:0:7"))[2] == b"400", "nobody is expected yet"
    access.expect_host(domain, 7)
    assert access._gate.judge(plain(domain, b"localhost:0:0:7"))[2] == b"200"
    assert access._gate.judge(plain(domain, b"localhost:0:0:8"))[2] == (b"400" if told else b"200")
    access.forget_host(domain)
    assert access._gate.judge(plain(domain, b"localhost:0:0:7"))[2] == b"400"
