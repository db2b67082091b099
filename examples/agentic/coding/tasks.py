"""The repair tasks: short functions with one mistake each, what they should do, and cases that tell right from wrong.

Arguments and results are plain JSON values. `fixed` is one right answer, for the tests; the model never sees it, nor any case but
those that its own code got wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairTask:
    """One function to repair; `cases` are (arguments, result) pairs."""

    name: str
    wants: str
    broken: str
    fixed: str
    cases: tuple[tuple[tuple[Any, ...], Any], ...]


def _task(name: str, wants: str, body: str, wrong: str, right: str, *cases: tuple[tuple[Any, ...], Any]) -> RepairTask:
    assert body.count("@") == 1, f"{name} has one place with a mistake"
    return RepairTask(name=name, wants=wants, broken=body.replace("@", wrong), fixed=body.replace("@", right), cases=cases)


TASKS = (
    _task(
        "add",
        "return the sum of two numbers",
        "def add(a, b):\n    return a @ b\n",
        "-",
        "+",
        ((1, 2), 3),
        ((0, 5), 5),
        ((-4, 4), 0),
    ),
    _task(
        "is_even",
        "tell whether a number is even",
        "def is_even(n):\n    return n % 2 == @\n",
        "1",
        "0",
        ((4,), True),
        ((7,), False),
        ((0,), True),
    ),
    _task(
        "largest",
        "return the largest number of a list",
        "def largest(numbers):\n    best = numbers[0]\n    for n in numbers:\n"
        "        if n @ best:\n            best = n\n    return best\n",
        "<",
        ">",
        (([3, 9, 2],), 9),
        (([-5, -2],), -2),
        (([1],), 1),
    ),
    _task(
        "count_vowels",
        "count the vowels a, e, i, o, u of a word",
        'def count_vowels(word):\n    return sum(letter in "@" for letter in word)\n',
        "aeio",
        "aeiou",
        (("queue",), 4),
        (("sky",), 0),
        (("banana",), 3),
    ),
    _task(
        "reverse_words",
        "return the words of a text in reverse order",
        'def reverse_words(text):\n    return " ".join(@)\n',
        "reversed(text)",
        "reversed(text.split())",
        (("one two three",), "three two one"),
        (("a",), "a"),
        (("to be",), "be to"),
    ),
    _task(
        "factorial",
        "return n! for n from 0 on",
        "def factorial(n):\n    result = @\n    for k in range(2, n + 1):\n        result *= k\n    return result\n",
        "0",
        "1",
        ((0,), 1),
        ((3,), 6),
        ((5,), 120),
    ),
    _task(
        "last",
        "return the last element of a list",
        "def last(items):\n    return items[@]\n",
        "0",
        "-1",
        (([1, 2, 3],), 3),
        ((["x", "y"],), "y"),
        (([7],), 7),
    ),
    _task(
        "sum_to",
        "return 1 + 2 + ... + n",
        "def sum_to(n):\n    return sum(range(@))\n",
        "n",
        "n + 1",
        ((1,), 1),
        ((4,), 10),
        ((10,), 55),
    ),
    _task(
        "clamp",
        "return x, but at least low and at most high",
        "def clamp(x, low, high):\n    return max(low, @(x, high))\n",
        "max",
        "min",
        ((5, 0, 3), 3),
        ((-1, 0, 3), 0),
        ((2, 0, 3), 2),
    ),
    _task(
        "unique",
        "return the elements of a list without repeats, in the order of their first place",
        "def unique(items):\n    seen = []\n    for item in items:\n"
        "        if item @ seen:\n            seen.append(item)\n    return seen\n",
        "in",
        "not in",
        (([1, 2, 1, 3],), [1, 2, 3]),
        ((["b", "a", "b"],), ["b", "a"]),
        (([],), []),
    ),
    _task(
        "is_palindrome",
        "tell whether a word reads the same backwards",
        "def is_palindrome(word):\n    return word == word[@]\n",
        "::1",
        "::-1",
        (("level",), True),
        (("ab",), False),
        (("",), True),
    ),
    _task(
        "fizz",
        'return "fizz" for multiples of 3, else the number as text',
        'def fizz(n):\n    return "fizz" if n % 3 == 0 else @\n',
        "n",
        "str(n)",
        ((3,), "fizz"),
        ((4,), "4"),
        ((9,), "fizz"),
    ),
    _task(
        "average",
        "return the mean of a list of numbers, and 0 for an empty list",
        "def average(numbers):\n    return sum(numbers) / @\n",
        "len(numbers)",
        "max(len(numbers), 1)",
        (([2, 4],), 3.0),
        (([],), 0),
        (([5],), 5.0),
    ),
    _task(
        "second_largest",
        "return the second largest of at least two different numbers",
        "def second_largest(numbers):\n    return sorted(set(numbers))[@]\n",
        "1",
        "-2",
        (([1, 5, 9],), 5),
        (([4, 4, 2, 8, 6],), 6),
        (([3, 1],), 1),
    ),
)
