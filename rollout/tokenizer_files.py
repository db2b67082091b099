"""The tokenizer's files of a model folder, and the two digests by which client and service compare them.

The front reads and sends them; a client and an episode digest what they hold in the same way. No tokenizer library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

# Everything a chat format needs; nothing else of a model folder is ever sent.
NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
)
MAX_BYTES = 48 * 2**20


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the known files that a model folder has, bounded in size."""
    found: dict[str, bytes] = {}
    room = MAX_BYTES
    for name in NAMES:
        path = folder / name
        if path.is_file() and path.stat().st_size <= room:
            found[name] = path.read_bytes()
            room -= len(found[name])
    return found


def chat_template(files: Mapping[str, bytes]) -> str | None:
    """Return the template text: the file of its own, else the entry in tokenizer_config.json."""
    own = files.get("chat_template.jinja")
    if own is not None:
        return own.decode("utf-8", "replace")
    try:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
    except ValueError:
        return None
    text = config.get("chat_template") if isinstance(config, dict) else None
    return text if isinstance(text, str) else None


def tokenizer_digest(files: Mapping[str, bytes]) -> str | None:
    """Return the SHA-256 of tokenizer.json in hex, or None without one."""
    content = files.get("tokenizer.json")
    return None if content is None else hashlib.sha256(content).hexdigest()


def chat_template_digest(files: Mapping[str, bytes]) -> str | None:
    """Return the SHA-256 of the template text in hex, or None without one."""
    text = chat_template(files)
    return None if text is None else hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
