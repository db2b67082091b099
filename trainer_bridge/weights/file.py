"""The weights' way through a shared disk: one safetensors file for each bucket of tensors.

`push.WeightPush` hands buckets over; the service opens the files below its own weights folder. Invariant: a file that has
its final name is complete and on disk, and none outlives its push. The format holds no code.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save

from trainer_bridge.errors import PushError

PREFIX = "push-"
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """A complete file of tensors; `xxh3` is the hexadecimal XXH3-64 of its bytes."""

    path: Path
    size: int
    xxh3: str


class WeightFolder:
    """The service's weights folder, as the trainer writes to it while it holds the update."""

    __slots__ = ("_folder", "_written")

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._written: list[Path] = []
        if not self._folder.is_dir():
            raise PushError(
                f"the weights folder {self._folder} is not there",
                field="weights_dir",
                value=str(self._folder),
                limit="the file transport needs a folder that trainer and service both see",
                remedy="start the service with --weights-dir on a shared disk",
            )

    def write(self, update_id: str, tensors: Mapping[str, torch.Tensor]) -> StagedFile:
        """Write one bucket under a temporary name, sync it to disk, rename it. Blocks: on the disk."""
        payload = save(dict(tensors))
        label = re.sub(r"[^A-Za-z0-9]", "", update_id)[:40]
        path = self._folder / f"{PREFIX}{label}-{len(self._written):05d}-{secrets.token_hex(4)}{SUFFIX}"
        temporary = path.with_name(path.name + ".tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            self._sync_folder()
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise PushError(
                f"cannot write {path}: {error.strerror}",
                field="weights_dir",
                value=str(self._folder),
                limit=f"{len(payload)} bytes are needed",
                remedy="free space in the weights folder, or start the service with another --weights-dir",
            ) from error
        self._written.append(path)
        return StagedFile(path=path, size=len(payload), xxh3=xxhash.xxh3_64_hexdigest(payload))

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_written(self) -> None:
        """Remove this push's files; the service has read them, or will not."""
        while self._written:
            self._written.pop().unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Remove the files of pushes that died. Call it only while holding the service's one open update."""
        for path in self._folder.glob(f"{PREFIX}*"):
            if path not in self._written and path.name.endswith((SUFFIX, SUFFIX + ".tmp")):
                path.unlink(missing_ok=True)
