"""The newest weights in a file of the service's own, so that a new engine host can take them up by itself.

The engine host owns one keeper. After each commit it writes the live tensors piece by piece between the engine's steps,
and renames the file when it is whole; a newer commit gives an unfinished file up. At its start a host takes the file up
if it is of the version that was lost and its digests are those of that version's commit. Invariant: what has the final
name is complete, on disk, and names its version.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollout.errors import WeightsFileRefused

if TYPE_CHECKING:
    import torch

log = logging.getLogger("rollout.engine_host")
PIECE_BYTES = 8 * 2**20
VERSION_KEY = "version"
# Names of dtypes in the file, and their bytes.
_FORMAT_NAMES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "float64": ("F64", 8)}


class RestorableEngine(Protocol):
    """What the keeper needs of an engine."""

    @property
    def version(self) -> int: ...
    @property
    def manifest(self) -> Mapping[str, Any]: ...
    def whole_tensor(self, name: str) -> torch.Tensor: ...
    def begin_update(self, manifest: Mapping[str, Any] | None, *, version: int, partial: bool = False) -> None: ...
    def stage(self, name: str, tensor: torch.Tensor) -> None: ...
    def commit_update(self, *, digests: Mapping[str, int] | None = None) -> Any: ...
    def abort_update(self) -> None: ...


def _header(specs: Mapping[str, Any], version: int) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt", VERSION_KEY: str(version)}}
    at = 0
    for name, spec in specs.items():
        dtype, size = _FORMAT_NAMES[spec.dtype]
        end = at + size * math.prod(spec.shape)
        fields[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class LastWeights:
    """Keeps an engine's newest weights in the file `path`; does nothing without one."""

    def __init__(self, engine: RestorableEngine, path: Path | None) -> None:
        self._engine, self._path = engine, path
        self._writing: Generator[None, None, None] | None = None
        if path is not None:
            # What a host that was killed left unfinished.
            with contextlib.suppress(OSError):
                self._part(path).unlink()

    @staticmethod
    def _part(path: Path) -> Path:
        return path.with_name(f".{path.name}.part")

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        return self._writing is not None

    def committed(self) -> None:
        """Begin to write the weights that have just become live; an older file under way is given up."""
        self.close()
        if self._path is not None:
            self._writing = self._write(self._path)

    def advance(self) -> None:
        """Write one piece. A disk that fails costs the file and nothing else."""
        if self._writing is None:
            return
        try:
            next(self._writing)
        except StopIteration:
            self._writing = None
        except OSError as error:
            log.error("weights of version %d are not kept in %s: %s", self._engine.version, self._path, error)
            self._writing = None

    def close(self) -> None:
        """Give an unfinished file up."""
        if self._writing is not None:
            self._writing.close()
            self._writing = None

    def _write(self, path: Path) -> Generator[None, None, None]:
        import torch

        specs, version = self._engine.manifest, self._engine.version
        fresh = self._part(path)
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(_header(specs, version))
                for name in specs:
                    flat = self._engine.whole_tensor(name).detach().reshape(-1).view(torch.uint8)
                    for start in range(0, flat.numel(), PIECE_BYTES):
                        # A copy also on the CPU: memory that numpy has seen could not be given back by a sleep.
                        file.write(flat[start : start + PIECE_BYTES].to("cpu", copy=True).numpy().data)
                        yield
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
            log.info("weights of version %d are kept in %s", version, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                fresh.unlink()

    def restore(self, version: int, digests: Mapping[str, int]) -> bool:
        """Take the file's weights up as `version` if they are that version's; return whether they serve now. Blocks: for the load."""
        if self._path is None or not self._path.is_file():
            return False
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path, framework="pt", device="cpu") as file:
                found = (file.metadata() or {}).get(VERSION_KEY)
                if found != str(version):
                    raise WeightsFileRefused(f"{self._path} holds version {found}, version {version} is needed", field="keep_last")
                self._engine.begin_update(None, version=version)
                for name in file.keys():  # noqa: SIM118 - no mapping
                    self._engine.stage(name, file.get_tensor(name))
                self._engine.commit_update(digests=digests)
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            self._engine.abort_update()
            log.warning("weights of version %d are not taken from %s: %s", version, self._path, error)
            return False
        log.info("weights of version %d are taken from %s", version, self._path)
        return True
