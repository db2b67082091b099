"""What callers hand to an episode, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout.agent.chat import Message
from rollout.agent.errors import ChatFormatError, InvalidEpisode
from rollout.agent.option_values import check_seed
from rollout.agent.tools import ToolResult


def checked_seed(seed: Any) -> int:
    """Return a seed. Raises: InvalidEpisode."""
    check_seed("seed", seed)
    return int(seed)


def checked_ids(ids: Any, *, allow_empty: bool = False) -> np.ndarray:
    """Return token ids as int32 [n]. Raises: InvalidEpisode."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or (not array.size and not allow_empty):
        raise InvalidEpisode(
            f"ids have shape {array.shape} and dtype {array.dtype}",
            field="ids",
            value=str(array.dtype),
            limit="a flat sequence of token ids",
            remedy="pass ids as ints",
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**31:
        raise InvalidEpisode(
            f"ids reach from {int(array.min())} to {int(array.max())}",
            field="ids",
            value=int(array.max()),
            limit="0 to 2**31 - 1",
            remedy="encode with the model's tokenizer",
        )
    return array.astype(np.int32)


def as_messages(observation: str | Message | ToolResult | Sequence[Message | ToolResult]) -> list[Message]:
    """Return an observation as messages. Raises: ChatFormatError."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    items = [observation] if isinstance(observation, (Mapping, ToolResult)) else observation
    if not isinstance(items, Sequence) or not all(isinstance(item, (Mapping, ToolResult)) for item in items):
        raise ChatFormatError(
            f"an observation is a {type(observation).__name__}",
            field="observation",
            value=observation,
            limit="a string, a message, a ToolResult or a list of those is needed",
            remedy="pass the environment's answer as text or as messages",
        )
    return [item.message() if isinstance(item, ToolResult) else item for item in items]


def num_characters(messages: Sequence[Any]) -> int:
    """Return how much text messages hold, in characters; parts of a content count with their texts."""
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, (list, tuple)) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        total += sum(len(text) for text in texts if isinstance(text, str))
    return total
