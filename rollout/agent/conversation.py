"""What the environment adds around sampled turns, as ids, without ever encoding what was sampled.

    rendered now = the row's text + the last reply + what the template adds after it       (replies: decoded to compare only)
    the row      = the row's ids  + sampled ids    + encode(what the template adds)

Where the model's template is of a known family and leaves the row's replies as they are (`renderer.py`), what it adds is written by the
family's renderer. Otherwise the whole conversation is rendered again. If it begins with the row's text (up to whitespace: some templates
trim replies), the rest is the end of turn, the separator, the new messages and the generation prompt, and only this is
encoded. Otherwise the template rewrote history (dropped thinking, added empty think blocks): the conversation forks, and the
new row's prompt is the rewritten history, in which what survives of a reply keeps its sampled ids. A format with `history="append"` never
forks: what the template adds after a turn is appended, whatever it would make of earlier ones. After 64
turns, 128, 256 and so on a family's renderer is compared with the full rendering again, which counts from where they part.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.agent.chat import ChatFormat, Message
from rollout.agent.controls import Behind
from rollout.agent.errors import ChatFormatError
from rollout.agent.families import Piece
from rollout.agent.renderer import ReplyShape, shape_of

# Beyond the turns that the proof of a renderer plays (`renderer.py`).
FIRST_COMPARISON = 64


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


@dataclass(frozen=True, slots=True)
class _Part:
    """Characters start to end of a reply's text."""

    reply: _Reply
    start: int
    end: int


class Conversation:
    """Messages and sampled replies of one episode, and the text of its current row up to the last reply.

    `start` (after `add_messages` and `add_reply` for what is there already), then `add_reply` and `extend` in turn. One owner: the episode.
    """

    __slots__ = ("_format", "_messages", "_placeholders", "_proven", "_replies", "_row_text", "_shapes", "_thinking_open", "_tools")

    def __init__(self, chat_format: ChatFormat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None):
        self._format = chat_format
        self._placeholders = chat_format.placeholders()
        self._messages = chat_format.mark(messages, self._placeholders)
        self._tools = self._placeholders.mark(list(tools)) if tools else None
        self._proven = True
        self._replies: list[_Reply] = []
        self._row_text: list[str] = []
        self._shapes: set[ReplyShape] = set()
        self._thinking_open = chat_format.opens_thinking

    def start(self) -> np.ndarray:
        """Return the ids of the first prompt, int32 [n]. Raises: ChatFormatError, UntrustedControlToken."""
        text = self._render(self._messages)
        self._row_text = [text]
        if not self._replies:
            return self._encode(text, behind="nothing")
        self._shapes = self._thinking_in(text)
        return self._rewritten(self._messages, text)

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Add messages before `start`: a conversation that goes on from an earlier one, with replies of it in between."""
        self._messages += self._format.mark(messages, self._placeholders)

    def drop_reply(self) -> None:
        """Take the last sampled turn back; nothing was said after it."""
        dropped = self._replies.pop()
        del self._messages[dropped.place :]

    def add_reply(self, ids: np.ndarray, *, end_id: int | None) -> str:
        """Take a sampled turn and return its text; `end_id`, its last id if that ended it, is no part of the text."""
        inner = ids[:-1] if end_id is not None else ids
        text = self._format.decode(inner)
        self._replies.append(_Reply(len(self._messages), inner, text, end_id))
        self._messages.append({"role": "assistant", "content": text})
        self._shapes.add(shape_of(text, thinking_open=self._thinking_open))
        return text

    def extend(self, messages: Sequence[Message]) -> Continuation:
        """Add what the environment says after the last turn. Raises: ChatFormatError (nothing has changed then)."""
        marked = self._format.mark(messages, self._placeholders, after_turn=True)
        grown = self._messages + marked
        added = self._added(marked)
        text = None
        compares = added is not None and self._compares()
        if added is None or compares:
            try:
                text = self._render(grown)
            except ChatFormatError as refused:
                added = added or self._added_to_refused(marked, refused)
        if text is None:
            assert added is not None, "what follows the last reply is known"
            ids, forks = self._without_end(self._encode(added)), False
            self._row_text += [self._replies[-1].text, added]
        else:
            reply = self._replies[-1].text if self._replies else ""
            rest = _rest(text, "".join(self._row_text), reply, self._format.end_of_turn)
            forks = rest is None
            if compares and (rest is None or rest.split() != (added or "").split()):
                self._proven = False
            ids = self._rewritten(grown, text) if rest is None else self._without_end(self._encode(rest))
            self._row_text = [text]
            self._shapes = (set() if rest is None else self._shapes) | self._thinking_in(text if rest is None else rest)
        self._messages = grown
        return Continuation(ids=ids, forks=forks)

    def _added(self, marked: Sequence[Message]) -> str | None:
        """Return what the template adds where that is known without rendering history, None where it is not."""
        renderer = self._format.renderer
        if not self._replies:
            return None
        appends = self._format.history == "append"
        if renderer is not None and (appends or (self._proven and renderer.keeps(frozenset(self._shapes), marked))):
            pieces = renderer.after_turn(marked)
            if pieces is not None:
                return self._format.join_pieces(self._of_untrusted(pieces, marked), self._placeholders)
        return self._added_to_any_reply(marked) if appends else None

    def _compares(self) -> bool:
        """Return whether what a renderer knows is compared with a full rendering after this turn."""
        count = len(self._replies)
        return self._format.history == "template" and count >= FIRST_COMPARISON and count & (count - 1) == 0

    def _of_untrusted(self, pieces: Sequence[Piece], marked: Sequence[Message]) -> list[Piece]:
        """Return the pieces with contents of trusted roles counted as the template's own words."""
        trusted = iter([self._format.trusts(message) for message in marked])
        return [(text, content and not next(trusted)) for text, content in pieces]

    def _added_to_any_reply(self, marked: Sequence[Message]) -> str:
        """Return what the template writes of `marked` behind a reply, whichever it is."""
        name = self._placeholders.reply(0)
        talk = [{"role": "user", "content": "."}, {"role": "assistant", "content": name}, *marked]
        _, found, added = self._render(talk).partition(name)
        if not found or name in added:
            raise _unusable("writes a reply not at all or more than once")
        return added

    def _added_to_refused(self, marked: Sequence[Message], refused: ChatFormatError) -> str:
        """Return what the template adds after the last turn where it takes no such history as a whole: some want calls that are no text.

        Raises: what it refused the whole with, where it does not take the last exchange either.
        """
        try:
            if self._replies:
                return self._added_to_any_reply(marked)
        except ChatFormatError:
            pass  # the first refusal says more
        raise refused

    def _without_end(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids without the end of turn that the policy sampled itself."""
        end_id = self._replies[-1].end_id if self._replies else None
        return ids[1:] if end_id is not None and len(ids) and int(ids[0]) == end_id else ids

    def _thinking_in(self, rendered: str) -> set[ReplyShape]:
        """Return what thinking in text that the template wrote means for the row: that only a full rendering can say what stays of it."""
        renderer = self._format.renderer
        own = rendered.removesuffix(renderer.generation_prompt) if renderer else rendered
        return {"odd"} if "think>" in own else set()

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

    def _encode(self, text: str, *, behind: Behind = "text") -> np.ndarray:
        return self._format.encode_rendered(text, self._placeholders, behind=behind)

    def _rewritten(self, messages: list[dict[str, Any]], text: str) -> np.ndarray:
        """Return the ids of rewritten history: the template's text encoded, surviving replies by their sampled ids."""
        try:
            outside, present = self._around(messages, [_Part(reply, 0, len(reply.text)) for reply in self._replies])
            kept = _between(text, outside)
        except ChatFormatError:
            # The template treats replies with thinking unlike those without, so what stands in for them must think as they do.
            outside, present = self._around(messages, [part for reply in self._replies for part in _parts(reply)])
            kept = _between(text, outside)
        ids = [self._encode(outside[0], behind="nothing")]
        for part, found, after in zip(present, kept, outside[1:]):
            ids += [self._surviving_ids(part, found), self._encode(after)]
        return np.concatenate(ids)

    def _around(self, messages: list[dict[str, Any]], parts: Sequence[_Part]) -> tuple[list[str], list[_Part]]:
        """Return the rendered texts before, between and after parts of replies, and the parts that the template shows at all."""
        names = [self._placeholders.reply(number) for number in range(len(parts))]
        stand_ins = list(messages)
        for reply in self._replies:
            stand_ins[reply.place] = {"role": "assistant", "content": _with_names(reply, parts, names)}
        rest = self._render(stand_ins)
        outside: list[str] = []
        present: list[_Part] = []
        for name, part in zip(names, parts):
            before, found, after = rest.partition(name)
            if found:
                outside.append(before)
                present.append(part)
                rest = after
        outside.append(rest)
        if any(name in text for name in names for text in outside):
            raise _unusable("rewrites history and writes a reply more than once or out of order")
        return outside, present

    def _surviving_ids(self, part: _Part, kept: str) -> np.ndarray:
        """Return ids for what a template kept of a part of a reply."""
        reply, own = part.reply, part.reply.text[part.start : part.end]
        if "".join(kept.split()) == "".join(own.split()):
            return reply.ids if own == reply.text else self._slice(reply, part.start, part.end)
        core = kept.strip()
        at = own.rfind(core)
        if at < 0:
            shared = _common_suffix(kept, own)
            core, at = kept[len(kept) - shared :], len(own) - shared
        at += part.start
        lead, _, trail = kept.rpartition(core) if core else (kept, "", "")
        parts = [self._encode(lead), self._slice(reply, at, at + len(core)), self._encode(trail)]
        return np.concatenate(parts)

    def _slice(self, reply: _Reply, start: int, end: int) -> np.ndarray:
        """Return the sampled ids of characters start to end; a token cut by either edge is encoded anew, nothing else is."""
        if start >= end:
            return np.empty(0, np.int32)
        places = range(len(reply.ids) + 1)
        first = bisect_left(places, start, key=lambda i: len(self._format.decode(reply.ids[:i])))
        # Of the places in a character that ends here and has several tokens, the one behind it: all of them decode to as many characters.
        behind = bisect_left(places, start + 1, key=lambda i: len(self._format.decode(reply.ids[:i]))) - 1
        first = max(first, behind)
        last = max(first, bisect_left(places, end + 1, key=lambda i: len(self._format.decode(reply.ids[:i]))) - 1)
        wanted, whole = reply.text[start:end], self._format.decode(reply.ids[first:last])
        lead, _, trail = wanted.partition(whole) if whole and whole in wanted else (wanted, "", "")
        middle = reply.ids[first:last] if whole and whole in wanted else np.empty(0, np.int32)
        return np.concatenate([self._format.fragment_ids(lead), middle, self._format.fragment_ids(trail)])


def _parts(reply: _Reply) -> list[_Part]:
    """Return what stands before, between and behind the thinking tags of a reply, without whitespace at the edges."""
    edges = [0, *(place for tag in re.finditer("</?think>", reply.text) for place in tag.span()), len(reply.text)]
    parts = []
    for start, end in zip(edges[::2], edges[1::2]):
        text = reply.text[start:end]
        if text.strip():
            parts.append(_Part(reply, start + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())))
    return parts


def _with_names(reply: _Reply, parts: Sequence[_Part], names: Sequence[str]) -> str:
    """Return a reply's text with names in place of its parts."""
    shown, at = [], 0
    for part, name in zip(parts, names):
        if part.reply is reply:
            shown += [reply.text[at : part.start], name]
            at = part.end
    return "".join([*shown, reply.text[at:]])


def _rest(text: str, row_text: str, reply: str, end: str | None) -> str | None:
    """Return what follows the row and its last reply in `text`, comparing up to whitespace; None if it does not begin so.

    Whitespace at the reply's end that the template wrote in its own way, before `end`, is the reply's. A reply of whitespace alone has no
    other end: where the template writes anything before `end`, as an empty think block, that stands before the reply and not behind it.
    """
    before = row_text + reply
    if end and not reply.strip():
        rest = _after(text, before)
        return rest.lstrip() if rest is not None and rest.lstrip().startswith(end) else None
    if text.startswith(before):
        return text[len(before) :]
    whole = text.startswith(row_text)
    rest = _after(text[len(row_text) :], reply) if whole else _after(text, before)
    blank = reply[len(reply.rstrip()) :] if whole else before[len(before.rstrip()) :]
    if rest is None or not blank:
        return rest
    return rest.lstrip() if end and rest.lstrip().startswith(end) else rest.removeprefix(blank)


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
        raise _unusable("rewrites history and changes its own text with the content of a reply")
    kept: list[str] = []
    at = len(first)
    for number, after in enumerate(others):
        found = text.find(after, at) if number < len(others) - 1 else len(text) - len(after)
        if found < at:
            raise _unusable("rewrites history and changes its own text with the content of a reply")
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
        f"the chat template {what}",
        field="chat_template",
        limit="a new row needs each reply at most once, in its place, in text that does not depend on it",
        remedy="use a template that keeps history, or one episode for each turn",
    )
