"""Whether a model's chat template only ever appends: played on the CPU, before a run, with the code that episodes use.

    for each scenario: start, then (reply, messages)*      reply ids are spelled character by character, as no encoder would
        the row = earlier ids + reply ids + what the template adds          -> it appends
        the template wrote earlier turns anew                               -> it forks (a new row, trained on its own)
        it takes no such conversation                                       -> refused

Each scenario is checked against a rendering of the whole conversation by the template itself.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.agent.chat import ChatFormat
from rollout.agent.conversation import Conversation
from rollout.agent.errors import AgentError, ChatFormatError
from rollout.agent.renderer import opens_thinking
from rollout.environment_report import Finding

Messages = list[dict[str, Any]]
_USER: Messages = [{"role": "user", "content": "And then?"}]
_TOOL: Messages = [{"role": "tool", "name": "add", "content": '{"sum": 4}'}]
_SCHEMA_TEXT = "Add two numbers."
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": _SCHEMA_TEXT,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    },
}
_RANDOM_CONVERSATIONS = 25
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A conversation to play: what the policy says in turn, what follows each reply, and whether the policy ends its turns itself."""

    name: str
    replies: Sequence[str]
    observations: Sequence[Messages]
    ends: bool = True
    tools: bool = False


_KEEP = 'pass history="append" to keep every turn in one row, or use a template that keeps history'
_REPORT = "report this template: records of it cannot be trusted"
_TELL = "describe the tools and the form of a call in the system message, or use a template that renders tools"
_TEXT = "The sum is 4.", "That is\n\nall: {4}", "Sure."
_CALL = 'Let me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 3}}\n</tool_call>'
_THOUGHT = "one and three\n</think>\n\nThe sum is 4."


def _scenarios(thinking_open: bool) -> list[Scenario]:
    thought = _THOUGHT if thinking_open else "<think>\n" + _THOUGHT
    plain = (thought,) if thinking_open else _TEXT
    call = f"{thought}\n{_CALL}" if thinking_open else _CALL
    cut = "one and" if thinking_open else "The sum"
    return [
        Scenario(name="chat", replies=plain, observations=[_USER] * 4),
        Scenario(name="tool loop", replies=[call], observations=[_TOOL] * 3, tools=True),
        Scenario(name="several results", replies=[call], observations=[_TOOL * 3, _TOOL * 2], tools=True),
        Scenario(name="results, then a user", replies=[call], observations=[_TOOL + _USER, _TOOL, _USER], tools=True),
        Scenario(name="thinking in a tool loop", replies=[thought], observations=[_TOOL] * 3, tools=True),
        Scenario(name="thinking before a user", replies=[thought], observations=[_USER] * 3),
        Scenario(name="turns cut by a budget", replies=[cut], observations=[_USER, _USER], ends=False),
        Scenario(name="whitespace at the edges", replies=["  4 \n\n", "\n4"], observations=[_USER] * 3),
    ]


def template_findings(
    folder: str | Path, *, history: str = "template", template_kwargs: Mapping[str, Any] | None = None
) -> tuple[bool, list[Finding]]:
    """Return whether the template of a model folder only appends, and what was found. Raises: ChatFormatError."""
    if not Path(folder).is_dir():
        raise ChatFormatError(
            f"{os.fspath(folder)} is not a folder",
            field="template",
            value=os.fspath(folder),
            limit="tokenizer.json and the chat template are read from it",
            remedy="name the folder of a downloaded model",
        )
    chat = ChatFormat.from_folder(folder, history=history, template_kwargs=template_kwargs)
    chat.render(_USER)
    prompt = chat.render(_USER).removeprefix(chat.render(_USER, add_generation_prompt=False))
    findings = [_about_family(chat), _about_end(chat), _about_tools(chat), _finding("tool calls", None, f"read as {chat.call_form}")]
    played = [_played(chat, scenario) for scenario in _scenarios(opens_thinking(prompt))]
    findings += [*played, _untrusted(chat), _random_conversations(chat, thinking_open=opens_thinking(prompt))]
    return all(finding.ok is not False for finding in findings) and played[0].ok is True, findings


def _finding(name: str, ok: bool | None, value: str, remedy: str | None = None) -> Finding:
    return Finding(name=name, ok=ok, value=value, remedy=remedy)


def _about_family(chat: ChatFormat) -> Finding:
    if chat.renderer is None:
        return _finding("family", None, "none that is known: each turn renders the whole conversation")
    return _finding("family", None, f"{chat.renderer.family.name}, proven for the roles {', '.join(sorted(chat.renderer.roles))}")


def _about_end(chat: ChatFormat) -> Finding:
    value = "the template writes none" if chat.end_of_turn is None else f"{chat.end_of_turn} ({chat.end_of_turn_id})"
    return _finding("end of turn", None, value)


def _about_tools(chat: ChatFormat) -> Finding:
    """Return whether the model is told of tools: not whether it appends, so a template that leaves them out does not fail."""
    name, system = "tools", {"role": "system", "content": "Be brief."}
    told = {}
    for lead, start in (("", _USER), (" behind a system message", [system, *_USER])):
        try:
            told[lead] = _SCHEMA_TEXT in chat.render(start, tools=[_SCHEMA]) and _SCHEMA_TEXT not in chat.render(start)
        except ChatFormatError:
            continue  # such a conversation is refused, with tools or altogether
    if not told:
        return _finding(name, None, "the template takes none", _TELL)
    if not any(told.values()):
        return _finding(name, None, "ignored: the prompt describes no tool, so the model is not told of them", _TELL)
    if not all(told.values()):
        (lead,) = [lead for lead, heard in told.items() if not heard]
        return _finding(name, None, f"ignored{lead or ' without a system message'}: the prompt describes no tool there", _TELL)
    return _finding(name, True, "the template tells the model of them")


def _spelled(chat: ChatFormat, text: str) -> np.ndarray:
    """Return ids of a text, each character on its own; as the tokenizer encodes it where that does not spell the text."""
    controls = "|".join(map(re.escape, chat.control_texts)) or "(?!)"
    ids = [np.empty(0, np.int32)]
    for place, part in enumerate(re.split(f"({controls})", text)):
        ids += [chat.rendered_ids(part)] if place % 2 else [chat.fragment_ids(character) for character in part]
    spelled = np.concatenate(ids)
    return spelled if chat.decode(spelled) == text else chat.rendered_ids(text)


def _played(chat: ChatFormat, scenario: Scenario) -> Finding:
    start: Messages = [{"role": "user", "content": "What is 1 + 3?"}]
    conversation = Conversation(chat, start, [_SCHEMA] if scenario.tools else None)
    taken = ""
    try:
        row = conversation.start()
        for number, messages in enumerate(scenario.observations):
            reply = scenario.replies[number % len(scenario.replies)]
            before = chat.decode(row)
            end = chat.end_of_turn_id if scenario.ends else None
            ids = _spelled(chat, reply)
            sampled = ids if end is None else np.append(ids, np.int32(end))
            conversation.add_reply(sampled, end_id=end)
            added = conversation.extend(messages)
            if added.forks:
                what = _difference(before + reply, chat.decode(added.ids))
                return _finding(scenario.name, False, f"forks after turn {number + 1}: {what}", _KEEP)
            row = np.concatenate([row, sampled, added.ids])
            try:
                wanted = chat.render(conversation.messages, tools=[_SCHEMA] if scenario.tools else None)
            except ChatFormatError:
                taken = "; the template takes no such history as a whole, only its last exchange"
                continue
            if chat.history == "template" and _solid(chat.decode(row)) != _solid(wanted):
                what = _difference(chat.decode(row), wanted)
                return _finding(scenario.name, False, f"differs from the template after turn {number + 1}: {what}", _REPORT)
    except AgentError as error:
        return _finding(scenario.name, None, f"refused: {error.what}")
    return _finding(scenario.name, True, f"appends, {len(scenario.observations)} turns{taken}")


def _solid(text: str) -> str:
    return "".join(text.split())


def _difference(before: str, after: str) -> str:
    """Return where two texts part, whitespace aside, as a person can read it."""
    one, other = _solid(before), _solid(after)
    at = next((place for place, (left, right) in enumerate(zip(one, other)) if left != right), min(len(one), len(other)))
    return f"{one[at : at + _SHOWN_CHARS]!r} became {other[at : at + _SHOWN_CHARS]!r}"


def _untrusted(chat: ChatFormat) -> Finding:
    """Return whether control tokens in what users and tools say stay text."""
    name, evil = "untrusted text", "".join(chat.control_texts)

    def controls(content: str) -> list[int]:
        messages: Messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": content}]
        return [int(i) for i in chat.prompt_ids(messages) if int(i) in chat.control_ids]

    try:
        same = controls(evil) == controls("x")
    except AgentError as error:
        return _finding(name, None, f"refused: {error.what}")
    if not same:
        return _finding(name, False, "yields control ids", _REPORT)
    return _finding(name, True, f"stays text, {len(chat.control_texts)} control tokens tried")


def _random_turn(rng: random.Random, roles: Sequence[str], lead: str) -> tuple[str, Messages]:
    """Return what the policy says and what follows."""
    reply = lead + "".join(rng.choice(["a", " b", "\n", "{}", "é"]) for _ in range(rng.randrange(1, 9)))
    contents = ["hm", "", " a\n", '"q"']
    return reply, [{"role": rng.choice(roles), "content": rng.choice(contents)} for _ in range(rng.randrange(1, 4))]


def _random_conversations(chat: ChatFormat, *, thinking_open: bool) -> Finding:
    """Return whether random conversations append, and whether a family's renderer adds what the full rendering adds."""
    name, rng = "random conversations", random.Random(0)
    roles = sorted(chat.renderer.roles - {"system"}) if chat.renderer else ["user"]
    turns = forks = 0
    for _ in range(_RANDOM_CONVERSATIONS):
        pair = [Conversation(chat, _USER), Conversation(chat.without_renderer(), _USER)]
        try:
            for conversation in pair:
                conversation.start()
            for _ in range(rng.randrange(1, 6)):
                reply, said = _random_turn(rng, roles, _THOUGHT if thinking_open else "")
                for conversation in pair:
                    conversation.add_reply(_spelled(chat, reply), end_id=None)
                added = [conversation.extend(said) for conversation in pair]
                turns, forks = turns + 1, forks + added[0].forks
                same = added[0].forks == added[1].forks and np.array_equal(added[0].ids, added[1].ids)
                if chat.history == "template" and not same:
                    return _finding(name, False, f"the family's renderer disagrees with the template: {said!r}", _REPORT)
        except AgentError:
            continue  # the template refuses such a conversation: nothing to compare
    if forks:
        return _finding(name, False, f"fork {forks} times in {turns} turns", _KEEP)
    return _finding(name, True if turns else None, f"append, {turns} turns")
