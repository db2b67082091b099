"""The key folder: the service's own CURVE pair, the clients' pairs, and the list of those that may connect.

    <state>/keys/service.key     the service's pair: public, secret
    <state>/keys/NAME.key        a client's pair and the service's public key; copy it to the client's machine
    <state>/keys/allowed.json    who may connect: name, public key, control (may pause and push weights), time of making
    <state>/keys/lock            held while one of them changes

`rollout serve` makes the first two for itself and for the clients of its own user (name `local`); `python -m rollout keys` makes,
replaces and takes away others. A running service follows the list. Invariants: a file with a secret is made anew with mode 0600 and
never opened for others; a change replaces a file as a whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout.errors import InvalidConfig
from rollout.state import FileLock, private_folder
from rollout.wire.curve import ClientKey, KeyPair, checked_key, new_key_pair

SERVICE = "service"
LOCAL = "local"
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_FILE_BYTES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedKey:
    """A client's key that may connect; with `control` also to the control socket."""

    name: str
    public: str
    control: bool
    created: str


def _read(path: Path) -> dict[str, object]:
    """Return a JSON object of one of our files. Raises: InvalidConfig; messages hold nothing of its content."""
    remedy = "name a file that `python -m rollout keys new NAME` made"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidConfig(f"key file {path} cannot be read", field="key", value=str(path), limit=error.strerror, remedy=remedy) from None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
            raise InvalidConfig(
                f"key file {path} may be read by others (mode {stat.S_IMODE(found.st_mode):o})",
                field="key",
                value=str(path),
                limit="a key file is a plain file that only its owner may read",
                remedy="chmod 600 it; if others may have read it, replace the key with `python -m rollout keys rotate NAME`",
            )
        text = file.read(MAX_FILE_BYTES)
    try:
        fields = json.loads(text)
        if isinstance(fields, dict):
            return fields
    except ValueError:
        pass
    raise InvalidConfig(f"key file {path} is not what it should be", field="key", value=str(path), limit="a JSON object", remedy=remedy)


def _write(path: Path, fields: Mapping[str, object], *, replace: bool) -> None:
    """Make a file that only its owner may read; it is there as a whole or not at all."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(fields, file, indent=1)
            file.flush()
            os.fsync(fd)
        if replace:
            os.replace(fresh, path)
        else:
            os.link(fresh, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)


def _pair(fields: Mapping[str, object]) -> KeyPair:
    return KeyPair(checked_key(fields.get("public"), "public"), checked_key(fields.get("secret"), "secret"))


def read_client_key(path: str | os.PathLike[str], server: str | None = None) -> ClientKey:
    """Return the key of a client's key file; `server` replaces the service's public key in it. Raises: InvalidConfig."""
    fields = _read(Path(path))
    return ClientKey(_pair(fields), checked_key(fields.get("server") if server is None else server, "server"))


def _checked_name(name: str) -> str:
    if NAME_PATTERN.fullmatch(name) and name != SERVICE:
        return name
    raise InvalidConfig(
        f"key name {name!r} is refused",
        field="name",
        value=name,
        limit=f"1 to 64 letters, digits, dots, dashes and underscores, not {SERVICE!r}",
        remedy="choose another name",
    )


def _read_allowed(path: Path) -> dict[str, AllowedKey]:
    """Return the list by name. Raises: InvalidConfig."""
    entries = _read(path).get("clients")
    try:
        keys = [AllowedKey(**entry) for entry in entries]  # type: ignore[attr-defined]
        if all(isinstance(key.name, str) and isinstance(key.control, bool) for key in keys):
            return {key.name: key for key in keys if checked_key(key.public, "public")}
    except TypeError:
        pass
    raise InvalidConfig(
        f"{path} is not a list of keys",
        field="clients",
        value=str(path),
        limit="entries of name, public, control and created",
        remedy="restore it from a copy, or remove the folder and make all keys anew",
    )


@dataclass(frozen=True, slots=True)
class KeyFolder:
    """Makes, replaces and takes away keys in one folder; see the module."""

    root: Path

    @property
    def allowed_path(self) -> Path:
        """The list of those that may connect."""
        return self.root / "allowed.json"

    def path(self, name: str) -> Path:
        """Return a client's key file."""
        return self.root / f"{name}.key"

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        private_folder(self.root)
        lock = FileLock(self.root / "lock")
        lock.acquire(blocking=True)
        try:
            yield
        finally:
            lock.release()

    def service_pair(self) -> KeyPair:
        """Return the service's own pair; made with the key `local` where there is none. Raises: InvalidConfig, InsecureAddress."""
        with self._changing():
            return self._service_pair()

    def _service_pair(self) -> KeyPair:
        path = self.path(SERVICE)
        if path.exists():
            return _pair(_read(path))
        pair = new_key_pair()
        _write(path, asdict(pair), replace=False)
        allowed = _read_allowed(self.allowed_path) if self.allowed_path.exists() else {}
        if LOCAL not in allowed:
            self._add(allowed, LOCAL, control=True, server=pair.public)
        return pair

    def _add(self, allowed: dict[str, AllowedKey], name: str, *, control: bool, server: str) -> Path:
        pair = new_key_pair()
        # The secret first: a name on the list whose file is missing could not be used.
        _write(self.path(name), {"name": name, **asdict(pair), "server": server}, replace=True)
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        allowed[name] = AllowedKey(name=name, public=pair.public, control=control, created=created)
        self._publish(allowed)
        return self.path(name)

    def _publish(self, allowed: Mapping[str, AllowedKey]) -> None:
        _write(self.allowed_path, {"clients": [asdict(key) for key in allowed.values()]}, replace=True)

    def allowed(self) -> dict[str, AllowedKey]:
        """Return who may connect, by name. Raises: InvalidConfig."""
        return _read_allowed(self.allowed_path) if self.allowed_path.exists() else {}

    def new(self, name: str, *, control: bool = True) -> Path:
        """Make a client's key and let it connect; returns its file. Raises: InvalidConfig for a name that is taken."""
        _checked_name(name)
        with self._changing():
            server = self._service_pair().public
            allowed = self.allowed()
            if name in allowed:
                raise InvalidConfig(
                    f"there is a key {name!r}",
                    field="name",
                    value=name,
                    limit="one key for each name",
                    remedy=f"choose another name, or replace it with `python -m rollout keys rotate {name}`",
                )
            return self._add(allowed, name, control=control, server=server)

    def rotate(self, name: str) -> Path:
        """Replace a client's key, whose sessions end; or, for the name `service`, the service's own. Returns the file.

        The service's own key counts from its next start on. Raises: InvalidConfig.
        """
        with self._changing():
            server = self._service_pair()
            allowed = self.allowed()
            if name == SERVICE:
                return self._rotate_service(allowed)
            return self._add(allowed, name, control=self._named(allowed, name).control, server=server.public)

    def _rotate_service(self, allowed: Mapping[str, AllowedKey]) -> Path:
        pair = new_key_pair()
        _write(self.path(SERVICE), asdict(pair), replace=True)
        for name in allowed:
            if self.path(name).exists():
                _write(self.path(name), {**_read(self.path(name)), "server": pair.public}, replace=True)
        return self.path(SERVICE)

    def revoke(self, name: str) -> None:
        """Take a client's key away; a running service ends its sessions. Raises: InvalidConfig for an unknown name."""
        with self._changing():
            allowed = self.allowed()
            del allowed[self._named(allowed, name).name]
            self._publish(allowed)
            with contextlib.suppress(FileNotFoundError):
                self.path(name).unlink()

    def _named(self, allowed: Mapping[str, AllowedKey], name: str) -> AllowedKey:
        if name not in allowed:
            raise InvalidConfig(
                f"there is no key {name!r}",
                field="name",
                value=name,
                limit=f"known: {', '.join(sorted(allowed)) or 'none'}",
                remedy="see `python -m rollout keys list`",
            )
        return allowed[name]


class AllowList:
    """The list as a running service reads it: `refresh` looks whether the file is another one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._by_public: dict[str, AllowedKey] = {}

    def refresh(self) -> bool:
        """Read the file if it changed; True if it did. A file that cannot be read lets nobody in. Raises: InvalidConfig."""
        try:
            found = self._path.stat()
        except OSError:
            seen = None
        else:
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if seen == self._seen and seen is not None:
            return False
        changed = seen != self._seen
        self._seen, self._by_public = seen, {}
        if seen is not None:
            self._by_public = {key.public: key for key in _read_allowed(self._path).values()}
        return changed

    def may_connect(self, public: str, *, control: bool) -> bool:
        """Tell whether this key may use the data socket, or the control socket."""
        key = self._by_public.get(public)
        return key is not None and (key.control or not control)

    def name_of(self, public: str) -> str | None:
        """Return the name of a key, None for one that is not on the list."""
        key = self._by_public.get(public)
        return None if key is None else key.name
