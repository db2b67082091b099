"""A follower that follows the log and computes nothing: for tests of the processes around it, which need no torch.

It answers what is answered; `PublishUpdate(version=HANG)` hangs it while its beat goes on, `PublishUpdate(version=BREAK)` raises.
"""

from __future__ import annotations

import logging
import os
import time

import numpy as np

from areno.ranks.answers import Answer, put_answer, put_state
from areno.ranks.follower import Follower, main
from areno.ranks.log import LogReader
from areno.ranks.operations import ANSWERED, CheckState, PublishUpdate, Stop
from areno.ranks.segment import Phase
from areno.ranks.state_check import FIELDS

HANG, BREAK = 1001, 1002
START_S = 0.4


class QuickFollower(Follower):
    """See the module."""

    def _follow(self) -> None:
        plan = self._plan
        time.sleep(START_S)
        self._phase(Phase.CONNECTING)
        self._phase(Phase.RUNNING)
        reader = LogReader(self._segment, plan.rank, plan.event_fd)
        while True:
            message = reader.next()
            assert message is not None
            entry = message.entry
            if isinstance(entry, Stop):
                return
            if isinstance(entry, PublishUpdate) and entry.version == HANG:
                time.sleep(3600)
            if isinstance(entry, PublishUpdate) and entry.version == BREAK:
                raise ValueError("it breaks as told")
            if isinstance(entry, CheckState):
                put_state(self._segment, plan.rank, entry.number, np.zeros((len(FIELDS), 4), np.int64))
            if isinstance(entry, ANSWERED):
                put_answer(self._segment, message.number, Answer(rank=plan.rank))
            reader.executed(message)


if __name__ == "__main__":
    status = main(kind=QuickFollower)
    logging.shutdown()
    os._exit(status)
