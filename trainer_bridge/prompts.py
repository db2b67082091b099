"""Numbered prompts and the place reached in them.

Owned by `source.RolloutSource`. Invariant: number i always means the same prompt, so that a saved number finds it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from trainer_bridge.errors import InvalidOption, InvalidState

P = TypeVar("P")


class PromptQueue(Generic[P]):
    """Prompts by number: a sequence over `epochs`, or an iterator that a restart passes over from its beginning."""

    def __init__(self, prompts: Iterable[P], epochs: int | None):
        self._sequence: Sequence[P] | None = prompts if isinstance(prompts, Sequence) else None
        if self._sequence is None and epochs != 1:
            raise InvalidOption(
                f"epochs={epochs} with an iterator",
                field="epochs",
                value=epochs,
                limit="an iterator can be read once",
                remedy="pass a sequence, or chain the iterator itself",
            )
        if self._sequence is not None and not len(self._sequence):
            raise InvalidOption("prompts is empty", field="prompts", value=0, limit="at least one prompt", remedy="pass some prompts")
        self._iterator: Iterator[P] = iter(()) if self._sequence is not None else iter(prompts)
        self._count = None if self._sequence is None or epochs is None else epochs * len(self._sequence)
        self.cursor = 0

    def draw(self) -> tuple[int, P] | None:
        """Return the next number and prompt, None at the end."""
        index = self.cursor
        if self._sequence is not None:
            if self._count is not None and index >= self._count:
                return None
            prompt = self._sequence[index % len(self._sequence)]
        else:
            try:
                prompt = next(self._iterator)
            except StopIteration:
                return None
        self.cursor += 1
        return index, prompt

    def restore(self, cursor: int, wanted: Collection[int]) -> dict[int, P]:
        """Move to `cursor` and return the prompts passed over that are `wanted`."""
        if self._sequence is not None:
            self.cursor = cursor
            return {index: self._sequence[index % len(self._sequence)] for index in wanted}
        found: dict[int, P] = {}
        while self.cursor < cursor:
            drawn = self.draw()
            if drawn is None:
                raise InvalidState(
                    f"the prompts end at {self.cursor}",
                    field="cursor",
                    value=cursor,
                    limit=f"the saved run had drawn {cursor}",
                    remedy="load with the same prompts from their beginning",
                )
            if drawn[0] in wanted:
                found[drawn[0]] = drawn[1]
        return found
