"""What `rollout check` looks at: this machine's software and services, each finding with its remedy.

Every probe is small, independent and bounded in time; a probe that breaks is itself a finding.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout.child_python import child_command, child_environment
from rollout.config import default_threads
from rollout.errors import InvalidConfig
from rollout.state import STATE_VARIABLE, StateFolder, default_state_dir
from rollout.wire.curve import has_curve
from rollout.wire.transport import Context, Poller, Sent

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
MIN_SHM_BYTES = 64 * 2**20
MIN_DISK_BYTES = 2**30
PACKAGES = (
    "numpy",
    "safetensors",
    "transformers",
    "tokenizers",
    "pyzmq",
    "msgpack",
    "pydantic",
    "xxhash",
    "platformdirs",
    "psutil",
    "jinja2",
)
IPC_WAIT_S = 2.0
# The first probe on a machine compiles its kernel.
MAPPED_WAIT_S = 120.0
MAPPED_REMEDY = "serve with --result-transport copy, and check the driver"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `ok` None means: nothing wrong, worth knowing."""

    name: str
    ok: bool | None
    value: str
    remedy: str | None = None


def _python() -> Finding:
    ok = sys.version_info >= MIN_PYTHON
    return Finding(
        name="python", ok=ok, value=f"{platform.python_version()} ({sys.executable})", remedy=None if ok else "use Python 3.11 or newer"
    )


def _torch() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return Finding(name="torch", ok=False, value=f"not importable: {error}", remedy="pip install 'torch>=2.11'")
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    ok = numbers >= MIN_TORCH
    return Finding(name="torch", ok=ok, value=torch.__version__, remedy=None if ok else "pip install 'torch>=2.11'")


def _threads() -> Finding:
    usable = len(os.sched_getaffinity(0))
    torch = importlib.import_module("torch")
    threads = torch.get_num_threads()
    value = f"torch uses {threads} here, {usable} CPUs are usable; a service takes {default_threads()} unless --threads says otherwise"
    remedy = None if threads <= usable else f"set OMP_NUM_THREADS={usable} for a trainer, less beside a service"
    return Finding(name="cpu threads", ok=threads <= usable, value=value, remedy=remedy)


def _encryption() -> Finding:
    if has_curve():
        return Finding(name="encryption", ok=True, value="libzmq has CURVE; TCP is encrypted")
    return Finding(name="encryption", ok=False, value="this libzmq has no CURVE, so TCP is refused", remedy="install pyzmq from a wheel")


def _cuda() -> Finding:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return Finding(name="cuda", ok=None, value="not available; the engine runs on the CPU")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Finding(name="cuda", ok=True, value=f"{torch.version.cuda}: {names}")


def _mapped_memory() -> Finding:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return Finding(name="mapped memory", ok=None, value="not tried without a CUDA device; results need none on the CPU")
    # A process of its own: an error of the device would stay with this one.
    run = subprocess.run(
        child_command("areno.decode.mapped"), env=child_environment(), capture_output=True, text=True, timeout=MAPPED_WAIT_S
    )
    return _mapped_finding(run)


def _mapped_finding(run: subprocess.CompletedProcess[str]) -> Finding:
    """Say what the engine's probe of mapped memory said."""
    if run.returncode:
        said = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        return Finding(name="mapped memory", ok=False, value=f"the probe broke: {said[-1]}", remedy=MAPPED_REMEDY)
    found = json.loads(run.stdout)
    if found["works"]:
        return Finding(name="mapped memory", ok=True, value=found["reason"])
    return Finding(name="mapped memory", ok=None, value=f"does not work, so the engine copies results: {found['reason']}")


def _packages() -> Finding:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return Finding(
        name="packages",
        ok=not missing,
        value=", ".join(found) if not missing else f"missing: {', '.join(missing)}",
        remedy=f"pip install {' '.join(missing)}" if missing else None,
    )


def _ipc() -> Finding:
    """Send one message through a local socket, as a service does."""
    with tempfile.TemporaryDirectory() as folder:
        context = Context()
        try:
            address = f"ipc://{folder}/check"
            bound, other = context.pair_bound(address, 2**20), context.pair_connected(address, 2**20)
            sent = other.send([b"ping"])
            works = sent is Sent.OK and bool(Poller([bound]).wait(IPC_WAIT_S)) and bound.receive() is not None
        finally:
            context.close()
    remedy = None if works else "allow Unix sockets in the temporary folder, or set TMPDIR to a local disk"
    return Finding(
        name="zmq ipc", ok=works, value="a message went through" if works else f"nothing arrived in {IPC_WAIT_S:g} s", remedy=remedy
    )


def _state() -> Finding:
    root = default_state_dir()
    try:
        probe = StateFolder(root).make().root / ".check"
    except InvalidConfig as refused:
        remedy = f"chmod 700 {root} if it is nobody else's, or set {STATE_VARIABLE} to a folder of its own"
        return Finding(name="state folder", ok=False, value=f"{refused.what}; {refused.limit}", remedy=remedy)
    probe.write_text("ok")
    probe.unlink()
    return Finding(name="state folder", ok=True, value=str(root))


def _services() -> Finding:
    folder = StateFolder(default_state_dir())
    running = folder.running() if folder.services.is_dir() else []
    value = ", ".join(f"{one.address} (pid {one.pid}, {one.model})" for one in running)
    return Finding(name="running services", ok=None, value=value or "none")


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    ok = free >= MIN_SHM_BYTES
    remedy = None if ok else "give the container more shared memory, for example --shm-size=1g"
    return Finding(name="shared memory", ok=ok, value=f"{free / 2**20:.0f} MiB free in /dev/shm", remedy=remedy)


def _disk() -> Finding:
    root = default_state_dir()
    free = shutil.disk_usage(root if root.is_dir() else Path.home()).free
    ok = free >= MIN_DISK_BYTES
    return Finding(
        name="disk",
        ok=ok,
        value=f"{free / 2**30:.1f} GiB free",
        remedy=None if ok else f"free some, or set {STATE_VARIABLE} to another disk",
    )


PROBES: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("python", _python),
    ("torch", _torch),
    ("cpu threads", _threads),
    ("encryption", _encryption),
    ("cuda", _cuda),
    ("mapped memory", _mapped_memory),
    ("packages", _packages),
    ("zmq ipc", _ipc),
    ("state folder", _state),
    ("disk", _disk),
    ("shared memory", _shared_memory),
    ("running services", _services),
)
REMEDIES = {
    "state folder": f"make the folder writable, or set {STATE_VARIABLE} to one that is",
    "zmq ipc": "pip install 'pyzmq>=26'",
    "cpu threads": "install torch",
    "cuda": "install torch",
    "mapped memory": MAPPED_REMEDY,
}


def environment_report() -> list[Finding]:
    """Return all findings."""
    findings = []
    for name, probe in PROBES:
        try:
            findings.append(probe())
        except Exception as error:
            findings.append(
                Finding(name=name, ok=False, value=f"{type(error).__name__}: {error}", remedy=REMEDIES.get(name, "see the message"))
            )
    return findings
