"""Hints of return through a service: they reach the engine under the client's name, and end with its lease."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.agent import Episode
from rollout.errors import InvalidRequest
from tests.fakes import fake_service


def hints(client: rollout.Client, wanted: int, timeout_s: float = 5.0) -> int:
    """Return the engine's hints, as soon as there are so many."""
    deadline = time.monotonic() + timeout_s
    while True:
        found: Any = client.stats()["engine"]["hints"]
        if found == wanted or time.monotonic() > deadline:
            return int(found)
        time.sleep(0.02)


@pytest.mark.timeout(60)
def test_hints_reach_the_engine_and_end_with_their_client(tmp_path: Path) -> None:
    with fake_service(tmp_path) as client:
        with rollout.connect(client.address) as other:

            async def play() -> None:
                episode = await Episode.open(other.aio, prompt_ids=[1, 2, 3], cache_salt="s")
                await episode.act(max_new_tokens=4)
                episode.tool_wait(30)
                await asyncio.sleep(0)

            asyncio.run(play())
            assert hints(client, 1) == 1
            client.tool_wait("mine", 1.5)
            assert hints(client, 2) == 2
            for wrong in (0.0, -1.0, float("nan"), "soon"):
                with pytest.raises(InvalidRequest) as refused:
                    client.tool_wait("mine", wrong)  # type: ignore[arg-type]
                assert refused.value.field == "expect_s"
        assert hints(client, 1) == 1
