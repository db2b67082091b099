"""The calculator: exact values of what people write, short errors for everything else, and nothing is ever run."""

from __future__ import annotations

import asyncio
import random
import time
from fractions import Fraction

import pytest

from examples.agentic.calculator.env import TOOL
from examples.agentic.calculator.expression import MAX_CHARS, MAX_EXPONENT, calculate, value_of, written
from rollout.agent import ToolBox, ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("24 * 17", "408"),
        (" 350-128 ", "222"),
        ("96 / 12", "8"),
        ("(3 + 4) * 12", "84"),
        ("2 + 3 * 4 ** 2", "50"),
        ("-2 ** 2", "-4"),
        ("2 ** -2", "0.25"),
        ("2 ** 3 ** 2", "512"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 4", "2.5"),
        ("1 / 3", "0.333333"),
        ("2 / 3", "0.666667"),
        ("-1 / 3", "-0.333333"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("1 / 3 * 3", "1"),
        ("+5 - -5", "10"),
        ("0 ** 0", "1"),
        (".5 * 4", "2"),
        ("1 / 10000000", "0"),
        ("10 ** 30", "1" + "0" * 30),
        ("((((1))))", "1"),
    ],
)
def test_an_expression_has_its_exact_value(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_random_expressions_have_the_values_that_whole_number_arithmetic_gives() -> None:
    dice = random.Random(0)
    operations = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": Fraction}
    for _ in range(500):
        a, b, c = (dice.randint(1, 999) for _ in range(3))
        first, second = dice.choice("+-*/"), dice.choice("+-*/")
        wanted = operations[second](Fraction(operations[first](a, b)), c)
        assert value_of(f"({a} {first} {b}) {second} {c}") == wanted


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1 / 0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", f"whole number of at most {MAX_EXPONENT}"),
        ("2 ** 65", f"whole number of at most {MAX_EXPONENT}"),
        ("9 ** 9 ** 9", "whole number of at most"),
        ("99999 ** 64", "too large"),
        ("10 ** 31", "too large"),
        ("(1 / 99999) ** 64", "too large"),
        ("10 ** 30 * 10", "too large"),
        ("", "not a complete arithmetic expression"),
        ("1 +", "not a complete arithmetic expression"),
        ("(1", "not a complete arithmetic expression"),
        ("1 2", "not a complete arithmetic expression"),
        ("007", "not a complete arithmetic expression"),
        ("()", "only numbers"),
        ("1(2)", "only numbers"),
        ("24 * 17 = 408", "'=' is not allowed"),
        ("1,234 + 1", "',' is not allowed"),
        ("3 x 4", "'x' is not allowed"),
        ("__import__('os').system('true')", "'_' is not allowed"),
        ("[1]", "'[' is not allowed"),
        ("1e999", "'e' is not allowed"),
        ("1j", "'j' is not allowed"),
        ("1\n+ 2", "'\\n' is not allowed"),
        ("1\x00", "'\\x00' is not allowed"),
        ("\u0663 + 1", "is not allowed"),
        ("1 if 2 else 3", "'i' is not allowed"),
        ("1 << 40", "'<' is not allowed"),
        ("1" * (MAX_CHARS + 1), f"at most {MAX_CHARS}"),
    ],
)
def test_anything_else_is_a_short_error_that_the_model_reads(expression: str, said: str) -> None:
    with pytest.raises(ToolError) as caught:
        calculate(expression)
    assert said in str(caught.value) and len(str(caught.value)) < 120


def test_every_short_text_of_allowed_characters_is_a_value_or_an_error_and_quick() -> None:
    dice, started = random.Random(1), time.monotonic()
    for _ in range(5000):
        text = "".join(dice.choice("0123456789+-*/%(). **") for _ in range(dice.randint(1, MAX_CHARS)))
        try:
            assert len(calculate(text)) < 40
        except ToolError as error:
            assert len(str(error)) < 120
    for text in ("(" * MAX_CHARS, "-" * (MAX_CHARS - 1) + "1", "9**" * 39 + "9", "(" * 59 + "1" + ")" * 59):
        try:
            calculate(text)
        except ToolError:
            continue
    assert time.monotonic() - started < 20


def test_a_value_is_written_as_a_person_would() -> None:
    assert [written(Fraction(text)) for text in ("5", "-5", "5/2", "-1/8", "1/3", "-1/3000000")] == [
        "5",
        "-5",
        "2.5",
        "-0.125",
        "0.333333",
        "0",
    ]


def test_the_tool_is_a_plain_function_with_a_schema_and_its_errors_become_results() -> None:
    assert TOOL.schema["function"]["parameters"]["required"] == ["expression"]
    box = ToolBox([TOOL])
    calls, bad = box.read(
        '<tool_call>{"name": "calculate", "arguments": {"expression": "1 / 0"}}</tool_call>'
        '<tool_call>{"name": "calculate", "arguments": {"expression": 12}}</tool_call>'
        '<tool_call>{"name": "calculate", "arguments": {"expression": "2 * 3"}}</tool_call>'
    )
    results = asyncio.run(box.run(calls, bad))
    assert [result.ok for result in results] == [False, False, True]
    assert [result.content for result in results] == ["error: division by zero", "error: arguments.expression must be of type string", "6"]
