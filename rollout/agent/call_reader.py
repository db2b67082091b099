"""Reading the tool calls of a reply while it grows: `feed` pieces of text, `end`; the outcome does not depend on the pieces.

    text --thinking is skipped--> opening --> body --> end of the call --> `WrittenCall`s, in the order written

Calls inside thinking are not calls. A reader holds at most one call's text, and of that no more than the limit.
"""

from __future__ import annotations

import re

from rollout.agent.call_forms import Body, CallForm, Opening, Parameters, Undecided, WrittenCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_SEPARATORS = re.compile(r"\A[\s;,]+")


class CallReader:
    """The calls of one reply in one form.

    `parameters` says what a tool takes; `max_call_chars` bounds a call; `thinking` says that the prompt opened a thinking block already.
    """

    __slots__ = ("_body", "_form", "_fresh", "_max_call_chars", "_parameters", "_skipped", "_text", "_thinking")

    def __init__(self, form: CallForm, parameters: Parameters, *, max_call_chars: int, thinking: bool = False):
        self._form, self._parameters, self._max_call_chars = form, parameters, max_call_chars
        self._text = ""
        self._thinking = thinking
        self._fresh = True
        self._body: Body | None = None
        self._skipped = 0

    def feed(self, piece: str) -> list[WrittenCall]:
        """Take more of the reply and return the calls that it completes."""
        self._text += piece
        return self._advance(final=False)

    def end(self) -> list[WrittenCall]:
        """Take the reply's end and return what it leaves: a call that was cut, and one that only the end completes."""
        calls = self._advance(final=True)
        if self._body is not None:
            too_long = self._skipped + len(self._text) > self._max_call_chars
            calls += self._too_long() if too_long else self._form.unclosed(self._text, self._body.closer)
        self._text, self._body, self._skipped = "", None, 0
        return calls

    def _advance(self, *, final: bool) -> list[WrittenCall]:
        calls: list[WrittenCall] = []
        while self._body is not None or self._open(final=final):
            assert self._body is not None, "a call is open"
            found = self._body.end(self._text)
            if found is None:
                self._shorten(self._body)
                break
            end, behind = found
            too_long = self._skipped + end > self._max_call_chars
            calls += self._too_long() if too_long else self._form.read(self._text[:end], self._parameters)
            self._text, self._body, self._skipped, self._fresh = self._text[behind:], None, 0, True
        return calls

    def _shorten(self, body: Body) -> None:
        """Drop the text of a call that is too long even without the part of its closer that may be there, but for that part."""
        if self._skipped + len(self._text) - len(body.closer) >= self._max_call_chars:
            surplus = max(0, len(self._text) - len(body.closer))
            self._text = self._text[surplus:]
            self._skipped += surplus
            body.forget(surplus)

    def _open(self, *, final: bool) -> bool:
        """Go to the next call's body; False where the text holds no more openings."""
        while True:
            if self._thinking:
                _, closed, after = self._text.partition(THINK_CLOSE)
                if not closed:
                    self._keep(len(THINK_CLOSE))
                    return False
                self._text, self._thinking, self._fresh = after, False, True
            if self._fresh:
                self._text = _SEPARATORS.sub("", self._text)
            try:
                opening = self._form.opening(self._text, fresh=self._fresh, final=final)
            except Undecided:
                return False
            thought = self._text.find(THINK_OPEN)
            if thought >= 0 and (opening is None or thought < opening.start):
                self._text, self._thinking = self._text[thought + len(THINK_OPEN) :], True
                continue
            return self._begin(opening)

    def _begin(self, opening: Opening | None) -> bool:
        if opening is None:
            if self._text.strip() and not THINK_OPEN.startswith(self._text.strip()):
                self._fresh = False
            self._keep(max(self._form.longest_marker, len(THINK_OPEN)))
            return False
        self._text, self._body = self._text[opening.body_at :], opening.body
        return True

    def _keep(self, marker: int) -> None:
        """Drop all but what may be the beginning of a marker of that length."""
        self._text = self._text[max(0, len(self._text) - marker + 1) :]

    def _too_long(self) -> list[WrittenCall]:
        return [WrittenCall(problem=f"the call is too long; the limit is {self._max_call_chars} characters")]


def opened_by_prompt(reply: str) -> bool:
    """Return whether a whole reply closes a thinking block that it did not open: the prompt did then."""
    closed = reply.find(THINK_CLOSE)
    return closed >= 0 and not 0 <= reply.find(THINK_OPEN) < closed
