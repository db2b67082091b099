"""Runs Python text that nobody has read: in bubblewrap, or in namespaces of our own (`jail.py`), never in the open unless asked.

Inside there is no network, no file of this machine but Python's own (read-only), an empty /task in memory, a cleared environment,
no descriptor of ours, no capability, and limits on processes, memory, files and processor time. Outside, a clock and a count of
output bytes end it. Where neither way works, `find_sandbox` refuses and says what would help.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import secrets
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

JAIL = Path(__file__).with_name("jail.py")
EXIT_NO_JAIL = 125
# Above those of `jail.py`, which count from 2**20 by process.
FIRST_OWN_ID = 1 << 24
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
LAUNCH = """
import json, os, resource, sys
os.chdir(sys.argv[2])
with open("main.py", "wb") as file:
    file.write(sys.stdin.buffer.read())
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
for own_id in map(int, sys.argv[3:]):
    os.setgroups([])
    os.setresgid(own_id, own_id, own_id)
    os.setresuid(own_id, own_id, own_id)
for name, value in json.loads(sys.argv[1]).items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", sys.argv[2] + "/main.py"])
"""
REMEDY = (
    "install bubblewrap (its command is bwrap), or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "user.max_user_namespaces above 0, kernel.apparmor_restrict_unprivileged_userns=0), or pass --unsandboxed to run model-written code "
    "as yourself, with your files and your network"
)


class SandboxUnavailable(RuntimeError):
    """Nothing here can keep foreign code in; the message names the remedies."""


class Ending(enum.StrEnum):
    """How a run ended."""

    EXIT = "exit"
    TIME = "time"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run may use. Units: seconds and bytes."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    work_bytes: int = 16 << 20
    output_bytes: int = 64 << 10
    processes: int = 16

    def resource_limits(self) -> dict[str, int]:
        """Return them by the names of `resource.RLIMIT_*`."""
        return {
            "CPU": self.cpu_s,
            "AS": self.memory_bytes,
            "FSIZE": self.work_bytes,
            "NOFILE": 64,
            "CORE": 0,
            "NPROC": self.processes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run came to: `output` is standard output, `errors` standard error, each cut at the limit."""

    ending: Ending
    status: int | None
    output: str
    errors: str


class Sandbox:
    """One way to run code; make it with `find_sandbox`. `name` is bubblewrap, namespaces (of root), user_namespaces or none."""

    def __init__(self, name: str, limits: Limits):
        self.name, self.limits = name, limits

    def _command(self, root: str) -> list[str]:
        python = os.path.realpath(sys.executable)
        if self.name in ("namespaces", "user_namespaces"):
            plan = {
                "root": root,
                "shown": shown_paths(),
                "work_bytes": self.limits.work_bytes,
                "limits": self.limits.resource_limits(),
                "python": python,
                "user_namespace": self.name == "user_namespaces",
            }
            return [python, "-I", "-S", str(JAIL), json.dumps(plan)]
        if self.name == "bubblewrap":
            return bubblewrap_command(python, self.limits)
        # Everything of this user would count, so the number of processes stays as it is.
        return launch_command(python, self.limits, root, counts_processes=False)

    async def run(self, code: str) -> Run:
        """Run a program's text to its end or to a limit. Raises: SandboxUnavailable if the jail could not be built."""
        with tempfile.TemporaryDirectory(prefix="areno-jail-", ignore_cleanup_errors=True) as root:
            # The unprivileged user that the jail becomes must reach its root.
            os.chmod(root, 0o755)
            process = await asyncio.create_subprocess_exec(
                *self._command(root),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
                cwd="/",
            )
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            ending, texts = Ending.EXIT, (bytearray(), bytearray())
            try:
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(code.encode("utf-8", "replace"))
                    await process.stdin.drain()
                process.stdin.close()
                pipes = zip((process.stdout, process.stderr), texts)
                async with asyncio.timeout(self.limits.wall_s):
                    if await self._read_all(pipes):
                        ending = Ending.OUTPUT
                    else:
                        await process.wait()
            except TimeoutError:
                ending = Ending.TIME
            finally:
                await _kill(process)
        output, errors = (text.decode("utf-8", "replace") for text in texts)
        if ending is Ending.EXIT and process.returncode == EXIT_NO_JAIL and "no jail:" in errors:
            raise SandboxUnavailable(f"{errors.strip()}: {REMEDY}")
        return Run(ending=ending, status=process.returncode if ending is Ending.EXIT else None, output=output, errors=errors)

    async def _read_all(self, pipes: Iterable[tuple[asyncio.StreamReader, bytearray]]) -> bool:
        """Read pipes to their ends, or one of them to the limit; return whether that was reached."""
        reading = {asyncio.ensure_future(self._read(pipe, text)) for pipe, text in pipes}
        try:
            for one in asyncio.as_completed(reading):
                if await one:
                    return True
            return False
        finally:
            for task in reading:
                task.cancel()

    async def _read(self, pipe: asyncio.StreamReader, text: bytearray) -> bool:
        """Read to the end, or to the limit; return whether the limit was reached."""
        while chunk := await pipe.read(1 << 14):
            text += chunk[: self.limits.output_bytes - len(text)]
            if len(text) >= self.limits.output_bytes:
                return True
        return False


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End a run with all of its processes: its session here, and with it the first process of its own namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None and not pipe.at_eof():
            pipe._transport.close()  # type: ignore[attr-defined]  # what nobody reads must not keep `wait` from its end
    await process.wait()


def shown_paths() -> list[str]:
    """Return what of this machine a program must see to be Python: the system's libraries and the interpreter's own folder."""
    own = {os.path.realpath(sys.base_prefix), os.path.realpath(sysconfig.get_path("stdlib"))}
    extra = sorted(path for path in own if not path.startswith("/usr/") and path != "/usr")
    kept = [path for path in extra if not any(path.startswith(f"{other}/") for other in extra)]
    return [*(path for path in SYSTEM if os.path.lexists(path)), *kept]


def launch_command(python: str, limits: Limits, folder: str, *, counts_processes: bool, own_id: int | None = None) -> list[str]:
    """Return the command that becomes user `own_id`, if there is one, limits itself, then runs standard input as a program in `folder`."""
    chosen = {name: value for name, value in limits.resource_limits().items() if counts_processes or name != "NPROC"}
    return [python, "-I", "-S", "-c", LAUNCH, json.dumps(chosen), folder, *([] if own_id is None else [str(own_id)])]


def bubblewrap_command(python: str, limits: Limits) -> list[str]:
    """Return the command that runs standard input as a program in bubblewrap.

    Whoever is not root gets a user namespace. The limit of processes does not bind root, in such a namespace neither: so root goes without
    one, builds the sandbox and in there becomes a user of this run's own, which takes its capabilities away for good.
    """
    shown: list[str] = []
    for path in shown_paths():
        # Bubblewrap would keep these for root alone.
        shown += [word for folder in reversed(Path(path).parents[:-1]) for word in ("--perms", "755", "--dir", str(folder))]
        shown += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    own_id = FIRST_OWN_ID + secrets.randbelow(FIRST_OWN_ID) if os.geteuid() == 0 else None
    if own_id is None:
        user = ["--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    else:
        user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *user,
        "--die-with-parent",
        "--new-session",
        *shown,
        *("--dev", "/dev"),
        *("--perms", "1777", "--size", str(limits.work_bytes), "--tmpfs", "/task"),
        # Left writable, these would take memory without a limit.
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/task"),
        "--clearenv",
        *("--setenv", "HOME", "/task"),
        *("--setenv", "PATH", "/usr/bin:/bin"),
        *launch_command(python, limits, "/task", counts_processes=True, own_id=own_id),
    ]


async def find_sandbox(limits: Limits | None = None, *, unsandboxed: bool = False, ways: Sequence[str] | None = None) -> Sandbox:
    """Return the first way that works here, tried by running a program in it. Raises: SandboxUnavailable naming the remedies."""
    limits = limits or Limits()
    ways = ways or (("namespaces", "bubblewrap") if os.geteuid() == 0 else ("bubblewrap", "user_namespaces"))
    if unsandboxed:
        return Sandbox("none", limits)
    reasons = []
    for way in ways:
        if way == "bubblewrap" and shutil.which("bwrap") is None:
            reasons.append("bubblewrap: there is no bwrap")
            continue
        sandbox = Sandbox(way, limits)
        try:
            run = await sandbox.run("print(6 * 7)")
        except (OSError, SandboxUnavailable) as error:
            reasons.append(f"{way}: {str(error).split(': install')[0]}")
            continue
        if run.output.strip() == "42":
            return sandbox
        reasons.append(f"{way}: {(run.errors or run.output or str(run.ending)).strip()[-300:]}")
    raise SandboxUnavailable(f"code of a model cannot be kept in here ({'; '.join(reasons)}): {REMEDY}")
