"""Real ranks over gloo that are lost in a phase of an engine's life, and rank 0 as a process of its own that is.

    python -m tests.integration.engine_phases FOLDER SIZE PHASE SIGNAL

prints the other ranks' process ids, then goes through an engine's life and signals itself in the phase.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from areno import Engine, EngineConfig, EngineFailure, Request, SamplingParams
from areno.parallel import TPGroup
from areno.ranks import operations as ops
from areno.ranks.peers import Peers, PeersPlan
from areno.ranks.segment import Own, Phase

OPTIONS: dict[str, Any] = {"max_rows": 4, "seed": 1, "page_size": 8, "device": "cpu"}
TIMEOUT_S = 3.0
# A start may show no beat while libraries load, and on a busy machine that takes seconds.
START_S = 15.0
ENTRIES = {"loading": ops.Build, "swap": ops.SwapUpdate, "publish": ops.PublishUpdate}
PHASES = ("start-up", "meeting", *ENTRIES, "idle", "close")
PROMPT = [5, 9, 11, 40, 7]


class PhasePeers(Peers):
    """Other ranks, and something that is done once in a phase: between two acts of rank 0, while the others are at work."""

    def __init__(self, folder: Path, size: int, phase: str, act: Callable[[], object], *, dedicated: bool = False) -> None:
        self._in_phase, self._act, self.awaits_loss = phase, act, phase != "close"
        super().__init__(
            PeersPlan(
                model=folder,
                devices=("cpu",) * size,
                backend="gloo",
                launches_ahead=1,
                rank_timeout_s=TIMEOUT_S,
                stall_s=60.0,
                start_s=START_S,
                threads=1,
                dedicated=dedicated,
            )
        )

    def now(self, phase: str) -> None:
        """Do what is to be done in this phase."""
        if phase == self._in_phase:
            self._in_phase = ""
            self._act()

    def meet(self) -> TPGroup:
        """As `Peers.meet`; a rank that starts has come as far as its beat, and loads its libraries."""
        while self._in_phase == "start-up" and any(self._segment.own(rank, Own.PHASE) < Phase.ATTACHED for rank in self.pids):
            time.sleep(0.01)
        self.now("start-up")
        return super().meet()

    def tell(self, entry: ops.Entry) -> int:
        """As `Peers.tell`."""
        number = super().tell(entry)
        for phase, kind in ENTRIES.items():
            if isinstance(entry, kind):
                self.now(phase)
        return number

    def _connect(self, given_up: threading.Event) -> TPGroup:
        self.now("meeting")
        return super()._connect(given_up)

    def _settle(self) -> None:
        self.now("close")
        super()._settle()


def generated(engine: Engine) -> list[int]:
    """Return what the engine makes of the prompt; without the helpers of other tests, whose libraries load for seconds."""
    engine.submit(Request(request_id=0, prompt_ids=PROMPT, sampling=SamplingParams(max_new_tokens=6, temperature=0.0)))
    ids: list[int] = []
    while engine.has_work:
        ids += engine.step().token_ids.tolist()
    return ids


def live(folder: Path, peers: PhasePeers) -> list[int]:
    """Build an engine, generate, update, wait, close; return what it generated. Raises: what a lost rank leaves."""
    engine = Engine(EngineConfig(model=str(folder), **OPTIONS), ranks=peers)
    try:
        ids = generated(engine)
        engine.begin_update(None, version=1)
        for name, tensor in load_file(folder / "model.safetensors").items():
            engine.stage(name, tensor)
        engine.commit_update()
        peers.now("idle")
        assert engine.lost_fd is not None
        # A rank may be lost just after it has done its part of the last entry.
        select.select([engine.lost_fd], [], [], TIMEOUT_S + 5.0 if peers.awaits_loss else 0.0)
        engine.check_ranks()
    finally:
        engine.close()
    return ids


def main(folder: str, size: str, phase: str, how: str) -> None:
    """See the module."""
    peers = PhasePeers(Path(folder), int(size), phase, lambda: os.kill(os.getpid(), int(how)), dedicated=True)
    print(json.dumps(peers.pids), flush=True)
    try:
        live(Path(folder), peers)
    except EngineFailure as error:
        print(error, file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
