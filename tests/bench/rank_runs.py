"""A benchmark run by several ranks side by side: one process and one device each, all called alike.

Every rank plans for itself and must come to the same log, so results come exactly as late as `run_ahead` says on every one of them,
and what a clock decides is decided by the first (`agree`). The first one's figures are the benchmark's. Where the engine's own ranks
can be measured as they are (`EngineConfig(tp=N)`), they should be; engines over one memory can only be compared like this.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from areno.parallel import TPGroup
from tests.tp_ranks import SideBySide

MOST_ON_CPU = 8
POLL_S = 0.2
MEET_S = 600.0
"""A rank that compiles kernels lets the others wait that long in a collective."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --tp and what the ranks are started with."""
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)


def start(module: str, given: Sequence[str], tp: int) -> int:
    """Run a benchmark's ranks and return the first exit status that is not 0; the first rank speaks for all. Blocks."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'store'}"
        command = [sys.executable, "-m", module, *given]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), "--meeting", meeting], stdout=None if rank == 0 else subprocess.DEVNULL)
            for rank in range(tp)
        ]
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                time.sleep(POLL_S)
            return next((rank.returncode for rank in ranks if rank.poll()), 0)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def join(options: argparse.Namespace, kind: str) -> TPGroup:
    """Meet the other ranks; a benchmark of one rank is alone. Blocks."""
    if options.rank is None:
        return TPGroup.single()
    device = torch.device("cuda", options.rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    return TPGroup.connect(
        rank=options.rank,
        size=options.tp,
        init_method=options.meeting,
        backend="nccl" if kind == "cuda" else "gloo",
        timeout_s=MEET_S,
        device=device,
    )


def ranks_of(group: TPGroup) -> SideBySide | None:
    """Return what makes an engine one of these ranks."""
    return SideBySide(group) if group.size > 1 else None


def agree(group: TPGroup, decision: bool) -> bool:
    """Return what the first rank decided. Blocks: for the others."""
    return decision if group.size == 1 else bool(group.gather_words([int(decision)])[0][0])
