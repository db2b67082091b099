"""What must be equal on every rank: the code, its libraries that compute, and the checkpoint. Checked before anything is loaded.

No torch; the checkpoint's tensors are known by their headers, sizes and times, not by their contents.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

from areno.errors import CheckpointError, EngineFailure

_LIBRARIES = ("torch", "numpy", "triton")
# All that a rank reads besides weights. An index says which of two files counts, a tokenizer which ids are never drawn.
_DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def code_identity() -> Mapping[str, str]:
    """Return a hash of this package's sources, where they lie, and the versions of the libraries.

    As they were at the first call: a process goes on with what it has loaded, whatever is installed meanwhile.
    """
    root = Path(__file__).resolve().parent.parent
    hashed = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        hashed.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return {"areno": hashed.hexdigest(), **{library: _version(library) for library in _LIBRARIES}, "path": str(root)}


def check_code(rank: int, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Compare this rank's code with that of rank 0. Raises: EngineFailure naming what differs."""
    differs = [name for name in ("areno", *_LIBRARIES) if found.get(name) != expected.get(name)]
    if differs:
        name = differs[0]
        raise EngineFailure(
            f"rank {rank} runs another version of {name}: {found.get(name)} from {found.get('path')}",
            field="tp",
            limit=f"rank 0 runs {expected.get(name)} from {expected.get('path')}",
            remedy="start the process of rank 0 anew, so that all run from one installation (check PYTHONPATH)",
        )


def checkpoint_identity(folder: Path) -> str:
    """Return a hash of the JSON files that are read and of the weight files' headers, sizes and times; missing files count as such.

    Raises: CheckpointError where a file cannot be read.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for path in [*(folder / name for name in _DESCRIPTIONS), *sorted(folder.glob("*.safetensors"))]:
        if not path.is_file():
            continue
        try:
            status = path.stat()
            with path.open("rb") as file:
                head = file.read(8)
                size = min(int.from_bytes(head, "little"), 1 << 26) if path.suffix == ".safetensors" else status.st_size
                content = head + file.read(size)
        except OSError as error:
            raise CheckpointError(
                f"{path.name} cannot be read: {error}",
                field="model",
                value=str(path),
                limit="every rank reads it",
                remedy="let the user of this process read all files of the folder, and do not write there while an engine starts",
            ) from error
        hashed.update(json.dumps([path.name, status.st_size, status.st_mtime_ns]).encode() + content)
    return hashed.hexdigest()


def check_checkpoint(rank: int, folder: Path, expected: str) -> None:
    """Compare what this rank sees of a checkpoint with what rank 0 saw. Raises: CheckpointError."""
    found = checkpoint_identity(folder)
    if found != expected:
        raise CheckpointError(
            f"rank {rank} sees another checkpoint in {folder} than rank 0",
            field="model",
            value=str(folder),
            limit=f"its JSON files and the headers of its weight files come to {found} there, {expected} here",
            remedy="do not write to the folder while an engine starts, then start again",
        )
