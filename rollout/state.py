"""The state folder: where services announce themselves, hold their locks and remember version numbers.

    <state>/services/<name>.json     announcement of a running service: address, lock, pid, incarnation, model
    <state>/services/<name>.lock     held (flock) while a tcp service runs; the kernel drops it with the process
    <socket>.lock                    the same for a local socket, beside it, so that two state folders cannot share one; gone at a clean end
    <state>/versions.json            the next weight version; numbers only grow, across restarts
    <state>/run/                     local sockets, mode 0700
    <state>/keys/                    keys of encrypted connections, see `keys`
    <state>/weights/<address>/       the default weights folder, one for each address

`ARENO_STATE_DIR` overrides the place. Invariant: an announcement whose lock is free is stale and is ignored.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import xxhash

from rollout.errors import AddressInUse, InvalidConfig, NoService
from rollout.wire.security import Address

STATE_VARIABLE = "ARENO_STATE_DIR"
APP = "areno-rollout"
HOST_FILE = re.compile(r"\.h\d+[0-9a-f]{4}(\.json)?")


def default_state_dir() -> Path:
    """Return the state folder that applies when none is named."""
    named = os.environ.get(STATE_VARIABLE)
    return Path(named).absolute() if named else platformdirs.user_state_path(APP)


def make_folder(path: Path, option: str) -> Path:
    """Make a folder and those above it; `option` is what names it. Raises: InvalidConfig."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InvalidConfig(
            f"folder {path} cannot be made",
            field=option,
            value=str(path),
            limit=error.strerror,
            remedy=f"set {option} to a folder below one that you may write in",
        ) from None
    return path


def private_folder(path: Path, option: str = "state_dir") -> Path:
    """Make a folder that only its owner may enter, or check that it is one; rights are never changed. Raises: InvalidConfig."""
    found = make_folder(path, option).lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise InvalidConfig(
            f"{path} is not a folder of this user",
            field=option,
            value=str(path),
            limit="sockets and weights live in a folder that only their owner may enter",
            remedy=f"remove it, or set {option} to another folder",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise InvalidConfig(
            f"{path} may be entered by others (mode {stat.S_IMODE(found.st_mode):o})",
            field=option,
            value=str(path),
            limit="sockets and weights live in a folder that only their owner may enter",
            remedy=f"set {option} to a folder of its own, or chmod 700 this one if it is nobody else's",
        )
    return path


class FileLock:
    """An advisory lock on a file, held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, *, blocking: bool = False) -> bool:
        """Take the lock; False if another process holds it. Blocks: only if asked."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(fd)
                return False
            if self._is_current(fd):
                self._fd = fd
                return True
            os.close(fd)

    def _is_current(self, fd: int) -> bool:
        """Whether the path still names this file; its last holder may have removed it between our open and our lock."""
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(fd))

    def release(self, *, remove: bool = False) -> None:
        """Drop the lock, and the file too if asked; idempotent."""
        if self._fd is not None:
            if remove:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            os.close(self._fd)
            self._fd = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a running service says about itself in the state folder; `server_key` is its public key, None without encryption."""

    address: str
    lock: str
    pid: int
    incarnation: str
    model: str
    server_key: str | None = None


@dataclass(frozen=True, slots=True)
class StateFolder:
    """Paths and rules of one state folder; makes what is missing."""

    root: Path

    @property
    def services(self) -> Path:
        """Where announcements and locks are."""
        return self.root / "services"

    def make(self) -> StateFolder:
        """Make the folders. Raises: InvalidConfig."""
        for folder in (self.root, self.services):
            private_folder(folder)
        return self

    @property
    def keys(self) -> Path:
        """Where keys are."""
        return self.root / "keys"

    def host_base(self, address: Address) -> Path:
        """Return the path that the files of an address's engine hosts begin with."""
        return Path(address.path or self.root / "run" / f"tcp{address.port}")

    def default_address(self) -> str:
        """Return the local address of the state folder's own service."""
        return f"ipc://{self.root / 'run' / 'service'}"

    def _name(self, address: str) -> str:
        return xxhash.xxh3_64_hexdigest(address.encode())

    def announcement_path(self, address: str) -> Path:
        """Return the file that announces the service of this address."""
        return self.services / f"{self._name(address)}.json"

    def lock_path(self, address: Address) -> Path:
        """Return the file whose lock owns an address."""
        return Path(f"{address.path}.lock") if address.path else self.services / f"{self._name(address.text)}.lock"

    def lock(self, address: Address) -> FileLock:
        """Return the held lock of an address. Raises: AddressInUse."""
        lock = FileLock(self.lock_path(address))
        if not lock.acquire():
            raise AddressInUse(
                f"address {address.text} is in use",
                field="address",
                value=address.text,
                limit=f"a running service holds {lock.path}",
                remedy="stop it, connect to it with rollout.connect(), or choose another address",
            )
        return lock

    def announce(self, announcement: Announcement) -> None:
        """Publish a service; the rename is atomic."""
        path = self.announcement_path(announcement.address)
        fields = {name: getattr(announcement, name) for name in Announcement.__dataclass_fields__}
        _replace(path, json.dumps(fields))

    def running(self) -> list[Announcement]:
        """Return the announcements of services that hold their lock."""
        found = []
        for path in sorted(self.services.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                announcement = Announcement(**json.loads(path.read_text()))
                lock = FileLock(Path(announcement.lock))
                if lock.acquire():
                    lock.release()
                else:
                    found.append(announcement)
        return found

    def find(self) -> Announcement:
        """Return the one running service. Raises: NoService for none or several."""
        running = self.running() if self.services.is_dir() else []
        if len(running) == 1:
            return running[0]
        if running:
            raise NoService(
                f"{len(running)} services run",
                field="address",
                limit=f"addresses: {', '.join(service.address for service in running)}",
                remedy="name one as the address: rollout.connect(address), or --address",
            )
        raise NoService(
            f"no running service is announced in {self.root}",
            field="address",
            limit=f"looked in {self.services}",
            remedy=f"start one with `python -m rollout serve --model PATH`, name its address, or set {STATE_VARIABLE}",
        )

    def next_version(self) -> int:
        """Hand out a weight version that was never handed out before in this folder."""
        path = self.root / "versions.json"
        lock = FileLock(self.root / "versions.lock")
        lock.acquire(blocking=True)
        try:
            version = _read_next(path) if path.exists() else 0
            _replace(path, json.dumps({"next": version + 1}))
        finally:
            lock.release()
        return version


def _read_next(path: Path) -> int:
    """Return the version that comes next. Raises: InvalidConfig for a file that does not say it."""
    text = path.read_text(errors="replace")
    try:
        version = json.loads(text)["next"]
        if type(version) is int and version >= 0:
            return version
    except (ValueError, LookupError, TypeError):
        pass
    raise InvalidConfig(
        f"{path} does not hold the next weight version",
        field="versions.json",
        value=text[:80],
        limit='it holds {"next": N} with N above every version that trainers here have seen',
        remedy="restore it from a copy, or write it so",
    )


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def socket_files(address: Address) -> list[Path]:
    """Return the files that a service's sockets leave in the file system."""
    return [Path(address.path), Path(address.control.removeprefix("ipc://"))] if address.scheme == "ipc" else []


def remove_host_files(base: Path) -> None:
    """Remove sockets and configs of engine hosts that were killed together with their front; the caller holds the address's lock."""
    for path in base.parent.glob(f"{glob.escape(base.name)}.h[0-9]*"):
        with contextlib.suppress(OSError):
            if HOST_FILE.fullmatch(path.name.removeprefix(base.name)):
                path.unlink()


def remove_socket_files(address: Address) -> None:
    """Remove what a dead service left at an address; the caller holds the address's lock. Raises: InvalidConfig."""
    for path in socket_files(address):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise InvalidConfig(
                    f"{path} is there and is no socket",
                    field="address",
                    value=address.text,
                    limit="only a socket that a dead service left is replaced",
                    remedy="name a path that is free",
                )
            path.unlink()
