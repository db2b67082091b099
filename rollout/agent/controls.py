"""Control tokens in text that must stay text.

A tool result that spells `<|im_end|>` must never end a turn. Before a template renders, every control token's text inside
untrusted strings is swapped for a placeholder that no one can guess, and after it every one that strings only spell together
(`provenance.py`); then the stretch between the template's own
control tokens that holds a placeholder is encoded with control tokens off, and everything else exactly as the tokenizer does.
Text without such a spelling is never treated apart. One `ControlText` belongs to one tokenizer and is shared; the
placeholders belong to one conversation.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any, Literal

from rollout.agent.errors import UntrustedControlToken

# What a piece of text stands behind in its row: the row's beginning, a control token, or ordinary text.
Behind = Literal["nothing", "control", "text"]


class Placeholders:
    """The placeholders of one conversation: `mark` swaps control texts out, `restore` brings them back.

    The names hold 20 random digits, so no text of the conversation can hold one by chance or design; they are digits only and of
    one length, so that no escaping, trimming or change of case in a template touches them and none begins another.
    """

    __slots__ = ("_controls", "_names", "_nonce", "_texts")

    def __init__(self, controls: ControlText):
        self._controls = controls
        self._nonce = str(10**19 + secrets.randbelow(9 * 10**19))
        self._texts: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def _name(self, kind: int, number: int) -> str:
        return f"{self._nonce}{kind}{number:09}"

    def reply(self, number: int) -> str:
        """Return the name that stands for sampled reply `number`."""
        return self._name(1, number)

    def hide(self, text: str) -> str:
        """Return the placeholder that stands for `text`."""
        name = self._names.get(text)
        if name is None:
            name = self._names[text] = self._name(2, len(self._texts))
            self._texts[name] = text
        return name

    def mark(self, value: Any) -> Any:
        """Return `value` (a string, or lists and dicts of them) with every control token's text hidden."""
        if isinstance(value, str):
            marked = self._controls.pattern.sub(lambda match: self.hide(match.group()), value)
            return self.hide(value) if self._controls.yields_controls(marked) else marked
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def pattern(self) -> re.Pattern[str] | None:
        """Return what matches any placeholder made so far, None if there is none."""
        return re.compile("|".join(self._texts)) if self._texts else None

    def restore(self, text: str) -> str:
        """Return rendered text with the hidden texts back in place."""
        pattern = self.pattern()
        return text if pattern is None else pattern.sub(lambda match: self._texts[match.group()], text)


class ControlText:
    """One tokenizer's control tokens, and encoding with and without them.

    Every added token counts as control, special or not: `<tool_call>` and `<think>` are as binding as the end of a turn.
    """

    __slots__ = ("_full", "_leads", "_plain", "_strips", "contents", "ids", "normalizes", "pattern")

    def __init__(self, tokenizer: Any):
        from tokenizers import Tokenizer

        self._full = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.ids = frozenset(added)
        self.contents = sorted({token.content for token in added.values() if token.content}, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, self.contents)) if self.contents else "(?!)")
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        description = json.loads(tokenizer.to_str())
        self.normalizes = description.get("normalizer") is not None and any(token.normalized for token in added.values())
        description["added_tokens"] = []
        description["post_processor"] = None
        self._plain = Tokenizer.from_str(json.dumps(description))
        self._leads: dict[Behind, str] = {"nothing": "", "control": self._lead_behind_control(), "text": self._lead_behind_text()}

    def _lead_behind_text(self) -> str:
        """Return text that must go before a piece, so that it is encoded as it is behind ordinary text."""
        alone, lead, both = (self._plain.encode(text, add_special_tokens=False).ids for text in ("a", "\n", "\na"))
        return "" if both[len(lead) :] == alone else "\n"

    def _lead_behind_control(self) -> str:
        """Return text that must go before a piece, so that it is encoded as it is behind a control token."""
        alone = self._plain.encode("a", add_special_tokens=False).ids
        for token, (_, rstrip) in self._strips.items():
            inside = self._full.encode(token + "a", add_special_tokens=False).ids[1:]
            if token and not rstrip:
                return "" if inside == alone else "\n"
        return ""

    def yields_controls(self, text: str) -> bool:
        """Return whether `text` becomes a control id only after normalisation, which the pattern cannot see."""
        return self.normalizes and bool(self.encoded_controls(text))

    def encoded_controls(self, text: str) -> list[int]:
        """Return the control ids that `text` encodes to, in order."""
        return [i for i in self.encode_trusted(text) if i in self.ids]

    def encode_trusted(self, text: str, *, behind: Behind = "nothing") -> list[int]:
        """Return the ids of text that may hold control tokens and stands behind what is named; nothing is added at either end."""
        return self._piece(self._full, text, behind)

    def encode_plain(self, text: str, *, behind: Behind) -> list[int]:
        """Return the ids of text in which nothing is a control token and that stands behind what is named.

        Raises: UntrustedControlToken when the vocabulary leaves no other way to write the text.
        """
        ids = self._piece(self._plain, text, behind)
        if self.ids.isdisjoint(ids):
            return ids
        places: list[Behind] = [behind, *(["text"] * (len(text) - 1))]  # type: ignore[list-item]
        ids = [i for character, place in zip(text, places) for i in self._piece(self._plain, character, place)]
        if self.ids.isdisjoint(ids):
            return ids
        raise UntrustedControlToken(
            f"the text {text[:60]!r} encodes to a control id even character by character",
            field="content",
            value=text[:60],
            limit="tool and user text never yields control ids",
            remedy="replace these characters before you observe them",
        )

    def _piece(self, tokenizer: Any, text: str, behind: Behind) -> list[int]:
        """Return the ids of a piece: some tokenizers put a space before the first word of a text, but not inside it."""
        lead = self._leads[behind]
        if lead:
            before = tokenizer.encode(lead, add_special_tokens=False).ids
            ids = tokenizer.encode(lead + text, add_special_tokens=False).ids
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return tokenizer.encode(text, add_special_tokens=False).ids

    def encode_rendered(self, text: str, placeholders: Placeholders, *, behind: Behind = "nothing") -> list[int]:
        """Return the ids of rendered text behind what is named: the template's control tokens are control, the hidden ones are text."""
        hidden = placeholders.pattern()
        if hidden is None or not hidden.search(text):
            return self.encode_trusted(text, behind=behind)
        ids: list[int] = []
        clean_from = 0
        for start, end in self._plain_runs(text):
            if not hidden.search(text, start, end):
                continue
            if clean_from < start:
                ids += self.encode_trusted(text[clean_from:start], behind="control" if clean_from else behind)
            ids += self.encode_plain(placeholders.restore(text[start:end]), behind="control" if start else behind)
            clean_from = end
        if clean_from < len(text):
            ids += self.encode_trusted(text[clean_from:], behind="control" if clean_from else behind)
        return ids

    def _plain_runs(self, text: str) -> Iterable[tuple[int, int]]:
        """Yield the stretches between control tokens; whitespace that a control token swallows belongs to the token."""
        start, swallows = 0, False
        for match in [*self.pattern.finditer(text), None]:
            end = match.start() if match else len(text)
            run = text[start:end]
            first = start + (len(run) - len(run.lstrip()) if swallows else 0)
            lstrip, swallows = self._strips[match.group()] if match else (False, False)
            yield first, max(first, end - (len(run) - len(run.rstrip()) if lstrip else 0))
            start = match.end() if match else end
