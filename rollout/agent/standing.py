"""How an episode stands: running or how it ended, whose turn it is, and what the limits still allow.

Owned by one `Episode`, which asks before each call and reports after it; nobody else writes it. Invariant: an episode that ended stays
as it ended.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from rollout.agent.errors import EpisodeStateError
from rollout.agent.limits import EpisodeLimits, Limit
from rollout.agent.tools import BadCall, ToolCall

# Far above the mean of any tokenizer: what is longer is not encoded, which takes seconds for megabytes.
CHARACTERS_OF_A_TOKEN = 32


class EpisodeStatus(enum.StrEnum):
    """How an episode stands; all but `running` are terminal."""

    RUNNING = "running"
    DONE = "done"
    TRUNCATED = "truncated"
    BAD_CALLS = "bad_calls"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Standing:
    """The status of one episode under its limits. `context` is the most tokens of a row, `context_limit` whose limit that is.

    `in_flight` is the id of the request that samples the turn now; `awaits_act` says that it is the policy's turn.
    """

    __slots__ = ("awaits_act", "bad_turns", "context", "context_limit", "in_flight", "limit", "limits", "reason", "status")

    def __init__(self, limits: EpisodeLimits, context: int, context_limit: Limit) -> None:
        self.limits, self.context, self.context_limit = limits, context, context_limit
        self.status = EpisodeStatus.RUNNING
        self.limit: Limit | None = None
        self.reason: str | None = None
        self.in_flight: bytes | None = None
        self.awaits_act = True
        self.bad_turns = 0

    @property
    def running(self) -> bool:
        """Whether the episode can go on."""
        return self.status is EpisodeStatus.RUNNING

    def end(self, status: EpisodeStatus, limit: Limit | None = None, *, reason: str | None = None) -> None:
        """End a running episode; one that ended stays as it is."""
        if self.running:
            self.status, self.limit, self.reason = status, limit, reason

    def require(self, *, acting: bool | None = None) -> None:
        """Check that a call may be made now; `acting` says whose turn it must be. Raises: EpisodeStateError."""
        if not self.running:
            raise EpisodeStateError(
                f"the episode ended as {self.status}{f' ({self.limit})' if self.limit else ''}",
                field="status",
                value=str(self.status),
                limit="it stays as it ended",
                remedy="check `running` after each call",
            )
        if self.in_flight is not None:
            raise EpisodeStateError("a turn is being sampled", field="status", limit="one call at a time", remedy="await act first")
        if acting is not None and acting != self.awaits_act:
            raise EpisodeStateError(
                "the policy has just spoken" if acting else "it is the policy's turn",
                field="status",
                limit="act and observe take turns",
                remedy="observe first (all messages in one call)" if acting else "await act first",
            )

    def budget(self, asked: int | None, default: int, *, length: int) -> tuple[int, bool]:
        """Return how many tokens a turn may have behind a row of `length`, and whether the row's limit made that fewer."""
        bound = self.limits.max_new_tokens
        wanted = asked if asked is not None else bound or default
        wanted = wanted if bound is None else min(wanted, bound)
        budget = min(wanted, self.context - length)
        return budget, budget < wanted

    def may_go_on(self, num_turns: int) -> bool:
        """Return whether another turn may come; the episode ends where its turns are used up."""
        if self.limits.max_turns is not None and num_turns >= self.limits.max_turns:
            self.end(EpisodeStatus.TRUNCATED, Limit.MAX_TURNS)
        return self.running

    def takes_text(self, characters: int) -> bool:
        """Return whether a text is worth reading; one so long that it would only hold up every other episode of the loop ends this one."""
        if characters <= CHARACTERS_OF_A_TOKEN * self.context:
            return True
        self.end(EpisodeStatus.TRUNCATED, self.context_limit, reason=f"{characters} characters do not fit {self.context} tokens")
        return False

    def takes_row(self, length: int) -> bool:
        """Return whether a row of `length` tokens leaves room for a turn; the episode ends where it does not."""
        if length < self.context:
            return True
        self.end(EpisodeStatus.TRUNCATED, self.context_limit, reason=f"{length} tokens and a new one do not fit {self.context}")
        return False

    def settle(self, finish_kind: str, *, length: int, shortened: bool) -> Limit | None:
        """Return what cut a turn after which the row has `length` tokens, and end the episode where it cannot go on."""
        match finish_kind:
            case "length":
                full = length >= self.context
                limit = self.context_limit if full or shortened else Limit.MAX_NEW_TOKENS
                if full:
                    self.end(EpisodeStatus.TRUNCATED, limit)
                return limit
            case "expired":
                self.end(EpisodeStatus.TRUNCATED, Limit.DEADLINE)
                return Limit.DEADLINE
            case "cancelled":
                self.end(EpisodeStatus.CANCELLED)
            case "failed":
                self.end(EpisodeStatus.FAILED, reason="the generation failed")
        return None

    def count_bad(self, good: Sequence[ToolCall], bad: Sequence[BadCall]) -> None:
        """Count turns in a row that hold only bad calls; too many end the episode."""
        self.bad_turns = self.bad_turns + 1 if bad and not good else 0
        if self.bad_turns >= self.limits.max_bad_turns:
            self.end(EpisodeStatus.BAD_CALLS, Limit.MAX_BAD_TURNS, reason=bad[0].message)
