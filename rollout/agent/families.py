"""What the templates of known model families write around a sampled turn.

    ... <header of the assistant's turn> [sampled ids] end separator  message*  generation prompt
                                         `after_turn` from here on ---------------------------->

A `Family` is a table of texts; it never looks at a template. `renderer.py` proves which one, if any, a model's own template is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# How a template renders: messages, tools, with the generation prompt or without.
Render = Callable[..., str]
_FIELDS, _TOOL_FIELDS = frozenset({"role", "content"}), frozenset({"role", "content", "name", "tool_call_id"})
# A piece of rendered text, and whether it came from a message's content (False: the template's own words).
Piece = tuple[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTurn:
    """How tool results are written: `head`, then each result between `opening` and `closing`; `joined` results share one turn."""

    head: str
    opening: str = ""
    closing: str = ""
    joined: bool = False
    trims: bool = False
    as_json: bool = False

    def shown(self, content: str) -> str:
        """Return a result as the template writes it."""
        if self.as_json:
            return json.dumps(content, ensure_ascii=False)
        return content.strip() if self.trims else content


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The texts of one family. `heads` go before a message's content, by role; `end` and `separator` behind each turn."""

    name: str
    end: str
    separator: str = ""
    heads: Mapping[str, str] = field(default_factory=dict)
    trims: bool = False
    tools: ToolTurn | None = None

    def after_turn(self, messages: Sequence[Mapping[str, Any]]) -> list[Piece] | None:
        """Return the end of the sampled turn and what follows it up to the generation prompt; None where a message is not of this form."""
        close = self.end + self.separator
        pieces: list[Piece] = [(close, False)]
        open_tools = False
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(content, str) or not set(message) <= (_TOOL_FIELDS if role == "tool" else _FIELDS):
                return None
            if role == "tool" and self.tools is not None:
                continues = open_tools and self.tools.joined
                if open_tools and not continues:
                    pieces.append((close, False))
                pieces.append(((self.tools.opening if continues else self.tools.head + self.tools.opening), False))
                pieces += [(self.tools.shown(content), True), (self.tools.closing, False)]
                open_tools = True
                continue
            head = self.heads.get(role) if isinstance(role, str) else None
            if head is None:
                return None
            if open_tools:
                pieces.append((close, False))
                open_tools = False
            pieces += [(head, False), (content.strip() if self.trims else content, True), (close, False)]
        if open_tools:
            pieces.append((close, False))
        return pieces


def _heads(form: str, **roles: str) -> dict[str, str]:
    return {role: form.format(shown) for role, shown in roles.items()}


_CHATML_HEAD = "<|im_start|>{}\n"
_LLAMA_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
_SHARED_RESPONSES = ToolTurn(head="", opening="\n<tool_response>\n", closing="\n</tool_response>", joined=True)

# Any role in its own turn: SmolLM2 and most fine-tunes.
CHATML = Family(
    name="chatml",
    end="<|im_end|>",
    separator="\n",
    heads=_heads(_CHATML_HEAD, user="user", system="system"),
    tools=ToolTurn(head=_CHATML_HEAD.format("tool")),
)
# Qwen2, Qwen2.5, Qwen3: tool results share a user turn.
QWEN = replace(CHATML, name="qwen", tools=replace(_SHARED_RESPONSES, head="<|im_start|>user"))
# Qwen3.5 and later: every content is trimmed.
QWEN3_5 = replace(QWEN, name="qwen3.5", trims=True, tools=replace(_SHARED_RESPONSES, head="<|im_start|>user", trims=True))
LLAMA3 = Family(
    name="llama3",
    end="<|eot_id|>",
    heads=_heads(_LLAMA_HEAD, user="user", system="system"),
    trims=True,
    tools=ToolTurn(head=_LLAMA_HEAD.format("tool"), trims=True),
)
# Llama 3.1 and later: results are the interpreter's, and quoted.
LLAMA3_1 = replace(LLAMA3, name="llama3.1", tools=ToolTurn(head=_LLAMA_HEAD.format("ipython"), as_json=True))
LING = Family(
    name="ling",
    end="<|role_end|>",
    heads=_heads("<role>{}</role>", user="HUMAN", system="SYSTEM"),
    tools=replace(_SHARED_RESPONSES, head="<role>OBSERVATION</role>"),
)
FAMILIES = (QWEN, QWEN3_5, CHATML, LLAMA3_1, LLAMA3, LING)
