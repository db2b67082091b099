"""What code of a model tries in the sandbox, and that it comes to nothing: network, files, sockets, processes, output, time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from examples.agentic.coding import sandbox as sandboxes
from examples.agentic.coding.sandbox import Ending, Limits, Run, Sandbox, SandboxUnavailable, find_sandbox
from examples.agentic.coding.train import main

LIMITS = Limits(wall_s=8.0, cpu_s=2)
WAYS = ["bubblewrap", "namespaces" if os.geteuid() == 0 else "user_namespaces"]


def found(way: str) -> Sandbox:
    if way == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("there is no bwrap here")
    try:
        return asyncio.run(find_sandbox(LIMITS, ways=[way]))
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=WAYS)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return found(request.param)


@pytest.fixture(params=["user_namespaces"] if os.geteuid() == 0 else [])
def namespaces_of_users(request: pytest.FixtureRequest) -> Sandbox:
    return found(request.param)


def run(sandbox: Sandbox, code: str, **limits: float) -> Run:
    limited = Sandbox(sandbox.name, dataclasses.replace(sandbox.limits, **limits))  # type: ignore[arg-type]
    return asyncio.run(asyncio.wait_for(limited.run(code), 30))


def test_a_program_runs_and_its_status_and_both_outputs_come_back(sandbox: Sandbox) -> None:
    done = run(sandbox, "import sys, json\nprint('é', json.dumps([1]))\nprint('e', file=sys.stderr)\nsys.exit(3)")
    assert (done.ending, done.status, done.output, done.errors) == (Ending.EXIT, 3, "é [1]\n", "e\n")


def test_it_sees_no_file_of_ours_no_environment_and_no_descriptor(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    held = os.open(secret, os.O_RDONLY)
    os.set_inheritable(held, True)
    code = f"""
import os
print(sorted(set(os.environ) - {{"LC_CTYPE"}}), os.getcwd(), sorted(os.listdir(".")))
ours = ({str(secret)!r}, {str(Path.home() / ".bashrc")!r}, "/etc/passwd", "/proc/1/environ", {__file__!r})
print([path for path in ours if os.path.exists(path)])
opened = []
for number in range(3, 256):
    try:
        os.fstat(number)
    except OSError:
        continue
    opened.append(number)
print(opened)
for path in ("/usr/x", "/x", "/lib/x"):
    try:
        open(path, "w")
        print("wrote", path)
    except OSError:
        pass
"""
    done = run(sandbox, code)
    os.close(held)
    lines = done.output.splitlines()
    assert lines[0] in ("['HOME', 'PATH'] /task ['main.py']", "['HOME', 'PATH', 'PWD'] /task ['main.py']"), done
    assert lines[1] == "[]" and lines[2] == "[]", done
    assert "wrote /usr/x" not in done.output and "wrote /lib/x" not in done.output


def test_it_reaches_no_network_and_no_socket_of_the_service(sandbox: Sandbox, tmp_path: Path) -> None:
    with socket.socket() as listening, socket.socket(socket.AF_UNIX) as service, socket.socket(socket.AF_UNIX) as abstract:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        service.bind(str(tmp_path / "service"))
        service.listen()
        abstract.bind("\0areno-test-" + tmp_path.name[-20:])
        abstract.listen()
        code = f"""
import socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {listening.getsockname()[1]})),
    (socket.AF_INET, ("1.1.1.1", 53)),
    (socket.AF_UNIX, {str(tmp_path / "service")!r}),
    (socket.AF_UNIX, {abstract.getsockname()!r}),
):
    one = socket.socket(family)
    one.settimeout(1)
    try:
        one.connect(address)
        print("reached", address)
    except OSError as error:
        print("refused")
"""
        assert run(sandbox, code).output.split() == ["refused"] * 4


@pytest.mark.timeout(60)
def test_a_fork_bomb_is_bounded_and_leaves_no_process(sandbox: Sandbox) -> None:
    before = {one.pid for one in psutil.process_iter()}
    code = "import os, time\nmade = 0\nwhile True:\n    try:\n        made += os.fork() > 0\n    except OSError:\n        time.sleep(0.2)\n"
    started = time.monotonic()
    done = run(sandbox, code, wall_s=1.5)
    assert done.ending in (Ending.TIME, Ending.EXIT) and time.monotonic() - started < 15
    count = (
        "import os, time\nmade = 0\ntry:\n    for _ in range(200):\n        if os.fork() == 0:\n            time.sleep(9)\n"
        "        made += 1\nexcept OSError:\n    print(made, flush=True)\nos._exit(0)\n"
    )
    assert 0 < int(run(sandbox, count).output) < LIMITS.processes
    assert not left_alive(before)


def left_alive(before: set[int]) -> list[psutil.Process]:
    """Return the processes of programs that are still there after a moment, but for those that were there before."""
    programs = [one for one in psutil.process_iter(["cmdline"]) if "/task/main.py" in (one.info["cmdline"] or [])]
    return psutil.wait_procs([one for one in programs if one.pid not in before], timeout=5)[1]


LINGERS = """
import ctypes, os, signal, time
libc = ctypes.CDLL(None)
for _ in range(2):
    if os.fork() == 0:
        break
os.setsid() if os.getpid() != os.getpgrp() else None
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
libc.prctl(1, 0, 0, 0, 0)
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):
    os.kill(1, number)
print(libc.ptrace(16, 1, None, None), flush=True)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("last", ["time.sleep(60)", "print('x' * 10**6)\ntime.sleep(60)", "if os.fork():\n    os._exit(0)\ntime.sleep(60)"])
def test_nothing_that_a_program_does_keeps_it_alive_after_its_run(sandbox: Sandbox, last: str) -> None:
    before = {one.pid for one in psutil.process_iter()}
    done = run(sandbox, LINGERS + last, wall_s=1.5)
    assert not left_alive(before)
    if sandbox.name != "bubblewrap":
        assert done.output.startswith("-1\n")  # process 1 is not to be traced


def test_a_program_ends_with_whoever_runs_it(sandbox: Sandbox) -> None:
    before = {one.pid for one in psutil.process_iter()}
    code = LINGERS + "time.sleep(60)"
    script = (
        "import asyncio\nfrom examples.agentic.coding.sandbox import Limits, Sandbox\n"
        f"asyncio.run(Sandbox({sandbox.name!r}, Limits(wall_s=50)).run({code!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as runner:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not any(
            "/task/main.py" in (one.info["cmdline"] or []) and one.pid not in before for one in psutil.process_iter(["cmdline"])
        ):
            time.sleep(0.02)
        else:
            assert time.monotonic() < deadline, "the program never began"
        runner.kill()
    assert not left_alive(before)


def test_five_gigabytes_of_output_are_cut_and_end_the_program(sandbox: Sandbox) -> None:
    code = "import sys\nblock = 'x' * 2**20\nfor _ in range(5 * 2**10):\n    sys.stdout.write(block)\n"
    done = run(sandbox, code)
    assert done.ending is Ending.OUTPUT and len(done.output) == LIMITS.output_bytes


def test_memory_files_and_time_are_bounded(sandbox: Sandbox) -> None:
    assert "MemoryError" in run(sandbox, "x = bytearray(2**31)").errors
    code = (
        "total = 0\ntry:\n    for n in range(64):\n        total += open(f'/task/{n}', 'wb').write(bytes(2**20))\n"
        "except OSError:\n    pass\nprint(total)"
    )
    written = run(sandbox, code)
    assert int(written.output or 0) <= LIMITS.work_bytes
    assert run(sandbox, "while True: pass", wall_s=1.0).ending is Ending.TIME
    assert run(sandbox, "import time; time.sleep(60)", wall_s=0.5).ending is Ending.TIME
    burnt = run(sandbox, "while True: pass", cpu_s=1)
    assert burnt.ending is Ending.EXIT and burnt.status != 0


def test_its_root_is_empty_but_for_python_and_no_folder_takes_more_than_the_work_folder_may(sandbox: Sandbox) -> None:
    code = """
import os
total = 0
for folder, folders, _ in os.walk("/"):
    folders[:] = [name for name in folders if folder != "/" or name in ("dev", "etc", "task", "tmp")]
    try:
        for number in range(8):
            with open(f"{folder}/big{number}", "wb") as file:
                for _ in range(8):
                    total += file.write(bytes(2**20))
    except OSError:
        pass
print(total)
print(sorted({name for name in os.listdir("/") if not name.startswith("big")}), sorted(os.listdir("/etc")))
"""
    total, names = run(sandbox, code).output.splitlines()
    assert 0 < int(total) <= LIMITS.work_bytes
    top = {path.split("/")[1] for path in sandboxes.shown_paths()} | {"dev", "task", "tmp"}
    root, etc = (set(json.loads(part.replace("'", '"'))) for part in names.replace("] [", "]|[").split("|"))
    assert root <= top and {name for name in etc if not name.startswith("big")} <= {"alternatives", "ld.so.cache"}


def test_it_has_no_capability_and_gets_none(sandbox: Sandbox) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.sethostname(b"x", 1), os.getuid() != 0)
try:
    os.setuid(0)
    print("root")
except OSError:
    print("refused")
"""
    assert run(sandbox, code).output.split() == ["-1", "-1", "True", "refused"]


def test_where_nothing_works_the_remedies_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "jail.py"
    broken.write_text("import sys\nsys.stderr.write('no jail: unshare: Operation not permitted')\nsys.exit(125)\n")
    monkeypatch.setattr(sandboxes, "JAIL", broken)
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: None)
    with pytest.raises(SandboxUnavailable, match=r"install bubblewrap.*--unsandboxed") as refused:
        asyncio.run(find_sandbox())
    assert "there is no bwrap" in str(refused.value) and "Operation not permitted" in str(refused.value)
    with pytest.raises(SystemExit) as ended:
        main(["--groups", "1"])
    assert "--unsandboxed" in str(ended.value.code)
    assert asyncio.run(find_sandbox(unsandboxed=True)).name == "none"


def test_unsandboxed_still_bounds_time_and_output() -> None:
    here = asyncio.run(find_sandbox(LIMITS, unsandboxed=True))
    assert run(here, "print(6 * 7)").output == "42\n"
    assert run(here, "while True: print('x' * 1000)").ending is Ending.OUTPUT
    assert run(here, "import time; time.sleep(60)", wall_s=0.5).ending is Ending.TIME


def test_namespaces_of_users_without_privileges_keep_in_too(namespaces_of_users: Sandbox, tmp_path: Path) -> None:
    test_it_reaches_no_network_and_no_socket_of_the_service(namespaces_of_users, tmp_path)
    test_it_has_no_capability_and_gets_none(namespaces_of_users)
    seen = run(
        namespaces_of_users, f"import os; print(os.getuid(), os.getpid(), os.path.exists({__file__!r}), os.path.exists('/etc/passwd'))"
    )
    assert seen.output.split() == ["1000", "2", "False", "False"]


TRIED_BY_NOBODY = """
import asyncio, json, os, sandbox, sys
code = '''
import os, socket, time
print(os.getuid(), os.path.exists("/etc/passwd"), os.listdir("/task"))
try:
    socket.create_connection(("127.0.0.1", 80), 1)
except OSError as error:
    print(error.strerror)
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(9)
        made += 1
except OSError:
    print(made, flush=True)
os._exit(0)
'''
async def main():
    found = await sandbox.find_sandbox(sandbox.Limits(wall_s=8.0), ways=[sys.argv[1]])
    run = await found.run(code)
    print(json.dumps([os.geteuid(), run.output.splitlines(), run.errors]))
try:
    asyncio.run(main())
except sandbox.SandboxUnavailable as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("way", ["bubblewrap", "user_namespaces"])
def test_a_user_without_any_privilege_keeps_code_in(way: str) -> None:
    python, nobody = Path("/usr/bin/python3"), 65534
    if not python.exists() or subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
        pytest.skip("the system has no Python 3.11 that everybody may run")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("sandbox.py", "jail.py"):
            shutil.copy(Path(sandboxes.__file__).with_name(name), folder)
        for path in (folder, *(os.path.join(folder, name) for name in os.listdir(folder))):
            os.chmod(path, 0o755)
        command = [python, "-B", "-c", TRIED_BY_NOBODY, way]
        done = subprocess.run(command, cwd=folder, user=nobody, group=nobody, extra_groups=[], capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    if isinstance(said, str):
        pytest.skip(said)
    uid, lines, errors = said
    assert uid == nobody and lines[0].split() == ["1000", "False", "['main.py']"], errors
    assert lines[1] in ("Network is unreachable", "Connection refused")  # bubblewrap brings the run's own loopback up
    assert 0 < int(lines[2]) < Limits().processes
