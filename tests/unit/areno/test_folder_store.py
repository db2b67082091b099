"""The store in which ranks meet: what it says, and that nobody who ends or stands still in it holds up anybody else."""

from __future__ import annotations

import datetime
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from areno.folder_store import FolderStore
from areno.parallel import TPGroup

pytestmark = pytest.mark.timeout(60)
WRITER = """
import datetime, sys
from pathlib import Path
from areno.folder_store import FolderStore
store = FolderStore(Path(sys.argv[1]), datetime.timedelta(seconds=5))
print("there", flush=True)
while True:
    for letter in "ab":
        store.set("large", letter * 400_000)
        store.add("counter", 1)
"""
LOCKER = """
import fcntl, os, sys, time
folder = sys.argv[1]
kept = []
for path in [folder, *(os.path.join(folder, name) for name in os.listdir(folder))]:
    kept.append(os.open(path, os.O_RDONLY))
    fcntl.flock(kept[-1], fcntl.LOCK_EX)
print("there", flush=True)
time.sleep(60)
"""


def store_at(folder: Path, seconds: float = 5.0) -> FolderStore:
    return FolderStore(folder, datetime.timedelta(seconds=seconds))


@contextmanager
def process(program: str, folder: Path) -> Iterator[int]:
    """Run a program until it is there; yield its process id, and kill it."""
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None and made.stdout.readline() == "there\n"
            yield made.pid
        finally:
            made.kill()


def test_what_one_sets_another_gets_behind_prefixes_too(tmp_path: Path) -> None:
    one, other = store_at(tmp_path / "meeting"), store_at(tmp_path / "meeting")
    one.set("a/b", b"\x00\xff")
    one.set("text", "später")
    assert other.get("a/b") == b"\x00\xff" and other.get("text").decode() == "später"
    dist.PrefixStore("x", one).set("key", "1")
    assert dist.PrefixStore("x", other).get("key") == b"1" and not other.check(["key"])
    other.set("text", "")
    assert one.get("text") == b"" and one.check(["text", "a/b"])
    assert (tmp_path / "meeting").stat().st_mode & 0o777 == 0o700


def test_a_wait_ends_with_the_key_or_with_the_time(tmp_path: Path) -> None:
    store = store_at(tmp_path, 0.2)
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="'gone' was not set within"):
        store.get("gone")
    with pytest.raises(dist.DistStoreError, match=r"not all of \['gone'\] were set within 0.1 s"):
        store.wait(["gone"], datetime.timedelta(seconds=0.1))
    assert time.monotonic() - started < 3.0
    timer = threading.Timer(0.1, store_at(tmp_path).set, ("late", "x"))
    timer.start()
    assert store_at(tmp_path).get("late") == b"x"
    timer.join()


def test_a_wait_ends_when_it_is_given_up(tmp_path: Path) -> None:
    given_up = threading.Event()
    store = FolderStore(tmp_path, datetime.timedelta(seconds=30), given_up)
    threading.Timer(0.1, given_up.set).start()
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="'gone' was not set before the meeting was given up"):
        store.get("gone")
    assert time.monotonic() - started < 3.0


LOST_RANK = """
import sys, tempfile, threading
from areno.parallel import TPGroup
from areno.ranks.meeting import meet_in_thread
def connect(given_up):
    return TPGroup.connect(rank=0, size=2, init_method=f"file://{tempfile.mkdtemp()}", backend="gloo", timeout_s=20.0, given_up=given_up)
def wait(met):
    threading.Event().wait(0.5)
    raise RuntimeError("rank 1 was lost")
try:
    meet_in_thread(connect, wait, 20.0)
except RuntimeError as error:
    print(error)
"""


def test_a_process_whose_meeting_failed_ends_as_any_other() -> None:
    """A thread that came back to Python from a store's wait while the interpreter ended took the process down."""
    ended = subprocess.run([sys.executable, "-c", LOST_RANK], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "rank 1 was lost\n", "")


def test_nobody_counts_twice(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: store_at(tmp_path).add("counter", 1), range(200)))
    assert sorted(told) == list(range(1, 201)) and store_at(tmp_path).add("counter", -5) == 195
    assert store_at(tmp_path).add("other", 3) == 3


def test_a_folder_that_is_gone_or_none_is_an_error_of_the_store(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (file, tmp_path / "no" / "parent"):
        with pytest.raises(dist.DistStoreError, match="the store at"):
            store_at(place)
    store = store_at(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(dist.DistStoreError, match="the store at"):
        store.set("key", "value")


def test_one_that_stands_still_anywhere_holds_up_nobody(tmp_path: Path) -> None:
    """torch's FileStore stood still with it, all threads of its process together."""
    draw = random.Random(0)
    with process(WRITER, tmp_path) as writer:
        for number in range(25):
            time.sleep(0.02 * draw.random())
            os.kill(writer, signal.SIGSTOP)
            started = time.monotonic()
            store = store_at(tmp_path)
            store.set("own", str(number))
            assert store.get("own") == str(number).encode() and store.add(f"counter-{number}", 1) == 1
            assert len(set(store.get("large"))) == 1, "whole"
            del store
            assert time.monotonic() - started < 1.0
            os.kill(writer, signal.SIGCONT)
    kept = store_at(tmp_path).get("large")
    assert len(kept) == 400_000 and len(set(kept)) == 1, "one that is killed leaves whole keys"


def test_ranks_meet_where_somebody_holds_every_lock(tmp_path: Path) -> None:
    store_at(tmp_path).set("key", "value")
    with process(LOCKER, tmp_path), ThreadPoolExecutor(2) as pool:
        options = {"size": 2, "init_method": f"file://{tmp_path}", "backend": "gloo", "timeout_s": 10.0}
        groups = list(pool.map(lambda rank: TPGroup.connect(rank=rank, **options), range(2)))  # type: ignore[arg-type]
        sums = list(pool.map(lambda group: group.all_reduce_(torch.ones(2)).tolist(), groups))
        assert sums == [[2.0, 2.0]] * 2
        for group in groups:
            group.close()
