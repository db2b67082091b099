"""The check of a chat template says what appends, what forks and why, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollout.agent.errors import ChatFormatError
from rollout.agent.template_check import template_findings
from rollout.cli import app
from tests.unit.rollout.agent import byte_tokenizer, real_templates
from tests.unit.rollout.agent.test_conversation import COUNTS, LAST_THREE, SHOUTS


def folder(tmp_path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def check(model: Path, *options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["check", "--template", str(model), "--json", *options])
    return result.exit_code, json.loads(result.output)


def test_a_template_that_keeps_history_passes(tmp_path: Path) -> None:
    code, report = check(folder(tmp_path, real_templates.files("llama3.1")))
    found = {finding["name"]: finding for finding in report["findings"]}
    assert code == 0 and report["ok"] and report["append_only"]
    assert found["family"]["value"] == "llama3.1, proven for the roles system, tool, user"
    assert found["tool calls"]["value"] == "read as llama3_json"
    assert found["tool loop"] == {"name": "tool loop", "ok": True, "value": "appends, 3 turns", "remedy": None}


def test_a_template_that_drops_thinking_fails_says_where_and_names_the_remedy_which_works(tmp_path: Path) -> None:
    model = folder(tmp_path, real_templates.files("qwen3"))
    code, report = check(model)
    bad = {finding["name"]: finding for finding in report["findings"] if finding["ok"] is False}
    assert code == 1 and not report["append_only"] and list(bad) == ["thinking before a user"]
    assert "forks after turn 1: '<think>oneandthree</think>" in bad["thinking before a user"]["value"]
    assert 'history="append"' in bad["thinking before a user"]["remedy"]
    code, report = check(model, "--history", "append")
    assert code == 0 and report["append_only"]


TELLS = "{% if tools %}# {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
TELLS_BEHIND_SYSTEM = "{% if messages[0].role == 'system' and tools %}# {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
TELLS_NAMES = "{% if tools %}# {% for tool in tools %}{{ tool.function.name }}{% endfor %}\n{% endif %}"
REFUSES = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("lead", "ok", "said"),
    [
        ("", None, "ignored: the prompt describes no tool"),
        (TELLS, True, "tells the model of them"),
        (TELLS_NAMES, None, "ignored: the prompt"),
        (TELLS_BEHIND_SYSTEM, None, "ignored without a system message"),
        (REFUSES, None, "takes none"),
    ],
)
def test_a_template_that_leaves_tools_out_is_told_of_with_what_to_do(tmp_path: Path, lead: str, ok: bool | None, said: str) -> None:
    model = folder(tmp_path, byte_tokenizer.files(lead + TURNS))
    code, report = check(model)
    (tools,) = [finding for finding in report["findings"] if finding["name"] == "tools"]
    assert tools["ok"] is ok and said in tools["value"]
    assert (tools["remedy"] is None) == (ok is True) and (ok or "in the system message" in tools["remedy"])
    assert code == 0 and report["append_only"], "whether tools are told of is no matter of appending"


@pytest.mark.parametrize(("name", "ok"), [("qwen3", True), ("llama3.1", True), ("smollm2", None), ("phi3", None)])
def test_real_templates_say_whether_they_tell_of_tools(tmp_path: Path, name: str, ok: bool | None) -> None:
    _, findings = template_findings(folder(tmp_path, real_templates.files(name)))
    (tools,) = [finding for finding in findings if finding.name == "tools"]
    assert tools.ok is ok


def test_options_of_the_template_are_passed_on(tmp_path: Path) -> None:
    model = folder(tmp_path, real_templates.files("qwen3"))
    code, report = check(model, "--template-options", '{"enable_thinking": false}')
    bad = [finding["name"] for finding in report["findings"] if finding["ok"] is False]
    assert code == 1 and {"chat", "tool loop", "random conversations"} <= set(bad)


@pytest.mark.parametrize(("template", "wanted"), [(LAST_THREE, "forks"), (SHOUTS, "forks"), (COUNTS, "refused")])
def test_templates_that_forget_shout_or_count_do_not_pass(tmp_path: Path, template: str, wanted: str) -> None:
    append_only, findings = template_findings(folder(tmp_path, byte_tokenizer.files(template)))
    assert not append_only
    assert any(wanted in finding.value for finding in findings)


def test_a_conversation_that_a_template_refuses_is_told_and_does_not_fail(tmp_path: Path) -> None:
    append_only, findings = template_findings(folder(tmp_path, real_templates.files("gemma")))
    (loop,) = [finding for finding in findings if finding.name == "tool loop"]
    assert append_only and loop.ok is None and "refused" in loop.value and "must alternate" in loop.value


def test_text_for_people_has_a_line_for_each_finding(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", "--template", str(folder(tmp_path, real_templates.files("smollm2")))])
    assert result.exit_code == 0 and "ok    chat" in result.output and "chatml" in result.output


def test_what_cannot_be_checked_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ChatFormatError, match=r"is not a folder.*name the folder of a downloaded model"):
        template_findings(tmp_path / "nothing")
    with pytest.raises(ChatFormatError, match=r"add chat_template\.jinja"):
        template_findings(folder(tmp_path, byte_tokenizer.files(None)))
    result = CliRunner().invoke(app, ["check", "--template", str(tmp_path), "--json"])
    assert result.exit_code == 1 and json.loads(result.output)["error"]["code"] == "chat_format_invalid"
    assert CliRunner().invoke(app, ["check", "--template", str(tmp_path), "--template-options", "[1]"]).exit_code == 2
    code = CliRunner().invoke(app, ["check", "--template", str(tmp_path), "--history", "drop"])
    assert code.exit_code == 1 and "one of template, append" in code.output
