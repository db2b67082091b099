"""JSON files of a checkpoint folder and typed access to their keys. No torch here.

Called by `model_config` and `vocabulary`; a file that exists but cannot be understood is an error, never a default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError, UnsupportedModel, shown


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`, None if there is no such file. Raises: CheckpointError."""
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error}",
            field="model",
            value=str(path),
            limit="it must be UTF-8 JSON",
            remedy=f"write or copy {path.name} again",
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{path.name} holds a {type(raw).__name__}",
            field="model",
            value=str(path),
            limit="an object is needed",
            remedy=f"write or copy {path.name} again",
        )
    return raw


def unsupported(key: str, value: object, known: str, remedy: str) -> UnsupportedModel:
    """Return the error for a feature that the decoder does not compute."""
    return UnsupportedModel(f"{key}={shown(value)} is not supported", field=key, value=value, limit=f"known: {known}", remedy=remedy)


# Sizes beyond these are no model; a layer is an object, and its number a loop.
MAX_COUNT = 2**31 - 1
MAX_LAYERS = 4096
MAX_NUMBER = 1e30


class ConfigReader:
    """Typed access to the keys of config.json, or of an object in it, whose name then stands before its keys'."""

    __slots__ = ("_prefix", "raw")

    def __init__(self, raw: Mapping[str, Any], prefix: str = ""):
        self.raw, self._prefix = raw, prefix

    def name(self, key: str) -> str:
        """Return the key with the names of the objects around it."""
        return f"{self._prefix}{key}"

    def wrong(self, key: str, value: object, limit: str, remedy: str | None = None) -> CheckpointError:
        """Return the error for a key's value."""
        name = self.name(key)
        return CheckpointError(
            f"config.json has {name}={shown(value)}",
            field=name,
            value=value,
            limit=limit,
            remedy=remedy or f"correct {name} in config.json",
        )

    def missing(self, key: str, reason: str) -> CheckpointError:
        """Return the error for a key that has to be there."""
        name = self.name(key)
        return CheckpointError(f"config.json has no {name}", field=name, limit=reason, remedy=f"add {name} to config.json")

    def section(self, key: str) -> ConfigReader | None:
        """Return a reader of the object under `key`, None if it is absent, null or empty."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object is needed")
        return ConfigReader(value, f"{self.name(key)}.") if value else None

    def count(self, key: str, default: int | None = None, *, null: int | None = None, most: int = MAX_COUNT) -> int:
        """Return a positive integer of at most `most`; `default` stands for an absent key, `null` for a null."""
        if key not in self.raw and default is None:
            raise self.missing(key, "the model's sizes need it")
        value = self.raw.get(key, default)
        value = null if value is None else value
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, value, f"a positive integer of at most {most} is needed")
        return value

    def positive(self, key: str, default: float) -> float:
        """Return a positive number; `default` stands for an absent key."""
        return self.finite(key, self.raw.get(key, default))

    def finite(self, key: str, value: object) -> float:
        """Return `value`, read under `key`, as a positive number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_NUMBER:
            raise self.wrong(key, value, "a positive finite number is needed")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean; `default` stands for an absent key."""
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false is needed")
        return value
