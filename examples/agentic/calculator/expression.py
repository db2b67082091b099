"""The calculator: an arithmetic expression in, its exact value out.

`calculate` is the tool that the model calls. The text is parsed with `ast` and walked by hand, so nothing in it is ever run, and every
bound (length, size of a power, size of a value) is checked before the work. Values are fractions: 0.1 + 0.2 is 0.3. What is wrong with
an expression becomes a `ToolError` whose short text the model reads.
"""

from __future__ import annotations

import ast
import re
from fractions import Fraction

from rollout.agent import ToolError

MAX_CHARS = 120
MAX_EXPONENT = 64
MAX_VALUE = Fraction(10**30)
DECIMALS = 6
_ALLOWED = re.compile(r"[0-9+\-*/%(). ]*")


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, for example (3 + 4) * 12
    """
    return written(value_of(expression))


def value_of(expression: str) -> Fraction:
    """Return the exact value. Raises: ToolError."""
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are allowed")
    wrong = _ALLOWED.sub("", expression)
    if wrong:
        raise ToolError(f"{wrong[0]!r} is not allowed; use numbers, + - * / // % ** and parentheses")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("this is not a complete arithmetic expression; an example is (3 + 4) * 12") from None
    return _value(tree.body)


def written(value: Fraction) -> str:
    """Return a value as a person writes it: whole numbers plain, others with up to six decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    rounded = round(value, DECIMALS)
    whole, rest = divmod(abs(rounded.numerator) * 10**DECIMALS // rounded.denominator, 10**DECIMALS)
    return f"{'-' if rounded < 0 else ''}{whole}.{rest:0{DECIMALS}d}".rstrip("0").rstrip(".")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool() | complex()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(repr(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            return _bounded(_combined(operator, _value(left), _value(right)))
    raise ToolError("only numbers, + - * / // % ** and parentheses are allowed")


def _combined(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(operator, ast.Div | ast.FloorDiv | ast.Mod) and right == 0:
        raise ToolError("division by zero")
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return Fraction(left // right)
        case ast.Mod():
            return left % right
        case ast.Pow():
            return _power(left, right)
    raise ToolError("only + - * / // % ** are allowed")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ToolError(f"an exponent must be a whole number of at most {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    # Checked by digits before the power is taken, so that a tower of powers costs nothing.
    digits = max(len(str(abs(base.numerator))), len(str(base.denominator)))
    if (digits - 1) * abs(exponent) > len(str(MAX_VALUE)):
        raise ToolError("the value is too large")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if abs(value) > MAX_VALUE or value.denominator > MAX_VALUE:
        raise ToolError("the value is too large")
    return value
