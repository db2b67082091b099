"""Rank 0 as a process of its own, with followers that compute nothing: `python -m tests.integration.rank_zero FOLDER MODE PHASE`.

MODE is dedicated or shared; in the phase "deaf" it waits for something and asks for nothing. Prints the other ranks' process ids
once it is in the phase, and the error that ends it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from areno.errors import EngineFailure
from areno.ranks import peers as peers_module
from areno.ranks.peers import Peers
from areno.ranks.segment import Phase
from tests.integration.rank_phases import PHASES, quick_plan


def run(folder: str, mode: str, phase: str) -> None:
    peers = Peers(quick_plan(Path(folder), dedicated=mode == "dedicated"))
    peers_module._TELL_S = 0.5
    if phase != "start-up":
        peers.wait_for(Phase.RUNNING)
    print(json.dumps(peers.pids), flush=True)
    try:
        if phase in ("start-up", "deaf"):
            time.sleep(3600)
        while True:
            PHASES[phase](peers)
    except EngineFailure as error:
        print(error, flush=True)
    peers.close()


if __name__ == "__main__":
    run(*sys.argv[1:])
