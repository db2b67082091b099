"""A graph is captured where every rank has room for it, and by none where one has not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from areno.decode.capture import CAPTURE_BYTES, CapturePermit


@dataclass
class Votes:
    """Stands for a group: what the other rank says, and how often it was asked."""

    other: bool
    size: int = 2
    asked: list[list[int]] = field(default_factory=list)

    def gather_words(self, words: list[int]) -> list[list[int]]:
        """Return both ranks' words."""
        self.asked.append(words)
        return [words, [int(self.other)]]


def permit(group: Any, free: int, *, enabled: bool = True) -> CapturePermit:
    return CapturePermit(group, enabled=enabled, free_bytes=lambda: free)


@pytest.mark.parametrize(("mine", "other"), [(True, True), (True, False), (False, True), (False, False)])
def test_both_ranks_come_to_the_same_answer(mine: bool, other: bool) -> None:
    group = Votes(other)
    asked = permit(group, CAPTURE_BYTES - (not mine))
    assert asked.allows("a") is (mine and other)
    assert group.asked == [[int(mine)]]


def test_a_kind_that_was_refused_is_not_asked_about_again_until_memory_has_changed() -> None:
    group = Votes(other=False)
    asked = permit(group, CAPTURE_BYTES)
    assert not asked.allows("a") and not asked.allows("a") and len(group.asked) == 1
    assert not asked.allows("b") and len(group.asked) == 2
    asked.forget()
    group.other = True
    assert asked.allows("a")


def test_one_rank_asks_nobody_and_looks_each_time() -> None:
    group = Votes(other=False, size=1)
    assert permit(group, CAPTURE_BYTES).allows("a") and not permit(group, CAPTURE_BYTES - 1).allows("a")
    assert not permit(group, CAPTURE_BYTES, enabled=False).allows("a") and not group.asked
