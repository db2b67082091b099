"""The process of a rank that is not the first: `python -m areno.ranks.follower --config FILE`, started by rank 0.

    attach, show a beat -> compare code and checkpoint -> meet the group -> Build -> entry, entry, ... -> Stop

It ends itself when rank 0 is gone, and leaves the reason of a failure in the shared segment for rank 0 to tell. Torch is imported
only after the beat has begun.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from areno.errors import ArenoError, EngineFailure
from areno.ranks.answers import Answer, put_answer, put_state
from areno.ranks.identity import check_checkpoint, check_code, code_identity
from areno.ranks.log import LogReader
from areno.ranks.operations import CheckState, Stop
from areno.ranks.plan import RankPlan
from areno.ranks.segment import Head, LogSegment, Own, Phase
from areno.ranks.watch import EXIT_FAILED, EXIT_ORPHANED, EXIT_REFUSED, STACKS_SIGNAL, LeaderWatch

if TYPE_CHECKING:
    from areno.parallel import TPGroup

log = logging.getLogger("areno.rank")
# A rank whose partner is gone lets the watch see that one's end first.
_AFTER_ANOTHER_S = 0.5


class Follower:
    """One follower; owns its end of the log."""

    def __init__(self, plan: RankPlan) -> None:
        self._plan, self._segment = plan, LogSegment.attach(plan.segment_fd)
        self._segment.set_own(plan.rank, Own.PID, os.getpid())
        self._phase(Phase.ATTACHED)
        LeaderWatch(self._segment, plan.rank, plan.rank_timeout_s, self._leader_lost)

    def _phase(self, phase: Phase) -> None:
        self._segment.set_own(self._plan.rank, Own.PHASE, phase)

    def _leader_lost(self, why: str, ended: bool) -> None:
        """End this process, from the watch's thread; a rank 0 that hangs and does nothing else is ended with it."""
        error = EngineFailure(f"rank {self._plan.rank} ends: {why}", field="tp", remedy="start the engine again")
        print(f"areno: {error}", file=sys.stderr, flush=True)
        own = self._segment.own
        if own(self._plan.rank, Own.READ) and own(self._plan.rank, Own.DONE) < self._segment.head(Head.ENTRIES):
            # Rank 0 may have been ended because both hang in this entry.
            faulthandler.dump_traceback(all_threads=True)
        if not ended and self._plan.dedicated and os.getppid() == self._plan.leader_pid:
            os.kill(self._plan.leader_pid, signal.SIGKILL)
        shutil.rmtree(self._plan.folder, ignore_errors=True)
        os._exit(EXIT_ORPHANED)

    def run(self) -> int:
        """Follow the log to its end; return the exit status, or end the process where it fails. Blocks."""
        plan = self._plan
        try:
            check_code(plan.rank, plan.code, code_identity())
            check_checkpoint(plan.rank, Path(plan.model), plan.checkpoint)
            self._follow()
        except ArenoError as error:
            early = self._segment.own(plan.rank, Own.PHASE) < Phase.CONNECTING
            building = self._segment.own(plan.rank, Own.DONE) == 0
            if early or (building and not isinstance(error, EngineFailure)):
                put_answer(self._segment, 1, Answer(rank=plan.rank, refusal=error))
                self._fail(str(error), EXIT_REFUSED, wait=False)
            self._fail(str(error), EXIT_FAILED, wait=error.field == "tp")
        except Exception as error:
            log.exception("rank %d fails", plan.rank)
            self._fail(f"{type(error).__name__}: {error}", EXIT_FAILED, wait=False)
        self._phase(Phase.ENDED)
        return 0

    def _fail(self, words: str, status: int, *, wait: bool) -> NoReturn:
        """End this process at once: what would be freed on the way out may wait for the other ranks, and they for this one's end."""
        if wait:
            time.sleep(_AFTER_ANOTHER_S)
        self._segment.say_last_words(self._plan.rank, words)
        self._phase(Phase.FAILED)
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)

    def _connect(self) -> TPGroup:
        import torch

        from areno.parallel import TPGroup

        plan = self._plan
        torch.set_num_threads(plan.threads)
        device = torch.device(plan.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._phase(Phase.CONNECTING)
        if plan.backend == "none":
            return TPGroup.single(device)
        return TPGroup.connect(
            rank=plan.rank, size=plan.size, init_method=plan.meeting, backend=plan.backend, timeout_s=plan.stall_s, device=device
        )

    def _follow(self) -> None:
        from areno.models.model_config import read_model_config
        from areno.rank import free_memory
        from areno.ranks.share import Share

        plan = self._plan
        group = self._connect()
        share = Share(self._segment, plan.rank, read_model_config(Path(plan.model)), group.device, group)
        self._phase(Phase.RUNNING)
        if group.size > 1:
            # Rank 0 asks for it next, before it says what to build.
            free_memory(group)
        reader = LogReader(self._segment, plan.rank, plan.event_fd)
        while True:
            message = reader.next()
            assert message is not None, "without a time-out there is always a next entry"
            entry = message.entry
            if isinstance(entry, Stop):
                share.stop()
                return
            if isinstance(entry, CheckState):
                put_state(self._segment, plan.rank, entry.number, share.state())
            else:
                answer = share.run(entry)
                if answer is not None:
                    put_answer(self._segment, message.number, answer)
            reader.executed(message)


def main(arguments: list[str] | None = None, kind: type[Follower] = Follower) -> int:
    """Run a follower; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m areno.ranks.follower", description="A rank of a tensor-parallel engine.")
    parser.add_argument("--config", required=True, help="JSON file written by rank 0")
    plan = RankPlan.from_json(Path(parser.parse_args(arguments).config).read_text())
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {plan.rank} %(levelname)s %(message)s")
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    # Who ends a service asks all of its processes; this one ends with rank 0, which may have work to finish.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    return kind(plan).run()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    # All is said. Libraries of a device, or of a group whose other ranks are gone, may wait at the interpreter's end.
    os._exit(status)
