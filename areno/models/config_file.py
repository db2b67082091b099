"""JSON files of a checkpoint folder and typed access to their keys. No torch here.

Called by `model_config` and `vocabulary`; a file that exists but cannot be understood is an error, never a default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError


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


class ConfigReader:
    """Typed access to the keys of one config.json."""

    __slots__ = ("raw",)

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw

    def wrong(self, key: str, value: object, limit: str) -> CheckpointError:
        return CheckpointError(
            f"config.json has {key}={value!r}", field=key, value=value, limit=limit, remedy=f"correct {key} in config.json"
        )

    def count(self, key: str, default: int | None = None, *, null: int | None = None) -> int:
        """Return a positive integer; `default` stands for an absent key, `null` for a null."""
        if key not in self.raw and default is None:
            raise CheckpointError(
                f"config.json has no {key}", field=key, limit="the model's sizes need it", remedy=f"add {key} to config.json"
            )
        value = self.raw.get(key, default)
        value = null if value is None else value
        if type(value) is not int or value < 1:
            raise self.wrong(key, value, "a positive integer is needed")
        return value

    def positive(self, key: str, default: float) -> float:
        return self.finite(key, self.raw.get(key, default))

    def finite(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, value, "a positive finite number is needed")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false is needed")
        return value
