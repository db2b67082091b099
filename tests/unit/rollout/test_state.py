"""The state folder: private, one owner for an address, versions that only grow."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.errors import AddressInUse, InvalidConfig, NoService
from rollout.state import Announcement, FileLock, StateFolder, default_state_dir, private_folder, remove_socket_files
from rollout.wire.security import parse_address


def announce(folder: StateFolder, name: str) -> FileLock:
    address = parse_address(f"ipc://{folder.root}/{name}")
    lock = folder.lock(address)
    folder.announce(Announcement(address=address.text, lock=str(lock.path), pid=1, incarnation="x", model="m"))
    return lock


def test_folders_are_private_and_a_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(InvalidConfig, match="may be entered by others"):
        private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755, "rights that somebody set are left alone"
    made = private_folder(tmp_path / "made")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(InvalidConfig, match="not a folder of this user"):
        private_folder(tmp_path / "link")


def test_the_environment_names_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARENO_STATE_DIR", str(tmp_path))
    assert default_state_dir() == tmp_path


def test_an_address_has_one_owner_and_is_named_to_the_second(tmp_path: Path) -> None:
    first, second = StateFolder(tmp_path / "a").make(), StateFolder(tmp_path / "b").make()
    address = parse_address(f"ipc://{tmp_path}/socket")
    lock = first.lock(address)
    with pytest.raises(AddressInUse, match=f"{address.text} is in use"):
        second.lock(address)
    lock.release()
    second.lock(address).release()


def test_the_one_running_service_is_found_and_stale_announcements_are_not(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).make()
    with pytest.raises(NoService, match="rollout serve"):
        folder.find()
    announce(folder, "stale").release()
    with pytest.raises(NoService):
        folder.find()
    lock = announce(folder, "one")
    assert folder.find().address.endswith("/one")
    other = announce(folder, "two")
    with pytest.raises(NoService, match=r"2 services run.*/one"):
        folder.find()
    lock.release()
    other.release()


def test_a_broken_announcement_is_ignored(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).make()
    (folder.services / "x.json").write_text("{")
    (folder.services / "y.json").write_text('{"address": 1}')
    assert folder.running() == []


def test_versions_only_grow_also_across_processes(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).make()
    code = f"from pathlib import Path; from rollout.state import StateFolder; print(StateFolder(Path({str(tmp_path)!r})).next_version())"
    numbers = [folder.next_version()]
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    numbers += [int(process.communicate(timeout=30)[0]) for process in processes]
    numbers.append(folder.next_version())
    assert sorted(numbers) == [0, 1, 2, 3, 4]
    assert numbers[-1] == 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"next": "4"}', '{"next": -1}', '{"next": true}', '{"version": 3}'])
def test_a_versions_file_that_says_no_number_is_refused_and_left_alone(text: str, tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).make()
    path = tmp_path / "versions.json"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=r"versions.json does not hold the next weight version.*restore it"):
        folder.next_version()
    assert path.read_text() == text


def test_a_lock_that_is_removed_with_its_release_can_be_taken_again_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    first, second = FileLock(path), FileLock(path)
    assert first.acquire() and not second.acquire()
    first.release(remove=True)
    assert not path.exists()
    assert second.acquire() and not first.acquire()
    second.release(remove=True)
    assert not path.exists()


def test_an_ordinary_file_at_an_address_is_never_removed(tmp_path: Path) -> None:
    address = parse_address(f"ipc://{tmp_path}/notes.txt")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidConfig, match="is no socket"):
        remove_socket_files(address)
    assert (tmp_path / "notes.txt").read_text() == "mine"
