"""JSON schemas of Python functions, and whether arguments fit one.

Covers what tool schemas use: the JSON types, enum, items, properties, required, additionalProperties, anyOf. A schema written by
hand may hold more; what is not known here is not checked. Loads nothing heavy.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, Union

from rollout.agent.errors import InvalidTool

_SIMPLE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_FIELD = re.compile(r"^:param\s+(?:[\w\[\], .|]+\s)?(\w+)\s*:\s*(.*)$")
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?)\s*:\s*$")


def function_schema(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Return a function's description and the schema of its arguments. Raises: InvalidTool."""
    name = getattr(function, "__name__", type(function).__name__)
    description, about = _read_docstring(_docstring(function))
    if not description:
        raise InvalidTool(
            f"tool {name} has no docstring",
            field="docstring",
            value=name,
            limit="the model reads it",
            remedy="write one line that says what the tool does",
        )
    hints = _hints(function, name)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidTool(
                f"tool {name}: parameter {parameter} cannot be named in a call",
                field=parameter.name,
                value=str(parameter.kind),
                limit="named parameters only",
                remedy="list the parameters by name",
            )
        if parameter.name not in hints:
            raise InvalidTool(
                f"tool {name}: parameter {parameter.name} has no type hint",
                field=parameter.name,
                value=None,
                limit="the schema is made from type hints",
                remedy=f"annotate {parameter.name}",
            )
        properties[parameter.name] = {**_hint_schema(hints[parameter.name], name, parameter.name)}
        if parameter.name in about:
            properties[parameter.name]["description"] = about[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return description, {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _docstring(function: Callable[..., Any]) -> str:
    """Return what the function says of itself; of an object that can be called, what its class or its call says."""
    if inspect.isroutine(function) or inspect.isclass(function):
        return inspect.getdoc(function) or ""
    return inspect.getdoc(type(function).__call__) or inspect.getdoc(type(function)) or ""


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise InvalidTool(
            f"tool {name}: a type hint cannot be resolved: {error}",
            field="function",
            value=name,
            limit="the schema is made from type hints",
            remedy="import or define that type where the function is defined, at the module's top level",
        ) from error


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the lines of the section that describes arguments."""
    intro: list[str] = []
    about: dict[str, str] = {}
    section, latest = "", ""
    for line in text.splitlines():
        heading, field = _SECTION.match(line), _FIELD.match(line.strip())
        if field:
            section, latest = "Args", field.group(1)
            about[latest] = field.group(2)
        elif line.strip().startswith(":"):
            section, latest = "Returns", ""  # another field of that style
        elif heading:
            section, latest = heading.group(1), ""
        elif not section:
            intro.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            found = _ARGUMENT.match(line.strip())
            if found:
                latest = found.group(1)
                about[latest] = found.group(2)
            elif latest:
                about[latest] += " " + line.strip()
    return "\n".join(intro).strip(), about


def _hint_schema(hint: Any, tool: str, parameter: str) -> dict[str, Any]:
    if hint in _SIMPLE:
        return dict(_SIMPLE[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        about = next((note for note in arguments[1:] if isinstance(note, str)), None)
        return {**_hint_schema(arguments[0], tool, parameter), **({"description": about} if about else {})}
    if typing.is_typeddict(hint):
        # The class's own list of required keys is wrong where annotations are strings.
        fields = typing.get_type_hints(hint, include_extras=True)
        optional = {field for field, kind in fields.items() if typing.get_origin(kind) is NotRequired}
        needed = {field for field, kind in fields.items() if typing.get_origin(kind) is Required}
        return {
            "type": "object",
            "properties": {field: _hint_schema(kind, tool, parameter) for field, kind in fields.items()},
            "required": [field for field in fields if field not in optional and (hint.__total__ or field in needed)],
            "additionalProperties": False,
        }
    if origin in (NotRequired, Required):
        return _hint_schema(arguments[0], tool, parameter)
    if origin is Literal:
        return {"enum": list(arguments)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_hint_schema(part, tool, parameter) for part in arguments]}
    if origin is list and len(arguments) == 1:
        return {"type": "array", "items": _hint_schema(arguments[0], tool, parameter)}
    if origin is dict and len(arguments) == 2 and arguments[0] is str:
        return {"type": "object", "additionalProperties": _hint_schema(arguments[1], tool, parameter)}
    raise InvalidTool(
        f"tool {tool}: the type {hint!r} of {parameter} has no JSON form",
        field=parameter,
        value=repr(hint),
        limit="str, int, float, bool, None, list, dict, TypedDict, Literal, Enum, unions of these, Annotated with a description",
        remedy="use one of these, or write parameters= by hand",
    )


def misfit(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    """Return what is wrong with `value` under `schema`, None if it fits. Calls itself one level down at a time."""
    if "enum" in schema and not any(value == allowed and type(value) is type(allowed) for allowed in schema["enum"]):
        return f"{where} must be one of {schema['enum']!r}"
    if "anyOf" in schema and all(misfit(value, option, where) for option in schema["anyOf"]):
        return f"{where} fits none of its types"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_kind(value, kind) for kind in kinds):
        return f"{where} must be of type {' or '.join(kinds)}"
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for place, item in enumerate(value):
            if problem := misfit(item, schema["items"], f"{where}[{place}]"):
                return problem
    return _object_misfit(value, schema, where) if isinstance(value, dict) else None


def _object_misfit(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> str | None:
    properties = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in value:
            return f"{where} lacks {name!r}"
    others = schema.get("additionalProperties", True)
    for name, item in value.items():
        known = properties.get(name)
        if known is None and others is False:
            return f"{where} has no {name[:64]!r}; known: {', '.join(properties) or 'none'}"
        rule = known if known is not None else others
        if isinstance(rule, Mapping) and (problem := misfit(item, rule, f"{where}.{name[:64]}")):
            return problem
    return None


def _is_kind(value: Any, kind: str) -> bool:
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    return True
