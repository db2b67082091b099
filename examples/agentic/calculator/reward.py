"""What an episode of questions is worth, and how an answer is read out of a reply.

Called by the environment, which owns what is asked; this file owns the numbers. The invariant: answers are compared as exact numbers,
and a question that was never answered is worth nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
RIGHT = 1.0
TOOL_WAS_RIGHT = 0.3
MAX_DIGITS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """How one question went: the answer in the final reply (None: no number there) and whether a tool result held the right one."""

    wanted: Fraction
    given: Fraction | None = None
    tool_was_right: bool = False

    @property
    def right(self) -> bool:
        """Return whether the answer is the right number."""
        return self.given == self.wanted


def read_answer(text: str) -> Fraction | None:
    """Return the last number in a reply, None if it has none."""
    found = _NUMBER.findall(text)
    number = found[-1].replace(",", "") if found else ""
    return Fraction(number) if 0 < len(number) <= MAX_DIGITS else None


def reward(questions: Sequence[Answered], *, num_questions: int) -> float:
    """Return the mean over all questions: 1 for a right answer, 0.3 where only the tool had it, 0 otherwise."""
    return sum(RIGHT if question.right else TOOL_WAS_RIGHT * question.tool_was_right for question in questions) / num_questions
