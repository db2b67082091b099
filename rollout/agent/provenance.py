"""Who wrote which part of a rendered conversation: the template and trusted roles, or someone untrusted.

Control texts inside one untrusted string are hidden before rendering; a template may still join several strings, or its own
text and a string, into one. So each conversation is rendered a second time with a stand-in for every untrusted character. It has
the same length, and whitespace, quotes and the words of the message format stay, so templates trim, escape and branch as before.
Control texts that the second rendering has too are the template's; all others in the first are hidden now, as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.agent.errors import UntrustedControlToken

if TYPE_CHECKING:
    from rollout.agent.controls import ControlText, Placeholders

# Words by which templates tell messages and parts apart; some write a control token around them (`<|user|>`).
_ROLES = {"user", "tool", "function", "system", "developer", "assistant", "ipython", "observation", "environment"}
_TYPES = {"text", "image", "image_url", "video", "audio", "input_text", "object", "string", "integer", "number", "boolean", "array", "null"}
_KEYS = {"role", "content", "name", "type", "tools", "tool_calls", "tool_call_id", "id"}
_SCHEMA_KEYS = {"parameters", "properties", "required", "arguments", "description", "items", "enum"}
_FORMAT_WORDS = frozenset(_ROLES | _TYPES | _KEYS | _SCHEMA_KEYS)
_WORD = re.compile(r"[\w./-]+")
_ANY = re.compile(r"""[^\s"'\\\x00-\x1f]+""")
_PUNCTUATION = re.compile(r"""[^\w\s"'\\/\x00-\x1f]+""")


class StandIns:
    """Copies of values whose untrusted characters are replaced by `mark`, one for one.

    With `keep_words`, letters of longer texts stay, for templates that look for a word in what a user says.
    """

    __slots__ = ("_contents", "_keep_words", "mark")

    def __init__(self, contents: Iterable[str], *, keep_words: bool):
        self._contents = "\0".join(contents)
        self._keep_words = keep_words
        self.mark = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in self._contents)

    def of(self, value: Any, *, structure: bool = False) -> Any:
        """Return `value` (strings, or lists and dicts of them) marked; `structure` says that templates branch on it."""
        if isinstance(value, str):
            return self._string(value, structure=structure)
        if isinstance(value, dict):
            return {self.of(key, structure=True): self.of(item, structure=key in ("role", "type")) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.of(item, structure=structure) for item in value]
        if value is None or isinstance(value, (bool, int, float)):
            return value
        return self._string(str(value), structure=False)  # bytes, arrays, objects: what a template writes of them

    def _string(self, value: str, *, structure: bool) -> str:
        within_control = value in self._contents
        if structure and _WORD.fullmatch(value) and (value in _FORMAT_WORDS or not within_control):
            return value
        replaced = _PUNCTUATION if self._keep_words and not within_control else _ANY
        return replaced.sub(lambda match: self.mark * len(match.group()), value)


def untrusted_places(text: str, marked: str, mark: str) -> np.ndarray | None:
    """Return bool [len(text)], true where `marked` has the mark; None if the two differ anywhere else."""
    if len(text) != len(marked):
        return None
    codes, other = (np.frombuffer(one.encode("utf-32-le", "surrogatepass"), "<u4") for one in (text, marked))
    places = other == ord(mark)
    return places if bool(np.all(places | (codes == other))) else None


def hide_joined(text: str, marked: str, untrusted: np.ndarray, controls: ControlText, placeholders: Placeholders) -> str:
    """Return rendered text in which every control text that the template did not write alone is hidden.

    Raises: UntrustedControlToken when untrusted text runs into a control text of the template and they cannot be told apart.
    """
    parts: list[str] = []
    at = 0
    for match in [*controls.pattern.finditer(marked), None]:
        end = match.start() if match else len(text)
        parts.append(_hide_run(text[at:end], untrusted[at:end], controls, placeholders))
        if match:
            parts.append(match.group())
            at = match.end()
    hidden = "".join(parts)
    if controls.pattern.findall(hidden) != controls.pattern.findall(marked):
        raise _inseparable()
    return hidden


def _hide_run(run: str, untrusted: np.ndarray, controls: ControlText, placeholders: Placeholders) -> str:
    if not untrusted.any():
        return run
    hidden = controls.pattern.sub(lambda match: placeholders.hide(match.group()), run)
    if hidden != run or not controls.yields_controls(run):
        return hidden if not controls.yields_controls(hidden) else placeholders.hide(placeholders.restore(hidden))
    first, last = np.flatnonzero(untrusted)[[0, -1]]
    return run[:first] + placeholders.hide(placeholders.restore(run[first : last + 1])) + run[last + 1 :]


def refuse_unless_same(text: str, renderings: Sequence[str], controls: ControlText) -> None:
    """Refuse text whose parts cannot be told apart, unless its control texts do not depend on what is untrusted.

    Raises: UntrustedControlToken.
    """
    find = controls.encoded_controls if controls.normalizes else controls.pattern.findall
    if not any(find(other) == find(text) for other in renderings):
        raise _inseparable()


def _inseparable() -> UntrustedControlToken:
    return UntrustedControlToken(
        "the chat template changes its control tokens with what untrusted messages say",
        field="messages",
        limit="tool and user text never yields control ids",
        remedy="give each message's content as one plain string, or use a template that only copies contents",
    )
