"""Strict loading of a safetensors checkpoint into a parameter table.

Takes model.safetensors, or model.safetensors.index.json with its shards, or a full set of numbered shards without an
index. Every tensor of the model must be there once, in its shape, finite; no tensor may be there that the model does
not have. With an index, the file that it names for a tensor is the one that counts. On any refusal the table may hold
part of the weights: the model must not be served.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from areno.errors import CheckpointError
from areno.parallel import TPGroup
from areno.weights.names import SOURCE_DTYPES, ParameterTable, canonical_name, is_finite, list_names

SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_RESAVE = "copy the checkpoint again in full, or write it again with save_pretrained"
_WRONG_CONFIG = "use the config.json that belongs to the weights"


@dataclass(frozen=True, slots=True)
class _Sources:
    """Files to read, and the index's tensor name -> file (None without an index)."""

    files: tuple[str, ...]
    index: Mapping[str, str] | None


def load_checkpoint(folder: str | Path, table: ParameterTable, group: TPGroup | None = None) -> None:
    """Fill every tensor of `table` from the safetensors files in `folder`, cast to the table's dtype.

    A rank of several reads its part of each tensor and no more; all of them load, and fail together. Mutates: the table's live
    storage and derived tensors. Raises: CheckpointError naming tensors and files.
    """
    folder = Path(folder)
    if group is None or group.size == 1:
        _load(folder, table)
        return
    failed: CheckpointError | None = None
    fingerprint = 0
    try:
        sources = _find_sources(folder)
        fingerprint = _fingerprint(folder, sources)
        _load(folder, table, sources)
    except CheckpointError as error:
        failed = error
    ranks = group.gather_words([fingerprint, int(failed is not None)])
    if failed is not None:
        raise failed
    for rank, (found, has_failed) in enumerate(ranks):
        if has_failed or found != fingerprint:
            what = "could not load its part of" if has_failed else "found other files than this rank in"
            raise CheckpointError(
                f"rank {rank} {what} the checkpoint",
                field="model",
                value=str(folder),
                limit="all ranks read the same files, which nobody writes meanwhile",
                remedy="see that rank's own error" if has_failed else "start again when the checkpoint is complete",
            )


def _fingerprint(folder: Path, sources: _Sources) -> int:
    """Return a number that changes with the files' names, sizes and times."""
    stats = [(name, (folder / name).stat()) for name in (CONFIG_FILE, *sources.files)]
    text = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _load(folder: Path, table: ParameterTable, sources: _Sources | None = None) -> None:
    sources = sources or _find_sources(folder)
    loading = _Loading(table)
    for file_name in sources.files:
        try:
            with safe_open(folder / file_name, framework="pt", device="cpu") as file:
                _load_file(loading, sources, file_name, file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file_name} cannot be read: {error}",
                field="model",
                value=file_name,
                limit="it is cut short or no safetensors file",
                remedy=_RESAVE,
            ) from error
    loading.finish()
    table.rebuild_derived()


def _load_file(loading: _Loading, sources: _Sources, file_name: str, file: Any) -> None:
    names = set(file.keys())
    if sources.index is not None:
        promised = {name for name, owner in sources.index.items() if owner == file_name}
        if promised - names:
            raise CheckpointError(
                f"{INDEX_FILE} places tensors in {file_name} that it does not hold: {list_names(promised - names)}",
                field="model",
                value=sorted(promised - names),
                limit="index and shards must be of one save",
                remedy=_RESAVE,
            )
        for name in names - sources.index.keys():
            loading.unlisted[canonical_name(name)] = file_name
        names = promised
    for name in sorted(names):
        loading.take(name, file_name, file)


def _wrong_tensor(name: str, file_name: str, problem: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"tensor {name} in {file_name}: {problem}", field="model", value=name, remedy=remedy)


@dataclass(slots=True)
class _Loading:
    """What one load has seen: the file that gave each tensor, names that belong to nothing or to no index entry."""

    table: ParameterTable
    origin: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    unlisted: dict[str, str] = field(default_factory=dict)
    tied: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, file_name: str, file: Any) -> None:
        """Copy one tensor of an open file into its view."""
        canonical = canonical_name(name)
        held = self.table.tied.get(canonical, canonical)
        if held not in self.table.views:
            # Old checkpoints carry rope's frequencies as buffers; the model computes them from the config.
            if not name.endswith("rotary_emb.inv_freq"):
                self.unknown[name] = file_name
            return
        if canonical in self.origin:
            raise _wrong_tensor(
                name, file_name, f"it is in {self.origin[canonical]} too", "keep one of the two, or add an index that says which counts"
            )
        self.origin[canonical] = file_name
        target, shard, stored = self.table.views[held], self.table.shards.get(held), file.get_slice(name)
        shape = tuple(stored.get_shape())
        if shape != self.table.shape_of(held):
            raise _wrong_tensor(name, file_name, f"its shape is {shape}, config.json makes it {self.table.shape_of(held)}", _WRONG_CONFIG)
        tensor = file.get_tensor(name) if shard is None else stored[shard.place]
        if tensor.dtype not in SOURCE_DTYPES:
            raise _wrong_tensor(name, file_name, f"its dtype is {tensor.dtype}", "save the weights in float32, bfloat16 or float16")
        if canonical in self.table.tied:
            self.tied[canonical] = tensor
            return
        target.copy_(tensor)
        if not is_finite(target):
            raise _wrong_tensor(
                name,
                file_name,
                f"it holds NaN or infinity as {self.table.dtype}",
                "repair the checkpoint, or serve it in float32 if it only overflows",
            )

    def finish(self) -> None:
        """Refuse what is unknown, missing, or tied in the config but not in the values."""
        if self.unknown:
            where = list_names(f"{name} ({file})" for name, file in self.unknown.items())
            raise CheckpointError(
                f"the checkpoint holds tensors that the model does not have: {where}",
                field="model",
                value=sorted(self.unknown),
                limit=f"config.json describes {len(self.table.views)} tensors",
                remedy=_WRONG_CONFIG,
            )
        missing = self.table.views.keys() - self.origin.keys()
        if missing:
            unlisted = [
                f"{name} is in {self.unlisted[name]} but not in {INDEX_FILE}" for name in sorted(missing & self.unlisted.keys())[:3]
            ]
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} of the model's tensors: {list_names(missing)}",
                field="model",
                value=sorted(missing),
                limit="; ".join(unlisted) or "every one of them is needed",
                remedy=_RESAVE,
            )
        for name, tensor in self.tied.items():
            target = self.table.tied[name]
            if not torch.equal(tensor.to(self.table.dtype), self.table.views[target].cpu()):
                remedy = "set tie_word_embeddings to false in config.json if the two were trained apart, or delete the tensor"
                raise _wrong_tensor(name, self.origin[name], f"config.json ties it to {target}, but the values differ", remedy)


def _find_sources(folder: Path) -> _Sources:
    """Decide which files count. Raises: CheckpointError."""
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in present:
        if name.endswith(".safetensors") and not (folder / name).is_file():
            raise CheckpointError(
                f"{name} is a folder", field="model", value=name, limit="weights are files", remedy="pass the folder that holds the files"
            )
    if INDEX_FILE in present:
        return _read_index(folder, present)
    shards = {name: match for name in present if (match := _SHARD.fullmatch(name))}
    if SINGLE_FILE in present:
        if shards:
            raise _ambiguous(f"{SINGLE_FILE} and {list_names(shards)}")
        return _Sources((SINGLE_FILE,), None)
    if shards:
        return _Sources(_complete_set(shards), None)
    found = list_names(present) or "nothing"
    raise CheckpointError(
        f"no weights in {folder}; it holds {found}",
        field="model",
        value=str(folder),
        limit=f"{SINGLE_FILE}, {INDEX_FILE} with its shards, or all of model-00001-of-0000N.safetensors are read",
        remedy="save the model with save_pretrained (pickled .bin and .pt files are never opened)",
    )


def _ambiguous(found: str) -> CheckpointError:
    return CheckpointError(
        f"two sets of weights: {found}",
        field="model",
        value=found,
        limit="which one counts cannot be told",
        remedy="delete the set that does not belong to the model",
    )


def _complete_set(shards: Mapping[str, re.Match[str]]) -> tuple[str, ...]:
    totals = {match[2] for match in shards.values()}
    if len(totals) > 1:
        raise _ambiguous(list_names(shards))
    total = totals.pop()
    wanted = [f"model-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
    missing = [name for name in wanted if name not in shards]
    if missing:
        raise CheckpointError(
            f"shards are missing: {list_names(missing)}",
            field="model",
            value=missing,
            limit=f"there are {int(total)} and no {INDEX_FILE}",
            remedy=_RESAVE,
        )
    return tuple(wanted)


def _read_index(folder: Path, present: list[str]) -> _Sources:
    """Return the index's files, all of them present, plain names in this folder."""
    try:
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
        files = sorted({str(file) for file in weight_map.values()})
        valid = bool(files) and all(isinstance(file, str) and file == Path(file).name for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{INDEX_FILE} cannot be read: {error!r}", field="model", value=INDEX_FILE, limit="weight_map is needed", remedy=_RESAVE
        ) from error
    if not valid:
        raise CheckpointError(
            f"{INDEX_FILE} names files {list_names(files) or 'of no tensor'}",
            field="model",
            value=files,
            limit="plain names of files beside it",
            remedy=_RESAVE,
        )
    missing = [file for file in files if file not in present]
    if missing:
        lost = [name for name, file in weight_map.items() if file in missing]
        raise CheckpointError(
            f"shards named in {INDEX_FILE} are missing: {list_names(missing)} with {list_names(lost)}",
            field="model",
            value=missing,
            limit="all are needed",
            remedy=_RESAVE,
        )
    if SINGLE_FILE in present and SINGLE_FILE not in files:
        raise _ambiguous(f"{SINGLE_FILE} and the shards of {INDEX_FILE}")
    return _Sources(tuple(files), weight_map)
