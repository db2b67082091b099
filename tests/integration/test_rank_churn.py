"""A seed of `tests.rank_churn` in each run of the tests, more of them in the long one; the seeds are those in which most happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rank_churn import Checkpoints, Churn


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("model", "size", "seed", "steps"),
    [
        ("qwen3", 2, 12, 40),
        pytest.param("llama-tied", 2, 22, 120, marks=pytest.mark.long),
        pytest.param("qwen3", 4, 22, 80, marks=pytest.mark.long),
        pytest.param("llama-tied", 4, 22, 80, marks=pytest.mark.long),
    ],
)
def test_several_ranks_tell_what_one_does_whatever_happens(tmp_path: Path, model: str, size: int, seed: int, steps: int) -> None:
    churn = Churn(seed, Checkpoints(tmp_path, model), size)
    try:
        churn.run(steps)
    finally:
        churn.close()
    for what in ("submit", "group", "cancel", "push", "nap", "preemptions", "forks"):
        assert churn.done[what], f"no {what} in this run"
