"""The agentic benchmark, small: every episode of a trace ends through a real front and client, and is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.bench import agent_load
from tests.bench.agent_trace import run_service
from tests.bench.scripted_engine import scripted_service
from tests.fakes import VOCABULARY, fake_service


@pytest.mark.timeout(60)
def test_a_small_trace_is_played_to_its_end_and_counted(tmp_path: Path) -> None:
    trace = agent_load.make(groups=4, members=4, seed=3, vocab=VOCABULARY, scale=0.1, waits=0.05)
    with fake_service(tmp_path) as client:
        figures = asyncio.run(run_service(client.aio, trace, "test"))
    assert figures["episodes"] == 16 and figures["wall_s"] > 0
    assert figures["tokens_per_s"] * figures["wall_s"] == pytest.approx(trace["total_generated"])
    assert len(figures["cached_share_by_turn"]) == max(len(member["turns"]) for group in trace["groups"] for member in group["members"])


@pytest.mark.timeout(200)
@pytest.mark.parametrize("groups", [40, pytest.param(250, marks=pytest.mark.long)])
def test_hundreds_and_thousands_of_episodes_at_once_end_without_an_error(tmp_path: Path, groups: int) -> None:
    trace = agent_load.make(groups=groups, members=8, seed=1, vocab=VOCABULARY, scale=0.02, waits=0.5)
    with scripted_service(tmp_path, max_rows=256, timeout_s=60.0) as client:
        figures = asyncio.run(run_service(client.aio, trace, "test"))
        stats = client.stats()
    assert figures["episodes"] == 8 * groups
    turns = sum(len(member["turns"]) for group in trace["groups"] for member in group["members"])
    assert stats["accepted"] == stats["length"] == turns and stats["failed"] == stats["cancelled"] == 0
    assert stats["engine"]["hints_kept"] > 0
