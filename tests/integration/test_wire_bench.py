"""The benchmark of the wire still measures: both modes, both ways, figures that a limit can be held against."""

from __future__ import annotations

import pytest

from tests.bench import wire


@pytest.mark.long
def test_the_wire_benchmark_gives_every_figure_of_its_limits() -> None:
    rows = wire.measure(bulk_tokens=4096, paced_tokens=64, repeats=1, sse=True)
    cases = [("paced", "rollout"), ("bulk", "sse"), ("bulk", "rollout"), ("single", "sse"), ("single", "rollout")]
    assert [(row["mode"], row["by"]) for row in rows] == cases
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["front_cpu_s_per_million"] > 0 and row["mb_per_million"] > 0
        if row["by"] == "rollout":
            assert row["mean_delta"] >= 1 and 0 < row["p50_ms"] <= row["p99_ms"]
            assert row["mode"] == "paced" or row["ratio_to_sse"] > 0
    slow = [dict(row, tokens_per_s=1.0, mean_delta=9.0, p99_ms=99.0, ratio_to_sse=1.0) if row["by"] == "rollout" else row for row in rows]
    assert len(wire.missed(slow)) == 6
