"""The weights' way through a shared disk: one safetensors file for each bucket of tensors.

The service opens the files below its own weights folder. Invariant: a file that has its final name is complete and on disk,
and none outlives its update. The format holds no code.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save

from trainer_bridge.errors import PushError
from trainer_bridge.weights.transport import Bucket, BucketClient, reached, unusable

PREFIX = "push-"
SUFFIX = ".safetensors"
DEFAULT_BUCKET_BYTES = 256 * 2**20
ONE_DISK = "start the service with --weights-dir on a disk that trainer and service both see"


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
            raise unusable("file", f"the weights folder {self._folder} is not there", ONE_DISK, value=str(self._folder))

    def write(self, update_id: str, tensors: Mapping[str, torch.Tensor]) -> StagedFile:
        """Write one bucket under a temporary name, sync it to disk, rename it. Blocks: on the disk."""
        payload = save(_apart(tensors))
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


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors in host memory of which no two share any, as safetensors wants them: tied ones, or views of one buffer."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        here = tensor.cpu()
        memory = here.untyped_storage().data_ptr()
        apart[name] = here.clone() if memory in seen else here
        seen.add(memory)
    return apart


class FileTransport:
    """One file for each bucket, removed as soon as it is staged."""

    name = "file"

    def __init__(
        self, client: BucketClient, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, timeout_s: float = 120.0, probe: bool = False
    ) -> None:
        self._client, self.bucket_bytes, self._timeout_s, self._probe = client, bucket_bytes, timeout_s, probe
        self.reason = "asked for"
        self._folder: WeightFolder | None = None
        self._update_id = ""

    def open(self, info: Any, update_id: str) -> None:
        """Remove what dead pushes left; with `probe`, let the service open an empty file. Raises: TransportUnusable."""
        self._folder, self._update_id = WeightFolder(info.weights_dir), update_id
        self._folder.remove_leftovers()
        if self._probe:
            reached("file", lambda: self.send({}), ONE_DISK)

    def send(self, bucket: Bucket) -> None:
        """Write a bucket and wait until it is staged. Blocks: on the disk and the service."""
        assert self._folder is not None, "a transport is opened first"
        try:
            file = self._folder.write(self._update_id, bucket)
            self._client.weights_stage_file(self._update_id, str(file.path), size=file.size, xxh3=file.xxh3, timeout_s=self._timeout_s)
        finally:
            self._folder.remove_written()

    def close(self) -> None:
        """All is staged already."""

    def abort(self) -> None:
        """Remove the files of this update."""
        if self._folder is not None:
            self._folder.remove_written()
