"""The soak, short: memory is flat and nothing is left after thousands of requests, a fifth of them cancelled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.soak import LIMIT_MB_PER_1000, measure
from tests.fixtures_models import write_checkpoint


@pytest.mark.timeout(300)
@pytest.mark.parametrize("requests", [1000, pytest.param(2000, marks=pytest.mark.long)])
def test_thousands_of_short_requests_leave_nothing_behind(tmp_path: Path, requests: int) -> None:
    row = measure(write_checkpoint(tmp_path / "model", "llama"), requests=requests, settle=requests // 2)
    assert row["cancelled"] > requests // 10 and row["forks"] > 100
    assert row["preemptions"] > 0 or requests < 2000
    assert row["leaked_pages"] == row["leaked_rows"] == row["leaked_slots"] == 0
    assert row["mb_per_1000"] < LIMIT_MB_PER_1000
