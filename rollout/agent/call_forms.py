"""The forms in which models write tool calls: where a call begins and ends in a reply, and what name and arguments it has.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>                              Hermes, Qwen2.5, Qwen3, SmolLM2
    qwen3_coder   <tool_call><function=name><parameter=key>value</parameter></function></tool_call>      Qwen3-Coder, Qwen3.5
    arg_keys      <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>          Ling 3, GLM-4.5
    llama3_json   {"name": ..., "parameters": {...}}; ...   the whole reply, or behind <|python_tag|>    Llama 3.1 and later
    mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}]   or   [TOOL_CALLS]name[ARGS]{...}     Mistral
    json          {"name": ..., "arguments": {...}} or a list of them, bare or in a code fence, the whole reply

A form only reads; whether a tool exists and its arguments fit is the `ToolBox`'s to say. `CallReader` drives a form over growing text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.agent.call_json import JsonEnd, load_json
from rollout.agent.errors import InvalidTool
from rollout.agent.schema import misfit

# A code fence's head before a call is no longer than this.
MAX_UNDECIDED_CHARS = 256
# Says what parameters a tool takes (a JSON schema of an object), None for a tool that does not exist.
Parameters = Callable[[str], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A call as it was written, not checked against any tool; `problem` says why it cannot be read, where it cannot.

    `call_id` is what the call names itself, nine letters and digits as Mistral's do; any other name is none.
    """

    name: str | None = None
    arguments: Any = None
    problem: str | None = None
    call_id: str | None = None


class Body(Protocol):
    """The text of a call that has begun; positions count from where the body begins."""

    closer: str

    def end(self, text: str) -> tuple[int, int] | None:
        """Return where the body ends and where the reply goes on behind it, None while that is not known."""
        ...

    def forget(self, count: int) -> None:
        """Move every place that is remembered `count` characters down: the text before was dropped."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Where a call begins (`start`), where its body begins (`body_at`), and what finds its end."""

    start: int
    body_at: int
    body: Body


class CallForm(Protocol):
    """One way to write calls. `longest_marker`: how many characters at the end of a text may be the beginning of an opening."""

    name: str
    longest_marker: int

    def opening(self, text: str, *, fresh: bool, final: bool) -> Opening | None:
        """Return the first opening in `text`; `fresh` says that only separators stand between it and the reply's beginning or a call.

        Raises: Undecided when more text is needed to say.
        """
        ...

    def read(self, body: str, parameters: Parameters) -> list[WrittenCall]:
        """Return the calls in the body of a call that is closed."""
        ...

    def unclosed(self, body: str, closer: str) -> list[WrittenCall]:
        """Return what to make of a body that the reply's end cut."""
        ...


class Undecided(Exception):
    """The text may go on to be a call or not; not an error of anyone's."""


class _Marked:
    """A body that a marker ends."""

    __slots__ = ("_searched", "closer")

    def __init__(self, closer: str):
        self.closer = closer
        self._searched = 0

    def end(self, text: str) -> tuple[int, int] | None:
        at = text.find(self.closer, self._searched)
        self._searched = max(0, len(text) - len(self.closer) + 1)
        return None if at < 0 else (at, at + len(self.closer))

    def forget(self, count: int) -> None:
        self._searched = max(0, self._searched - count)


class _Json:
    """A body that ends with its JSON value."""

    __slots__ = ("_scan", "closer")

    def __init__(self, begin: int = 0):
        self.closer = "the last bracket"
        self._scan = JsonEnd(begin)

    def end(self, text: str) -> tuple[int, int] | None:
        at = self._scan.scan(text)
        return None if at is None else (at, at)

    def forget(self, count: int) -> None:
        self._scan.at = max(0, self._scan.at - count)


class _NamedJson(_Json):
    """A name, whatever stands behind it, and a JSON object; or JSON alone."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        super().__init__()
        self._found = False

    def end(self, text: str) -> tuple[int, int] | None:
        if not self._found:
            bare = text.lstrip()
            at = len(text) - len(bare) if bare[:1] in ("[", "{") else text.find("{")
            if at < 0 or not bare:
                return None
            self._found, self._scan = True, JsonEnd(at)
        return super().end(text)


def _unclosed(closer: str) -> list[WrittenCall]:
    return [WrittenCall(problem=f"the call is not closed: {closer} is missing")]


def _not_json(error: ValueError) -> WrittenCall:
    return WrittenCall(problem=f"the call is not valid JSON: {error}")


def _from_object(value: Any, argument_names: tuple[str, ...]) -> WrittenCall:
    """Return the call that a JSON object is."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return WrittenCall(problem=f'the call must be a JSON object with a string "name" and an object "{argument_names[0]}"')
    name, call_id = value["name"], _call_id(value.get("id"))
    given = [key for key in argument_names if key in value]
    if set(value) - {"name", "id", "type", *given[:1]}:
        return WrittenCall(name=name, problem=f'the call must hold "name" and "{argument_names[0]}" only', call_id=call_id)
    arguments = value[given[0]] if given else None
    if not isinstance(arguments, dict):
        found = _kind(arguments) if given else "missing"
        return WrittenCall(name=name, problem=f'"{argument_names[0]}" must be a JSON object, it is {found}', call_id=call_id)
    return WrittenCall(name=name, arguments=arguments, call_id=call_id)


def _call_id(written: Any) -> str | None:
    return written if isinstance(written, str) and re.fullmatch("[A-Za-z0-9]{9}", written) else None


def _kind(value: Any) -> str:
    for kind, name in ((type(None), "null"), (bool, "a bool"), ((int, float), "a number"), (str, "a string"), (list, "a list")):
        if isinstance(value, kind):
            return name
    return "an object"


class _Tagged:
    """A body between two markers."""

    _open, _close = "<tool_call>", "</tool_call>"
    longest_marker = len(_open)

    def opening(self, text: str, *, fresh: bool, final: bool) -> Opening | None:
        at = text.find(self._open)
        return None if at < 0 else Opening(start=at, body_at=at + len(self._open), body=_Marked(self._close))

    def unclosed(self, body: str, closer: str) -> list[WrittenCall]:
        return _unclosed(closer)


class Hermes(_Tagged):
    """One JSON object between `<tool_call>` and `</tool_call>`; arguments are an object, never a string holding one."""

    name = "hermes"

    def read(self, body: str, parameters: Parameters) -> list[WrittenCall]:
        try:
            return [_from_object(load_json(body), ("arguments",))]
        except ValueError as error:
            return [_not_json(error)]


class Qwen3Coder(_Tagged):
    """A function element with one parameter element for each argument, inside `<tool_call>` or bare.

    A value is text; it becomes what the tool's schema asks for (JSON, or Python's True, False and None).
    """

    name = "qwen3_coder"
    _openings = re.compile(r"<tool_call>|(?=<function=)")
    _function = re.compile(r"\s*<function=([^>\n]*)>(.*?)</function>\s*\Z", re.DOTALL)
    _parameter = re.compile(r"\s*<parameter=([^>\n]*)>(.*?)</parameter>\s*", re.DOTALL)

    def opening(self, text: str, *, fresh: bool, final: bool) -> Opening | None:
        found = self._openings.search(text)
        if found is None:
            return None
        return Opening(start=found.start(), body_at=found.end(), body=_Marked("</tool_call>" if found.group() else "</function>"))

    def read(self, body: str, parameters: Parameters) -> list[WrittenCall]:
        if "</function>" not in body and body.startswith("<function="):
            body += "</function>"  # a bare element, which its own end closed
        function = self._function.match(body)
        if function is None:
            return [WrittenCall(problem="the call must be <function=name>, its parameters, </function>")]
        name = function.group(1).strip()
        return [_from_pairs(name, function.group(2), self._parameter, "<parameter=key>value</parameter>", parameters)]


class ArgKeys(_Tagged):
    """A name and an element for each key and each value, inside `<tool_call>`; values are typed as in `Qwen3Coder`."""

    name = "arg_keys"
    _pair = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)

    def read(self, body: str, parameters: Parameters) -> list[WrittenCall]:
        head, marker, rest = body.partition("<arg_key>")
        name, rest = head.strip(), marker + rest
        if not name or "\n" in name:
            return [
                WrittenCall(problem="the call must be a name, then <arg_key>key</arg_key><arg_value>value</arg_value> for each argument")
            ]
        return [_from_pairs(name, rest, self._pair, "<arg_key>key</arg_key><arg_value>value</arg_value>", parameters)]


def _from_pairs(name: str, text: str, pair: re.Pattern[str], form: str, parameters: Parameters) -> WrittenCall:
    """Return the call whose arguments are pairs of a key and a value, each typed by the tool's schema."""
    properties = (parameters(name) or {}).get("properties", {})
    arguments: dict[str, Any] = {}
    at = 0
    while text[at:].strip():
        found = pair.match(text, at)
        if found is None:
            return WrittenCall(name=name, problem=f"each argument must be {form}")
        key = found.group(1).strip()
        if key in arguments:
            return WrittenCall(name=name, problem=f"the argument {key[:64]!r} is there twice")
        arguments[key] = _typed(found.group(2).removeprefix("\n").removesuffix("\n"), properties.get(key, {"type": "string"}))
        at = found.end()
    return WrittenCall(name=name, arguments=arguments)


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return what `text` means under a schema: the text itself where that fits and nothing else does, else the value that it spells."""
    fits = misfit(text, schema, "value") is None
    if fits and schema.get("type") == "string":
        return text
    words = {"True": True, "False": False, "None": None}
    try:
        value = words[text.strip()] if text.strip() in words else load_json(text)
    except ValueError:
        return text
    return value if not fits or (not isinstance(value, str) and misfit(value, schema, "value") is None) else text


class Mistral(_Tagged):
    """`[TOOL_CALLS]` and a list of JSON objects, or a name (with `[CALL_ID]...`, `[ARGS]`) and a JSON object."""

    name = "mistral"
    _open = "[TOOL_CALLS]"
    longest_marker = len(_open)

    def opening(self, text: str, *, fresh: bool, final: bool) -> Opening | None:
        at = text.find(self._open)
        return None if at < 0 else Opening(start=at, body_at=at + len(self._open), body=_NamedJson())

    def read(self, body: str, parameters: Parameters) -> list[WrittenCall]:
        body = body.strip()
        head = "" if body.startswith(("[", "{")) else body.partition("{")[0]
        name, call_id = head.partition("[")[0].strip(), _call_id(head.partition("[CALL_ID]")[2].partition("[")[0].strip())
        try:
            value = load_json(body[len(head) :])
        except ValueError as error:
            return [_not_json(error)]
        if head:
            return [WrittenCall(name=name, arguments=value, call_id=call_id)]
        return [_from_object(one, ("arguments",)) for one in (value if isinstance(value, list) else [value])]


class _WholeReply:
    """JSON that begins where the reply begins; more of it may follow behind separators. JSON without a name is an answer, no call."""

    name: str
    longest_marker: int
    _begin: re.Pattern[str]
    _partial: re.Pattern[str]
    _argument_names: tuple[str, ...]

    def opening(self, text: str, *, fresh: bool, final: bool) -> Opening | None:
        if not fresh:
            return None
        found = self._begin.match(text)
        if found is not None and found.end() < MAX_UNDECIDED_CHARS:
            return Opening(start=0, body_at=found.end(), body=_Json())
        if not final and len(text) < MAX_UNDECIDED_CHARS and self._partial.fullmatch(text):
            raise Undecided
        return None

    def read(self, body: str, parameters: Parameters) -> list[WrittenCall]:
        try:
            value = load_json(body)
        except ValueError as error:
            return [_not_json(error)] if '"name"' in body else []
        found = value if isinstance(value, list) else [value]
        return [_from_object(one, self._argument_names) for one in found if self._is_call(one)]

    def _is_call(self, value: Any) -> bool:
        return isinstance(value, dict) and "name" in value and any(key in value for key in self._argument_names)

    def unclosed(self, body: str, closer: str) -> list[WrittenCall]:
        return _unclosed(closer) if '"name"' in body else []


class Llama3Json(_WholeReply):
    """JSON objects with "parameters", separated by semicolons; behind `<|python_tag|>` anywhere in the reply."""

    name = "llama3_json"
    _tag = "<|python_tag|>"
    longest_marker = len(_tag)
    _begin = re.compile(r"[\s;,]*(?:<\|python_tag\|>)?\s*(?=\{)")
    _partial = re.compile(r"[\s;,]*(?:<(?:\|(?:p(?:y(?:t(?:h(?:o(?:n(?:_(?:t(?:a(?:g(?:\|>?)?)?)?)?)?)?)?)?)?)?)?)?)?\s*")
    _argument_names = ("parameters", "arguments")

    def opening(self, text: str, *, fresh: bool, final: bool) -> Opening | None:
        found = super().opening(text, fresh=fresh, final=final)
        if found is not None:
            return found
        at = text.find(self._tag)
        if at < 0:
            return None
        body_at = at + len(self._tag)
        return Opening(start=at, body_at=body_at, body=_Json())


class PlainJson(_WholeReply):
    """JSON objects or lists of them with "arguments" (or "parameters"), bare or in a code fence."""

    name = "json"
    longest_marker = 1
    _begin = re.compile(r"[\s;,]*(?:```\s*(?:\w+\s*)?)*(?=[\[{])")
    _partial = re.compile(r"[\s;,]*(?:`{1,2}|(?:```\s*(?:\w+\s*)?)+`{0,2})?")
    _argument_names = ("arguments", "parameters")


CALL_FORMS: Mapping[str, CallForm] = {form.name: form for form in (Hermes(), Qwen3Coder(), ArgKeys(), Llama3Json(), Mistral(), PlainJson())}
DEFAULT_FORM = "hermes"


def call_form(name: str) -> CallForm:
    """Return the form of that name. Raises: InvalidTool listing the known ones."""
    if name not in CALL_FORMS:
        raise InvalidTool(
            f"there is no tool-call form {name!r}",
            field="form",
            value=name,
            limit=f"known: {', '.join(sorted(CALL_FORMS))}",
            remedy="name one of these, or leave it out to take the one that the chat template shows",
        )
    return CALL_FORMS[name]


def form_of_template(template: str | None) -> str:
    """Return the name of the form that a chat template shows its model; that of Hermes where it shows none."""
    shown = template or ""
    if "<function=" in shown:
        return Qwen3Coder.name
    if "<arg_key>" in shown:
        return ArgKeys.name
    if "[TOOL_CALLS]" in shown:
        return Mistral.name
    if "<tool_call>" not in shown and "<|start_header_id|>" in shown and '"parameters"' in shown:
        return Llama3Json.name
    return DEFAULT_FORM
