"""Requests that wait for the engine: no host is ready, or the version they ask for is not served yet.

The request desk puts every request in here and asks when something changed. What came in one message goes in one message,
so that the members of a group reach the engine together and share its prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout.service.admission import Admission
from rollout.service.host_link import HostLink
from rollout.service.records import Record
from rollout.wire.codec import Arrays
from rollout.wire.operations import Op


@dataclass(slots=True, eq=False)
class Submission:
    """One message to the engine: one request, or the members of a group, which differ in their seeds only."""

    params: Mapping[str, object]
    arrays: Arrays
    grouped: bool
    members: dict[int, Record] = field(default_factory=dict)


class Submissions:
    """Owns what waits; see the module."""

    def __init__(self, link: HostLink, admission: Admission) -> None:
        self._link, self._admission = link, admission
        self._waiting: dict[int, Submission] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, submission: Submission) -> None:
        """Take a message; it goes at once if it may."""
        for engine_id in submission.members:
            self._waiting[engine_id] = submission
        self._send_if_open(submission)

    def send_open(self) -> None:
        """Send what may go now."""
        for submission in dict.fromkeys(self._waiting.values()):
            self._send_if_open(submission)

    def _send_if_open(self, submission: Submission) -> None:
        records = list(submission.members.values())
        # The members of one message wait for the same version.
        if not self._admission.open_for(records[0]):
            return
        for record in records:
            del self._waiting[record.engine_id]
            record.submitted = True
        fields = {
            "engine_ids": list(submission.members),
            "seeds": [record.seed for record in records],
            "grouped": submission.grouped,
            "params": submission.params,
        }
        self._link.send(Op.SUBMIT, fields, submission.arrays)

    def take_back(self, record: Record) -> Record | None:
        """Take out a request that ended while it waited; no effect on one that does not wait.

        Returns a member of its group that still waits, with the input that they shared.
        """
        submission = self._waiting.pop(record.engine_id, None)
        if submission is None:
            return None
        del submission.members[record.engine_id]
        return next(iter(submission.members.values()), None)

    def take_all(self) -> list[int]:
        """Take out everything; returns the engine numbers."""
        waiting, self._waiting = self._waiting, {}
        return list(waiting)
