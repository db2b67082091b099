"""Stop strings: output text decoded id by id, searched as it grows.

    ids --> TextDecoder: text that later ids cannot change --> StopMatcher: the first id that completes a stop string

Only requests with stop strings come here, so nobody else pays for text. Decoding is the model's tokenizer's own (control
tokens included), over a short window of the last ids; text is released once no later id can change it, so a character whose
bytes come in several ids is released with the last of them, and what stands before it at once. No torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.errors import InvalidRequest

# What decoders write for bytes that are no text (yet).
UNDECODABLE = "\ufffd"
# The window is cut back when it is longer than this; one that ends in bytes without a character for longer is cut anywhere.
_WINDOW = 16
_LONGEST_WINDOW = 64
_BYTES_OF_A_CHARACTER = 4


class Decodes(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        ...


class TextDecoder:
    """Turns ids that come one by one into text that stays as it is."""

    __slots__ = ("_clean", "_given", "_ids", "_start", "_tokenizer")

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # The window begins at `_start`; `_given` is the part of its text that was released. `_clean` is a later place where
        # all text was released, that is, where a window may begin.
        self._start = 0
        self._clean = 0
        self._given = ""

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=False)

    def fork(self) -> TextDecoder:
        """Return a decoder that has read the same."""
        other = TextDecoder(self._tokenizer)
        other._ids, other._start, other._clean, other._given = list(self._ids), self._start, self._clean, self._given
        return other

    def begin(self, ids: Sequence[int]) -> None:
        """Take the first ids, all at once; the next one's text comes with theirs."""
        self._ids.extend(ids)

    def add(self, token_id: int) -> str:
        """Take the next id and return the text that it settles."""
        self._ids.append(token_id)
        text = self._decode(self._start)
        settled = text.rstrip(UNDECODABLE)
        if not settled.startswith(self._given):
            # A run of bytes that is cut inside a character may hide what it showed before; the last byte brings it back.
            self._cut(clean=False)
            return ""
        news = settled[len(self._given) :]
        self._given = settled
        self._cut(clean=settled == text)
        return news

    def _cut(self, *, clean: bool) -> None:
        length = len(self._ids) - self._start
        if clean:
            if length > _WINDOW:
                self._start = self._clean
                self._given = self._decode(self._start)
            self._clean = len(self._ids)
        elif length > _LONGEST_WINDOW:
            self._start = self._clean = len(self._ids) - _BYTES_OF_A_CHARACTER
            self._given = self._decode(self._start).rstrip(UNDECODABLE)

    def text(self) -> str:
        """Return the text of all ids, an unfinished character included as it stands."""
        return self._decode(0)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that is complete, and the output's text before it."""

    string: str
    text: str


class StopMatcher:
    """Looks for the stop strings of one request. Ids up to the `min_new_tokens`-th complete none, but a match may begin in them.

    `earlier` are output ids of an interrupted run that this one continues.
    """

    __slots__ = ("_before_any", "_decoder", "_longest", "_parts", "_strings", "_tail")

    def __init__(self, tokenizer: Decodes, strings: Sequence[str], *, min_new_tokens: int, earlier: Sequence[int] = ()) -> None:
        self._decoder = TextDecoder(tokenizer)
        self._strings = tuple(strings)
        self._longest = max(map(len, strings))
        self._before_any = min_new_tokens
        self._parts: list[str] = []
        self._tail = ""
        if earlier:
            # Thousands of them one by one would hold up everybody else's requests.
            self._before_any -= len(earlier) - 1
            self._decoder.begin(earlier[:-1])
            self._take(earlier[-1])

    def fork(self) -> StopMatcher:
        """Return a matcher that has read the same; what was read before is not decoded again."""
        other = StopMatcher.__new__(StopMatcher)
        other._strings, other._longest, other._before_any, other._tail = self._strings, self._longest, self._before_any, self._tail
        other._decoder, other._parts = self._decoder.fork(), list(self._parts)
        return other

    def _take(self, token_id: int) -> tuple[str, int]:
        """Return the text in which a match that this id completes lies, and where the id's own text begins in it."""
        news = self._decoder.add(token_id)
        self._before_any -= 1
        if not news:
            return "", 0
        text, begins = self._tail + news, len(self._tail)
        self._parts.append(news)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        return text, begins

    def add(self, token_id: int) -> StopMatch | None:
        """Take the next id; return the match that it completes, the one that ends first (of two, the longer)."""
        text, begins = self._take(token_id)
        if self._before_any >= 0 or not text:
            return None
        best: tuple[int, int, str] | None = None
        for string in self._strings:
            start = text.find(string, max(0, begins - len(string) + 1))
            if start >= 0 and (best is None or (start + len(string), start) < best[:2]):
                best = start + len(string), start, string
        if best is None:
            return None
        return StopMatch(best[2], "".join(self._parts)[: best[1] - len(text)])

    def text(self) -> str:
        """Return the output's whole text, earlier output included."""
        return self._decoder.text()


class StopText:
    """The served model's tokenizer, loaded with the first request that needs it."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._content = files.get("tokenizer.json")
        self._tokenizer: Decodes | None = None
        self._failure: str | None = None if self._content is not None else "the model folder has no tokenizer.json"
        # The library with the service, so that no message makes it look for code; the tokenizer when somebody needs it.
        self._library: Any = importlib.import_module("tokenizers") if self._content is not None else None

    def refusal(self, strings: Sequence[str]) -> InvalidRequest | None:
        """Return why these stop strings cannot be matched here, or None. Loads the tokenizer."""
        for place, string in enumerate(strings):
            if UNDECODABLE in string:
                return InvalidRequest(
                    f"stop[{place}]={string!r} holds U+FFFD",
                    field="stop",
                    value=string,
                    limit="U+FFFD stands for bytes that are no text",
                    remedy="use stop_ids for such an end",
                )
        if self._tokenizer is None and self._failure is None:
            self._load()
        if self._failure is None:
            return None
        return InvalidRequest(
            "stop strings need the model's tokenizer",
            field="stop",
            value=strings[0],
            limit=self._failure,
            remedy="save tokenizer.json with the model and start the service again, or use stop_ids",
        )

    def _load(self) -> None:
        try:
            self._tokenizer = self._library.Tokenizer.from_buffer(self._content)
        except Exception as error:  # the loader raises plain Exception for whatever is wrong with the file
            self._failure = f"tokenizer.json cannot be loaded: {str(error)[:200]}"
        self._content = None

    def matcher(self, strings: Sequence[str], *, min_new_tokens: int, earlier: Sequence[int]) -> StopMatcher:
        """Return a matcher; the caller has asked for `refusal`."""
        assert self._tokenizer is not None, "a refusal was overlooked"
        return StopMatcher(self._tokenizer, strings, min_new_tokens=min_new_tokens, earlier=earlier)
