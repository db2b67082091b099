"""The benchmark that counts what ranks tell each other: its figures are there and hold the default path to its limit."""

from __future__ import annotations

import json

import pytest

from tests.bench import tp_comm


@pytest.mark.long
@pytest.mark.timeout(300)
def test_collectives_and_bytes_of_a_step_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    tp_comm.main(["--tp", "2", "--rows", "4", "--steps", "2", "--rounds", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["mode"] for row in rows] == list(tp_comm.KINDS)
    for row in rows:
        assert row["sums"] == 1 + 2 * 4 and row["collectives"] == row["sums"] + row["sampling_gathers"]
        assert row["ratio_to_tp1"] > 0
        if not row["mode"].startswith("top"):
            assert row["sampling_gathers"] == 1 and row["sampling_bytes_per_row_and_rank"] <= tp_comm.LIMIT_BYTES
