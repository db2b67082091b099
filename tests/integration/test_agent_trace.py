"""The agentic benchmark, small: every episode of a trace ends through a real front and client, and is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.bench import agent_load
from tests.bench.agent_trace import run_service
from tests.fakes import VOCABULARY, fake_service


@pytest.mark.timeout(60)
def test_a_small_trace_is_played_to_its_end_and_counted(tmp_path: Path) -> None:
    trace = agent_load.make(groups=4, members=4, seed=3, vocab=VOCABULARY, scale=0.1, waits=0.05)
    with fake_service(tmp_path) as client:
        figures = asyncio.run(run_service(client.aio, trace, "test"))
    assert figures["episodes"] == 16 and figures["wall_s"] > 0
    assert figures["tokens_per_s"] * figures["wall_s"] == pytest.approx(trace["total_generated"])
    assert len(figures["cached_share_by_turn"]) == max(len(member["turns"]) for group in trace["groups"] for member in group["members"])
