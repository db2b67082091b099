"""What rank 0 does with its other ranks in each phase of an engine's life, on followers that compute nothing."""

from __future__ import annotations

import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from areno.commands import DecodeLaunch, PrefillChunk, PrefillLaunch
from areno.ranks import operations as ops
from areno.ranks.peers import Peers, PeersPlan
from areno.ranks.segment import SegmentSizes
from areno.sampling.variant import Variant

TIMEOUT_S = 1.5
_NOTHING = np.zeros(0, np.int64)
_LANES: dict[str, Any] = {"seats": np.zeros(4, np.int64), "generations": np.zeros(4, np.int32), "variant": Variant(noise=True)}


def quick_plan(
    folder: Path, *, size: int = 3, dedicated: bool = False, stall_s: float = 60.0, build_s: float = 60.0, start_s: float = 10.0
) -> PeersPlan:
    """Return the plan of `size` ranks, the others of which are `quick_rank` processes."""
    return PeersPlan(
        model=folder,
        devices=("cpu",) * size,
        backend="none",
        launches_ahead=2,
        rank_timeout_s=TIMEOUT_S,
        stall_s=stall_s,
        build_s=build_s,
        start_s=start_s,
        threads=1,
        dedicated=dedicated,
        sizes=SegmentSizes(world=size, num_records=8, bulk_bytes=4096),
        module="tests.integration.quick_rank",
    )


def _prefill(peers: Peers) -> None:
    chunk = PrefillChunk(
        ids=np.arange(3000, dtype=np.int64),
        start=0,
        pages=np.arange(200),
        rows=(0,),
        score_from=0,
        score_targets=_NOTHING,
        temperature=1.0,
        seat=0,
        generation=1,
    )
    peers.tell(PrefillLaunch(chunks=(chunk,), fork_sources=_NOTHING, fork_targets=_NOTHING, **_LANES))


def _decode(peers: Peers) -> None:
    peers.tell(DecodeLaunch(bucket=4, longest=10, **_LANES))


def _update(peers: Peers) -> None:
    import torch

    peers.stage("model.norm.weight", torch.zeros(5000), start=0, shape=(5000,), whole=True)


def _commit(peers: Peers) -> None:
    peers.expect(peers.tell(ops.PublishUpdate(version=1)))


def _sleep(peers: Peers) -> None:
    peers.expect(peers.tell(ops.ReleaseKV()))


def _idle(peers: Peers) -> None:
    assert select.select([peers.lost_fd], [], [], 30.0)[0], "nobody is told of a lost rank"
    peers.check()


PHASES: dict[str, Callable[[Peers], None]] = {
    "prefill": _prefill,
    "decode": _decode,
    "update": _update,
    "commit": _commit,
    "sleep": _sleep,
    "idle": _idle,
}
