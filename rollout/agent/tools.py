"""Tools that a model may call: their schemas, the calls in a reply, and running them within bounds.

The form is the one of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number in a reply.
Nothing that a model writes raises here: a call is good (its tool exists and its arguments fit the schema) or bad (with a short
message that goes back to the model, its tool not run). Decisions a caller may rely on: calls inside thinking are not calls; a
JSON object that repeats a key is bad, as two readers would disagree on it; arguments are an object, never a string holding
one; an integer is a fine number, a bool is neither. Invariant: what reaches a conversation is bounded, in size and in time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.agent.deadline import call_within
from rollout.agent.errors import InvalidTool, PhaseTimeout, ToolFailed
from rollout.agent.schema import function_schema, misfit

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_MESSAGE_CHARS = 300
_CALL = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)


class ToolError(Exception):
    """Raise this in a tool to tell the model what was wrong with its call; the text is the result that it sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that may run: its tool exists and its arguments fit the schema. `place` counts the calls of a reply from 0."""

    name: str
    arguments: Mapping[str, Any]
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCall:
    """A call that must not run, and the bounded message that says why; `name` is None where it could not be read."""

    message: str
    place: int
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What one call gives the conversation; `ok` is False for bad calls, failures and time-outs."""

    name: str
    content: str
    ok: bool
    place: int

    def message(self) -> dict[str, Any]:
        """Return the message that a chat template renders."""
        return {"role": "tool", "name": self.name, "content": self.content}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call. Units: seconds, characters.

    `parameters` is a JSON schema of an object. Synchronous functions run in a thread of their own, which a time-out leaves
    behind. `essential` tools end the episode when they break instead of telling the model.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]
    timeout_s: float = 30.0
    max_output_chars: int = 8192
    essential: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z_][\w.-]{0,63}", self.name):
            raise InvalidTool(
                f"the tool name {self.name!r} cannot be used",
                field="name",
                value=self.name,
                limit="a letter, then up to 63 letters, digits or any of _ . -",
                remedy="pass name=",
            )
        if not self.timeout_s > 0:
            raise InvalidTool(
                f"timeout_s={self.timeout_s}",
                field="timeout_s",
                value=self.timeout_s,
                limit="above 0",
                remedy="pass the seconds that a call may take",
            )
        if self.max_output_chars < MAX_MESSAGE_CHARS:
            raise InvalidTool(
                f"max_output_chars={self.max_output_chars}",
                field="max_output_chars",
                value=self.max_output_chars,
                limit=f"at least {MAX_MESSAGE_CHARS}",
                remedy="raise it, or leave it out",
            )

    @classmethod
    def from_function(cls, function: Callable[..., Any], *, name: str | None = None, **options: Any) -> Tool:
        """Make a tool of a function from its type hints and docstring. Raises: InvalidTool."""
        description, parameters = function_schema(function)
        return cls(name=name or function.__name__, description=description, parameters=parameters, function=function, **options)

    @property
    def schema(self) -> dict[str, Any]:
        """Return the tool as chat templates want it."""
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}}

    def clip(self, text: str) -> str:
        """Return `text` within the output limit; the cut is written where it is."""
        if len(text) <= self.max_output_chars:
            return text
        note = f"\n[output cut: {len(text)} characters, limit {self.max_output_chars}]"
        return text[: self.max_output_chars - len(note)] + note


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Bounds on what one reply may ask for. Units: characters, calls."""

    max_call_chars: int = 65_536
    max_calls: int = 16


class ToolBox:
    """The tools of an episode: reads calls out of replies and runs them, one after the other in the order written."""

    __slots__ = ("_limits", "_tools")

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]], limits: ToolLimits | None = None):
        self._limits = limits or ToolLimits()
        self._tools: dict[str, Tool] = {}
        for given in tools:
            tool = given if isinstance(given, Tool) else Tool.from_function(given)
            if tool.name in self._tools:
                raise InvalidTool(
                    f"two tools are named {tool.name!r}",
                    field="tools",
                    value=tool.name,
                    limit="names differ",
                    remedy="give one of them another name=",
                )
            self._tools[tool.name] = tool

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return all tools as chat templates want them."""
        return [tool.schema for tool in self._tools.values()]

    def read(self, text: str) -> tuple[tuple[ToolCall, ...], tuple[BadCall, ...]]:
        """Return the good and the bad calls of a reply. Never raises, whatever the text."""
        good: list[ToolCall] = []
        bad: list[BadCall] = []
        for place, match in enumerate(_CALL.finditer(_after_thinking(text))):
            if place >= self._limits.max_calls:
                bad.append(BadCall(message=f"at most {self._limits.max_calls} calls a turn are run; the rest were not", place=place))
                break
            closed = match.group().endswith(CLOSE)
            call = self._read_one(match.group(1), place, closed=closed)
            (good if isinstance(call, ToolCall) else bad).append(call)  # type: ignore[arg-type]
        return tuple(good), tuple(bad)

    def _read_one(self, body: str, place: int, *, closed: bool) -> ToolCall | BadCall:
        if len(body) > self._limits.max_call_chars:
            return BadCall(message=f"the call has {len(body)} characters; the limit is {self._limits.max_call_chars}", place=place)
        if not closed:
            return BadCall(message=f"the call is not closed: {CLOSE} is missing", place=place)
        try:
            call = json.loads(body, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
            return BadCall(message=_short(f"the call is not valid JSON: {reason}"), place=place)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return BadCall(message='the call must be a JSON object with a string "name" and an object "arguments"', place=place)
        name = call["name"]
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools)
            return BadCall(message=_short(f"there is no tool {name[:64]!r}; the tools are: {known}"), place=place, name=name[:64])
        if set(call) - {"name", "arguments", "id"}:
            return BadCall(message='the call must hold "name" and "arguments" only', place=place, name=name)
        arguments = call.get("arguments")
        if not isinstance(arguments, dict):
            found = "missing" if "arguments" not in call else _kind(arguments)
            return BadCall(message=f'"arguments" must be a JSON object, it is {found}', place=place, name=name)
        problem = misfit(arguments, tool.parameters, "arguments")
        if problem:
            return BadCall(message=_short(problem), place=place, name=name)
        return ToolCall(name=name, arguments=arguments, place=place)

    async def run(self, calls: Sequence[ToolCall], bad: Sequence[BadCall] = ()) -> list[ToolResult]:
        """Run the good calls and return a result for every call, in the order written. Raises: ToolFailed."""
        results = [ToolResult(name=call.name or "error", content=f"error: {call.message}", ok=False, place=call.place) for call in bad]
        for call in calls:
            results.append(await self._run_one(call))
        return sorted(results, key=lambda result: result.place)

    async def _run_one(self, call: ToolCall) -> ToolResult:
        tool = self._tools[call.name]
        try:
            value = await call_within(tool.timeout_s, f"tool {tool.name}", tool.function, **call.arguments)
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except ToolError as error:
            return ToolResult(name=tool.name, content=tool.clip(f"error: {error}"), ok=False, place=call.place)
        except Exception as error:  # a tool is foreign code: its failure becomes data here
            if tool.essential:
                raise ToolFailed(
                    _short(f"tool {tool.name} broke: {type(error).__name__}: {error}"),
                    field="tool",
                    value=tool.name,
                    remedy="mend the tool, or make it essential=False to tell the model instead",
                ) from error
            said = f"no answer within {tool.timeout_s:g} s" if isinstance(error, PhaseTimeout) else f"{type(error).__name__}: {error}"
            return ToolResult(name=tool.name, content=tool.clip(_short(f"error: {said}")), ok=False, place=call.place)
        return ToolResult(name=tool.name, content=tool.clip(text), ok=True, place=call.place)


def _after_thinking(text: str) -> str:
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return text.partition("<think>")[0] if "<think>" in text else text


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."


def _kind(value: Any) -> str:
    for kind, name in ((type(None), "null"), (bool, "a bool"), ((int, float), "a number"), (str, "a string"), (list, "a list")):
        if isinstance(value, kind):
            return name
    return "an object"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:64]!r} is there twice")
        found[key] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:32]} is too large for a number")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
