"""When a commit may go to the engine: what it waits for, and what waits for it.

    evaluations under way end -> (drain, abort_requests) new requests are held, those in the engine end -> the engine commits

The control desk hands commits over and is called back once; the front calls `advance` in each turn of its loop. An
evaluation is a lease of its session with a deadline: no commit starts while one is open, and one that is asked for
while a commit waits or runs starts after it, so that neither side can starve the other. Invariant: requests are held
from the start of a drain to the end of its commit and at no other time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollout.errors import DrainTimeout, NoEvaluation, RolloutError
from rollout.service.admission import Admission
from rollout.service.sessions import Session
from rollout.wire.generation_messages import CANCELLED_BY_UPDATE


class RequestsInEngine(Protocol):
    """What the gate needs of the request desk."""

    @property
    def num_in_engine(self) -> int: ...

    def abort_in_engine(self, detail: str) -> None: ...

    def submit_held(self) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class WaitingCommit:
    """A commit that was asked for. `go` sends it to the engine, `refuse` answers it with an error; one of them is called, once.

    `mode`: inflight, drain or abort_requests; `drain_s` bounds the drain from its start, which is None until then.
    """

    session: Session
    request_id: bytes
    mode: str
    drain_s: float
    go: Callable[[], None]
    refuse: Callable[[RolloutError], None]
    drain_until: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Evaluation:
    session: Session
    request_id: bytes
    deadline_s: float
    started: Callable[[str, int], None]
    until: float = 0.0


class CommitGate:
    """Owns the waiting commit, the evaluations and the hold on new requests; see the module."""

    def __init__(self, admission: Admission, requests: RequestsInEngine) -> None:
        self._admission, self._requests = admission, requests
        self._waiting: WaitingCommit | None = None
        self._committing = False
        self._evaluations: dict[str, _Evaluation] = {}
        self._queued: list[_Evaluation] = []

    @property
    def num_evaluations(self) -> int:
        """Evaluations under way."""
        return len(self._evaluations)

    def waits_for(self, session: Session, request_id: bytes) -> bool:
        """Tell whether a call of this session waits here; a resumed client sends such calls again."""
        calls = [(one.session, one.request_id) for one in self._queued]
        calls += [(one.session, one.request_id) for one in (self._waiting,) if one is not None]
        return any(holder is session and call_id == request_id for holder, call_id in calls)

    def ask(self, commit: WaitingCommit, now: float) -> None:
        """Take a commit; it goes at once if nothing stands in its way."""
        assert self._waiting is None and not self._committing, "one update at a time"
        self._waiting = commit
        self.advance(now)

    def withdraw(self) -> WaitingCommit | None:
        """Take back the commit that waits; None if there is none or it has gone to the engine. What was held goes on."""
        commit, self._waiting = self._waiting, None
        if commit is not None:
            self._release()
        return commit

    def finish(self, now: float) -> None:
        """Note that the engine's commit is over, one way or the other."""
        self._committing = False
        self._release()
        self._start_queued(now)

    def advance(self, now: float) -> float | None:
        """Do what is due; return when to look again, None if only news can help."""
        for evaluation_id in [name for name, one in self._evaluations.items() if one.until <= now]:
            del self._evaluations[evaluation_id]
        commit = self._waiting
        if commit is None:
            self._start_queued(now)
        elif not self._evaluations:
            if commit.mode != "inflight" and commit.drain_until is None:
                self._admission.held = True
                commit.drain_until = now + commit.drain_s
                if commit.mode == "abort_requests":
                    self._requests.abort_in_engine(CANCELLED_BY_UPDATE)
            if commit.drain_until is None or not self._requests.num_in_engine:
                self._waiting, self._committing = None, True
                commit.go()
            elif commit.drain_until <= now:
                self._time_out(commit)
        times = [one.until for one in self._evaluations.values()]
        if self._waiting is not None and self._waiting.drain_until is not None:
            times.append(self._waiting.drain_until)
        return min(times, default=None)

    def _time_out(self, commit: WaitingCommit) -> None:
        left = self._requests.num_in_engine
        self.withdraw()
        commit.refuse(
            DrainTimeout(
                f"{left} requests were still running after {commit.drain_s:g} s",
                field="drain_s",
                value=commit.drain_s,
                limit="the update is staged and open, the old weights serve on",
                remedy="commit again with a larger drain_s, with mode='inflight' or 'abort_requests', or abort the update",
            )
        )

    def _release(self) -> None:
        if self._admission.held:
            self._admission.held = False
            self._requests.submit_held()

    def let_held_go(self) -> None:
        """Hand over what may go again for another reason than a commit's end."""
        self._requests.submit_held()

    def begin_evaluation(
        self, session: Session, request_id: bytes, deadline_s: float, now: float, started: Callable[[str, int], None]
    ) -> None:
        """Open an evaluation, now or after the commit under way; `started` hears its id and the version it runs under."""
        self._queued.append(_Evaluation(session=session, request_id=request_id, deadline_s=deadline_s, started=started))
        self._start_queued(now)

    def _start_queued(self, now: float) -> None:
        if self._waiting is not None or self._committing:
            return
        queued, self._queued = self._queued, []
        for evaluation in queued:
            evaluation_id = secrets.token_hex(8)
            evaluation.until = now + evaluation.deadline_s
            self._evaluations[evaluation_id] = evaluation
            evaluation.started(evaluation_id, self._admission.version)

    def end_evaluation(self, session: Session, evaluation_id: str, now: float) -> None:
        """End an evaluation; idempotent for its holder. Raises: NoEvaluation for another client's."""
        evaluation = self._evaluations.get(evaluation_id)
        if evaluation is not None and evaluation.session is not session:
            raise NoEvaluation(
                f"evaluation {evaluation_id!r} is another client's",
                field="evaluation_id",
                value=evaluation_id,
                limit="an evaluation belongs to the client that opened it",
                remedy="end your own",
            )
        self._evaluations.pop(evaluation_id, None)
        self.advance(now)

    def end_session(self, session: Session, now: float) -> None:
        """End the evaluations that a session held."""
        self._queued = [one for one in self._queued if one.session is not session]
        self._evaluations = {name: one for name, one in self._evaluations.items() if one.session is not session}
        self.advance(now)
