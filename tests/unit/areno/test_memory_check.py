"""A pool that memory cannot hold is refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

from areno import Engine, EngineConfig
from areno.errors import InvalidConfig
from tests.fixtures_models import write_checkpoint


def test_more_pages_than_memory_holds_are_refused_with_the_bytes_and_a_number_that_fits(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(InvalidConfig, match=r"num_pages=2000000000 needs .* GiB .*set num_pages to \d+ or less") as refused:
        Engine(EngineConfig(model=str(folder), num_pages=2_000_000_000))
    assert refused.value.field == "num_pages"
