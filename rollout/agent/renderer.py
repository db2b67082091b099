"""What a model's template adds around a sampled turn, known without rendering history again.

A `Renderer` is made once for a `ChatFormat`: the family whose texts agree with the model's own template on every probe, and what the
template does to earlier replies. `after_turn` answers only within what the probes showed; for anything else the conversation renders the
template in full and compares. Invariant: where a renderer answers, the template would have written the same text and no other history.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout.agent.errors import ChatFormatError
from rollout.agent.families import FAMILIES, Family, Piece, Render
from rollout.agent.learned_family import learned_families

Messages = Sequence[Mapping[str, Any]]

_NO_TAG = r"(?:(?!</?think>).)*"
_SOMETHING = r"(?=\s*(?!</?think>)\S)"
_THOUGHT = re.compile(rf"\s*<think>{_SOMETHING}{_NO_TAG}</think>{_SOMETHING}{_NO_TAG}", re.DOTALL)
_THOUGHT_OPENED = re.compile(rf"{_SOMETHING}{_NO_TAG}</think>{_SOMETHING}{_NO_TAG}", re.DOTALL)

_USER, _TOOL, _SYSTEM = ({"role": role, "content": text} for role, text in (("user", "Why not?"), ("tool", "42"), ("system", "Be kind.")))
_NAMED = {"role": "tool", "name": "add", "tool_call_id": "call12345", "content": ' {"a": [1, "é"]}\n'}
_KINDS: Mapping[str, tuple[Messages, ...]] = {
    "user": ([_USER], [{"role": "user", "content": "  two\n\nlines \n"}], [{"role": "user", "content": ""}], [_USER, _USER]),
    "tool": ([_TOOL], [_TOOL, _NAMED], [_NAMED, _TOOL, {"role": "tool", "content": ""}]),
    "system": ([_SYSTEM, _USER],),
}
_MIXED: tuple[Messages, ...] = ([_TOOL, _USER], [_USER, _TOOL], [_TOOL, _USER, _TOOL], [])
_PLAIN = ("Sure, that is 4.", "  a\nb  ", '{"name": "add"}', "<tool_call>\n{}\n</tool_call>", "x", "", " \n")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": []},
        },
    }
]
_LONG = 40
# No template changes digits, or has these by chance.
_DIGITS = "7108293546"
# Text that a template looks for in messages; some change what they write where a user says such a word.
_LOOKED_FOR = re.compile(
    r"""(?P<quote>['"])(?P<word>(?:(?!(?P=quote)).)+)(?P=quote)\s+(?:not\s+)?in\s"""
    r"""|(?:startswith|endswith|find|index|count|split|replace|partition)\(\s*(?P<mark>['"])(?P<text>(?:(?!(?P=mark)).)+)(?P=mark)"""
)
_MAX_LOOKED_FOR = 48

# What a reply is to a template: without thinking, thinking first and then an answer, or anything else.
ReplyShape = Literal["plain", "thought", "odd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """A proven family. `roles` are those that the template takes after a turn; `keeps_plain` says that replies without thinking stay as
    they are, `keeps_thinking` before which roles' messages replies with thinking do.
    """

    family: Family
    generation_prompt: str
    roles: frozenset[str]
    keeps_plain: bool
    keeps_thinking: frozenset[str]

    def after_turn(self, messages: Messages) -> list[Piece] | None:
        """Return what the template writes after a sampled turn, generation prompt included; None where that was not proven."""
        if not all(message.get("role") in self.roles for message in messages):
            return None
        pieces = self.family.after_turn(messages)
        return None if pieces is None else [*pieces, (self.generation_prompt, False)]

    def keeps(self, shapes: frozenset[ReplyShape], messages: Messages) -> bool:
        """Return whether a row whose replies have these shapes stays as it is when these messages follow."""
        if not self.keeps_plain or "odd" in shapes or not messages:
            return False
        return "thought" not in shapes or all(message.get("role") in self.keeps_thinking for message in messages)


def opens_thinking(prompt: str) -> bool:
    """Return whether a generation prompt leaves a thinking block open."""
    return prompt.count("<think>") > prompt.count("</think>")


def shape_of(reply: str, *, thinking_open: bool) -> ReplyShape:
    """Return `plain` for a reply without thinking, `thought` for one that thinks first and then answers, `odd` for all others."""
    if "think>" not in reply:
        return "odd" if thinking_open else "plain"
    return "thought" if (_THOUGHT_OPENED if thinking_open else _THOUGHT).fullmatch(reply) else "odd"


def prove_renderer(render: Render, template: str) -> Renderer | None:
    """Return the renderer of a template, None if no family agrees. Of several that do, that of the most roles, a written one first."""
    prompt, words = _generation_prompt(render), _looked_for(template)
    if prompt is None or len(words) > _MAX_LOOKED_FOR:
        return None
    family, roles = _best(render, prompt, FAMILIES)
    if not roles >= {"user", "tool"}:
        learned, its_roles = _best(render, prompt, [*learned_families(render)])
        family, roles = (learned, its_roles) if len(its_roles) > len(roles) else (family, roles)
    probes = [*_MIXED, *([{"role": role, "content": said}] for role in ("user", "tool") for said in _saying(words))]
    probes = [probe for probe in probes if all(message["role"] in roles for message in probe)]
    if "user" not in roles or not all(_agrees(render, family, prompt, probe) for probe in probes):
        return None
    thinking_open = opens_thinking(prompt)
    thought = "hmm\n</think>\n\nThat is 4." if thinking_open else "<think>\nhmm\n</think>\n\nThat is 4."
    keeps_thinking = frozenset(role for role in roles if _stays(render, family, prompt, role, (thought,)))
    plain = (*_PLAIN, *(said for said in _saying(words) if "think>" not in said))
    keeps_plain = bool(keeps_thinking) if thinking_open else all(_stays(render, family, prompt, role, plain) for role in roles)
    return Renderer(family=family, generation_prompt=prompt, roles=roles, keeps_plain=keeps_plain, keeps_thinking=keeps_thinking)


def shows(render: Render, role: str, *, after_turn: bool) -> bool:
    """Return whether a template writes what messages of a role say, after a turn or anywhere; one that refuses them says so itself."""
    message = {"role": role, "name": "add", "tool_call_id": "call12345", "content": _DIGITS}
    begun = [_USER, {"role": "assistant", "content": "R"}]
    rendered = []
    for talk in ([*begun, message], [*begun, message, *begun], [message, _USER])[: 2 if after_turn else 3]:
        with contextlib.suppress(ChatFormatError):
            rendered.append(render(talk))
    return not rendered or any(_DIGITS in text for text in rendered)


def _looked_for(template: str) -> list[str]:
    """Return the texts that a template looks for anywhere, each once."""
    found = (match.group("word") or match.group("text") for match in _LOOKED_FOR.finditer(template))
    return [*dict.fromkeys(text.replace("\\n", "\n") for text in found)]


def _saying(words: Sequence[str]) -> list[str]:
    """Return messages that say words: each at both ends, and all that are no thinking tags in the middle."""
    between = " ".join(word for word in words if "think>" not in word)
    return [*(f"{word} x {word}" for word in words), *([f"a {between} b"] if between else [])]


def _best(render: Render, prompt: str, families: Sequence[Family]) -> tuple[Family, frozenset[str]]:
    """Return the family that agrees with the template for the most roles, and these."""
    proven = [(family, _roles(render, family, prompt)) for family in families] or [(FAMILIES[0], frozenset[str]())]
    return max(proven, key=lambda one: len(one[1]))


def _roles(render: Render, family: Family, prompt: str) -> frozenset[str]:
    """Return the roles whose messages the template writes as the family does."""
    return frozenset(role for role, probes in _KINDS.items() if all(_agrees(render, family, prompt, probe) for probe in probes))


def _generation_prompt(render: Render) -> str | None:
    """Return what the template writes to ask for a reply, None if that depends on what it follows."""
    found = set()
    for talk in (
        [_USER],
        [_USER, {"role": "assistant", "content": "R"}, _USER],
        [_SYSTEM, _USER, {"role": "assistant", "content": "R"}, _TOOL],
    ):
        try:
            without, full = render(talk, add_generation_prompt=False), render(talk, add_generation_prompt=True)
        except ChatFormatError:
            continue
        found.add(full[len(without) :] if full.startswith(without) else None)
    return found.pop() if len(found) == 1 else None


def _agrees(render: Render, family: Family, prompt: str, new: Messages) -> bool:
    """Return whether the template writes `new` behind a reply as the family does, with tools and without, early and late."""
    pieces = family.after_turn(new)
    if pieces is None:
        return False
    after = "".join(text for text, _ in pieces) + prompt
    begun = [_USER, {"role": "assistant", "content": "Earlier."}]
    try:
        for tools, talk in ((None, [_USER]), (_TOOLS, [_SYSTEM, *begun * 3, _USER])):
            if not render([*talk, {"role": "assistant", "content": "Reply."}, *new], tools=tools).endswith("Reply." + after):
                return False
    except ChatFormatError:
        return False
    return True


def _stays(render: Render, family: Family, prompt: str, role: str, replies: Sequence[str]) -> bool:
    """Return whether rows of these replies, each followed by a message of `role`, stay as they were through a long conversation."""
    new = [*_KINDS[role][0]]
    pieces = family.after_turn(new)
    assert pieces is not None, "the role was proven before"
    after = "".join(text for text, _ in pieces) + prompt
    talk: list[Mapping[str, Any]] = [_SYSTEM, _USER]
    try:
        row = render(talk)
        for number in range(_LONG):
            reply = replies[number % len(replies)]
            row += reply + after
            talk += [{"role": "assistant", "content": reply}, *new]
            if number in (1, _LONG - 1) and "".join(render(talk).split()) != "".join(row.split()):
                return False
    except ChatFormatError:
        return False
    return True
