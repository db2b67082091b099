"""Tool calls in every form: read whole or piece by piece with one outcome, typed by the schema, bounded whatever is written."""

from __future__ import annotations

import json
import random
import time
import warnings
from typing import Any

import pytest

from rollout.agent import CallCounts, CallReader, NoToolCalls, ToolBox
from rollout.agent.call_forms import CALL_FORMS, WrittenCall, call_form, form_of_template
from rollout.agent.errors import InvalidTool
from rollout.agent.tools import MAX_MESSAGE_CHARS, ToolLimits


def add(a: int, b: float = 2.0) -> float:
    """Add."""
    return a + b


def note(text: str, tags: list[str] | None = None, loud: bool = False) -> str:
    """Write down."""
    return text


FORMS = sorted(CALL_FORMS)
BOXES = {form: ToolBox([add, note], form=form) for form in FORMS}


def coder(name: str, arguments: dict[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def keyed(name: str, arguments: dict[str, str]) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD, NOTE = {"name": "add", "arguments": {"a": 1}}, {"name": "note", "arguments": {"text": "hi } ]"}}
ADD_LLAMA, NOTE_LLAMA = ({"name": one["name"], "parameters": one["arguments"]} for one in (ADD, NOTE))
TWO = {
    "hermes": [
        hermes("add", {"a": 1}) + "\n" + hermes("note", {"text": "hi } ]"}),
        "Sure.\n" + hermes("add", {"a": 1}) + hermes("note", {"text": "hi } ]"}) + "!",
    ],
    "qwen3_coder": [
        "I will.\n" + coder("add", {"a": "1"}) + "\n" + coder("note", {"text": "hi } ]"}),
        "<function=add>\n<parameter=a>1</parameter></function><function=note><parameter=text>hi } ]</parameter>\n</function>",
    ],
    "arg_keys": [
        keyed("add", {"a": "1"}) + "\n" + keyed("note", {"text": "hi } ]"}),
        "Hm.<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>" + keyed("note", {"text": "hi } ]"}),
    ],
    "llama3_json": [
        json.dumps(ADD_LLAMA) + "; " + json.dumps(NOTE_LLAMA),
        "<|python_tag|>" + json.dumps(ADD_LLAMA) + ";\n" + json.dumps(NOTE_LLAMA),
        "Let me see. <|python_tag|>" + json.dumps(ADD_LLAMA) + json.dumps(NOTE),
    ],
    "mistral": [
        "[TOOL_CALLS] " + json.dumps([ADD, {**NOTE, "id": "abcdef123"}]),
        "Fine.[TOOL_CALLS]add[ARGS]{\"a\": 1}[TOOL_CALLS]note[CALL_ID]abcdef123[ARGS]" + json.dumps(NOTE["arguments"]),
        "[TOOL_CALLS]add{\"a\": 1}[TOOL_CALLS]note " + json.dumps(NOTE["arguments"]),
    ],
    "json": [
        json.dumps(ADD) + "\n" + json.dumps(NOTE),
        json.dumps([ADD, NOTE], indent=1),
        "```json\n" + json.dumps(ADD) + "\n```\n```json\n" + json.dumps(NOTE) + "\n```",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("form", "text"), [(form, text) for form in FORMS for text in TWO[form]])
@pytest.mark.parametrize("lead", ["", "<think>\nmaybe LURE\n</think>\n\n", "maybe LURE</think>\n"])
def test_two_calls_are_read_in_order_in_every_form_and_calls_inside_thinking_are_not(form: str, text: str, lead: str) -> None:
    good, bad = BOXES[form].read(lead.replace("LURE", TWO[form][0]) + text)
    assert bad == ()
    assert [(call.name, dict(call.arguments), call.place) for call in good] == [("add", {"a": 1}, 0), ("note", {"text": "hi } ]"}, 1)]


def pieces(text: str, rng: random.Random | None) -> list[str]:
    if rng is None:
        return list(text)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]


def streamed(form: str, parts: list[str], *, thinking: bool = False) -> list[WrittenCall]:
    reader = BOXES[form].reader(thinking=thinking)
    return [call for part in parts for call in reader.feed(part)] + reader.end()


LURES = [
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "add"),
    *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>1</parameter>", "[TOOL_CALLS]", "add[ARGS]"),
    *('{"name":', '"add"', '"arguments"', '"parameters"', ":", "{}", "}", "]", "[", ",", ";", "```json\n", "```", "\\", '"', "<"),
    *("<|python_tag|>", "<think>", "</think>", "\ud800", " ", "\n", "1e999", '{"name": "add", "arguments": {"a": 1}}'),
]


@pytest.mark.parametrize("form", FORMS)
def test_the_outcome_does_not_depend_on_how_a_reply_is_cut_into_pieces(form: str) -> None:
    rng = random.Random(3)
    far = [blank + text for text in TWO[form] for blank in (" \n" * 400, "```\n" + " " * 400, "``" + "`" * 300)]
    texts = [*TWO[form], *far, *("".join(rng.choice(LURES) for _ in range(rng.randrange(12))) for _ in range(1200))]
    calls = 0
    for text in texts:
        whole = streamed(form, [text])
        assert streamed(form, pieces(text, None)) == whole, text
        assert streamed(form, pieces(text, rng)) == whole, text
        good, bad = BOXES[form].read(text)
        assert all(len(one.message) <= MAX_MESSAGE_CHARS for one in bad) and all(isinstance(one.arguments, dict) for one in good)
        calls += len(whole)
    assert calls > 50


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        ("hermes", '<tool_call>{"name": "add"', "</tool_call> is missing"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1", "</tool_call> is missing"),
        ("qwen3_coder", "<function=add><parameter=a>1", "</function> is missing"),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "must be <function=name>"),
        ("qwen3_coder", "<tool_call><function=add>a=1</function></tool_call>", "<parameter=key>value</parameter>"),
        ("qwen3_coder", coder("add", {"a": "one"}), "arguments.a must be of type integer"),
        ("qwen3_coder", coder("add", {"a": "1.5"}), "arguments.a must be of type integer"),
        ("qwen3_coder", coder("sub", {"a": "1"}), "there is no tool 'sub'"),
        ("qwen3_coder", coder("add", {}), "lacks 'a'"),
        ("qwen3_coder", "<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>", "there twice"),
        ("arg_keys", "<tool_call>add<arg_key>a", "</tool_call> is missing"),
        ("arg_keys", "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "must be a name"),
        ("arg_keys", "<tool_call>add<arg_key>a</arg_key></tool_call>", "each argument must be"),
        ("arg_keys", keyed("add", {"a": "1"}).replace("</tool_call>", keyed("", {"a": "2"})[12:]), "there twice"),
        ("arg_keys", keyed("add", {"a": "x"}), "must be of type integer"),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}', "the last bracket is missing"),
        ("llama3_json", '{"name": "add", "parameters": null}', '"parameters" must be a JSON object, it is null'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1,}}', "not valid JSON"),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1, "a": 2}}', "there twice"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}', "is missing"),
        ("mistral", "[TOOL_CALLS]", "is missing"),
        ("mistral", "[TOOL_CALLS]sub{}", "there is no tool 'sub'"),
        ("mistral", '[TOOL_CALLS]add{"a": 1e999}', "too large"),
        ("mistral", "[TOOL_CALLS][1]", "must be a JSON object"),
        ("json", '{"name": "add", "arguments": [1]}', "it is a list"),
        ("json", '```json\n{"name": "add", "arguments": {"a": 1}', "is missing"),
        ("json", json.dumps({"name": "add", "arguments": {"a": "x" * 70_000}}), "the limit is 65536"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_bad_in_every_form(form: str, text: str, wanted: str) -> None:
    good, bad = BOXES[form].read(text)
    assert good == () and len(bad) == 1
    assert wanted in bad[0].message and len(bad[0].message) <= MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    "text", ['{"answer": 4}', "[1, 2]", '{"answer": ', "plain {braces}", "", "```python\nprint(1)\n```", "<|python_tag|>print(1)"]
)
@pytest.mark.parametrize("form", ["llama3_json", "json"])
def test_json_that_is_no_call_is_an_answer(form: str, text: str) -> None:
    assert BOXES[form].read(text) == ((), ())


def test_values_of_the_xml_form_have_the_types_of_the_schema() -> None:
    (call,), bad = BOXES["qwen3_coder"].read(coder("note", {"text": "5", "tags": '["a", "b"]', "loud": "True"}))
    assert (dict(call.arguments), bad) == ({"text": "5", "tags": ["a", "b"], "loud": True}, ())
    (call,), _ = BOXES["qwen3_coder"].read(coder("note", {"text": " two\n\nlines\n<b>&amp;</b> ", "tags": "None"}))
    assert dict(call.arguments) == {"text": " two\n\nlines\n<b>&amp;</b> ", "tags": None}
    (call,), _ = BOXES["qwen3_coder"].read(coder("add", {"a": "3", "b": "4e-1"}))
    assert dict(call.arguments) == {"a": 3, "b": 0.4}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_without_end_is_held_within_its_limit_and_read_in_linear_time(form: str) -> None:
    start = {
        "arg_keys": "<tool_call>add",
        "hermes": "<tool_call>{",
        "qwen3_coder": "<function=add>",
        "llama3_json": '{"name":',
        "mistral": "[TOOL_CALLS][",
        "json": '{"name":',
    }[form]
    reader = BOXES[form].reader()
    reader.feed(start)
    started = time.process_time()
    for _ in range(20_000):
        assert reader.feed("x" * 50) == []
        assert len(reader._text) <= 65_536 + 50
    assert time.process_time() - started < 5
    (call,) = reader.end()
    assert "the limit is 65536" in str(call.problem)


@pytest.mark.parametrize("form", FORMS)
def test_the_limit_of_a_call_holds_to_the_character_however_it_comes(form: str) -> None:
    outcomes = set()
    for limit in range(20, 170):
        box = ToolBox([add, note], ToolLimits(max_call_chars=limit), form=form)
        whole, single = ([*box.reader().feed(TWO[form][0])], box.reader())
        assert [call for character in TWO[form][0] for call in single.feed(character)] == whole
        outcomes |= {len([call for call in whole if call.problem is None])}
    assert {0, 2} <= outcomes


def test_a_call_behind_one_that_is_too_long_is_read() -> None:
    box = ToolBox([add], ToolLimits(max_call_chars=100))
    text = hermes("add", {"a": "x" * 500}) + hermes("add", {"a": 1})
    for parts in ([text], list(text)):
        reader = box.reader()
        good, bad = box.check([call for part in parts for call in reader.feed(part)] + reader.end())
        assert [call.place for call in bad] == [0] and [call.place for call in good] == [1]


def test_a_stream_whose_prompt_opened_thinking_begins_inside_it() -> None:
    text = hermes("add", {"a": 9}) + "</think>" + hermes("add", {"a": 1})
    assert [call.arguments for call in streamed("hermes", list(text), thinking=True)] == [{"a": 1}]


def test_the_form_comes_from_the_template_and_a_name_that_is_none_is_refused() -> None:
    assert form_of_template(None) == form_of_template("{{ messages }}") == form_of_template("... <tool_call>") == "hermes"
    assert form_of_template("<tool_call>\n<function=example>") == "qwen3_coder"
    assert form_of_template("<tool_call>{{ name }}\n<arg_key>{{ key }}") == "arg_keys"
    assert form_of_template('<|start_header_id|> {"name": f, "parameters": d}') == "llama3_json"
    assert form_of_template("[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    with pytest.raises(InvalidTool, match=r"known: arg_keys, hermes, json, llama3_json, mistral, qwen3_coder.*leave it out"):
        ToolBox([add], form="xml")
    assert call_form("json").name == "json"


def test_a_form_of_ones_own_is_used() -> None:
    class Shout(type(CALL_FORMS["hermes"])):  # type: ignore[misc]
        name, _open, _close, longest_marker = "shout", "CALL", "DONE", 4

    box = ToolBox([add], form=Shout())
    assert isinstance(box.reader(), CallReader)
    assert [call.name for call in box.read('CALL{"name": "add", "arguments": {"a": 1}}DONE')[0]] == ["add"]


def test_a_run_that_parses_no_call_warns_and_one_that_parses_any_does_not() -> None:
    none = CallCounts(failed=10, absent=6)
    with pytest.warns(NoToolCalls, match="10 failed to parse, 6 turns held none.*form="):
        none.warn_if_none_parsed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CallCounts(parsed=1, failed=100).warn_if_none_parsed()
        CallCounts(absent=15).warn_if_none_parsed()
