"""The numbers of a service: counters, gauges and their one snapshot.

Counters live with their owners; this module reads them. `snapshot` is what `stats` sends and what an operator reads.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

from rollout.service.ledger import Ledger
from rollout.service.sessions import SessionBook
from rollout.service.streams import Streams


@dataclass(slots=True)
class FrontMetrics:
    """Counts of the front itself. `malformed`: messages that no decoder took; `undeliverable`: replies without a peer."""

    started_at: float = field(default_factory=time.monotonic)
    messages: int = 0
    malformed: int = 0
    undeliverable: int = 0
    lapsed_leases: int = 0
    host_starts: int = 0


def snapshot(
    metrics: FrontMetrics, ledger: Ledger, sessions: SessionBook, streams: Streams, *, held: int, health: str
) -> dict[str, object]:
    """Return every number of the front by name.

    Units: bytes, tokens and counts as named. The counters reconcile: received = refused + attached + accepted, and
    accepted = live + stop + length + cancelled + expired + failed.
    """
    return {
        "health": health,
        "uptime_s": time.monotonic() - metrics.started_at,
        **dataclasses.asdict(ledger.counters),
        "live": ledger.live,
        "deciding": ledger.deciding,
        "waiting_for_host_or_version": held,
        "unacknowledged_endings": ledger.held,
        "reserved_bytes": ledger.reserved_bytes,
        "record_pages": ledger.tokens.used_pages,
        "sessions": len(sessions),
        "flushes": streams.flushes,
        "flushed_bytes": streams.flushed_bytes,
        "due_bytes": streams.due_bytes(),
        "unacknowledged_bytes": sum(session.unacked_bytes for session in sessions.all()),
        "messages": metrics.messages,
        "malformed": metrics.malformed,
        "undeliverable": metrics.undeliverable,
        "lapsed_leases": metrics.lapsed_leases,
        "host_starts": metrics.host_starts,
    }
