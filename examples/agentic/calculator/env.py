"""Arithmetic word questions with a calculator, as a multi-turn message environment.

    system     the form of a tool call, then worked examples as earlier turns
    user       A shelf holds 23 books. How many books are on 8 shelves?
    assistant  <tool_call>{"name": "calculate", "arguments": {"expression": "23 * 8"}}</tool_call>
    tool       184
    assistant  The answer is 184.
    user       the next question, until all have been answered

The episode itself answers a turn that calls the tool; any other turn is the answer to the open question. A chat template that renders
tools says how to call them; for one that does not, as SmolLM2's, `Calculator` writes it into the system message. The invariant:
everything an episode asks follows from its seed, and every right answer is exact.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from examples.agentic.calculator.expression import calculate, value_of, written
from examples.agentic.calculator.reward import Answered, read_answer, reward
from rollout.agent import ChatFormat, Episode, Start, Step, Tool, Turn

NUM_QUESTIONS = 2
TOOL = Tool.from_function(calculate)

_KINDS = (
    ("A shelf holds {big} books. How many books are on {small} shelves?", "{big} * {small}"),
    ("A train travels {big} miles in an hour. How many miles does it travel in {small} hours?", "{big} * {small}"),
    ("Ana has {huge} stamps. She sells {big} stamps. How many stamps does she have left?", "{huge} - {big}"),
    ("A baker packs {product} rolls into bags of {small} rolls. How many bags are filled?", "{product} / {small}"),
    ("Ben has {huge} marbles. He finds {big} marbles. How many marbles does he have now?", "{huge} + {big}"),
)
# A model of this size copies the operation of the latest examples, so there is one for each, and the order was measured.
_EXAMPLES = (
    ("Tom has 350 coins. He gives away 128 coins. How many coins does he have left?", "350 - 128"),
    ("A car drives 58 miles in an hour. How many miles does it drive in 6 hours?", "58 * 6"),
    ("Eva has 415 shells. She finds 36 shells. How many shells does she have now?", "415 + 36"),
    ("A farm packs 96 eggs into cartons of 12 eggs. How many cartons are filled?", "96 / 12"),
    ("A box holds 24 pencils. How many pencils are in 17 boxes?", "24 * 17"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, an expression that answers it, and the answer."""

    text: str
    expression: str
    value: Fraction

    @classmethod
    def draw(cls, dice: random.Random) -> Question:
        """Draw a kind of question and its numbers."""
        text, expression = dice.choice(_KINDS)
        big, small = dice.randint(12, 99), dice.randint(3, 40)
        numbers = {"big": big, "small": small, "huge": dice.randint(100, 999), "product": big * small}
        filled = expression.format(**numbers)
        return cls(text=text.format(**numbers), expression=filled, value=value_of(filled))


def tool_call(expression: str) -> str:
    """Return the call of the calculator as a model writes it."""
    return "<tool_call>" + json.dumps({"name": TOOL.name, "arguments": {"expression": expression}}) + "</tool_call>"


def renders_tools(chat_format: ChatFormat) -> bool:
    """Return whether the model's own template tells it about tools."""
    talk = [{"role": "user", "content": "a"}]
    return chat_format.render(talk, tools=[TOOL.schema]) != chat_format.render(talk)


def opening(*, describe_tool: bool) -> list[Mapping[str, str]]:
    """Return what comes before the first question: instructions and worked examples."""
    lines = ["Answer each question with the calculator."]
    if describe_tool:
        description = json.dumps({"name": TOOL.name, "description": TOOL.description, "parameters": TOOL.parameters})
        lines += [f"The tool: {description}", "To use it, write one line of exactly this form:", tool_call("12 * 7")]
    lines.append("The tool answers with the value. Then write: The answer is 84.")
    messages: list[Mapping[str, str]] = [{"role": "system", "content": "\n".join(lines)}]
    for text, expression in _EXAMPLES:
        value = calculate(expression)
        messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": tool_call(expression)},
            {"role": "tool", "content": value},
            {"role": "assistant", "content": f"The answer is {value}."},
        ]
    return messages


class Calculator:
    """One episode of questions as an environment for the episode runner, played once."""

    __slots__ = ("_given", "_opening", "questions")

    def __init__(self, *, num_questions: int = NUM_QUESTIONS, describe_tool: bool = True) -> None:
        self._opening = opening(describe_tool=describe_tool)
        self._given: list[Fraction | None] = []
        self.questions: Sequence[Question] = [Question(text="", expression="0", value=Fraction(0))] * num_questions

    @property
    def num_opening(self) -> int:
        """Return how many messages come before the first question."""
        return len(self._opening)

    async def reset(self, seed: int) -> Start:
        """Draw the questions of `seed` and ask the first one."""
        dice = random.Random(seed)
        self.questions = [Question.draw(dice) for _ in self.questions]
        return Start(messages=[*self._opening, {"role": "user", "content": self.questions[0].text}], tools=(TOOL,))

    async def step(self, turn: Turn) -> Step:
        """Take a turn without a call as the answer to the open question, and ask the next one."""
        self._given.append(read_answer(turn.text))
        if len(self._given) == len(self.questions):
            return Step(done=True)
        return Step(messages=[{"role": "user", "content": self.questions[len(self._given)].text}])

    async def score(self, episode: Episode) -> float:
        """Return the reward; questions that a limit or bad calls left open are worth what the tool got right."""
        return reward(self.answered(episode.messages), num_questions=len(self.questions))

    def answered(self, messages: Sequence[Mapping[str, str]]) -> list[Answered]:
        """Return how the questions of a conversation went, one entry for each that was asked."""
        found: list[Answered] = []
        results: list[set[str]] = []
        for message in messages[self.num_opening :]:
            if message["role"] == "user":
                results.append(set())
            elif message["role"] == "tool":
                results[-1].add(message["content"])
        for place, (question, values) in enumerate(zip(self.questions, results)):
            given = self._given[place] if place < len(self._given) else None
            found.append(Answered(wanted=question.value, given=given, tool_was_right=written(question.value) in values))
        return found
