"""Numbered prompts and the place reached in them.

Owned by `source.RolloutSource`. Invariant: number i always means the same prompt, so that a saved number finds it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import xxhash

from trainer_bridge.errors import InvalidOption, InvalidState

P = TypeVar("P")
MAX_DIGESTED = 65_536
MAX_PLAIN_DEPTH = 8


def _plain(value: object, depth: int = 0) -> bool:
    """Return whether the repr of a value is the same in every process: no addresses, no order of a set."""
    if value is None or type(value) in (str, bytes, int, float, bool, range):
        return True
    if depth >= MAX_PLAIN_DEPTH:
        return False
    if type(value) in (list, tuple):
        return all(_plain(part, depth + 1) for part in value)  # type: ignore[attr-defined]
    if type(value) is dict:
        return all(_plain(key, depth + 1) and _plain(part, depth + 1) for key, part in value.items())
    return False


class PromptDigest:
    """A running hash over prompts whose repr says what they are; None from the first other prompt on."""

    def __init__(self) -> None:
        self._hash: xxhash.xxh3_64 | None = xxhash.xxh3_64()

    def add(self, prompt: object) -> None:
        """Take in the next prompt."""
        if self._hash is None:
            return
        if not _plain(prompt):
            self._hash = None
            return
        self._hash.update(repr(prompt).encode("utf-8", "backslashreplace") + b"\0")

    @property
    def text(self) -> str | None:
        """Return the hash so far."""
        return None if self._hash is None else self._hash.hexdigest()


def _digest_of(sequence: Sequence[Any]) -> str | None:
    """Return the digest of a sequence in memory, None where that would mean to load or hash very much."""
    digest = PromptDigest()
    if isinstance(sequence, range | str):
        digest.add(sequence)
    elif isinstance(sequence, list | tuple) and len(sequence) <= MAX_DIGESTED:
        for prompt in sequence:
            digest.add(prompt)
    else:
        return None
    return digest.text


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
        self._drawn = PromptDigest()
        self._fingerprint: dict[str, Any] | None = None

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
            self._drawn.add(prompt)
        self.cursor += 1
        return index, prompt

    def fingerprint(self) -> dict[str, Any]:
        """Return what tells these prompts from others: their count (None for an iterator) and a digest where one is cheap.

        The digest is over the whole sequence, or over what was drawn from an iterator so far.
        """
        if self._sequence is None:
            return {"count": None, "digest": self._drawn.text}
        if self._fingerprint is None:
            self._fingerprint = {"count": len(self._sequence), "digest": _digest_of(self._sequence)}
        return dict(self._fingerprint)

    def _check_same(self, saved: Mapping[str, Any]) -> None:
        ours = self.fingerprint()
        same_digest = saved["digest"] == ours["digest"] or None in (saved["digest"], ours["digest"])
        if saved["count"] != ours["count"] or not same_digest:
            raise InvalidState(
                f"the saved run had other prompts: {dict(saved)}",
                field="prompts",
                value=dict(saved),
                limit=f"these have {ours}",
                remedy="load with the same prompts in the same order, and an iterator from its beginning",
            )

    def restore(self, cursor: int, wanted: Collection[int], saved: Mapping[str, Any]) -> dict[int, P]:
        """Move to `cursor` and return the prompts passed over that are `wanted`; `saved` is their fingerprint.

        Raises: InvalidState.
        """
        if self._sequence is not None:
            self._check_same(saved)
            if self._count is not None and cursor > self._count:
                raise InvalidState(
                    f"cursor={cursor}",
                    field="cursor",
                    value=cursor,
                    limit=f"these prompts and epochs end at {self._count}",
                    remedy="load with the same prompts and at least as many epochs",
                )
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
        self._check_same(saved)
        return found
