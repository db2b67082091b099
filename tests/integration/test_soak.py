"""The soak, short: memory is flat and nothing is left after two thousand requests, a fifth of them cancelled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.soak import LIMIT_MB_PER_1000, measure
from tests.fixtures_models import write_checkpoint


@pytest.mark.timeout(300)
def test_two_thousand_short_requests_leave_nothing_behind(tmp_path: Path) -> None:
    row = measure(write_checkpoint(tmp_path / "model", "llama"), requests=2000, settle=1000)
    assert row["cancelled"] > 200 and row["preemptions"] > 0 and row["forks"] > 100
    assert row["leaked_pages"] == row["leaked_rows"] == row["leaked_slots"] == 0
    assert row["mb_per_1000"] < LIMIT_MB_PER_1000
