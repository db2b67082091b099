"""The family of a template that nobody wrote down, read off what the template writes around stand-ins.

Only for templates in which a turn does not depend on its neighbours; like every family it counts for nothing until it is proven
(`renderer.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.agent.errors import ChatFormatError
from rollout.agent.families import Family, Render, ToolTurn

NAME = "own"
# No one of these is part of another, and no template changes digits.
_REPLY, _ONE, _OTHER = "710", "82", "93"
_BEGUN = ({"role": "user", "content": "6"}, {"role": "assistant", "content": _REPLY})


def learned_families(render: Render) -> Iterator[Family]:
    """Yield what the template may be: contents as they are, and trimmed."""
    try:
        turn = _around(render, [{"role": "user", "content": _ONE}, {"role": "assistant", "content": _OTHER}], 2)
    except ChatFormatError:
        return
    if turn is None:
        return
    before, _, close = turn
    if not close.strip() or not before.startswith(close):
        return
    heads = {"user": before.removeprefix(close)}
    tools = None
    with contextlib.suppress(ChatFormatError):  # it takes no system message there
        later = _around(render, [{"role": "system", "content": _ONE}, {"role": "user", "content": _OTHER}], 2)
        if later is not None:
            heads["system"] = later[0].removeprefix(close)
    with contextlib.suppress(ChatFormatError):  # it takes no tool results
        tools = _tool_turn(render, close)
    plain = Family(name=NAME, end=close, heads=heads, tools=tools)
    for trims in (False, True):
        for trims_tools in (False, True) if tools else (False,):
            yield replace(plain, trims=trims, tools=tools and replace(tools, trims=trims_tools))


def _around(render: Render, messages: Sequence[Mapping[str, Any]], count: int) -> list[str] | None:
    """Return what stands behind the reply, before, between and behind the contents of the messages; None if they are not all there."""
    _, found, rest = render([*_BEGUN, *messages], add_generation_prompt=False).partition(_REPLY)
    parts = []
    for content in (_ONE, _OTHER)[:count]:
        before, there, rest = rest.partition(content)
        found = found and there
        parts.append(before)
    return [*parts, rest] if found else None


def _tool_turn(render: Render, close: str) -> ToolTurn | None:
    """Return how tool results are written, None where that is not of a known shape."""
    one = _around(render, [{"role": "tool", "content": _ONE}], 1)
    two = _around(render, [{"role": "tool", "content": _ONE}, {"role": "tool", "content": _OTHER}], 2)
    if one is None or two is None or not one[0].startswith(close) or not one[1].endswith(close):
        return None
    head, closing, between = one[0].removeprefix(close), one[1].removesuffix(close), two[1]
    if between == closing + close + head:
        return ToolTurn(head=head, closing=closing)
    opening = between.removeprefix(closing)
    if not between.startswith(closing) or not head.endswith(opening):
        return None
    return ToolTurn(head=head.removesuffix(opening), opening=opening, closing=closing, joined=True)
