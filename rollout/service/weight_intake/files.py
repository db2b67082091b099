"""Files that an engine host opens: regular ones of its own user below one folder, reached without a link.

Weights files are safetensors below the service's weights folder; `segments` opens shared memory by the same rules. Size and
XXH3 are checked before a tensor is read, and the safetensors library parses what the checked handle holds, never a path that
could have changed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from rollout.errors import WeightsFileRefused, WeightUpdateError
from rollout.service.weight_intake.pieces import Pace, Steps

if TYPE_CHECKING:
    import torch

HASH_PIECE_BYTES = 8 * 2**20
Refuse = Callable[[str], WeightUpdateError]


def _refused(path: str, why: str, remedy: str = "write the file below info().weights_dir and pass its path") -> WeightsFileRefused:
    return WeightsFileRefused(f"weights file {path!r} is refused", field="path", value=path, limit=why, remedy=remedy)


def _parts_below(folder: Path, path: str) -> tuple[str, ...]:
    given = Path(path)
    if given.is_absolute():
        if not given.is_relative_to(folder):
            raise _refused(path, f"it is not below the weights folder {folder}")
        given = given.relative_to(folder)
    if not given.parts or ".." in given.parts or "\0" in path:
        raise _refused(path, "its path must go down from the weights folder")
    return given.parts


def open_own_file(folder: Path, parts: tuple[str, ...], refuse: Refuse, access: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file of this user below `folder`, reached without any link. Raises: what `refuse` returns."""
    *folders, name = parts
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in folders:
                deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                os.close(at)
                at = deeper
            # Without O_NONBLOCK the open of a FIFO would wait for a writer.
            fd = os.open(name, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
    except OSError as error:
        raise refuse(f"it cannot be opened without following links: {error.strerror}") from None
    found = os.fstat(fd)
    why = None
    if not stat.S_ISREG(found.st_mode):
        why = "it is not a regular file"
    elif found.st_uid != os.geteuid():
        why = f"it belongs to user {found.st_uid}, the service runs as {os.geteuid()}"
    elif found.st_nlink != 1:
        why = f"it has {found.st_nlink} links"
    if why is not None:
        os.close(fd)
        raise refuse(why)
    return fd


def open_weights_file(folder: Path, path: str, size: int) -> int:
    """Return a descriptor of a weights file of `size` bytes below `folder`. Raises: WeightsFileRefused."""
    fd = open_own_file(folder, _parts_below(folder, path), lambda why: _refused(path, why))
    found = os.fstat(fd).st_size
    if found != size:
        os.close(fd)
        raise _refused(path, f"it has {found} bytes, {size} were announced")
    return fd


def read_tensors(fd: int, path: str, size: int, xxh3: str | None) -> Generator[Pace, None, dict[str, torch.Tensor]]:
    """Return a safetensors file's tensors, yielding between bounded pieces of the work. Raises: WeightsFileRefused."""
    if xxh3 is not None:
        yield from _check_hash(fd, path, size, xxh3)
    from safetensors import SafetensorError
    from safetensors.torch import load

    # Read, not mapped: a mapped file that its writer truncates ends the process that touches it.
    content, at = bytearray(size), 0
    while at < size:
        count = os.preadv(fd, [memoryview(content)[at : at + HASH_PIECE_BYTES]], at)
        if not count:
            raise _refused(path, f"it ended at byte {at} of {size}")
        at += count
        yield Pace.GO_ON
    try:
        return load(bytes(content))
    except SafetensorError as error:
        raise _refused(path, f"it is no whole safetensors file: {error}", "write it with safetensors, then rename it") from None


def _check_hash(fd: int, path: str, size: int, xxh3: str) -> Steps:
    digest, at = xxhash.xxh3_64(), 0
    while at < size:
        piece = os.pread(fd, HASH_PIECE_BYTES, at)
        if not piece:
            raise _refused(path, f"it ended at byte {at} of {size}")
        digest.update(piece)
        at += len(piece)
        yield Pace.GO_ON
    if digest.hexdigest() != xxh3:
        raise _refused(path, f"its XXH3 is {digest.hexdigest()}, {xxh3} was announced", "write the file again")
