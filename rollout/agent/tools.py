"""Tools that a model may call: what they are, which calls of a reply are good, and running them within bounds.

How calls are written is `call_forms.py`'s. Nothing that a model writes raises here: a call is good (its tool exists and its arguments fit
the schema) or bad (with a short message that goes back to the model, its tool not run). Decisions a caller may rely on: calls inside
thinking are not calls; a JSON object that repeats a key is bad, as two readers would disagree on it; an integer is a fine number, a
bool is neither. Invariant: what reaches a conversation is bounded, in size and in time.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.agent.call_forms import DEFAULT_FORM, CallForm, WrittenCall, call_form
from rollout.agent.call_reader import CallReader, opened_by_prompt
from rollout.agent.deadline import call_within
from rollout.agent.errors import InvalidTool, PhaseTimeout, ToolFailed
from rollout.agent.option_values import check_count, check_seconds
from rollout.agent.schema import function_schema, misfit
from rollout.errors import shown
from rollout.option_names import checks_names

MAX_MESSAGE_CHARS = 300
# A run of so few turns may well hold no call by chance.
MIN_TURNS_TO_WARN = 16


class NoToolCalls(UserWarning):
    """A whole run in which tools were on offer held no tool call that could be read."""


class ToolError(Exception):
    """Raise this in a tool to tell the model what was wrong with its call; the text is the result that it sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that may run: its tool exists and its arguments fit the schema. `place` counts the calls of a reply from 0."""

    name: str
    arguments: Mapping[str, Any]
    place: int
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCall:
    """A call that must not run, and the bounded message that says why; `name` is None where it could not be read."""

    message: str
    place: int
    name: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What one call gives the conversation; `ok` is False for bad calls, failures and time-outs. `call_id` is the call's own name."""

    name: str
    content: str
    ok: bool
    place: int
    call_id: str | None = None

    def message(self) -> dict[str, Any]:
        """Return the message that a chat template renders; some (Mistral's) want an id of nine letters and digits."""
        return {"role": "tool", "name": self.name, "tool_call_id": self.call_id or f"call{self.place:05d}", "content": self.content}


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
                f"the tool name {shown(self.name)} cannot be used",
                field="name",
                value=self.name,
                limit="a letter, then up to 63 letters, digits or any of _ . -",
                remedy="pass name=",
            )
        check_seconds("timeout_s", self.timeout_s, error=InvalidTool)
        check_count("max_output_chars", self.max_output_chars, MAX_MESSAGE_CHARS, error=InvalidTool)

    @classmethod
    def from_function(cls, function: Callable[..., Any], *, name: str | None = None, **options: Any) -> Tool:
        """Make a tool of a function from its type hints and docstring. Raises: InvalidTool."""
        description, parameters = function_schema(function)
        own = getattr(function, "__name__", type(function).__name__)
        return cls(name=name or own, description=description, parameters=parameters, function=function, **options)

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


@checks_names(InvalidTool)
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Bounds on what one reply may ask for. Units: characters, calls."""

    max_call_chars: int = 65_536
    max_calls: int = 16

    def __post_init__(self) -> None:
        check_count("max_call_chars", self.max_call_chars, 1, error=InvalidTool)
        check_count("max_calls", self.max_calls, 1, error=InvalidTool)


@dataclass(slots=True)
class CallCounts:
    """Tool calls over turns in which tools were on offer: `parsed` and `failed` count calls, `absent` counts turns that held none."""

    parsed: int = 0
    failed: int = 0
    absent: int = 0

    def count(self, good: Sequence[ToolCall], bad: Sequence[BadCall]) -> None:
        """Count one turn."""
        self.parsed += len(good)
        self.failed += len(bad)
        self.absent += not (good or bad)

    def add(self, other: CallCounts) -> None:
        """Add what was counted elsewhere."""
        self.parsed += other.parsed
        self.failed += other.failed
        self.absent += other.absent

    def warn_if_none_parsed(self) -> None:
        """Warn where a run's turns held no call that could be read; runs of fewer than 16 such turns say nothing."""
        if not self.parsed and self.failed + self.absent >= MIN_TURNS_TO_WARN:
            warnings.warn(
                f"no tool call of the whole run could be read: {self.failed} failed to parse, {self.absent} turns held none; the model may "
                "write another form than the one that is read (name it: ToolBox(tools, form=...)) or its template shows it no tools",
                NoToolCalls,
                stacklevel=3,
            )


class ToolBox:
    """The tools of an episode: reads calls out of replies and runs them, one after the other in the order written.

    `form` names how the model writes calls: one of `hermes`, `qwen3_coder`, `arg_keys`, `llama3_json`, `mistral`, `json`, or a `CallForm`;
    absent, the episode takes the one that the chat template shows. Raises: InvalidTool.
    """

    __slots__ = ("_form", "_limits", "_tools")

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]], limits: ToolLimits | None = None, *, form: str | CallForm | None = None):
        self._limits = limits or ToolLimits()
        self._form = call_form(form) if isinstance(form, str) else form
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

    def read(self, text: str, *, form: str | None = None, thinking: bool = False) -> tuple[tuple[ToolCall, ...], tuple[BadCall, ...]]:
        """Return the good and the bad calls of a whole reply. Never raises, whatever the text.

        `form` is used where the box has none; `thinking`: the prompt opened a thinking block (so it did too where only its end is there).
        """
        reader = self.reader(form=form, thinking=thinking or opened_by_prompt(text))
        return self.check([*reader.feed(text), *reader.end()])

    def reader(self, *, form: str | None = None, thinking: bool = False) -> CallReader:
        """Return what reads a reply while it is streamed; `thinking`: the prompt opened a thinking block. Raises: InvalidTool."""
        used = self._form or call_form(form or DEFAULT_FORM)
        return CallReader(used, self._parameters, max_call_chars=self._limits.max_call_chars, thinking=thinking)

    def _parameters(self, name: str) -> Mapping[str, Any] | None:
        tool = self._tools.get(name)
        return tool.parameters if tool else None

    def check(self, written: Iterable[WrittenCall]) -> tuple[tuple[ToolCall, ...], tuple[BadCall, ...]]:
        """Return which of a reply's calls may run and which may not."""
        good: list[ToolCall] = []
        bad: list[BadCall] = []
        for place, call in enumerate(written):
            if place >= self._limits.max_calls:
                bad.append(BadCall(message=f"at most {self._limits.max_calls} calls a turn are run; the rest were not", place=place))
                break
            problem = self._problem(call)
            if problem is None and call.name is not None:
                good.append(ToolCall(name=call.name, arguments=call.arguments, place=place, call_id=call.call_id))
            else:
                bad.append(BadCall(message=_short(str(problem)), place=place, name=call.name and call.name[:64], call_id=call.call_id))
        return tuple(good), tuple(bad)

    def _problem(self, call: WrittenCall) -> str | None:
        """Return why a call must not run, None if it may."""
        if call.name is not None and call.name not in self._tools:
            return f"there is no tool {call.name[:64]!r}; the tools are: {', '.join(self._tools)}"
        if call.problem is not None or call.name is None:
            return call.problem or "the call has no name"
        return misfit(call.arguments, self._tools[call.name].parameters, "arguments")

    async def run(self, calls: Sequence[ToolCall], bad: Sequence[BadCall] = ()) -> list[ToolResult]:
        """Run the good calls and return a result for every call, in the order written. Raises: ToolFailed."""
        results = [_result(call, call.name or "error", f"error: {call.message}", ok=False) for call in bad]
        for call in calls:
            results.append(await self._run_one(call))
        return sorted(results, key=lambda result: result.place)

    async def _run_one(self, call: ToolCall) -> ToolResult:
        tool = self._tools[call.name]
        try:
            value = await call_within(tool.timeout_s, f"tool {tool.name}", tool.function, **call.arguments)
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except ToolError as error:
            return _result(call, tool.name, tool.clip(f"error: {error}"), ok=False)
        except Exception as error:  # a tool is foreign code: its failure becomes data here
            if tool.essential:
                raise ToolFailed(
                    _short(f"tool {tool.name} broke: {type(error).__name__}: {error}"),
                    field="tool",
                    value=tool.name,
                    remedy="mend the tool, or make it essential=False to tell the model instead",
                ) from error
            said = f"no answer within {tool.timeout_s:g} s" if isinstance(error, PhaseTimeout) else f"{type(error).__name__}: {error}"
            return _result(call, tool.name, tool.clip(_short(f"error: {said}")), ok=False)
        return _result(call, tool.name, tool.clip(text), ok=True)


def _result(call: ToolCall | BadCall, name: str, content: str, *, ok: bool) -> ToolResult:
    return ToolResult(name=name, content=content, ok=ok, place=call.place, call_id=call.call_id)


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."
