"""The repair tasks and their environment: right is right, wrong is told, and a program cannot talk itself right."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from examples.agentic.coding.env import CodeRepair, Verdict, code_of, judge
from examples.agentic.coding.reward import reward
from examples.agentic.coding.sandbox import Sandbox, SandboxUnavailable, find_sandbox
from examples.agentic.coding.tasks import TASKS, RepairTask
from examples.agentic.coding.train import parse_options
from rollout.agent import EpisodeGroup, run_group
from tests.unit.rollout.agent.byte_tokenizer import control_id, spelled
from tests.unit.rollout.agent.fake_client import FakeClient

END = control_id("<|im_end|>")
ADD = TASKS[0]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    """Return what there is; the code of these tests is known."""
    try:
        return asyncio.run(find_sandbox())
    except SandboxUnavailable:
        return asyncio.run(find_sandbox(unsandboxed=True))


def verdicts(sandbox: Sandbox, *codes: tuple[RepairTask, str]) -> list[Verdict]:
    async def all_of_them() -> list[Verdict]:
        return await asyncio.gather(*(judge(sandbox, task, code) for task, code in codes))

    return asyncio.run(all_of_them())


def test_every_broken_function_fails_a_case_and_every_fixed_one_none(sandbox: Sandbox) -> None:
    assert len({task.name for task in TASKS}) == len(TASKS)
    broken = verdicts(sandbox, *((task, task.broken) for task in TASKS))
    assert all(verdict.complaint and verdict.passed < len(task.cases) for task, verdict in zip(TASKS, broken))
    fixed = verdicts(sandbox, *((task, task.fixed) for task in TASKS))
    assert all(verdict == Verdict(passed=len(task.cases), complaint=None) for task, verdict in zip(TASKS, fixed))


@pytest.mark.parametrize(
    ("code", "passed", "complaint"),
    [
        ("def add(a, b): return a - b", 0, "add(1, 2) returned -1, not 3."),
        ("def add(a, b): return str(a + b)", 0, 'add(1, 2) returned "3", not 3.'),
        ("def add(a, b): raise ValueError('x' * 500)", 0, "add(1, 2) raised ValueError: xxx"),
        ("def add(a, b): return print", 0, "add(1, 2) raised TypeError"),
        ("def add(a b): return 1", 0, "SyntaxError"),
        ("def sub(a, b): return 1", 0, "add(1, 2) raised NameError"),
        ("import sys\nsys.exit()", 0, "It ended before it was called."),
        ("print('0' * 32 + '[[3], [5], [0]]')\nimport os\nos._exit(0)", 0, "It ended before it was called."),
        ("import json\njson.dumps = lambda found: '[]'\ndef add(a, b): return 1", 0, None),
        ("import json\njson.loads = lambda text: 5\ndef add(a, b): return 1", 0, None),
    ],
)
def test_a_wrong_program_is_told_the_first_thing_that_is_wrong(sandbox: Sandbox, code: str, passed: int, complaint: str | None) -> None:
    (verdict,) = verdicts(sandbox, (ADD, code))
    assert verdict.passed == passed and verdict.complaint is not None and len(verdict.complaint) <= 200
    assert complaint is None or complaint in verdict.complaint


def test_the_last_block_of_a_reply_is_its_code() -> None:
    assert code_of("Sure:\n```python\na\n```\nor\n```py\nb\n```\nDone") == "b\n"
    assert code_of("```python\na\n```\nIn another way:\n```python\nb") == "a\n"  # cut by its budget
    assert code_of("```\ncut off") == "cut off" and code_of("def f(): pass") == "def f(): pass"


def test_a_repair_at_once_is_worth_most() -> None:
    assert [reward(3, 3, 1), reward(3, 3, 3), reward(2, 3, 1), reward(0, 3, 1), reward(1, 3, 3)] == pytest.approx([1, 0.8, 1 / 3, 0, 0])


def play(client: Any, sandbox: Any, **options: Any) -> Any:
    group = EpisodeGroup(make_environment=lambda: CodeRepair(sandbox), members=2, seed=0)
    return asyncio.run(run_group(client, group, **options))


def test_an_episode_goes_on_until_the_function_is_right(sandbox: Sandbox) -> None:
    probe = CodeRepair(sandbox)
    asyncio.run(probe.reset(0))
    turns: Counter[str] = Counter()

    def reply(prompt: Any, options: dict[str, Any]) -> list[int]:
        turns[options["lineage"]] += 1
        return [*spelled("no idea" if turns[options["lineage"]] == 1 else f"```python\n{probe.task.fixed}```"), END]

    client = FakeClient(reply)
    result = play(client, sandbox)
    assert [one.reward for one in result.results] == [0.9, 0.9] and result.results[0].num_turns == 2
    assert "should" in result.results[0].messages[1]["content"] and "Not yet." in result.results[0].messages[3]["content"]


def test_a_sandbox_that_fails_is_nobodys_failure() -> None:
    class Gone:
        async def run(self, code: str) -> Any:
            raise SandboxUnavailable("it is gone")

    result = play(FakeClient([]), Gone(), max_attempts=2)
    assert {one.failure.kind for one in result.results} == {"infrastructure"} and len(result.superseded) == 2 and not result.kept


@pytest.mark.parametrize("arguments", [["--groups", "0"], ["--steps", "1", "--members", "1"], ["--temperature", "-1"]])
def test_options_are_checked_before_anything_starts(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
