"""A minute of chaos: clients, front, host and trainer killed at random, and still every token once and every request one end."""

from __future__ import annotations

import pytest

from tests.chaos import Chaos

SECONDS = 60.0


@pytest.mark.timeout(240)
def test_nothing_is_lost_whoever_is_killed() -> None:
    happened = Chaos(SECONDS, seed=5).run()
    assert sum(count for name, count in happened.items() if name.startswith(("kill", "stop", "hang"))) >= 5
    assert happened["kill front"] >= 1
    assert happened["host_starts"] >= 2 and happened["version"] >= 1
