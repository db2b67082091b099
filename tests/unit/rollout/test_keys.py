"""Key files: modes, names, replacement, and what a running service reads of them."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from rollout.errors import InvalidConfig
from rollout.keys import AllowList, KeyFolder, read_client_key


def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "keys")


def test_the_first_use_makes_the_services_pair_and_a_key_for_its_own_user(tmp_path: Path) -> None:
    keys = folder(tmp_path)
    pair = keys.service_pair()
    assert keys.service_pair() == pair
    assert read_client_key(keys.path("local")).server == pair.public
    assert [(key.name, key.control) for key in keys.allowed().values()] == [("local", True)]
    assert read_client_key(keys.path("local")).pair.public == keys.allowed()["local"].public


def test_every_file_is_made_for_its_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys = folder(tmp_path)
        keys.new("alice")
        keys.rotate("alice")
        keys.rotate("service")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in keys.root.iterdir()}
    assert set(modes) == {"alice.key", "local.key", "service.key", "allowed.json", "lock"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(keys.root.stat().st_mode) == 0o700


def test_a_link_that_somebody_laid_is_replaced_and_not_followed(tmp_path: Path) -> None:
    keys = folder(tmp_path)
    keys.service_pair()
    target = tmp_path / "elsewhere"
    keys.path("eve").symlink_to(target)
    keys.new("eve")
    assert not target.exists() and not keys.path("eve").is_symlink()


def test_a_rotated_key_keeps_its_rights_and_a_revoked_one_is_gone(tmp_path: Path) -> None:
    keys = folder(tmp_path)
    before = read_client_key(keys.new("actor", control=False)).pair
    after = read_client_key(keys.rotate("actor")).pair
    assert before.public != after.public
    assert keys.allowed()["actor"].public == after.public and not keys.allowed()["actor"].control
    keys.revoke("actor")
    assert "actor" not in keys.allowed() and not keys.path("actor").exists()


def test_a_new_service_key_is_written_into_the_key_files_that_are_here(tmp_path: Path) -> None:
    keys = folder(tmp_path)
    keys.new("alice")
    before = read_client_key(keys.path("alice"))
    keys.rotate("service")
    after = read_client_key(keys.path("alice"))
    assert after.server == keys.service_pair().public != before.server
    assert after.pair == before.pair


@pytest.mark.parametrize("name", ["", "service", "../x", "a/b", ".hidden", "a" * 65, "a b"])
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidConfig, match="choose another name"):
        folder(tmp_path).new(name)


def test_a_taken_name_and_an_unknown_one_are_refused_with_the_way_out(tmp_path: Path) -> None:
    keys = folder(tmp_path)
    keys.new("alice")
    with pytest.raises(InvalidConfig, match="keys rotate alice"):
        keys.new("alice")
    for change in (keys.revoke, keys.rotate):
        with pytest.raises(InvalidConfig, match="known: alice, local"):
            change("bob")


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path).new("alice")
    path.chmod(0o640)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        read_client_key(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"public": 1}', json.dumps({"public": "x" * 40, "secret": "SECRET" * 7, "server": ""})])
def test_a_broken_key_file_is_refused_without_a_word_of_its_content(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.key"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(InvalidConfig) as refused:
        read_client_key(path)
    assert "SECRET" not in str(refused.value)


def test_no_repr_shows_a_secret(tmp_path: Path) -> None:
    key = read_client_key(folder(tmp_path).new("alice"))
    assert key.pair.secret not in repr(key) and key.pair.public in repr(key)


def test_a_running_service_follows_the_list_and_a_broken_one_lets_nobody_in(tmp_path: Path) -> None:
    keys = folder(tmp_path)
    public = read_client_key(keys.new("actor", control=False)).pair.public
    allowed = AllowList(keys.allowed_path)
    assert allowed.refresh() and not allowed.refresh()
    assert allowed.may_connect(public, control=False) and not allowed.may_connect(public, control=True)
    keys.revoke("actor")
    assert allowed.refresh() and not allowed.may_connect(public, control=False)
    local = keys.allowed()["local"].public
    keys.allowed_path.write_text('{"clients": [{"name": 1}]}')
    with pytest.raises(InvalidConfig):
        allowed.refresh()
    assert not allowed.may_connect(local, control=False)
    keys.allowed_path.unlink()
    assert allowed.refresh() and not allowed.may_connect(local, control=False)


def test_changes_from_many_threads_lose_no_key(tmp_path: Path) -> None:
    keys = folder(tmp_path)
    threads = [threading.Thread(target=keys.new, args=(f"k{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(keys.allowed()) == {"local", *(f"k{index}" for index in range(8))}
