"""What the tokenizer's files and the generation config say about ids: how many there are, which end a text.

Called by `model_config`; no torch here. The end ids are all that any of the files names, since a model that was
trained to end a turn with one of them does not care which file knew it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError
from areno.models.config_file import read_json


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`eos_ids` is sorted; ids from `num_valid_ids` on have no token."""

    eos_ids: tuple[int, ...]
    num_valid_ids: int


def read_vocabulary(folder: Path, config: Mapping[str, Any], vocab_size: int) -> Vocabulary:
    """Return the end ids of config.json, generation_config.json and the tokenizer together, and the count of real ids.

    Raises: CheckpointError.
    """
    generation = read_json(folder / "generation_config.json") or {}
    tokens = _read_tokens(folder)
    options = read_json(folder / "tokenizer_config.json") or {}
    eos = options.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    sources = {
        "config.json": config.get("eos_token_id"),
        "generation_config.json": generation.get("eos_token_id"),
        "tokenizer.json": tokens.get(text) if isinstance(text, str) else None,
    }
    eos_ids: set[int] = set()
    for source, value in sources.items():
        for eos_id in value if isinstance(value, list) else [value]:
            if eos_id is None:
                continue
            if type(eos_id) is not int or not 0 <= eos_id < vocab_size:
                raise CheckpointError(
                    f"{source} has the end-of-sequence id {eos_id!r}",
                    field="eos_token_id",
                    value=eos_id,
                    limit=f"the model's ids are 0 to {vocab_size - 1}",
                    remedy=f"correct it in {source}",
                )
            eos_ids.add(eos_id)
    num_ids = max(tokens.values(), default=vocab_size - 1) + 1
    return Vocabulary(tuple(sorted(eos_ids)), min(num_ids, vocab_size))


def _read_tokens(folder: Path) -> dict[str, int]:
    """Return the tokenizer's text -> id, empty without a tokenizer.json."""
    tokenizer = read_json(folder / "tokenizer.json")
    if tokenizer is None:
        return {}
    try:
        vocabulary = tokenizer["model"]["vocab"]
        # Unigram models keep a list of (text, score) in id order, all others a mapping from text to id.
        ids = dict(vocabulary) if isinstance(vocabulary, dict) else {entry[0]: index for index, entry in enumerate(vocabulary)}
        ids.update({entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()})
        valid = all(type(token_id) is int for token_id in ids.values())
    except (KeyError, TypeError, IndexError, AttributeError):
        valid = False
    if not valid:
        raise CheckpointError(
            "tokenizer.json has no readable vocabulary",
            field="model",
            value=str(folder),
            limit="model.vocab and added_tokens with integer ids are needed",
            remedy="save the tokenizer again",
        )
    return ids
