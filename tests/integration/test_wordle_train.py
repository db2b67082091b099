"""The word game's training script, short: warm-up, games in groups, a step, a push, and figures before and after."""

from __future__ import annotations

import io

import pytest

from examples.agentic.wordle.train import Options, run


@pytest.mark.timeout(200)
def test_a_short_run_gives_figures_and_serves_what_it_learnt() -> None:
    out = io.StringIO()
    facts = run(Options(words=3, warm_steps=14, steps=1, groups=4, members=8, held_out=8), out)
    assert facts["version"] >= 1 and len(facts["step_rewards"]) == 1 and facts["max_logprob_gap"] < 1e-4
    assert 0 <= facts["found_first"] <= 1 and 0 <= facts["found_last"] <= 1
    assert "warm-up 14/14" in out.getvalue() and "step 1/1" in out.getvalue()
