"""What the environment adds around sampled turns, as ids, without ever encoding what was sampled.

    rendered now = the row's text + the last reply + what the template adds after it       (replies: decoded to compare only)
    the row      = the row's ids  + sampled ids    + encode(what the template adds)

After each turn the whole conversation is rendered again. If it begins with the row's text (up to whitespace: some templates
trim replies), the rest is the end of turn, the separator, the new messages and the generation prompt, and only this is
encoded. Otherwise the template rewrote history (dropped thinking, added empty think blocks): the conversation forks, and the
new row's prompt is the rewritten history, in which what survives of a reply keeps its sampled ids.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.agent.chat import ChatFormat, Message
from rollout.agent.errors import ChatFormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Environment ids int32 [n]: for the row, or for a new row when the template rewrote history (`forks`)."""

    ids: np.ndarray
    forks: bool


@dataclass(frozen=True, slots=True)
class _Reply:
    place: int  # index in the list of messages
    ids: np.ndarray  # without the id that ended the turn
    text: str
    end_id: int | None


class Conversation:
    """Messages and sampled replies of one episode, and the text of its current row up to the last reply.

    `start`, then `add_reply` and `extend` in turn. One owner: the episode.
    """

    __slots__ = ("_format", "_messages", "_placeholders", "_replies", "_row_text", "_tools")

    def __init__(self, chat_format: ChatFormat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None):
        self._format = chat_format
        self._placeholders = chat_format.placeholders()
        self._messages = chat_format.mark(messages, self._placeholders)
        self._tools = self._placeholders.mark(list(tools)) if tools else None
        self._replies: list[_Reply] = []
        self._row_text = ""

    def start(self) -> np.ndarray:
        """Return the ids of the first prompt, int32 [n]. Raises: ChatFormatError, UntrustedControlToken."""
        self._row_text = self._render(self._messages)
        return self._encode(self._row_text)

    def add_reply(self, ids: np.ndarray, *, end_id: int | None) -> str:
        """Take a sampled turn and return its text; `end_id`, its last id if that ended it, is no part of the text."""
        inner = ids[:-1] if end_id is not None else ids
        text = self._format.decode(inner)
        self._replies.append(_Reply(len(self._messages), inner, text, end_id))
        self._messages.append({"role": "assistant", "content": text})
        return text

    def extend(self, messages: Sequence[Message]) -> Continuation:
        """Add what the environment says after the last turn. Raises: ChatFormatError (nothing has changed then)."""
        grown = self._messages + self._format.mark(messages, self._placeholders)
        text = self._render(grown)
        last = self._replies[-1] if self._replies else None
        added = _rest(text, self._row_text, last.text if last else "")
        forks = added is None
        ids = self._rewritten(grown, text) if added is None else self._encode(added)
        if not forks and last and last.end_id is not None and len(ids) and int(ids[0]) == last.end_id:
            ids = ids[1:]  # the policy sampled it
        self._messages, self._row_text = grown, text
        return Continuation(ids=ids, forks=forks)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages so far; a reply's content is its text, for display and for environments."""
        return [{key: self._shown(value) for key, value in message.items()} for message in self._messages]

    def _shown(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._placeholders.restore(value)
        if isinstance(value, dict):
            return {key: self._shown(item) for key, item in value.items()}
        return [self._shown(item) for item in value] if isinstance(value, list) else value

    def _render(self, messages: Sequence[Message]) -> str:
        return self._format.render_marked(messages, self._placeholders, tools=self._tools)

    def _encode(self, text: str) -> np.ndarray:
        return self._format.encode_rendered(text, self._placeholders)

    def _rewritten(self, messages: list[dict[str, Any]], text: str) -> np.ndarray:
        """Return the ids of rewritten history: the template's text encoded, surviving replies by their sampled ids."""
        outside, present = self._around_replies(messages)
        parts = [self._encode(outside[0])]
        for reply, kept, after in zip(present, _between(text, outside), outside[1:]):
            parts += [self._surviving_ids(reply, kept), self._encode(after)]
        return np.concatenate(parts)

    def _around_replies(self, messages: list[dict[str, Any]]) -> tuple[list[str], list[_Reply]]:
        """Return the rendered texts before, between and after the replies, and the replies that the template shows at all."""
        names = [self._placeholders.reply(number) for number in range(len(self._replies))]
        stand_ins = list(messages)
        for name, reply in zip(names, self._replies):
            stand_ins[reply.place] = {"role": "assistant", "content": name}
        rest = self._render(stand_ins)
        outside: list[str] = []
        present: list[_Reply] = []
        for name, reply in zip(names, self._replies):
            before, found, after = rest.partition(name)
            if found:
                outside.append(before)
                present.append(reply)
                rest = after
        outside.append(rest)
        if any(name in text for name in names for text in outside):
            raise _unusable("writes a reply more than once or out of order")
        return outside, present

    def _surviving_ids(self, reply: _Reply, kept: str) -> np.ndarray:
        """Return ids for what a template kept of a reply."""
        if "".join(kept.split()) == "".join(reply.text.split()):
            return reply.ids
        core = kept.strip()
        at = reply.text.rfind(core)
        if at < 0:
            shared = _common_suffix(kept, reply.text)
            core, at = kept[len(kept) - shared :], len(reply.text) - shared
        lead, _, trail = kept.rpartition(core) if core else (kept, "", "")
        parts = [self._encode(lead), self._slice(reply, at, at + len(core)), self._encode(trail)]
        return np.concatenate(parts)

    def _slice(self, reply: _Reply, start: int, end: int) -> np.ndarray:
        """Return the sampled ids of characters start to end; a token cut by either edge is encoded anew, nothing else is."""
        if start >= end:
            return np.empty(0, np.int32)
        places = range(len(reply.ids) + 1)
        first = bisect_left(places, start, key=lambda i: len(self._format.decode(reply.ids[:i])))
        last = max(first, bisect_left(places, end + 1, key=lambda i: len(self._format.decode(reply.ids[:i]))) - 1)
        wanted, whole = reply.text[start:end], self._format.decode(reply.ids[first:last])
        lead, _, trail = wanted.partition(whole) if whole and whole in wanted else (wanted, "", "")
        middle = reply.ids[first:last] if whole and whole in wanted else np.empty(0, np.int32)
        return np.concatenate([self._format.fragment_ids(lead), middle, self._format.fragment_ids(trail)])


def _rest(text: str, row_text: str, reply: str) -> str | None:
    """Return what follows the row and its last reply in `text`, comparing up to whitespace; None if it does not begin so."""
    if text.startswith(row_text + reply):
        return text[len(row_text) + len(reply) :]
    rest = _after(text[len(row_text) :], reply) if text.startswith(row_text) else _after(text, row_text + reply)
    blank = reply[len(reply.rstrip()) :]
    return rest[len(blank) :] if rest is not None and rest.startswith(blank) else rest


def _after(text: str, beginning: str) -> str | None:
    """Return `text` after `beginning` and the whitespace inside it, None if other characters differ."""
    wanted = "".join(beginning.split())
    if not "".join(text.split()).startswith(wanted):
        return None
    solid = re.compile(r"\S")
    at = 0
    for _ in wanted:
        at = solid.search(text, at).end()  # type: ignore[union-attr]
    return text[at:]


def _between(text: str, outside: Sequence[str]) -> list[str]:
    """Return what stands in `text` between the given outside texts, in order."""
    first, *others = outside
    if not text.startswith(first) or not text.endswith(outside[-1]):
        raise _unusable("changes its own text with the content of a reply")
    kept: list[str] = []
    at = len(first)
    for number, after in enumerate(others):
        found = text.find(after, at) if number < len(others) - 1 else len(text) - len(after)
        if found < at:
            raise _unusable("changes its own text with the content of a reply")
        kept.append(text[at:found])
        at = found + len(after)
    return kept


def _common_suffix(left: str, right: str) -> int:
    length = 0
    for one, other in zip(reversed(left), reversed(right)):
        if one != other:
            break
        length += 1
    return length


def _unusable(what: str) -> ChatFormatError:
    return ChatFormatError(
        f"the chat template rewrites history and {what}",
        field="chat_template",
        limit="a new row needs each reply at most once, in its place, in text that does not depend on it",
        remedy="use a template that keeps history, or one episode for each turn",
    )
