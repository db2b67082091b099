"""Repairing a function as an environment: the broken code and a case that it gets wrong in, repaired code out, judged in a sandbox.

Expected results never enter the sandbox: what the code returns comes out as JSON and is compared here, so a program that prints
what it likes, or ends early, gains nothing. Invariant: the task follows from the seed; a sandbox that is away is nobody's failure.
"""

from __future__ import annotations

import json
import random
import re
import secrets
from dataclasses import dataclass
from typing import Any

from examples.agentic.coding.reward import reward
from examples.agentic.coding.sandbox import Ending, Sandbox, SandboxUnavailable
from examples.agentic.coding.tasks import TASKS, RepairTask
from rollout.agent import Episode, InfrastructureFailure, Start, Step, Turn

MAX_ATTEMPTS = 3
MAX_SHOWN_CHARACTERS = 200
SYSTEM = "You repair Python functions. Answer with the whole corrected function in one ```python block and nothing else."
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How many cases a program got right, and what to tell its author of the first that it did not."""

    passed: int
    complaint: str | None


def code_of(text: str) -> str:
    """Return the last whole code block of a reply; where none is whole, the one that was cut off; without any, the reply."""
    blocks = BLOCK.findall(text)
    whole = [code for code, end in blocks if end]
    return (whole or [code for code, _ in blocks] or [text])[-1]


def program(task: RepairTask, code: str, mark: str) -> str:
    """Return a program that prints, behind `mark`, what the code's function returns for the arguments of every case."""
    arguments = json.dumps([case[0] for case in task.cases])
    return (
        f"{code}\n\nimport json as _json\n_found = []\n"
        f"for _arguments in _json.loads({arguments!r}):\n"
        f"    try:\n        _found.append([_json.loads(_json.dumps({task.name}(*_arguments)))])\n"
        "    except Exception as _error:\n        _found.append(f'{type(_error).__name__}: {_error}')\n"
        f"print()\nprint({mark!r} + _json.dumps(_found))\n"
    )


async def judge(sandbox: Sandbox, task: RepairTask, code: str) -> Verdict:
    """Run code on the task's cases. Raises: InfrastructureFailure."""
    mark = secrets.token_hex(16)
    try:
        run = await sandbox.run(program(task, code, mark))
    except (OSError, SandboxUnavailable) as error:
        raise InfrastructureFailure(f"the sandbox failed: {error}", remedy="try again") from error
    said = next((line.removeprefix(mark) for line in run.output.splitlines() if line.startswith(mark)), None)
    found = _found(said, len(task.cases)) if said is not None and run.ending is Ending.EXIT else None
    if found is None:
        cause = {Ending.TIME: "It did not end in time.", Ending.OUTPUT: "It printed too much."}.get(run.ending)
        return Verdict(passed=0, complaint=cause or _shown(run.errors.strip().splitlines()[-1:] or ["It ended before it was called."]))
    passed, complaint = 0, None
    for (arguments, wanted), result in zip(task.cases, found):
        right = isinstance(result, list) and isinstance(result[0], bool) is isinstance(wanted, bool) and result[0] == wanted
        passed += right
        if not right and complaint is None:
            got = f"returned {json.dumps(result[0])}" if isinstance(result, list) else f"raised {result}"
            call = f"{task.name}({', '.join(json.dumps(one) for one in arguments)})"
            complaint = _shown([f"{call} {got}, not {json.dumps(wanted)}."])
    return Verdict(passed=passed, complaint=complaint)


def _found(said: str, cases: int) -> list[Any] | None:
    """Return what a program said it found, None if that has not the form."""
    try:
        found = json.loads(said)
    except ValueError:
        return None
    whole = isinstance(found, list) and len(found) == cases
    return found if whole and all(isinstance(one, str) or (isinstance(one, list) and len(one) == 1) for one in found) else None


def _shown(lines: list[str]) -> str:
    text = lines[0]
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 3] + "..."


class CodeRepair:
    """One repair, played once; up to `MAX_ATTEMPTS` replies."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.task = TASKS[0]
        self.attempts = self.best = 0

    async def reset(self, seed: int) -> Start:
        """Show the task of `seed` with the first case that it gets wrong."""
        self.task = random.Random(seed).choice(TASKS)
        verdict = await judge(self._sandbox, self.task, self.task.broken)
        text = f"`{self.task.name}` should {self.task.wants}.\n```python\n{self.task.broken}```\n{verdict.complaint}"
        return Start(messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}])

    async def step(self, turn: Turn) -> Step:
        """Judge a reply; say what is wrong with it unless that was the last attempt."""
        self.attempts += 1
        verdict = await judge(self._sandbox, self.task, code_of(turn.text))
        self.best = max(self.best, verdict.passed)
        if verdict.complaint is None or self.attempts >= MAX_ATTEMPTS:
            return Step(done=True)
        return Step(messages=[{"role": "user", "content": f"Not yet. {verdict.complaint}"}])

    async def score(self, episode: Episode) -> float:
        """Return the reward of the best attempt."""
        return reward(self.best, len(self.task.cases), max(self.attempts, 1))
