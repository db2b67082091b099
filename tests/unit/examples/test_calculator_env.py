"""The calculator environment: questions from a seed, answers, rewards, and what a model is told about its tool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from examples.agentic.calculator.env import TOOL, Calculator, Question, opening, renders_tools, tool_call
from examples.agentic.calculator.expression import calculate, written
from examples.agentic.calculator.reward import Answered, read_answer, reward
from rollout.agent import ChatFormat, ToolBox
from tests.unit.rollout.agent.byte_tokenizer import CHATML, SMOL, THINKING, files


def a_turn(text: str) -> Any:
    """Stand in for a sampled turn, of which the environment reads the text alone."""
    return SimpleNamespace(text=text)


def play(replies: Sequence[tuple[str | None, str | None]], *, seed: int = 5, num_questions: int = 2) -> tuple[float, Calculator]:
    """Play an episode in which each entry is a tool result and an answer, either may be left out; return its reward."""

    async def episode() -> tuple[float, Calculator]:
        env = Calculator(num_questions=num_questions)
        messages = list((await env.reset(seed)).messages)
        for result, answer in replies:
            if result is not None:
                messages += [{"role": "assistant", "content": "call"}, {"role": "tool", "content": result}]
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
                messages += (await env.step(a_turn(answer))).messages
        return await env.score(SimpleNamespace(messages=messages)), env  # type: ignore[arg-type]

    return asyncio.run(episode())


def answers(seed: int = 5, num_questions: int = 2) -> list[str]:
    dice = random.Random(seed)
    return [written(Question.draw(dice).value) for _ in range(num_questions)]


def test_equal_seeds_ask_equal_questions_and_other_seeds_others() -> None:
    def asked(seed: int) -> str:
        return asyncio.run(Calculator().reset(seed)).messages[-1]["content"]

    assert asked(3) == asked(3)
    assert len({asked(seed) for seed in range(60)}) > 55


def test_every_question_has_a_whole_answer_that_its_expression_gives_and_its_numbers_are_in_the_text() -> None:
    kinds = set()
    for seed in range(400):
        question = Question.draw(random.Random(seed))
        assert question.value.denominator == 1 and calculate(question.expression) == str(question.value)
        numbers = [part for part in question.expression.split() if part.isdigit()]
        assert all(number in question.text for number in numbers)
        kinds.add(question.expression.split()[1])
    assert kinds == {"+", "-", "*", "/"}


def test_the_opening_holds_right_worked_examples_in_the_form_that_is_parsed() -> None:
    messages = opening(describe_tool=True)
    assert [message["role"] for message in messages] == ["system"] + ["user", "assistant", "tool", "assistant"] * 5
    box = ToolBox([TOOL])
    for call, result, answer in zip(messages[2::4], messages[3::4], messages[4::4]):
        (good,), bad = box.read(call["content"])
        assert not bad and calculate(good.arguments["expression"]) == result["content"]
        assert read_answer(answer["content"]) == Fraction(result["content"])
    assert {call["content"].split('"')[-2].split()[1] for call in messages[2::4]} == {"+", "-", "*", "/"}


def test_a_model_is_told_about_its_tool_exactly_once() -> None:
    told = opening(describe_tool=True)[0]["content"]
    assert '"name": "calculate"' in told and tool_call("12 * 7") in told and TOOL.description in told
    assert "calculate" not in opening(describe_tool=False)[0]["content"]
    assert [renders_tools(ChatFormat(files(template))) for template in (CHATML, SMOL, THINKING)] == [False, False, True]


def test_an_episode_asks_its_questions_one_after_the_other_and_then_is_done() -> None:
    async def episode() -> list[bool]:
        env = Calculator(num_questions=3)
        start = await env.reset(1)
        assert start.tools == (TOOL,) and len(start.messages) == env.num_opening + 1
        steps = [await env.step(a_turn("The answer is 1.")) for _ in range(3)]
        assert [len(step.messages) for step in steps] == [1, 1, 0]
        assert [step.messages[0]["content"] for step in steps[:2]] == [question.text for question in env.questions[1:]]
        return [step.done for step in steps]

    assert asyncio.run(episode()) == [False, False, True]


def test_the_reward_is_the_mean_over_the_questions() -> None:
    first, second = answers()
    wrong = "The answer is 1000003."
    assert play([(first, f"The answer is {first}."), (second, f"It is {second}")])[0] == 1.0
    assert play([(None, f"The answer is {first}."), (None, wrong)])[0] == 0.5
    assert play([(first, wrong), ("17.5", wrong)])[0] == pytest.approx(0.15)
    assert play([(second, wrong), (first, wrong)])[0] == 0.0
    assert play([("error: division by zero", "I do not know."), (None, "")])[0] == 0.0


def test_questions_left_open_are_worth_only_what_the_tool_got_right() -> None:
    first, _ = answers()
    assert play([(first, None)])[0] == pytest.approx(0.15)
    assert play([(first, f"The answer is {first}.")])[0] == 0.5
    assert play([])[0] == 0.0


def test_a_conversation_tells_how_each_question_went() -> None:
    first, second = answers()
    score, env = play([(first, f"The answer is {first}."), ("3", f"The answer is {second}.")])
    assert score == 1.0
    messages = [*opening(describe_tool=True), {"role": "user", "content": "q"}, {"role": "tool", "content": first}]
    assert env.answered(messages) == [Answered(wanted=Fraction(first), given=Fraction(first), tool_was_right=True)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 408.", Fraction(408)),
        ("24 * 17 = 408", Fraction(408)),
        ("It is 1,234 in all.", Fraction(1234)),
        ("-12", Fraction(-12)),
        ("2.50 dollars", Fraction(5, 2)),
        ("no number", None),
        ("", None),
        ("9" * 5000, None),
        ("The answer is 3, not\u00b2", Fraction(3)),
    ],
)
def test_the_answer_is_the_last_number_of_a_reply(text: str, answer: Fraction | None) -> None:
    assert read_answer(text) == answer


def test_no_answer_is_never_right() -> None:
    assert not Answered(wanted=Fraction(0)).right
    assert reward([], num_questions=2) == 0.0
