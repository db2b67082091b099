"""The order in which a rank leaves: what was captured with collectives inside goes before the group that it names."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areno import Engine, EngineConfig
from areno.decode.resident import ResidentPath
from areno.forward import Forward
from areno.ranks.ranks import Alone
from areno.ranks.share import Share
from tests.fixtures_models import write_checkpoint


def test_a_rank_that_stops_drops_its_captures_before_it_leaves_the_group() -> None:
    ended: list[str] = []
    group: Any = SimpleNamespace(close=lambda: ended.append("group"))
    nothing: Any = None
    share = Share(nothing, 1, nothing, torch.device("cpu"), group)
    share.stop()
    assert ended == ["group"], "a rank may be told to stop before it was built"
    built: Any = SimpleNamespace(rank=SimpleNamespace(forget_captures=lambda: ended.append("captures")))
    share._built = built
    share.stop()
    assert ended == ["group", "captures", "group"]


def test_an_engine_that_closes_drops_the_captures_of_steps_and_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    class Told(Alone):
        def close(self, leave: Callable[[], None] | None = None) -> None:
            ended.append("asked")
            assert leave is not None
            leave()

    monkeypatch.setattr(ResidentPath, "forget_captures", lambda self: ended.append("steps"))
    monkeypatch.setattr(Forward, "forget_captures", lambda self: ended.append("prompts"))
    folder = write_checkpoint(tmp_path / "tiny", "qwen3", seed=0)
    Engine(EngineConfig(model=str(folder), device="cpu", max_rows=4), ranks=Told(torch.device("cpu"))).close()
    assert ended == ["asked", "steps", "prompts"]
