"""kill -9 and SIGSTOP of each rank in each phase: a typed error that names it, in bounded time, and no process left behind.

The processes, the shared memory and the signals are real; the ranks compute nothing, so that each case takes a second. What a real
engine does with such an error: `test_service_ranks.py`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from areno.errors import CheckpointError, EngineFailure, InvalidConfig
from areno.ranks import operations as ops
from areno.ranks.identity import checkpoint_identity, code_identity
from areno.ranks.peers import Peers
from areno.ranks.ranks import rank_devices
from areno.ranks.segment import Head, LogSegment, Own, Phase
from areno.ranks.state_check import FIELDS
from tests.integration.quick_rank import BREAK, HANG
from tests.integration.rank_phases import PHASES, TIMEOUT_S, quick_plan

REPOSITORY = Path(__file__).resolve().parents[2]
SIGNALS = {signal.SIGKILL: "was killed by SIGKILL", signal.SIGSTOP: "has shown no sign of life"}
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that stands for a checkpoint."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Peers]]:
    made: list[Peers] = []

    def begin(**options: Any) -> Peers:
        made.append(Peers(quick_plan(folder, **options)))
        return made[-1]

    yield begin
    for peers in made:
        peers.close()


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def slow(*cases: Any) -> list[Any]:
    """Mark cases that wait for a time-out and differ little from others."""
    return [pytest.param(*case, marks=pytest.mark.long) for case in cases]


KILLED = [("start-up", 1, 2), *((phase, 1, 2) for phase in PHASES), ("decode", 2, 3)]
STOPPED = [("start-up", 1, 2), ("decode", 1, 3), ("idle", 1, 2)]
SLOW = slow(*((phase, rank, 3) for phase in ["start-up", *PHASES] for rank in (1, 2)))


@pytest.mark.parametrize(
    ("how", "phase", "rank", "size"),
    [
        *((signal.SIGKILL, *case) for case in KILLED),
        *((signal.SIGSTOP, *case) for case in STOPPED),
        *(pytest.param(how, *case.values, marks=case.marks) for how in SIGNALS for case in SLOW),
    ],
)
def test_a_lost_rank_ends_the_others_and_is_named(
    start: Callable[..., Peers], how: signal.Signals, phase: str, rank: int, size: int
) -> None:
    peers = start(size=size, **({"start_s": TIMEOUT_S} if phase == "start-up" else {}))
    pids = peers.pids
    if phase == "start-up":
        wait_until(lambda: peers._segment.own(rank, Own.PHASE) == Phase.ATTACHED, 10.0)
        os.kill(pids[rank], how)
    else:
        peers.meet()
        if phase != "idle":
            PHASES[phase](peers)
        os.kill(pids[rank], how)
    started = time.monotonic()
    with pytest.raises(EngineFailure, match=rf"rank {rank} \(pid {pids[rank]}\) {SIGNALS[how]}") as failed:
        if phase == "start-up":
            peers.meet()
        while True:
            PHASES[phase](peers)
    assert time.monotonic() - started < (1.0 if how == signal.SIGKILL else TIMEOUT_S + 1.5)
    assert failed.value.field == "tp" and failed.value.value == rank and "start it again" in str(failed.value.remedy)
    with pytest.raises(EngineFailure) as again:
        peers.tell(ops.LaunchSlices())
    assert again.value is failed.value, "every later call says the same"
    peers.close()
    assert not any(psutil.pid_exists(pid) for pid in pids.values()), "all are reaped"
    assert not peers._folder.exists()


@pytest.mark.parametrize(
    ("how", "mode", "phase"),
    [
        (signal.SIGKILL, "dedicated", "start-up"),
        (signal.SIGKILL, "dedicated", "decode"),
        (signal.SIGSTOP, "dedicated", "decode"),
        (signal.SIGSTOP, "shared", "decode"),
        *slow(*((signal.SIGKILL, "dedicated", phase) for phase in ("prefill", "commit", "sleep", "idle"))),
        *slow(*((signal.SIGSTOP, mode, phase) for mode in ("dedicated", "shared") for phase in ("start-up", "prefill", "commit", "idle"))),
    ],
)
def test_a_lost_rank_0_leaves_no_other_rank(folder: Path, how: signal.Signals, mode: str, phase: str) -> None:
    command = [sys.executable, "-m", "tests.integration.rank_zero", str(folder), mode, phase]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as zero:
        assert zero.stdout is not None
        pids = [int(pid) for pid in json.loads(zero.stdout.readline()).values()]
        time.sleep(0.1)
        zero.send_signal(how)
        wait_until(lambda: not any(alive(pid) for pid in pids), 2.0 if how == signal.SIGKILL else TIMEOUT_S + 3.0)
        if how == signal.SIGSTOP and mode == "shared":
            # Nobody ends a process that may be a person's notebook; what it finds when it goes on is an error.
            assert zero.poll() is None
            zero.send_signal(signal.SIGCONT)
            if phase == "start-up":
                zero.kill()
            else:
                assert "rank" in zero.stdout.readline()
        said = zero.communicate(timeout=10.0)[1]
        assert zero.returncode == (0 if mode == "shared" and phase != "start-up" else -signal.SIGKILL)
    assert "ends: rank 0 has ended" in said if how == signal.SIGKILL else "rank 0 has shown no sign of life" in said


def test_a_rank_0_that_waits_in_vain_for_a_lost_rank_is_ended_with_the_reason(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.rank_zero", str(folder), "dedicated", "deaf"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as zero:
        assert zero.stdout is not None
        pids = [int(pid) for pid in json.loads(zero.stdout.readline()).values()]
        os.kill(pids[1], signal.SIGKILL)
        said = zero.communicate(timeout=10.0)[1]
    assert zero.returncode == 4 and f"rank 2 (pid {pids[1]}) was killed by SIGKILL" in said and "waits in vain" in said
    wait_until(lambda: not any(alive(pid) for pid in pids), 2.0)


def test_a_rank_that_hangs_while_its_beat_goes_on_is_named_with_its_entry_and_says_where(
    start: Callable[..., Peers], capfd: pytest.CaptureFixture[str]
) -> None:
    peers = start(stall_s=1.0)
    pids = peers.pids
    peers.meet()
    with pytest.raises(EngineFailure, match=r"rank 1 \(pid \d+\) hangs in entry 2 of 2 of the log; it got no further in 1 s"):
        peers.tell(ops.LaunchSlices())
        peers.expect(peers.tell(ops.PublishUpdate(version=HANG)))
    said = capfd.readouterr().err
    mine, *others = said.split("areno: stacks of rank ")
    assert "stacks of rank 0:" in mine and "in expect" in mine
    assert [f"{rank} (pid {pid})" in one for (rank, pid), one in zip(pids.items(), others, strict=True)] == [True, True]
    assert all("quick_rank.py" in one and "in _follow" in one for one in others), "the line in which each hangs"


def test_a_rank_that_is_lost_while_ranks_meet_is_named_though_the_library_waits_on(
    start: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def connect(peers: Peers, given_up: threading.Event) -> None:
        os.kill(peers.pids[1], signal.SIGKILL)
        released.wait(30.0)

    monkeypatch.setattr(Peers, "_connect", connect)
    peers = start(size=2)
    started = time.monotonic()
    with pytest.raises(EngineFailure, match=rf"rank 1 \(pid {peers.pids[1]}\) was killed by SIGKILL"):
        peers.meet()
    assert time.monotonic() - started < 8.0
    released.set()


def test_ranks_that_never_meet_and_errors_of_the_meeting_are_told(start: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.ranks.peers._LOST_IS_SEEN_S", 0.1)
    released = threading.Event()
    monkeypatch.setattr(Peers, "_connect", lambda peers, given_up: released.wait(30.0))
    with pytest.raises(EngineFailure, match=r"the ranks did not meet within 0\.4 s.*see their log"):
        start(size=2, stall_s=0.4).meet()
    released.set()

    def refuse(peers: Peers, given_up: threading.Event) -> None:
        raise EngineFailure("no way there", field="tp")

    monkeypatch.setattr(Peers, "_connect", refuse)
    with pytest.raises(EngineFailure, match="no way there"):
        start(size=2).meet()


def test_the_first_entry_in_which_ranks_load_has_a_bound_of_its_own(start: Callable[..., Peers]) -> None:
    peers = start(size=2, stall_s=0.3, build_s=1.2)
    peers.meet()
    started = time.monotonic()
    with pytest.raises(EngineFailure, match=r"rank 1 \(pid \d+\) hangs in entry 1 of 1 of the log; it got no further in 1\.2 s"):
        peers.expect(peers.tell(ops.PublishUpdate(version=HANG)))
    assert time.monotonic() - started > 1.1


def test_a_rank_0_that_hangs_where_the_others_have_done_their_part_is_told(
    start: Callable[..., Peers], capfd: pytest.CaptureFixture[str]
) -> None:
    peers = start(size=2, stall_s=1.2)
    peers.meet()
    for _ in range(2):
        peers.tell(ops.LaunchSlices())
    # Work that goes on in pieces, each shorter than the bound.
    with peers.together():
        time.sleep(0.7)
        peers.tell(ops.LaunchSlices())
        time.sleep(0.7)
    time.sleep(1.4)
    peers.check()
    started = time.monotonic()
    with pytest.raises(EngineFailure, match=r"rank 0 hangs in work that ranks do together, at entry 3 of the log; .* in 1\.2 s"):
        with peers.together():
            wait_until(lambda: peers.failure is not None, 10.0)
    assert time.monotonic() - started < 5.0
    assert "in wait_until" in capfd.readouterr().err.split("stacks of rank 0:")[1]


def test_a_group_ends_after_all_that_was_captured_with_it(start: Callable[..., Peers]) -> None:
    ended: list[str] = []

    class Group:
        device = torch.device("cpu")

        def abort(self) -> None:
            ended.append("abort")

        def close(self) -> None:
            ended.append("close")

    peers = start(size=2)
    peers.meet()
    assert peers._folder.exists(), "a group may look into the meeting's file as long as it lives"
    peers._group = Group()  # type: ignore[assignment]
    peers.close(lambda: ended.append("leave"))
    peers.close(lambda: ended.append("leave again"))
    assert ended == ["abort", "leave", "close"] and not peers._folder.exists()


def test_a_rank_that_breaks_leaves_its_reason(start: Callable[..., Peers]) -> None:
    peers = start()
    peers.meet()
    with pytest.raises(EngineFailure, match=r"ended with status 4; ValueError: it breaks as told"):
        peers.expect(peers.tell(ops.PublishUpdate(version=BREAK)))


def test_work_that_ends_well_while_a_rank_is_lost_gives_no_result(start: Callable[..., Peers]) -> None:
    peers = start(size=2)
    peers.wait_for(Phase.RUNNING)
    with peers.together():
        pass
    with pytest.raises(EngineFailure, match="was killed by SIGKILL"):
        with peers.together():
            os.kill(peers.pids[1], signal.SIGKILL)
            wait_until(lambda: peers.failure is not None, 2.0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AssertionError("a bug"), RuntimeError("boom")])
def test_work_of_all_ranks_that_rank_0_leaves_halfway_ends_them(
    start: Callable[..., Peers], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areno.ranks.peers._LOST_IS_SEEN_S", 0.1)
    peers = start(size=2)
    peers.meet()
    with pytest.raises(CheckpointError):
        with peers.together():
            raise CheckpointError("a refusal that all ranks share")
    peers.check()
    raised = EngineFailure if isinstance(error, RuntimeError) else type(error)
    with pytest.raises(raised):
        with peers.together():
            raise error
    with pytest.raises(EngineFailure, match=f"rank 0 left the work of all ranks halfway: {type(error).__name__}"):
        peers.tell(ops.LaunchSlices())
    wait_until(lambda: not any(alive(pid) for pid in peers.pids.values()), 2.0)


def test_ranks_that_run_on_are_blamed_for_nothing_and_end_with_close(start: Callable[..., Peers]) -> None:
    peers = start()
    pids = peers.pids
    peers.meet()
    for _ in range(5):
        for phase in PHASES.keys() - {"idle"}:
            PHASES[phase](peers)
        peers.begin_check(lambda: np.zeros((len(FIELDS), 4), np.int64))
        peers.compare(wait=True)
    time.sleep(1.3 * TIMEOUT_S)
    peers.check()
    peers.close()
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    with pytest.raises(EngineFailure, match="the engine is closed"):
        peers.tell(ops.LaunchSlices())


def test_ranks_that_nobody_closes_end_with_their_owner(folder: Path) -> None:
    script = (
        "import sys, json\n"
        "from pathlib import Path\n"
        "from areno.ranks.peers import Peers\n"
        "from tests.integration.rank_phases import quick_plan\n"
        "peers = Peers(quick_plan(Path(sys.argv[1])))\n"
        "print(json.dumps(peers.pids))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=30, check=True)
    assert not any(alive(int(pid)) for pid in json.loads(done.stdout).values())


def test_ranks_end_with_the_last_reference_to_their_owner_and_not_by_signals_that_ask_rank_0(folder: Path) -> None:
    peers = Peers(quick_plan(folder))
    pids = peers.pids
    peers.wait_for(Phase.RUNNING)
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    peers.expect(peers.tell(ops.ReleaseKV()))
    del peers
    gc.collect()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()), 2.0)


def test_a_rank_with_other_code_or_another_checkpoint_is_refused_by_name(
    start: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = code_identity()
    with monkeypatch.context() as patch:
        patch.setattr("areno.ranks.peers.code_identity", lambda: {**mine, "torch": "1.0"})
        with pytest.raises(EngineFailure, match=r"rank \d runs another version of torch: .* rank 0 runs 1.0.*from one installation"):
            start().meet()
        patch.setattr("areno.ranks.peers.code_identity", lambda: {**mine, "areno": "0" * 32})
        with pytest.raises(EngineFailure, match="runs another version of areno"):
            start().meet()
    monkeypatch.setattr("areno.ranks.peers.checkpoint_identity", lambda folder: "0" * 32)
    with pytest.raises(CheckpointError, match=r"rank \d sees another checkpoint .* than rank 0"):
        start().meet()


def test_a_package_that_is_replaced_under_a_running_process_is_noticed_by_its_next_ranks(folder: Path, tmp_path: Path) -> None:
    import areno

    installed = tmp_path / "installed"
    shutil.copytree(Path(areno.__file__).parent, installed / "areno", ignore=shutil.ignore_patterns("__pycache__"))
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from areno.errors import EngineFailure\n"
        "from areno.ranks.peers import Peers\n"
        "from areno.ranks.segment import Phase\n"
        "from tests.integration.rank_phases import quick_plan\n"
        "for upgrade in (True, False):\n"
        "    peers = Peers(quick_plan(Path(sys.argv[1]), size=2))\n"
        "    try:\n"
        "        peers.wait_for(Phase.RUNNING)\n"
        "        print('they run')\n"
        "    except EngineFailure as error:\n"
        "        print(error)\n"
        "    peers.close()\n"
        "    if upgrade:\n"
        "        Path(sys.argv[2], 'areno', 'newer.py').write_text('')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(installed), str(REPOSITORY)))}
    command = [sys.executable, "-P", "-c", script, str(folder), str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True, env=environment)
    first, second = done.stdout.splitlines()
    assert first == "they run" and "rank 1 runs another version of areno" in second and str(installed) in second


def test_a_checkpoint_is_known_by_config_headers_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"x" * 10)
    first = checkpoint_identity(tmp_path)
    assert checkpoint_identity(tmp_path) == first
    (tmp_path / "config.json").write_text("{ }")
    assert checkpoint_identity(tmp_path) != first


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
)
def test_a_checkpoint_is_known_by_every_file_that_says_what_ranks_load_and_draw(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    without = checkpoint_identity(tmp_path)
    (tmp_path / name).write_bytes((2).to_bytes(8, "little") + b"{}")
    first = checkpoint_identity(tmp_path)
    assert first != without
    # Another file of the same size and time.
    status = (tmp_path / name).stat()
    (tmp_path / name).write_bytes((2).to_bytes(8, "little") + b"[]")
    os.utime(tmp_path / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert checkpoint_identity(tmp_path) not in (first, without)


def test_a_file_of_a_checkpoint_that_cannot_be_read_is_refused_by_name_and_starts_nothing(
    start: Callable[..., Peers], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    (folder / "model.safetensors").write_bytes(bytes(8))
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: .*Permission denied.*let the user of this process"):
            start()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("word", [Head.WRITTEN, Head.ENTRIES])
def test_an_interrupt_in_the_middle_of_an_entry_ends_all_ranks_since_they_count_entries_on_their_own(
    start: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch, word: Head
) -> None:
    peers = start(size=2)
    peers.wait_for(Phase.RUNNING)
    stored = LogSegment.set_head

    def interrupted(segment: LogSegment, at: Head, value: int) -> None:
        if at is word:
            raise KeyboardInterrupt
        stored(segment, at, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LogSegment, "set_head", interrupted)
        peers.tell(ops.AbortUpdate())
    with pytest.raises(EngineFailure, match=r"rank 0 left the work of all ranks halfway: KeyboardInterrupt.*start the engine again"):
        peers.tell(ops.AbortUpdate())
    wait_until(lambda: not any(alive(pid) for pid in peers.pids.values()), 5.0)


def test_an_interrupt_after_a_piece_of_weights_was_told_leaves_no_slot_that_ranks_read_to_be_written_over(
    start: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = start(size=2)
    peers.wait_for(Phase.RUNNING)
    told, waited = Peers.tell, list[int]()

    def interrupted(self: Peers, entry: ops.Entry) -> int:
        told(self, entry)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Peers, "tell", interrupted)
        peers.stage("model.norm.weight", torch.zeros(8), start=0, shape=(8,), whole=True)
    monkeypatch.setattr(Peers, "wait_for_entry", lambda self, number: waited.append(number))
    for _ in range(2):
        peers.stage("model.norm.weight", torch.zeros(8), start=0, shape=(8,), whole=True)
    assert waited == [0, 1], "each slot waits for the entry that used it last"


def test_interrupts_before_pieces_are_told_leave_nothing_to_wait_for(start: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    peers = start(size=2)
    peers.wait_for(Phase.RUNNING)

    def interrupted(self: Peers, entry: ops.Entry) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Peers, "tell", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                peers.stage("model.norm.weight", torch.zeros(8), start=0, shape=(8,), whole=True)
    for _ in range(4):
        peers.stage("model.norm.weight", torch.zeros(8), start=0, shape=(8,), whole=True)
    peers.expect(peers.tell(ops.PublishUpdate(version=1)))


def test_fewer_devices_than_ranks_are_refused_with_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert rank_devices(torch.device("cuda", 1), 2) == ("cuda:1", "cuda:2") and rank_devices(torch.device("cpu"), 2) == ("cpu", "cpu")
    with pytest.raises(InvalidConfig, match=r"tp=4 needs as many devices; 3 CUDA devices are there; use tp=3 or less"):
        rank_devices(torch.device("cuda", 0), 4)
    with pytest.raises(
        InvalidConfig, match=r"3 CUDA devices are there, 2 of them from cuda:1 on; use tp=2 or less, or a device with a lower"
    ):
        rank_devices(torch.device("cuda", 1), 3)


def test_a_piece_of_weights_for_which_rank_0_has_no_memory_is_told_to_nobody(start: Callable[..., Peers], folder: Path) -> None:
    class NoRoom(torch.Tensor):
        def to(self, *args: Any, **options: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("no room")

    peers = start(size=2)
    peers.meet()
    peers._plan = dataclasses.replace(peers._plan, broadcasts=True)
    before = peers._writer.entries
    with pytest.raises(torch.OutOfMemoryError):
        peers.stage("model.norm.weight", torch.zeros(8).as_subclass(NoRoom), start=0, shape=(8,), whole=True)
    assert peers._writer.entries == before
    peers.expect(peers.tell(ops.PublishUpdate(version=1)))
