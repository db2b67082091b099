"""What ranks say to the first one: the answer to an entry, the state of their rows, each in an area of its own.

An answer is a refusal as JSON, or nothing, and numbers. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from areno.errors import ArenoError
from areno.ranks.codec import broken_log
from areno.ranks.segment import Area, LogSegment, Own

_PARTS = ("what", "field", "limit", "remedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one rank says to one entry; numbers by name."""

    rank: int
    refusal: ArenoError | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)


def error_to_fields(error: ArenoError) -> dict[str, str | None]:
    """Return an error as fields of text."""
    return {"code": error.code, **{name: getattr(error, name) for name in _PARTS}}


def error_from_fields(fields: Mapping[str, str | None]) -> ArenoError:
    """Return the error of these fields, of the class that has its code."""
    kinds = [ArenoError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    kind = next((one for one in kinds if one.code == fields.get("code")), ArenoError)
    return kind(str(fields["what"]), field=fields.get("field"), limit=fields.get("limit"), remedy=fields.get("remedy"))


def put_answer(segment: LogSegment, number: int, answer: Answer) -> None:
    """Answer the entry of a number. Mutates: the rank's answer area and words."""
    rank, refusal = answer.rank, answer.refusal
    text = json.dumps({"refusal": None if refusal is None else error_to_fields(refusal), "numbers": dict(answer.numbers)}).encode()
    area = segment.area(rank, Area.ANSWER)
    assert len(text) <= len(area), f"an answer of {len(text)} bytes does not fit"
    area[: len(text)] = text
    segment.set_own(rank, Own.ANSWER_BYTES, len(text))
    segment.set_own(rank, Own.ANSWERED, number)


def has_answered(segment: LogSegment, rank: int, number: int) -> bool:
    """Whether a rank has answered the entry of a number."""
    return segment.own(rank, Own.ANSWERED) >= number


def get_answer(segment: LogSegment, rank: int) -> Answer:
    """Return a rank's newest answer. Raises: EngineFailure where it is none."""
    text = bytes(segment.area(rank, Area.ANSWER)[: segment.own(rank, Own.ANSWER_BYTES)])
    try:
        fields = json.loads(text)
        refusal = None if fields["refusal"] is None else error_from_fields(fields["refusal"])
        return Answer(rank=rank, refusal=refusal, numbers={str(name): int(value) for name, value in fields["numbers"].items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise broken_log(f"rank {rank} answered {text[:80]!r}") from None


def put_state(segment: LogSegment, rank: int, number: int, state: np.ndarray) -> None:
    """Tell the rows' state for a check. Shapes: int64 of any shape. Mutates: the rank's state area and words."""
    area = segment.area(rank, Area.STATE)
    content = np.ascontiguousarray(state, dtype=np.int64).tobytes()
    assert len(content) <= len(area), f"a state of {len(content)} bytes does not fit"
    area[: len(content)] = content
    segment.set_own(rank, Own.STATE_BYTES, len(content))
    segment.set_own(rank, Own.CHECKED, number)


def get_state(segment: LogSegment, rank: int, number: int) -> np.ndarray | None:
    """Return what a rank told for a check, flat; None until it did."""
    if segment.own(rank, Own.CHECKED) != number:
        return None
    size = segment.own(rank, Own.STATE_BYTES)
    return np.frombuffer(bytes(segment.area(rank, Area.STATE)[:size]), np.int64)
